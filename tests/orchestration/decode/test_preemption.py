"""More turns than a decode ring has blocks for: they grow, are preempted and resumed, and no client notices."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from ringserve.cp_core.errors import CapacityExceeded, DeadlineExceeded, NotFound, TurnCancelled, Unavailable
from ringserve.orchestration.protocol.plans import PromptMode
from ringserve.orchestration.protocol.turns import PrefillDone, PrefillTurn, Reservation, Reserve, ResumeTurn
from tests.orchestration.service import Answer, Service, is_idle
from tests.waiting import eventually, pass_time
from tests.workers.models import Oracle, random_tokens

LENGTHS = (21, 5, 34, 13)
MAX_TOKENS = (60, 66, 52, 40)
HEADROOM = 8


def small_service(path: Path, num_prefill: int, num_decode: int, **options: int | bool) -> Service:
    """Return a service with decode blocks for about two of the four turns, over all ranks."""
    return Service(
        path,
        num_prefill,
        num_decode,
        num_blocks=128,
        decode_blocks=48 // num_decode,
        headroom_tokens=HEADROOM,
        **options,  # type: ignore[arg-type]
    )


async def answer_all(service: Service, **sampling: float) -> list[Answer]:
    """Run the turns concurrently, the first being the oldest."""
    requests = [
        service.request(random_tokens(length, seed=length), max_tokens=count, **sampling)  # type: ignore[arg-type]
        for length, count in zip(LENGTHS, MAX_TOKENS, strict=True)
    ]
    return list(await asyncio.gather(*(service.answer(request) for request in requests)))


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(1, 1), (1, 3), (2, 2), (3, 2)])
async def test_turns_that_gave_way_answer_as_transformers_does(
    num_prefill: int, num_decode: int, model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    async with small_service(model_paths["llama_gqa"], num_prefill, num_decode) as service:
        free = service.free_blocks()
        answers = await answer_all(service)
        assert service.decode.num_preemptions > 0
        assert (await service.decode.get_status()).num_preemptions == service.decode.num_preemptions
        await is_idle(service, free)
    for length, count, answer in zip(LENGTHS, MAX_TOKENS, answers, strict=True):
        assert answer.token_ids == oracles["llama_gqa"].greedy(random_tokens(length, seed=length), count)


async def test_turns_give_way_on_rings_of_processes_that_share_heads(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    async with small_service(model_paths["llama_gqa"], 1, 2, prefill_tp=2, decode_tp=2) as service:
        free = service.free_blocks()
        answers = await answer_all(service)
        assert service.decode.num_preemptions > 0
        await is_idle(service, free)
    for length, count, answer in zip(LENGTHS, MAX_TOKENS, answers, strict=True):
        assert answer.token_ids == oracles["llama_gqa"].greedy(random_tokens(length, seed=length), count)


async def test_drawn_tokens_are_the_same_with_and_without_preemption(model_paths: Mapping[str, Path]) -> None:
    path = model_paths["llama_gqa"]
    async with small_service(path, 2, 2) as service:
        preempted = await answer_all(service, temperature=0.9, seed=11)
        assert service.decode.num_preemptions > 0
    async with Service(path, 2, 2) as service:
        undisturbed = await answer_all(service, temperature=0.9, seed=11)
        assert service.decode.num_preemptions == 0
    assert [answer.token_ids for answer in preempted] == [answer.token_ids for answer in undisturbed]


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(1, 3), (3, 2)])
async def test_a_preempted_conversation_continues_with_the_kv_of_both_rings(
    num_prefill: int, num_decode: int, model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    """The cached KV is uneven on both rings, and the prompt differs from the history in the middle."""
    oracle = oracles["llama_gqa"]
    async with small_service(model_paths["llama_gqa"], num_prefill, num_decode) as service:
        prompt = random_tokens(43)
        first = await service.answer(service.request(prompt, conversation="c", max_tokens=7))
        edited = [*prompt[:29], 7, 8, 9, *first.token_ids]
        old = asyncio.create_task(service.answer(service.request(random_tokens(30, seed=1), max_tokens=100)))
        await eventually(lambda: service.decode.num_running == 1)
        young = await service.answer(service.request(edited, conversation="c", max_tokens=90))
        assert young.token_ids == oracle.greedy(edited, 90)
        assert (await old).token_ids == oracle.greedy(random_tokens(30, seed=1), 100)
        assert service.decode.num_preemptions > 0
        history = [*edited, *young.token_ids]
        third = await service.answer(service.request([5], conversation="c", mode=PromptMode.APPEND, max_tokens=5))
        assert third.token_ids == oracle.greedy([*history, 5], 5)
        assert third.begun.plan.cached_tokens == len(history) - 1
        service.check_integrity()


async def test_a_conversation_cancelled_after_its_preemption_is_as_before_its_turn(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    """The prefill ring then holds more of the cancelled turn than agrees with the conversation."""
    oracle = oracles["llama_gqa"]
    async with small_service(model_paths["llama_gqa"], 2, 2) as service:
        prompt = random_tokens(40)
        first = await service.answer(service.request(prompt, conversation="c", max_tokens=7))
        history = [*prompt, *first.token_ids]
        old = asyncio.create_task(service.answer(service.request(random_tokens(30, seed=1), max_tokens=100)))
        await eventually(lambda: service.decode.num_running == 1)
        edited = [*history[:25], *random_tokens(15, seed=3)]
        young = asyncio.create_task(service.answer(service.request(edited, conversation="c", max_tokens=120)))
        await eventually(lambda: service.decode.num_preemptions == 1 and old.done() and service.decode.num_running == 1)
        young.cancel()
        await asyncio.gather(young, return_exceptions=True)
        await eventually(lambda: service.router.num_running == 0)
        answer = await service.answer(service.request([4, 5], conversation="c", mode=PromptMode.APPEND))
        assert answer.token_ids == oracle.greedy([*history, 4, 5], 5)
        assert answer.begun.plan.cached_tokens <= 25
        service.check_integrity()


@pytest.mark.parametrize("stage", ["preempted", "resuming", "resuming and late"])
async def test_an_abort_or_a_deadline_while_held_up_frees_everything(
    stage: str, model_paths: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with small_service(model_paths["llama_gqa"], 2, 2) as service:
        free = service.free_blocks()
        asked, never = asyncio.Event(), asyncio.Event()

        async def resume_turn(request: ResumeTurn) -> None:
            asked.set()
            await never.wait()

        monkeypatch.setattr(service.router, "resume_turn", resume_turn)
        old = asyncio.create_task(service.answer(service.request(random_tokens(20), max_tokens=150)))
        await eventually(lambda: service.decode.num_running == 1)
        doomed = service.request(random_tokens(20), max_tokens=150, deadline=100.0)
        young = asyncio.create_task(service.answer(doomed))
        await eventually(lambda: service.decode.num_preemptions == 1)
        with pytest.raises(CapacityExceeded, match="1 running turns wait for free blocks"):
            await service.answer(service.request(random_tokens(9)))
        if stage == "preempted":
            assert not asked.is_set()
        else:
            assert len((await old).token_ids) == 150
            await eventually(asked.is_set)
        if stage.endswith("late"):
            pass_time(100.0)
        else:
            await service.router.abort_requests([doomed.request_id])
        with pytest.raises((TurnCancelled, DeadlineExceeded)) as ending:
            await young
        assert isinstance(ending.value, DeadlineExceeded) == stage.endswith("late")
        assert len((await old).token_ids) == 150
        await is_idle(service, free)


async def test_a_preempted_turn_that_the_router_has_forgotten_ends_at_once(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringserve.orchestration.router.registry.FAILOVER_SECONDS", 0.05)  # no gateway tells of the end
    async with small_service(model_paths["llama_gqa"], 2, 2) as service:
        free, asked = service.free_blocks(), 0

        async def resume_turn(request: ResumeTurn) -> None:
            nonlocal asked
            asked += 1
            raise NotFound(f"turn {request.turn_id} has ended")

        monkeypatch.setattr(service.router, "resume_turn", resume_turn)
        old = asyncio.create_task(service.answer(service.request(random_tokens(20), max_tokens=150)))
        await eventually(lambda: service.decode.num_running == 1)
        young = asyncio.create_task(service.answer(service.request(random_tokens(20), max_tokens=150)))
        with pytest.raises(Unavailable, match=r"no longer knows turn .* which was preempted"):
            await young
        assert asked == 1
        assert (await old).token_ids == oracles["llama_gqa"].greedy(random_tokens(20), 150)
        await is_idle(service, free)


async def test_a_turn_that_cannot_be_resumed_at_once_is_resumed_later(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefill ring refuses: before the decode ring expects KV again, then after, then in the prefill itself."""
    monkeypatch.setattr("ringserve.orchestration.decode.engine.RESUME_PAUSE_SECONDS", 0.02)
    async with small_service(model_paths["llama_gqa"], 2, 2) as service:
        free = service.free_blocks()
        settle, reserve, prefill = service.prefill.settle, service.prefill.reserve, service.prefill.prefill
        refusals = 0

        async def refuse_to_settle(kv_id: str, turn_id: str, retain_tokens: int) -> None:
            nonlocal refusals
            if retain_tokens and refusals == 0:
                refusals += 1
                raise Unavailable("no answer")
            await settle(kv_id, turn_id, retain_tokens)

        async def refuse_to_reserve(request: Reserve) -> Reservation:
            nonlocal refusals
            if request.attempt > 1 and refusals == 1:
                refusals += 1
                raise CapacityExceeded("no room")
            return await reserve(request)

        async def fail_to_prefill(request: PrefillTurn) -> PrefillDone:
            nonlocal refusals
            if request.attempt > 1 and refusals == 2:
                refusals += 1
                raise Unavailable("a rank died")
            return await prefill(request)

        monkeypatch.setattr(service.prefill, "prefill", fail_to_prefill)
        monkeypatch.setattr(service.prefill, "settle", refuse_to_settle)
        monkeypatch.setattr(service.prefill, "reserve", refuse_to_reserve)
        old = asyncio.create_task(service.answer(service.request(random_tokens(20), max_tokens=150)))
        await eventually(lambda: service.decode.num_running == 1)
        young = await service.answer(service.request(random_tokens(22), max_tokens=120))
        assert young.token_ids == oracles["llama_gqa"].greedy(random_tokens(22), 120)
        assert (await old).token_ids == oracles["llama_gqa"].greedy(random_tokens(20), 150)
        assert refusals == 3
        await is_idle(service, free)


async def test_turns_cancelled_at_any_moment_of_a_crowded_ring_leave_no_kv_behind(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    chance = random.Random(3)
    async with small_service(model_paths["llama_gqa"], 2, 3) as service:
        free = service.free_blocks()
        began = time.monotonic()
        await service.answer(service.request(random_tokens(LENGTHS[3]), max_tokens=50))
        alone = time.monotonic() - began  # so that the moments fit this machine

        async def one(number: int) -> None:
            request = service.request(random_tokens(LENGTHS[number % 4]), max_tokens=50)
            turn = asyncio.create_task(service.answer(request))
            if number % 3:
                await asyncio.wait([turn], timeout=chance.uniform(0, 4 * alone))
                turn.cancel()
                await asyncio.gather(turn, return_exceptions=True)
                return
            with contextlib.suppress(CapacityExceeded):
                answer = await turn
                assert answer.token_ids == oracles["llama_gqa"].greedy(random_tokens(LENGTHS[number % 4]), 50)

        for start in range(0, 24, 6):
            await asyncio.gather(*(one(number) for number in range(start, start + 6)))
        assert service.decode.num_preemptions > 0
        await eventually(lambda: service.router.num_running == 0)
        await is_idle(service, free)


async def test_a_prefill_ring_that_lost_the_prompt_computes_it_again(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with small_service(model_paths["llama_gqa"], 2, 2) as service:
        rebuilt, resume = asyncio.Event(), service.router.resume_turn

        async def resume_turn(request: ResumeTurn) -> None:
            await rebuilt.wait()
            await resume(request)

        monkeypatch.setattr(service.router, "resume_turn", resume_turn)
        old = asyncio.create_task(service.answer(service.request(random_tokens(20), max_tokens=150)))
        await eventually(lambda: service.decode.num_running == 1)
        young = asyncio.create_task(service.answer(service.request(random_tokens(31), max_tokens=100)))
        await eventually(lambda: service.decode.num_preemptions == 1)
        # The senders may learn last that all KV has arrived; a ring that dies before that fails its turns.
        begun = service.router._turns._running.values()
        await eventually(lambda: all(each.attempt.prefilling and each.attempt.prefilling.done() for each in begun))
        await service.prefill_ranks.made[0].kill()
        await eventually(lambda: service.prefill.ring.rebuilds == 1 and service.prefill.ring.state == "ready")
        rebuilt.set()
        assert (await old).token_ids == oracles["llama_gqa"].greedy(random_tokens(20), 150)
        assert (await young).token_ids == oracles["llama_gqa"].greedy(random_tokens(31), 100)
