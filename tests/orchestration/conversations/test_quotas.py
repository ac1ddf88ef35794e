"""Quotas bound a tenant's KV at its own cost alone, and released KV is computed again to the token."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringserve.cp_core.errors import CapacityExceeded, InvalidRequest, NotFound
from ringserve.orchestration.conversations.store import ConversationStore
from ringserve.orchestration.protocol.plans import PromptMode
from ringserve.orchestration.protocol.turns import KvQuota, TurnRequest, tenant_of
from tests.orchestration.conversations.test_store import Clock
from tests.orchestration.service import Service
from tests.waiting import eventually
from tests.workers.models import Oracle, random_tokens

ANSWER = 5


def of(service: Service, tenant: str, name: str, limit: int, prompt: list[int], **more: object) -> TurnRequest:
    """Return a tenant's request as its gateway builds it; without `name` it belongs to no conversation."""
    request = service.request(prompt, conversation=f"{tenant}/{name}" if name else "", **more)  # type: ignore[arg-type]
    quota = KvQuota(tenant=tenant, max_tokens=limit) if limit else None
    return replace(request, request_id=f"{tenant}/{request.request_id}", kv_quota=quota)


async def retained(service: Service, name: str) -> int:
    view = await service.router.get_conversation(name)
    return max(view.retained_on("prefill"), view.retained_on("decode"))


async def test_a_tenants_least_recently_used_conversation_loses_its_kv_and_continues_exactly(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    clock = Clock()
    async with Service(model_paths["llama_gqa"], 2, 3, clock=clock) as service:
        histories = {}
        for number, name in enumerate(("old", "newer", "newest")):
            clock.now += 1
            prompt = random_tokens(40, seed=number)
            answer = await service.answer(of(service, "acme", name, 0, prompt))
            histories[name] = [*prompt, *answer.token_ids]
        await service.answer(of(service, "beta", "old", 0, random_tokens(40)))
        # 3 x 44 tokens are retained and this turn takes 35: at a limit of 150 tokens one conversation is evicted.
        await service.answer(of(service, "acme", "", 150, random_tokens(30)))
        await eventually(lambda: service.prefill.ring.pool.get("acme/old") is None)
        await eventually(lambda: service.decode.ring.pool.get("acme/old") is None)
        found = [await retained(service, name) for name in ("acme/old", "acme/newer", "acme/newest", "beta/old")]
        assert found == [0, 44, 44, 44]

        view = await service.router.get_conversation("acme/old")
        assert (view.num_tokens, view.num_turns) == (45, 1)
        again = await service.answer(of(service, "acme", "old", 0, [3, 4], mode=PromptMode.APPEND))
        assert again.begun.plan.cached_tokens == 0
        expected = oracles["llama_gqa"].greedy([*histories["old"], 3, 4], ANSWER)
        assert again.token_ids == expected
        service.check_integrity()


async def test_a_running_turn_retains_its_kv_and_counts_with_its_longest_answer(
    model_paths: Mapping[str, Path],
) -> None:
    async with Service(model_paths["llama_gqa"], 2, 2) as service:
        begun = await service.router.begin_turn(of(service, "acme", "c", 500, random_tokens(100), max_tokens=300))
        async with aclosing(service.decode.stream_turn(begun.turn_id)) as events:
            await anext(events)
            with pytest.raises(CapacityExceeded) as caught:
                await service.router.begin_turn(of(service, "acme", "", 500, random_tokens(90), max_tokens=11))
            assert str(caught.value).startswith(
                "tenant 'acme': its running turns may need 400 KV tokens and this request 101, of 500 allowed"
            )
            assert caught.value.retry_after_seconds == 1.0
            await service.answer(of(service, "acme", "", 500, random_tokens(90), max_tokens=10))
            await service.answer(of(service, "beta", "", 500, random_tokens(200), max_tokens=10))
        await eventually(lambda: not service.router.num_running)
        await service.answer(of(service, "acme", "", 500, random_tokens(90), max_tokens=11))
        service.check_integrity()


async def test_a_turn_beyond_the_whole_quota_is_invalid_and_releases_nothing(model_paths: Mapping[str, Path]) -> None:
    async with Service(model_paths["llama_gqa"], 2, 2) as service:
        await service.answer(of(service, "acme", "c", 100, random_tokens(60)))
        with pytest.raises(
            InvalidRequest, match="90 prompt tokens and max_tokens 11 make 101, and tenant 'acme' may hold at most 100"
        ):
            await service.router.begin_turn(of(service, "acme", "d", 100, random_tokens(90), max_tokens=11))
        assert await retained(service, "acme/c") == 64
        with pytest.raises(NotFound):
            await service.router.get_conversation("acme/d")


async def test_a_conversation_that_goes_on_does_not_count_twice(model_paths: Mapping[str, Path]) -> None:
    async with Service(model_paths["llama_gqa"], 2, 2) as service:
        await service.answer(of(service, "acme", "c", 100, random_tokens(60)))
        second = await service.answer(of(service, "acme", "c", 100, [1, 2, 3], mode=PromptMode.APPEND))
        assert second.begun.plan.cached_tokens == 64
        with pytest.raises(InvalidRequest, match="make 101"):
            await service.answer(
                of(service, "acme", "c", 100, [1], mode=PromptMode.APPEND, max_tokens=27)  # after 73 tokens
            )


async def test_a_fork_counts_and_what_it_shares_outlives_its_source(model_paths: Mapping[str, Path]) -> None:
    async with Service(model_paths["llama_gqa"], 2, 2) as service:
        await service.answer(of(service, "acme", "c", 0, random_tokens(60)))
        await service.router.fork_conversation("acme/c", "acme/fork", None)
        await service.router.delete_conversation("acme/c")
        await service.answer(of(service, "acme", "", 100, random_tokens(40)))  # 64 + 45 would be too many
        await eventually(lambda: service.decode.ring.pool.get("acme/fork") is None)
        assert await retained(service, "acme/fork") == 0
        service.check_integrity()


async def test_a_fork_is_refused_or_makes_room_where_its_tenants_quota_is_full(model_paths: Mapping[str, Path]) -> None:
    async with Service(model_paths["llama_gqa"], 1, 1) as service:
        await service.answer(of(service, "acme", "old", 0, random_tokens(20, seed=1)))
        await service.answer(of(service, "acme", "c", 0, random_tokens(60)))
        with pytest.raises(InvalidRequest, match="source_id: the conversation and a fork of 64 tokens come to 128 KV"):
            await service.router.fork_conversation("acme/c", "acme/f", None, KvQuota(tenant="acme", max_tokens=127))
        await service.router.fork_conversation("acme/c", "acme/f", None, KvQuota(tenant="acme", max_tokens=130))
        assert await retained(service, "acme/old") == 0
        assert await retained(service, "acme/f") == 64
        service.check_integrity()


async def test_turns_that_begin_at_once_never_exceed_the_quota_together(model_paths: Mapping[str, Path]) -> None:
    async with Service(model_paths["llama_gqa"], 2, 2) as service:
        turns = [of(service, "acme", f"c{number}", 100, random_tokens(45, seed=number)) for number in range(6)]
        answers = await asyncio.gather(*(service.answer(turn) for turn in turns), return_exceptions=True)
        assert [isinstance(each, CapacityExceeded) for each in answers] == [False, False, True, True, True, True]
        await eventually(lambda: not service.router.num_running)
        total = [await retained(service, f"acme/c{number}") for number in range(2)]
        assert sum(total) == 2 * 49


@given(st.lists(st.tuples(st.sampled_from("ofrx"), st.sampled_from(["a/1", "a/2", "b/1", "c", "/d"])), max_size=40))
@settings(max_examples=200, deadline=None)
def test_a_tenants_conversations_are_those_whose_id_says_so(steps: list[tuple[str, str]]) -> None:
    clock = Clock()
    store = ConversationStore(4, ttl_seconds=5.0, clock=clock)
    for step, name in steps:
        clock.now += 1
        known = {each.conversation_id: each for each in store.page("", "", 100)[0]}
        if step == "o":
            conversation, _ = store.open(name, "request")
            conversation.tokens = np.arange(3)
            store.close(conversation)
        elif step == "f" and known and name not in known:
            source = next(iter(known.values()))
            fork, _ = store.begin_fork(source, name, 2)
            store.end_fork(source, fork)
        elif step == "r" and name in known:
            store.remove(name)
        elif step == "x":
            store.expire()
        ids = [each.conversation_id for each in store.page("", "", 100)[0]]
        for tenant in ("a", "b", ""):
            mine = sorted(each.conversation_id for each in store.of_tenant(tenant))
            assert mine == [each for each in ids if tenant_of(each) == tenant]
