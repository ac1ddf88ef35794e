"""Answers of no stated length end where the model, the rings or the tenant's quota have no more room."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from ringserve.cp_core.errors import InvalidRequest
from ringserve.orchestration.protocol.turns import KvQuota, TurnRequest
from ringserve.workers.protocol.steps import FinishReason
from tests.orchestration.service import BLOCK_TOKENS, Service, is_idle
from tests.services.gateway.test_failover import PROMPT, all_ready, killing_at, run
from tests.workers.models import Oracle, random_tokens

Models = Mapping[str, Path]
Oracles = Mapping[str, Oracle]


def open_ended(service: Service, num_tokens: int, quota: int = 0, **more: object) -> TurnRequest:
    """Return a request whose answer has no stated length, of a tenant with a quota, if any."""
    request = replace(service.request(random_tokens(num_tokens), **more), is_open_ended=True)  # type: ignore[arg-type]
    if not quota:
        return request
    name = f"acme/{request.request_id}"
    return replace(request, request_id=name, kv_quota=KvQuota(tenant="acme", max_tokens=quota))


async def test_an_answer_ends_for_its_length_where_the_smallest_ring_is_full(
    model_paths: Models, oracles: Oracles
) -> None:
    async with Service(model_paths["llama_gqa"], 2, 2, decode_blocks=20) as service:
        answer = await service.answer(open_ended(service, 100))
        room = 2 * 20 * BLOCK_TOKENS - 100
        assert answer.begun.max_tokens == room
        assert answer.token_ids == oracles["llama_gqa"].greedy(random_tokens(100), room)
        assert answer.finished.finish_reason is FinishReason.LENGTH
        service.check_integrity()


async def test_turns_beside_each_other_take_their_room_as_they_grow(model_paths: Models, oracles: Oracles) -> None:
    """Each may fill the ring alone. One of them waits for the blocks of the other, and none is refused or cut."""
    async with Service(model_paths["llama_gqa"], 2, 2, decode_blocks=20, headroom_tokens=8) as service:
        answers = await asyncio.gather(*(service.answer(open_ended(service, size)) for size in (60, 61)))
        for size, answer in zip((60, 61), answers, strict=True):
            assert answer.token_ids == oracles["llama_gqa"].greedy(random_tokens(size), 160 - size)
        assert service.decode.num_preemptions
        service.check_integrity()


async def test_the_models_positions_bound_an_answer(model_paths: Models) -> None:
    async with Service(model_paths["llama_gqa"], 1, 1, num_blocks=1 << 12) as service:
        request = open_ended(service, 30)
        assert (await service.router.begin_turn(request)).max_tokens == service.model.max_positions - 30
        await service.router.abort_requests([request.request_id])


async def test_a_prompt_that_leaves_no_room_is_refused_with_the_reason(model_paths: Models) -> None:
    async with Service(model_paths["llama_gqa"], 2, 2, decode_blocks=20) as service:
        with pytest.raises(InvalidRequest, match=r"160 prompt tokens .* \(the KV room of ring decode-0\)"):
            await service.answer(open_ended(service, 160))
        with pytest.raises(InvalidRequest, match=r"30 prompt tokens .* tenant 'acme' may hold at most 30 KV tokens"):
            await service.answer(open_ended(service, 30, quota=30))


async def test_a_quota_leaves_room_for_turns_beside_an_answer_of_no_stated_length(model_paths: Models) -> None:
    async with Service(model_paths["llama_gqa"], 1, 1) as service:
        requests = [open_ended(service, 50, quota=3000) for _ in range(3)]
        found = [(await service.router.begin_turn(request)).max_tokens for request in requests]
        assert found == [1475, 712, 331], "half of what is left beside the prompts"
        await service.router.abort_requests([request.request_id for request in requests])


async def test_what_a_tenant_retains_is_evicted_for_usual_answers_alone(model_paths: Models) -> None:
    async with Service(model_paths["llama_gqa"], 1, 1) as service:
        kept = service.request(random_tokens(1600), conversation="acme/c")
        await service.answer(replace(kept, request_id="acme/first"))
        for quota, expected, is_evicted in ((8000, (8000 - 50 - 1604) // 2, False), (2098, 1024, True)):
            request = open_ended(service, 50, quota=quota)
            assert (await service.router.begin_turn(request)).max_tokens == expected
            view = await service.router.get_conversation("acme/c")
            assert (view.retained_on("decode") == 0) == is_evicted
            await service.router.abort_requests([request.request_id])


async def test_an_answer_of_no_stated_length_has_the_same_end_after_a_loss(
    model_paths: Models, oracles: Oracles
) -> None:
    async with Service(model_paths["llama_gqa"], 2, 2, decode_blocks=32, other_decode=[2]) as service:
        free, room = service.free_blocks(), 2 * 32 * BLOCK_TOKENS - len(PROMPT)
        request = replace(service.request(PROMPT), is_open_ended=True)
        seen = await run(service, request, killing_at(service, 5))
        assert len(seen.failovers) == 1
        assert seen.tokens == oracles["llama_gqa"].greedy(PROMPT, room)
        assert seen.finished
        assert seen.finished.finish_reason is FinishReason.LENGTH
        answer = service.router._turns.ended.answer_of(request.request_id)
        assert answer is not None
        assert answer.max_tokens == room
        await all_ready(service)
        await is_idle(service, free)
