"""Quotas and drains with turns whose decode ring computes the prompt: they involve no prefill ring."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from ringserve.cp_core.errors import CapacityExceeded
from ringserve.orchestration.protocol.plans import PromptMode
from ringserve.workers.protocol.steps import Algorithm
from tests.orchestration.conversations.test_drain_rebalancing import ANSWER, KIND, Draining
from tests.orchestration.conversations.test_quotas import of, retained
from tests.orchestration.decode.test_direct_failures import DIRECT, held_prompts
from tests.orchestration.service import Service
from tests.waiting import eventually
from tests.workers.models import Oracle, random_tokens

Models = Mapping[str, Path]
Oracles = Mapping[str, Oracle]


async def direct_turn(service: Draining, name: str, prompt: list[int], mode: PromptMode = PromptMode.APPEND) -> None:
    """Run a conversation's next turn on its decode ring and check it; `prompt` is new or the whole history."""
    whole = [*service.histories[name], *prompt] if mode is PromptMode.APPEND else prompt
    request = service.request(prompt, conversation=name, mode=mode, max_tokens=ANSWER)
    answer = await service.answer(replace(request, algorithm=DIRECT))
    assert answer.begun.plan.algorithm is DIRECT
    assert answer.token_ids == service.oracle.greedy(whole, ANSWER)
    service.histories[name] = [*whole, *answer.token_ids]


async def test_a_turn_that_the_decode_ring_computes_counts_while_it_runs_and_afterwards(
    model_paths: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Service(model_paths[KIND], 2, 3, max_direct_tokens=16) as service:
        await service.answer(of(service, "acme", "c", 200, random_tokens(60)))
        follow = of(service, "acme", "c", 200, [1, 2, 3], mode=PromptMode.APPEND, max_tokens=80)
        with held_prompts(monkeypatch) as (begun, may_go_on):
            turn = asyncio.create_task(service.answer(replace(follow, algorithm=DIRECT)))
            await asyncio.to_thread(begun.wait, 60.0)
            # Its 65 + 3 tokens and the 80 that it may answer.
            with pytest.raises(CapacityExceeded, match="its running turns may need 148 KV tokens and this request 60"):
                await service.router.begin_turn(of(service, "acme", "", 200, random_tokens(50), max_tokens=10))
            may_go_on.set()
            assert (await turn).begun.plan.algorithm is DIRECT
        assert await retained(service, "acme/c") == 147
        await service.answer(of(service, "acme", "", 200, random_tokens(50), max_tokens=10))
        await eventually(lambda: service.decode.ring.pool.get("acme/c") is None)
        await eventually(lambda: service.prefill.ring.pool.get("acme/c") is None)
        service.check_integrity()


async def test_a_prefill_ring_that_drains_gives_away_what_agrees_with_the_books_and_no_more(
    model_paths: Models, oracles: Oracles
) -> None:
    service = Draining(model_paths[KIND], oracles[KIND], max_direct_tokens=16)
    async with service:
        await service.begin("ab")
        await direct_turn(service, "a", [7, 8])
        # The ring keeps 30 tokens of the history before it was edited, and 25 of them agree with the turn.
        edited = [*service.histories["b"][:25], 9, 10, 11]
        await direct_turn(service, "b", edited, PromptMode.WHOLE_HISTORY)
        view = await service.drain("prefill-0")
        assert (view.moved, view.left, view.failed) == (2, 0, 0)
        for name, num_retained in (("a", 30), ("b", 25)):
            shown = await service.router.get_conversation(name)
            assert (shown.placements[0].ring, shown.placements[0].num_tokens) == ("prefill-1", num_retained)
            history = service.histories[name]
            request = service.request([3] * 20, conversation=name, mode=PromptMode.APPEND, max_tokens=ANSWER)
            answer = await service.answer(replace(request, algorithm=Algorithm.PASS_KV))
            assert answer.token_ids == service.oracle.greedy([*history, *[3] * 20], ANSWER)
            assert answer.begun.plan.cached_tokens == len(history) - 1
            assert answer.report.pulled_bytes == (len(history) - 1 - num_retained) * service.model.kv_bytes_per_token
        service.check_integrity()


async def test_a_prefill_ring_waits_for_the_turn_that_does_without_it_and_gives_its_kv_away_then(
    model_paths: Models, oracles: Oracles, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Draining(model_paths[KIND], oracles[KIND], max_direct_tokens=16)
    async with service:
        await service.begin("a")
        with held_prompts(monkeypatch) as (begun, may_go_on):
            turn = asyncio.create_task(direct_turn(service, "a", [7, 8]))
            await asyncio.to_thread(begun.wait, 60.0)
            await service.router.drain_ring("prefill-0", 60.0)
            view = await service.progress("prefill-0")
            assert (view.running_turns, view.left, view.has_left) == (0, 1, False)
            may_go_on.set()
            await turn
        assert (await service.left("prefill-0")).moved == 1
        assert service.retained("prefill-1", "a") == "a"
        await direct_turn(service, "a", [5])
        service.check_integrity()
