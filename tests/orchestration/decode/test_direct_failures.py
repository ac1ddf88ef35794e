"""Turns whose decode ring fails to compute the prompt, or refuses to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from ringserve.cp_core.errors import (
    CapacityExceeded,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    TurnCancelled,
    Unavailable,
)
from ringserve.orchestration.protocol.plans import PromptMode
from ringserve.orchestration.protocol.turns import PrefillDone, PrefillTurn, TurnRequest
from ringserve.workers.decode.prompts import DecodePrompts
from ringserve.workers.protocol.steps import Algorithm, ComputePrompt
from ringserve.workers.sampling.parameters import Sampled
from tests.orchestration.service import Answer, Service
from tests.waiting import WAIT_SECONDS, eventually, pass_time
from tests.workers.models import Oracle, random_tokens

DIRECT = Algorithm.DECODE_RING
MAX_TOKENS = 5
LENGTH = 45

Models = Mapping[str, Path]
Oracles = Mapping[str, Oracle]


@contextmanager
def held_prompts(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Yield the events (a prompt is being computed, it may continue); the end of the context lets it continue."""
    begun, may_go_on = threading.Event(), threading.Event()
    run = DecodePrompts.run

    def run_late(self: DecodePrompts, prompt: ComputePrompt) -> Sampled | None:
        begun.set()
        assert may_go_on.wait(WAIT_SECONDS), "nobody let the prompt go on"
        return run(self, prompt)

    with monkeypatch.context() as patch:
        patch.setattr(DecodePrompts, "run", run_late)
        try:
            yield begun, may_go_on
        finally:
            may_go_on.set()


@asynccontextmanager
async def conversing(path: Path, **options: int) -> AsyncGenerator[tuple[Service, list[int]], None]:
    """Yield a service with conversation "c" of one turn, and its history. In the end all other blocks must be free."""
    async with Service(path, 2, 3, max_direct_tokens=16, **options) as service:  # type: ignore[arg-type]
        prompt = random_tokens(LENGTH)
        first = await service.answer(service.request(prompt, conversation="c", max_tokens=MAX_TOKENS))
        yield service, [*prompt, *first.token_ids]
        await eventually(lambda: service.router.num_running == 0)
        service.check_integrity()
        pools = [leader.ring.pool for leader in service.peers.leaders.values()]
        await eventually(lambda: all(not rank.active_blocks for pool in pools for rank in pool.usage()))


def direct_request(service: Service, new: list[int], **options: float | None) -> TurnRequest:
    request = service.request(new, conversation="c", mode=PromptMode.APPEND, max_tokens=MAX_TOKENS)
    return replace(request, algorithm=DIRECT, **options)  # type: ignore[arg-type]


async def goes_on(service: Service, history: list[int], oracle: Oracle) -> Answer:
    """Assert that the next turn's tokens are right and use the conversation's KV."""
    answer = await service.answer(direct_request(service, [4, 5]))
    assert answer.token_ids == oracle.greedy([*history, 4, 5], MAX_TOKENS)
    assert answer.begun.plan.cached_tokens == len(history) - 1
    return answer


async def test_an_abort_while_the_prompt_is_computed_waits_for_the_step_and_changes_nothing(
    model_paths: Models, oracles: Oracles, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with conversing(model_paths["llama_gqa"]) as (service, history):
        request = direct_request(service, [1, 2, 3])
        with held_prompts(monkeypatch) as (begun, may_go_on):
            turn = asyncio.create_task(service.answer(request))
            await asyncio.to_thread(begun.wait, 60.0)
            aborting = asyncio.create_task(service.router.abort_requests([request.request_id]))
            await eventually(lambda: any(each.is_ending for each in service.decode._turns._turns.values()))
            active = [rank.active_blocks for rank in service.decode.ring.pool.usage()]
            assert sum(active) > 0, "a rank may still write to the turn's blocks"
            may_go_on.set()
            assert (await aborting)[0] == [request.request_id]
            with pytest.raises(TurnCancelled, match="the request was aborted"):
                await turn
        await goes_on(service, history, oracles["llama_gqa"])


async def test_a_prompt_that_waits_behind_another_is_dropped_when_its_client_hangs_up(
    model_paths: Models, oracles: Oracles, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = oracles["llama_gqa"]
    async with conversing(model_paths["llama_gqa"]) as (service, history):
        other = random_tokens(20, seed=1)
        other += (await service.answer(service.request(other, conversation="other", max_tokens=3))).token_ids
        with held_prompts(monkeypatch) as (begun, may_go_on):
            first = service.request([7], conversation="other", mode=PromptMode.APPEND, max_tokens=3)
            runs = asyncio.create_task(service.answer(replace(first, algorithm=DIRECT)))
            await asyncio.to_thread(begun.wait, 60.0)
            waiting = await service.router.begin_turn(direct_request(service, [1, 2, 3]))
            decode = service.peers.decode(waiting.decode_endpoint)
            async with aclosing(decode.stream_turn(waiting.turn_id)) as events:
                has_begun = asyncio.Event()

                async def read() -> object:
                    has_begun.set()  # its waiter continues when this task waits
                    return await anext(events)

                reading = asyncio.create_task(read())
                await has_begun.wait()
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
            may_go_on.set()
            assert (await runs).token_ids == oracle.greedy([*other, 7], 3)
        await eventually(lambda: service.router.num_running == 0)
        await goes_on(service, history, oracle)


async def test_a_deadline_ends_a_turn_whose_prompt_is_being_computed(
    model_paths: Models, oracles: Oracles, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with conversing(model_paths["llama_gqa"]) as (service, history):
        with held_prompts(monkeypatch) as (begun, may_go_on):
            turn = asyncio.create_task(service.answer(direct_request(service, [1, 2], deadline_seconds=20.0)))
            assert await asyncio.to_thread(begun.wait, WAIT_SECONDS)
            pass_time(20.0)
            await eventually(lambda: any(each.is_ending for each in service.decode._turns._turns.values()))
            may_go_on.set()
            with pytest.raises(DeadlineExceeded, match=r"deadline of 20\.0 s"):
                await turn
        await goes_on(service, history, oracles["llama_gqa"])


async def test_a_ring_lost_while_it_computes_ends_the_turn_and_the_conversation_goes_on(
    model_paths: Models, oracles: Oracles, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = oracles["llama_gqa"]
    async with conversing(model_paths["llama_gqa"]) as (service, history):
        incarnation = service.decode.ring.incarnation
        with held_prompts(monkeypatch) as (begun, may_go_on):
            turn = asyncio.create_task(service.answer(direct_request(service, [1, 2])))
            await asyncio.to_thread(begun.wait, 60.0)
            transport = service.decode_ranks.made[1].worker._transports[0]
            transport.close()
            may_go_on.set()
            with pytest.raises(Unavailable):
                await turn
        await eventually(lambda: service.decode.ring.incarnation != incarnation and bool(service.decode.ring.infos))
        await eventually(lambda: any(ring.role == "decode" and ring.takes_turns for ring in service.router.rings))
        # The prefill ring has the prompt; tokens of the lost ring alone are computed again.
        # A gateway might begin the lost turn again, so the router keeps it for a while.
        answer = await service.answer(replace(direct_request(service, [4, 5]), algorithm=None, wait=True))
        assert answer.token_ids == oracle.greedy([*history, 4, 5], MAX_TOKENS)
        assert answer.begun.plan.cached_tokens == LENGTH
        assert answer.begun.plan.algorithm is not DIRECT


async def test_a_ring_that_has_evicted_the_kv_refuses_and_the_turn_goes_over_a_prefill_ring(
    model_paths: Models, oracles: Oracles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn that asked for the decode ring alone is refused."""
    async with conversing(model_paths["llama_gqa"]) as (service, history):
        planner = service._planner
        monkeypatch.setattr(planner, "compare_direct", lambda *_: 0.0)  # the test is not about the choice
        await service.decode.settle("c", "", 10)
        with pytest.raises(CapacityExceeded, match="41 tokens of the prompt are not cached and it computes 16 at most"):
            await service.answer(direct_request(service, [4]))
        await eventually(lambda: service.router.num_running == 0)
        answer = await service.answer(replace(direct_request(service, [4, 5]), algorithm=None))
        plan = answer.begun.plan
        assert answer.token_ids == oracles["llama_gqa"].greedy([*history, 4, 5], MAX_TOKENS)
        assert plan.algorithm is not DIRECT
        assert "ring decode-0 could not compute the prompt itself" in plan.remarks
        assert plan.prefill_ring == "prefill-0"


async def test_a_decode_ring_without_room_refuses_as_it_does_every_turn(model_paths: Models) -> None:
    async with conversing(model_paths["llama_gqa"], decode_blocks=16) as (service, _):
        others = asyncio.create_task(service.answer(service.request(random_tokens(60), max_tokens=60)))
        await eventually(lambda: service.decode.num_running == 1)
        for algorithm in (DIRECT, None):
            request = replace(direct_request(service, [1]), algorithm=algorithm)
            big = replace(request, sampling=replace(request.sampling, max_tokens=100))
            with pytest.raises(CapacityExceeded, match="blocks of 4 tokens are needed"):
                await service.answer(big)
            await eventually(lambda: service.router.num_running == 1)
        await others
        assert (await service.answer(direct_request(service, [1]))).begun.plan.algorithm is DIRECT


@pytest.mark.parametrize("num_new", [17, 1])
async def test_what_no_ring_can_do_is_refused_in_a_sentence(num_new: int, model_paths: Models) -> None:
    async with conversing(model_paths["llama_gqa"]) as (service, history):
        name = "c" if num_new > 1 else "new"
        mode = PromptMode.APPEND if num_new > 1 else PromptMode.WHOLE_HISTORY
        request = service.request(random_tokens(num_new), conversation=name, mode=mode)
        new, retained = (num_new + 1, len(history) - 1) if num_new > 1 else (1, 0)
        says = rf"algorithm: decode_ring is for up to 16 new tokens .*; this turn has {new} after {retained}"
        with pytest.raises(InvalidRequest, match=says):
            await service.answer(replace(request, algorithm=DIRECT))


async def test_a_turn_that_was_computed_here_and_preempted_is_resumed_by_a_prefill_ring(
    model_paths: Models, oracles: Oracles
) -> None:
    """The prefill ring retains tokens that differ from the turn's edited prompt: none of them may be used."""
    oracle = oracles["llama_gqa"]
    async with Service(
        model_paths["llama_gqa"], 2, 2, decode_blocks=24, headroom_tokens=8, max_direct_tokens=16
    ) as service:
        prompt = random_tokens(40)
        first = await service.answer(service.request(prompt, conversation="c", max_tokens=7))
        old_prompt = random_tokens(30, seed=1)
        old = asyncio.create_task(service.answer(service.request(old_prompt, max_tokens=100)))
        await eventually(lambda: service.decode.num_running == 1)
        edited = [*prompt[:36], 7, 8, *first.token_ids]
        young = await service.answer(
            replace(service.request(edited, conversation="c", max_tokens=90), algorithm=DIRECT)
        )
        assert service.decode.num_preemptions > 0
        assert young.begun.plan.algorithm is DIRECT
        assert young.begun.plan.cached_tokens == 36
        assert young.token_ids == oracle.greedy(edited, 90)
        assert (await old).token_ids == oracle.greedy(old_prompt, 100)
        history = [*edited, *young.token_ids]
        third = await service.answer(replace(direct_request(service, [5]), algorithm=Algorithm.PASS_Q))
        assert third.token_ids == oracle.greedy([*history, 5], MAX_TOKENS)
        assert third.begun.plan.cached_tokens == len(history) - 1
        service.check_integrity()
        assert [ring.num_turns for ring in service.router.rings] == [0, 0]


async def test_asking_twice_joins_and_a_turn_of_another_kind_is_not_computed_here(
    model_paths: Models, oracles: Oracles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost answer is asked for again."""
    asked = []
    async with conversing(model_paths["llama_gqa"]) as (service, history):
        prefill = service.decode.prefill

        async def ask_twice(request: PrefillTurn) -> PrefillDone:
            answers = await asyncio.gather(prefill(request), prefill(request))
            asked.append(request)
            assert answers[0] == answers[1]
            return answers[0]

        monkeypatch.setattr(service.decode, "prefill", ask_twice)
        await goes_on(service, history, oracles["llama_gqa"])
        (request,) = asked
        other = await service.answer(replace(direct_request(service, [1]), algorithm=Algorithm.PASS_KV))
        for unknown in (replace(request, turn_id=other.begun.turn_id), replace(request, attempt=2)):
            with pytest.raises(NotFound, match="has no prompt to compute on decode ring decode-0"):
                await prefill(unknown)
        assert len(asked) == 1


async def test_a_prompt_begins_with_its_reservation_and_its_turn_may_end_before_the_router_asks(
    model_paths: Models, oracles: Oracles, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with conversing(model_paths["llama_gqa"]) as (service, history):
        prefill, answers = service.decode.prefill, []

        async def ask_late(request: PrefillTurn) -> PrefillDone:
            await eventually(lambda: request.turn_id in service.decode._turns._ended)
            assert not len(request.token_ids), "they came with the reservation"
            answers.append(await prefill(request))
            return answers[0]

        monkeypatch.setattr(service.decode, "prefill", ask_late)
        answer = await goes_on(service, history, oracles["llama_gqa"])
        await eventually(lambda: bool(answers))
        assert answers[0].report == answer.report
