"""Prompts that begin as an earlier one did share its KV, whoever sent it without a conversation, and stay exact."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ringserve.cp_core.errors import NotFound, TurnCancelled
from ringserve.orchestration.protocol.turns import TurnRequest
from ringserve.orchestration.ring.life import Ring
from ringserve.orchestration.router import registry
from ringserve.orchestration.router.registry import RunningTurn
from tests.orchestration.service import BLOCK_TOKENS, Answer, Service
from tests.waiting import eventually
from tests.workers.models import Oracle, random_tokens

MODEL = "llama_gqa"
MAX_TOKENS = 5


@asynccontextmanager
async def serving(
    model_paths: Mapping[str, Path], num_prefill: int = 2, num_decode: int = 3, **settings: Any
) -> AsyncIterator[Service]:
    async with Service(model_paths[MODEL], num_prefill, num_decode, retain_prompts=True, **settings) as service:
        yield service
        await eventually(lambda: service.router.num_running == 0)
        service.check_integrity()


def of_tenant(tenant: str, request: TurnRequest) -> TurnRequest:
    return replace(request, request_id=f"{tenant}/{request.request_id}")


def is_rebuilt(ring: Ring, before: str) -> bool:
    return ring.incarnation != before and ring.is_serving(ring.incarnation)


def cached(answer: Answer) -> int:
    return answer.begun.plan.cached_tokens


async def test_the_same_prompt_again_computes_its_last_token_alone(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    prompt = random_tokens(75, 1)
    expected = oracles[MODEL].greedy(prompt, MAX_TOKENS)
    async with serving(model_paths) as service:
        answers = [await service.answer(service.request(prompt)) for _ in range(3)]
    assert [answer.token_ids for answer in answers] == [expected] * 3
    assert [cached(answer) for answer in answers] == [0, 74, 74]


async def test_a_chat_without_a_conversation_goes_on_from_its_last_answer(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    async with serving(model_paths) as service:
        history: list[int] = []
        for number in range(4):
            kv_tokens = max(0, len(history) - 1)
            history += random_tokens(19, number)
            answer = await service.answer(service.request(history))
            assert answer.token_ids == oracles[MODEL].greedy(history, MAX_TOKENS)
            assert cached(answer) == kv_tokens
            history += answer.token_ids
        assert (service.router.num_unnamed, service.router.num_conversations) == (1, 0), (
            "each turn goes on in the unnamed conversation before it"
        )
        assert (await service.router.list_conversations("", "", 10)).conversations == ()


@pytest.mark.parametrize("shared", [BLOCK_TOKENS - 1, 4 * BLOCK_TOKENS - 1, 4 * BLOCK_TOKENS, 4 * BLOCK_TOKENS + 1, 70])
@pytest.mark.parametrize(("num_prefill", "num_decode"), [(1, 3), (3, 2)])
async def test_prompts_share_a_document_of_any_length(
    shared: int, num_prefill: int, num_decode: int, model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    document = random_tokens(shared, 7)
    prompts = [document + random_tokens(9 + number, 10 + number) for number in range(3)]
    async with serving(model_paths, num_prefill, num_decode) as service:
        answers = [await service.answer(service.request(prompt)) for prompt in prompts]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == oracles[MODEL].greedy(prompt, MAX_TOKENS)
    assert cached(answers[0]) == 0
    assert all(cached(answer) == (shared if shared >= 16 else 0) for answer in answers[1:])


async def test_prompts_that_share_run_together_and_while_their_source_goes_on(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    document = random_tokens(50, 3)
    async with serving(model_paths) as service:
        first = await service.answer(service.request(document, conversation="named"))
        prompts = [document + random_tokens(5 + number, number) for number in range(6)]
        follow_up = document + first.token_ids + random_tokens(8, 99)
        requests = [service.request(prompt) for prompt in prompts]
        answers = await asyncio.gather(
            service.answer(service.request(follow_up, conversation="named")), *map(service.answer, requests)
        )
        for prompt, answer in zip([follow_up, *prompts], answers, strict=True):
            assert answer.token_ids == oracles[MODEL].greedy(prompt, MAX_TOKENS)
            assert cached(answer) >= 49


async def test_a_new_conversation_begins_with_what_others_computed_and_keeps_its_own(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    document = random_tokens(40, 3)
    async with serving(model_paths) as service:
        await service.answer(service.request(document))
        prompt = document + random_tokens(10, 4)
        first = await service.answer(service.request(prompt, conversation="mine"))
        assert cached(first) == 40
        follow_up = prompt + first.token_ids + random_tokens(3, 5)
        second = await service.answer(service.request(follow_up, conversation="mine"))
        assert cached(second) == len(prompt) + len(first.token_ids) - 1
        assert second.token_ids == oracles[MODEL].greedy(follow_up, MAX_TOKENS)


async def test_tenants_never_share(model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]) -> None:
    prompt = random_tokens(40, 3)
    async with serving(model_paths) as service:
        answers = [
            await service.answer(of_tenant(tenant, service.request(prompt))) for tenant in ("ann", "bob", "ann", "bob")
        ]
    assert [cached(answer) for answer in answers] == [0, 0, 39, 39]
    assert {tuple(answer.token_ids) for answer in answers} == {tuple(oracles[MODEL].greedy(prompt, MAX_TOKENS))}


async def test_a_turn_that_is_cancelled_while_it_shares_leaves_the_source_as_it_was(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    document = random_tokens(50, 3)
    async with serving(model_paths, chunk_tokens=16) as service:
        await service.answer(service.request(document))
        free = service.free_blocks()
        for number in range(3):
            request = service.request(document + random_tokens(400, number), max_tokens=50)
            running = asyncio.create_task(service.answer(request))
            await eventually(lambda sent=request: service.router._turns.of_request(sent.request_id) is not None)  # type: ignore[misc]
            if number:  # later than while it reserves
                await eventually(lambda: service.free_blocks() != free)
            await service.router.abort_requests([request.request_id])
            with pytest.raises(TurnCancelled):
                await running
            await eventually(lambda: service.free_blocks() == free)
        again = document + random_tokens(3, 9)
        answer = await service.answer(service.request(again))
        assert cached(answer) == 50
        assert answer.token_ids == oracles[MODEL].greedy(again, MAX_TOKENS)


async def test_a_source_that_was_evicted_is_computed_again_and_not_looked_for_twice(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    document = random_tokens(60, 3)
    async with serving(model_paths, 1, 1, num_blocks=24) as service:
        await service.answer(service.request(document))
        for number in range(6):
            await service.answer(service.request(random_tokens(60, 20 + number)))
        prompt = document + random_tokens(4, 9)
        answer = await service.answer(service.request(prompt))
        assert cached(answer) == 0
        assert answer.token_ids == oracles[MODEL].greedy(prompt, MAX_TOKENS)
        assert (await service.answer(service.request(prompt))).begun.plan.cached_tokens == len(prompt) - 1


async def test_a_history_is_evicted_from_its_end_and_its_beginning_is_still_shared(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    histories = [random_tokens(400, number) for number in range(3)]
    async with serving(model_paths, num_blocks=140, decode_blocks=90) as service:
        for number, history in enumerate(histories):
            await service.answer(service.request(history, conversation=f"named-{number}"))
        prompt = histories[0] + random_tokens(5, 9)
        answer = await service.answer(service.request(prompt))
        assert 100 < cached(answer) < 350
        assert answer.token_ids == oracles[MODEL].greedy(prompt, MAX_TOKENS)
        again = histories[0][:150] + random_tokens(5, 10)
        assert (await service.answer(service.request(again))).token_ids == oracles[MODEL].greedy(again, MAX_TOKENS)


async def test_full_rings_of_both_roles_retain_different_prompts(
    model_paths: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    roles: dict[str, str] = {}
    monkeypatch.setattr(
        registry, "spare_role", lambda kv_id: roles.setdefault(kv_id, ("prefill", "decode")[len(roles) % 2])
    )
    async with serving(model_paths, 1, 1, num_blocks=90) as service:  # of 17 blocks or so for each prompt
        for number in range(8):
            await service.answer(service.request(random_tokens(60, number)))
        pools = [leader.ring.pool for leader in (service.prefill, service.decode)]
        here = [{kv_id for kv_id in roles if pool.num_retained(kv_id)} for pool in pools]
        assert all(len(names) <= 5 for names in here)
        assert len(here[0] | here[1]) >= 7


async def test_a_rebuilt_ring_shares_nothing_of_before(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    prompt = random_tokens(60, 3)
    async with serving(model_paths) as service:
        await service.answer(service.request(prompt))
        for leader, ranks in ((service.prefill, service.prefill_ranks), (service.decode, service.decode_ranks)):
            ring, before = leader.ring, leader.ring.incarnation
            await ranks.made[-1].kill()
            await eventually(partial(is_rebuilt, ring, before))
        await eventually(lambda: all(ring.is_ready for ring in service.router.rings))
        answer = await service.answer(service.request(prompt))
        assert answer.token_ids == oracles[MODEL].greedy(prompt, MAX_TOKENS)


async def test_clients_cannot_name_an_unnamed_conversation(model_paths: Mapping[str, Path]) -> None:
    async with serving(model_paths) as service:
        await service.answer(service.request(random_tokens(20, 1)))
        with pytest.raises(NotFound):
            await service.router.get_conversation("prompt-")
        assert service.router.num_unnamed == 1


async def test_a_request_that_wants_no_cache_shares_nothing_and_leaves_nothing(model_paths: Mapping[str, Path]) -> None:
    prompt = random_tokens(40, 1)
    async with serving(model_paths) as service:
        free = service.free_blocks()
        for _ in range(2):
            answer = await service.answer(replace(service.request(prompt), no_cache=True))
            assert cached(answer) == 0
        await eventually(lambda: service.free_blocks() == free)
        assert service.router.prefix_tokens == (0, 0)
        await service.answer(service.request(prompt))
        assert cached(await service.answer(replace(service.request(prompt), no_cache=True))) == 0
        assert cached(await service.answer(service.request(prompt))) == 39
        assert service.router.prefix_tokens == (80, 39)


async def test_a_history_that_was_replaced_since_the_prompt_found_it_is_not_shared(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    document = random_tokens(60, 3)
    prompt, edited = document + random_tokens(4, 9), document[:20] + random_tokens(60, 8)
    async with serving(model_paths) as service:
        await service.answer(service.request(document, conversation="named"))
        late = service.request(prompt)
        lifecycle = service.router._lifecycle
        reserve = lifecycle._reserve

        async def reserve_late(turn: RunningTurn) -> None:
            if turn.request.request_id == late.request_id:
                await service.answer(service.request(edited, conversation="named"))
            await reserve(turn)

        monkeypatch.setattr(lifecycle, "_reserve", reserve_late)
        answer = await service.answer(late)
        assert service.router._conversations.get("named").num_turns == 2
        assert cached(answer) == 0
        assert answer.token_ids == oracles[MODEL].greedy(prompt, MAX_TOKENS)
