"""Turns that are cancelled, expire, are refused, or lose a rank. They leave nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import pytest

from ringserve.cp_core.errors import (
    Busy,
    CapacityExceeded,
    DeadlineExceeded,
    InvalidRequest,
    NotBegun,
    NotFound,
    RingserveError,
    TurnCancelled,
    Unavailable,
)
from ringserve.orchestration import tasks
from ringserve.orchestration.protocol.plans import PromptMode
from ringserve.orchestration.protocol.turns import Reservation, Reserve
from ringserve.orchestration.router import registry
from ringserve.workers.protocol.transfers import KvExpect
from tests.orchestration.service import Service, is_idle, read_tokens
from tests.waiting import eventually
from tests.workers.models import Oracle, random_tokens


@pytest.mark.parametrize("selector", ["auto", "chain"])
async def test_a_client_that_hangs_up_leaves_no_kv_behind(selector: str, model_paths: Mapping[str, Path]) -> None:
    async with Service(model_paths["llama_gqa"], 2, 2) as service:
        service.select(selector)
        free = service.free_blocks()
        # A turn whose stream never began runs to its end.
        for seen, max_tokens in ((0, 20), (1, 500), (3, 500)):
            await read_tokens(service, service.request(random_tokens(90), max_tokens=max_tokens), seen)
            await is_idle(service, free)


async def test_a_deadline_ends_the_turn_everywhere(model_paths: Mapping[str, Path]) -> None:
    async with Service(model_paths["llama_gqa"], 2, 2) as service:
        free = service.free_blocks()
        with pytest.raises(DeadlineExceeded, match=r"deadline of 0\.2 s"):
            await service.answer(service.request(random_tokens(60), max_tokens=5000, deadline=0.2))
        await is_idle(service, free)


async def test_an_abort_by_request_id_ends_the_stream_and_frees_the_turn(model_paths: Mapping[str, Path]) -> None:
    async with Service(model_paths["llama_gqa"], 2, 2) as service:
        free = service.free_blocks()
        request = service.request(random_tokens(60), max_tokens=5000)
        turn = asyncio.create_task(service.answer(request))
        await eventually(lambda: service.decode.num_running == 1)
        assert await service.router.abort_requests([request.request_id, "other"]) == ([request.request_id], ["other"])
        with pytest.raises(TurnCancelled, match="aborted"):
            await turn
        await is_idle(service, free)


async def test_an_abort_while_rings_still_reserve_is_what_the_client_hears_of(
    model_paths: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Service(model_paths["llama_gqa"], 2, 2) as service:
        free = service.free_blocks()
        rank = service.decode_ranks.made[0]
        expect_kv, asked, may_expect = rank.expect_kv, asyncio.Event(), asyncio.Event()

        async def expect_late(expect: KvExpect, timeout: float) -> None:
            asked.set()
            await may_expect.wait()
            await expect_kv(expect, timeout)

        monkeypatch.setattr(rank, "expect_kv", expect_late)
        request = service.request(random_tokens(60))
        turn = asyncio.create_task(service.answer(request))
        await asked.wait()
        assert await service.router.abort_requests([request.request_id]) == ([request.request_id], [])
        may_expect.set()
        with pytest.raises(TurnCancelled, match="the request was aborted"):
            await turn
        await eventually(lambda: service.router.num_running == 0)
        await is_idle(service, free)


async def test_a_cancelled_turn_leaves_its_conversation_as_it_was(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    async with Service(model_paths["llama_gqa"], 2, 3) as service:
        prompt = random_tokens(50)
        first = await service.answer(service.request(prompt, conversation="c"))
        history = [*prompt, *first.token_ids]
        cancelled = service.request([1, 2, 3], conversation="c", mode=PromptMode.APPEND, max_tokens=500)
        await read_tokens(service, cancelled, 3)
        await eventually(lambda: service.router.num_running == 0)
        answer = await service.answer(service.request([4, 5], conversation="c", mode=PromptMode.APPEND))
        assert answer.token_ids == oracles["llama_gqa"].greedy([*history, 4, 5], 5)
        assert answer.begun.plan.cached_tokens == len(history) - 1
        service.check_integrity()


async def test_a_conversation_takes_one_turn_at_a_time(model_paths: Mapping[str, Path]) -> None:
    async with Service(model_paths["llama_gqa"], 1, 1) as service:
        running = service.request(random_tokens(20), conversation="c", max_tokens=5000)
        turn = asyncio.create_task(service.answer(running))
        await eventually(lambda: service.decode.num_running == 1)
        with pytest.raises(Busy, match=running.request_id):
            await service.answer(service.request([1], conversation="c"))
        with pytest.raises(Busy, match=running.request_id):
            await service.router.delete_conversation("c")
        turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)


@pytest.mark.parametrize(
    ("act", "error", "says"),
    [
        (lambda s: s.answer(s.request([])), InvalidRequest, "0 tokens"),
        (lambda s: s.answer(s.request([1], mode=PromptMode.APPEND, conversation="new")), NotFound, "append"),
        (lambda s: s.answer(s.request([1] * 200, max_tokens=60)), InvalidRequest, "260.*maximum context length is 256"),
        (lambda s: s.router.get_conversation("none"), NotFound, "'none'"),
        (lambda s: s.router.delete_conversation("none"), NotFound, "'none'"),
    ],
)
async def test_what_cannot_be_done_is_refused_in_a_sentence(
    act: Callable[[Service], Awaitable[object]],
    error: type[RingserveError],
    says: str,
    model_paths: Mapping[str, Path],
) -> None:
    async with Service(model_paths["llama_gqa"], 1, 1, num_blocks=64) as service:
        free = service.free_blocks()
        with pytest.raises(error, match=says):
            await act(service)
        await is_idle(service, free)


async def test_a_full_ring_refuses_at_once_and_serves_when_there_is_room(model_paths: Mapping[str, Path]) -> None:
    async with Service(model_paths["llama_gqa"], 2, 2, num_blocks=32) as service:
        free = service.free_blocks()
        big = service.request(random_tokens(40), max_tokens=180)
        turn = asyncio.create_task(service.answer(big))
        await eventually(lambda: service.decode.num_running == 1)
        with pytest.raises(CapacityExceeded, match="blocks"):
            await service.answer(service.request(random_tokens(40), max_tokens=180))
        await turn
        await service.answer(service.request(random_tokens(40), max_tokens=180))
        await is_idle(service, free)


async def test_a_turn_that_finds_no_room_costs_its_conversation_nothing(model_paths: Mapping[str, Path]) -> None:
    async with Service(model_paths["llama_gqa"], 2, 2, num_blocks=32) as service:
        prompt = random_tokens(40)
        first = await service.answer(service.request(prompt, conversation="c"))
        history = [*prompt, *first.token_ids]
        big = asyncio.create_task(service.answer(service.request(random_tokens(60), max_tokens=100)))
        await eventually(lambda: service.decode.num_running == 1)
        with pytest.raises(CapacityExceeded):
            await service.answer(service.request([1], conversation="c", mode=PromptMode.APPEND, max_tokens=150))
        await big
        answer = await service.answer(service.request([1], conversation="c", mode=PromptMode.APPEND))
        assert answer.begun.plan.cached_tokens == len(history) - 1


async def test_kept_conversations_make_room_for_new_turns(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    oracle = oracles["llama_gqa"]
    async with Service(model_paths["llama_gqa"], 2, 2, num_blocks=40) as service:
        histories = {}
        for name in ("a", "b", "c", "d"):
            prompt = random_tokens(100, seed=ord(name))
            answer = await service.answer(service.request(prompt, conversation=name))
            histories[name] = [*prompt, *answer.token_ids]
        # Room for about three: the first has been evicted somewhere, and is computed again all the same.
        for name, history in histories.items():
            answer = await service.answer(service.request([9], conversation=name, mode=PromptMode.APPEND))
            assert answer.token_ids == oracle.greedy([*history, 9], 5)
        service.check_integrity()


@pytest.mark.parametrize(("role", "selector"), [("prefill", "auto"), ("prefill", "chain"), ("decode", "auto")])
async def test_a_dead_rank_fails_the_turn_and_the_next_one_works(
    role: str, selector: str, model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    oracle = oracles["llama_gqa"]
    async with Service(model_paths["llama_gqa"], 2, 2) as service:
        service.select(selector)
        prompt = random_tokens(70)
        first = await service.answer(service.request(prompt, conversation="c"))
        history = [*prompt, *first.token_ids]
        turn = asyncio.create_task(service.answer(service.request(random_tokens(2000), max_tokens=5000)))
        await eventually(lambda: service.router.num_running == 1)
        leader, ranks = (
            (service.prefill, service.prefill_ranks) if role == "prefill" else (service.decode, service.decode_ranks)
        )
        if role == "decode":
            await eventually(lambda: service.decode.num_running == 1)
        else:
            await eventually(lambda: service.prefill.is_computing or service.decode.num_running == 1)
        await ranks.made[1].kill()
        if role == "decode":
            with pytest.raises(Unavailable, match="decode-0"):
                await turn
        await eventually(lambda: leader.ring.rebuilds == 1 and leader.ring.state == "ready")
        turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)
        await eventually(lambda: service.router.num_running == 0)
        answer = await service.answer(service.request([8, 9], conversation="c", mode=PromptMode.APPEND))
        assert answer.token_ids == oracle.greedy([*history, 8, 9], 5)
        kept = answer.begun.plan.cached_tokens
        assert kept == (len(history) - 1 if role == "prefill" else len(prompt))
        service.check_integrity()


async def test_turns_join_one_batch_and_wait_for_a_place_in_it(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    oracle = oracles["llama_gqa"]
    async with Service(model_paths["llama_gqa"], 2, 2, max_batch=3) as service:
        prompts = [random_tokens(20 + number, number) for number in range(7)]
        turns = [
            asyncio.create_task(service.answer(service.request(prompt, max_tokens=30 + number)))
            for number, prompt in enumerate(prompts)
        ]
        most = 0

        def watched() -> bool:
            nonlocal most
            most = max(most, service.decode.num_running)
            return all(turn.done() for turn in turns)

        await eventually(watched)
        for number, (prompt, turn) in enumerate(zip(prompts, turns, strict=True)):
            assert (await turn).token_ids == oracle.greedy(prompt, 30 + number)
        assert most == 3


async def test_a_turn_that_ends_while_its_rings_reserve_has_not_begun(
    model_paths: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Service(model_paths["llama_gqa"], 2, 2) as service:
        free, reserved, ended = service.free_blocks(), asyncio.Event(), asyncio.Event()
        on_prefill, on_decode = service.prefill.reserve, service.decode.reserve

        async def reserve_late(request: Reserve) -> Reservation:
            await ended.wait()
            return await on_prefill(request)

        async def reserve(request: Reserve) -> Reservation:
            reservation = await on_decode(request)
            reserved.set()
            return reservation

        monkeypatch.setattr(service.prefill, "reserve", reserve_late)
        monkeypatch.setattr(service.decode, "reserve", reserve)
        turn = asyncio.create_task(service.router.begin_turn(service.request(random_tokens(20), max_tokens=5)))
        await reserved.wait()
        (running,) = service.router._turns.of_tenant("")
        await service.decode.abort_turn(running.turn_id, Unavailable("the ring lost a rank"))
        ended.set()
        with pytest.raises(NotBegun, match="ring decode-0 ended the turn before it began; retry"):
            await turn
        await is_idle(service, free)


async def test_an_answer_ends_though_the_prefill_ring_hangs(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "END_SECONDS", 0.01)
    async with Service(model_paths["llama_gqa"], 2, 3) as service:
        free, settle = service.free_blocks(), service.prefill.settle
        asked, may_settle = asyncio.Event(), asyncio.Event()

        async def settle_late(kv_id: str, turn_id: str, retain_tokens: int) -> None:
            asked.set()
            await may_settle.wait()
            await settle(kv_id, turn_id, retain_tokens)

        monkeypatch.setattr(service.prefill, "settle", settle_late)
        prompt = random_tokens(20)
        first = await service.answer(service.request(prompt, conversation="c"))
        await asked.wait()
        assert service.router.num_running == 1, "the conversation waits for the ring, its client does not"
        assert service.decode.num_turns == 0
        may_settle.set()
        follow = service.request([1, 2], conversation="c", mode=PromptMode.APPEND, wait=True)
        answer = await service.answer(follow)
        assert answer.token_ids == oracles["llama_gqa"].greedy([*prompt, *first.token_ids, 1, 2], 5)
        assert answer.begun.plan.cached_tokens == len(prompt) + len(first.token_ids) - 1
        await service.router.delete_conversation("c")
        await is_idle(service, free)


async def test_a_settlement_that_is_lost_is_repeated(
    model_paths: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "FIRST_PAUSE", 0.001)
    async with Service(model_paths["llama_gqa"], 2, 2) as service:
        free, settle, lost = service.free_blocks(), service.prefill.settle, [Unavailable("lost on the way")] * 3

        async def settle_once_reached(kv_id: str, turn_id: str, retain_tokens: int) -> None:
            if lost:
                raise lost.pop()
            await settle(kv_id, turn_id, retain_tokens)

        monkeypatch.setattr(service.prefill, "settle", settle_once_reached)
        await service.answer(service.request(random_tokens(20)))
        await is_idle(service, free)
        assert not lost
