"""Turns that share prefill steps get the same tokens as alone, whichever turns beside them are cut, stopped or lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from ringserve.cp_core.cost.steps import StepLimits
from ringserve.cp_core.errors import CapacityExceeded, TurnCancelled, Unavailable
from ringserve.orchestration.prefill.loop import PrefillLoop
from ringserve.orchestration.prefill.scheduler import AGE_SHARE, ScheduledStep
from ringserve.orchestration.protocol.plans import PromptMode
from ringserve.orchestration.protocol.rings import PrefillScheduling
from ringserve.orchestration.protocol.turns import Reserve, TurnRequest
from ringserve.workers.protocol.steps import PrefillOutput, PrefillStep
from ringserve.workers.sampling.parameters import SamplingParameters
from tests.orchestration.service import Answer, Service, is_idle
from tests.waiting import eventually
from tests.workers.models import Oracle, random_tokens

MAX_TOKENS = 4
LENGTHS = (700, 3, 41, 1, 130, 17, 260)
FOLLOW_UP = 9
SELECTORS = ("auto", "pass_q", "pass_kv")
SWITCHES = {
    "as it is": PrefillScheduling(min_chunk_tokens=8),
    "with a small budget": PrefillScheduling(min_chunk_tokens=3, step_budget=40.0),
}


def loop_of(service: Service) -> PrefillLoop:
    assert service.prefill.loop is not None
    return service.prefill.loop


def loop_with_long_steps(service: Service) -> PrefillLoop:
    """Return the loop of the prefill ring, in which a lone turn's prompt of any length is one step, which yields."""
    loop = loop_of(service)
    loop.scheduler.limit_steps(
        StepLimits(budget=64.0, tokens=4096, min_chunk=8), StepLimits(budget=1e6, tokens=4096, min_chunk=8)
    )
    return loop


@asynccontextmanager
async def held_until_waiting(service: Service, count: int) -> AsyncIterator[list[asyncio.Task[Answer]]]:
    """Hold turns started in the body until there are `count` of them, so that they share steps."""
    loop = loop_of(service)
    async with loop.at_work:
        tasks: list[asyncio.Task[Answer]] = []
        yield tasks
        await eventually(lambda: loop.scheduler.num_waiting == count)


async def answers(service: Service, requests: Sequence[TurnRequest]) -> list[Answer]:
    async with held_until_waiting(service, len(requests)) as tasks:
        tasks += [asyncio.create_task(service.answer(request)) for request in requests]
    return await asyncio.gather(*tasks)


@pytest.fixture(scope="module")
def conversations(oracles: Mapping[str, Oracle]) -> list[tuple[list[int], list[int], list[int], list[int]]]:
    """Return (prompt, its answer, follow-up, its answer) by transformers, for long and short prompts."""
    oracle, scripts = oracles["llama_gqa"], []
    for length in LENGTHS:
        prompt, more = random_tokens(length, seed=length), random_tokens(FOLLOW_UP, seed=1000 + length)
        answer = oracle.greedy(prompt, MAX_TOKENS)
        scripts.append((prompt, answer, more, oracle.greedy([*prompt, *answer, *more], MAX_TOKENS)))
    return scripts


@pytest.mark.parametrize(
    ("switches", "num_prefill"),
    [("as it is", 1), ("as it is", 3), *((switches, 2) for switches in SWITCHES), ("with a small budget", 3)],
)
async def test_turns_side_by_side_give_the_tokens_of_transformers(
    switches: str,
    num_prefill: int,
    model_paths: Mapping[str, Path],
    conversations: list[tuple[list[int], list[int], list[int], list[int]]],
) -> None:
    scheduling = SWITCHES[switches]
    # Switches decide what shares a step, selectors its algorithm: each switch meets an algorithm of its own.
    selectors = SELECTORS if switches == "as it is" else (SELECTORS[list(SWITCHES).index(switches) % len(SELECTORS)],)
    async with Service(
        model_paths["llama_gqa"], num_prefill, 2, chunk_tokens=160, scheduling=scheduling, max_batch=16
    ) as service:
        free = service.free_blocks()
        for selector in selectors:
            service.select(selector)
            first = [
                service.request(prompt, conversation=f"{selector}-{len(prompt)}", max_tokens=MAX_TOKENS)
                for prompt, *_ in conversations
            ]
            done = await answers(service, first)
            assert [answer.token_ids for answer in done] == [script[1] for script in conversations]
            # The second turns find cached KV, unevenly spread, and a new long prompt beside them.
            second = [
                service.request(
                    more, conversation=f"{selector}-{len(prompt)}", mode=PromptMode.APPEND, max_tokens=MAX_TOKENS
                )
                for prompt, _, more, _ in conversations
            ]
            beside = service.request(conversations[0][0], max_tokens=MAX_TOKENS)
            *followed, alone = await answers(service, [*second, beside])
            assert [answer.token_ids for answer in followed] == [script[3] for script in conversations]
            assert alone.token_ids == conversations[0][1]
            for answer in [*done, *followed, alone]:
                check_report(answer, None if selector == "auto" or num_prefill == 1 else selector)
            assert any(chunk.num_turns > 1 for answer in done for chunk in answer.report.chunks)
        service.check_integrity()
        for selector in selectors:
            for prompt, *_ in conversations:
                await service.router.delete_conversation(f"{selector}-{len(prompt)}")
        await is_idle(service, free)


def check_report(answer: Answer, forced: str | None) -> None:
    """Assert that the chunks cover the new tokens in order, by the algorithm that was demanded."""
    plan, report = answer.begun.plan, answer.report
    position = plan.cached_tokens
    for chunk in report.chunks:
        assert chunk.tokens.start == position
        position = chunk.tokens.stop
        assert chunk.num_turns >= 1
        assert forced in (None, chunk.algorithm)
    assert position == plan.cached_tokens + plan.new_tokens
    assert report.prefill_seconds > 0
    assert report.queue_seconds >= 0


def note_lengths(service: Service, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list to which every step will add the tokens of each of its sequences."""
    rank, lengths = service.prefill_ranks.made[0], list[int]()
    compute = rank.prefill

    async def noted(step: PrefillStep, timeout: float) -> PrefillOutput:
        lengths.extend(sequence.layout.num_tokens for sequence in step.sequences)
        return await compute(step, timeout)

    monkeypatch.setattr(rank, "prefill", noted)
    return lengths


async def test_a_short_prompt_does_not_wait_for_a_long_one(
    model_paths: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Service(model_paths["llama_gqa"], 2, 2, chunk_tokens=64) as service:
        lengths = note_lengths(service, monkeypatch)
        long = service.request(random_tokens(2000), max_tokens=1)
        short = service.request(random_tokens(10), max_tokens=1)
        long_answer, short_answer = await answers(service, [long, short])
        # It has a step of its own, before the first of the long prompt's many.
        assert [chunk.num_turns for chunk in short_answer.report.chunks] == [1]
        assert len(long_answer.report.chunks) > 30
        assert (lengths[0], sum(lengths[1:])) == (10, 2000)


async def test_a_higher_priority_goes_first(model_paths: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A step has room for one of the prompts."""
    async with Service(model_paths["llama_gqa"], 2, 2, chunk_tokens=6) as service:
        lengths = note_lengths(service, monkeypatch)
        async with held_until_waiting(service, 4) as tasks:
            for length, priority in ((3, 0), (4, -100), (5, 100), (6, 7)):
                request = service.request(random_tokens(length, seed=length), max_tokens=1, priority=priority)
                tasks.append(asyncio.create_task(service.answer(request)))
        await asyncio.gather(*tasks)
        assert lengths == [5, 6, 3, 4]


async def test_a_turn_aborted_while_it_waits_leaves_at_once(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    async with Service(model_paths["llama_gqa"], 2, 2) as service:
        free, loop = service.free_blocks(), loop_of(service)
        prompt = random_tokens(30)
        aborted = service.request(random_tokens(50))
        async with held_until_waiting(service, 1) as tasks:
            other = asyncio.create_task(service.answer(aborted))
            tasks.append(asyncio.create_task(service.answer(service.request(prompt))))
            await eventually(lambda: loop.scheduler.num_waiting == 2)
            await service.router.abort_requests([aborted.request_id])  # the ring computes nothing meanwhile
            with pytest.raises(TurnCancelled):
                await other
            assert loop.scheduler.num_waiting == 1
        assert (await tasks[0]).token_ids == oracles["llama_gqa"].greedy(prompt, 5)
        await is_idle(service, free)
        assert loop.scheduler.load == 0


async def test_a_turn_aborted_in_a_shared_step_costs_the_others_nothing(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Service(model_paths["llama_gqa"], 2, 2) as service:
        free, loop = service.free_blocks(), loop_of(service)
        prompts = [random_tokens(length, length) for length in (20, 33, 47)]
        requests = [service.request(prompt) for prompt in prompts]
        is_begun, may_go_on = asyncio.Event(), asyncio.Event()
        rank = service.prefill_ranks.made[0]
        compute = rank.prefill

        async def held(*arguments: object) -> object:
            is_begun.set()
            await may_go_on.wait()
            return await compute(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(rank, "prefill", held)
        running = asyncio.create_task(answers_or_errors(service, requests))
        await is_begun.wait()
        assert loop.scheduler.num_waiting == 3
        abort = asyncio.create_task(service.router.abort_requests([requests[1].request_id]))
        await eventually(lambda: loop.scheduler.num_waiting == 2)
        assert not abort.done(), "its blocks are in use until the step is over"
        may_go_on.set()
        await abort
        first, second, third = await running
        assert isinstance(second, TurnCancelled)
        for prompt, answer in ((prompts[0], first), (prompts[2], third)):
            assert isinstance(answer, Answer)
            assert answer.token_ids == oracles["llama_gqa"].greedy(prompt, 5)
            assert [chunk.num_turns for chunk in answer.report.chunks] == [3]
        await is_idle(service, free)


async def answers_or_errors(service: Service, requests: Sequence[TurnRequest]) -> list[Answer | BaseException]:
    async with held_until_waiting(service, len(requests)) as tasks:
        tasks += [asyncio.create_task(service.answer(request)) for request in requests]
    return await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_ring_lost_in_a_shared_step_fails_all_its_turns_and_serves_again(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    async with Service(model_paths["llama_gqa"], 2, 2) as service:
        before = loop_of(service)
        requests = [service.request(random_tokens(length, length)) for length in (20, 33, 1000)]
        async with before.at_work:
            tasks = [asyncio.create_task(service.answer(request)) for request in requests]
            await eventually(lambda: before.scheduler.num_waiting == 3)
            await service.prefill_ranks.made[1].kill()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, Unavailable)
        await eventually(lambda: service.prefill.ring.rebuilds == 1 and service.prefill.ring.state == "ready")
        assert loop_of(service) is not before
        prompt = random_tokens(70)
        answer = await service.answer(service.request(prompt))
        assert answer.token_ids == oracles["llama_gqa"].greedy(prompt, 5)
        service.check_integrity()


async def test_a_turn_of_a_lost_ring_that_nothing_settles_does_not_hold_its_place_until_its_deadline(
    model_paths: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ringserve.orchestration.prefill.leader.LEASE_SECONDS", 0.05)
    async with Service(model_paths["llama_gqa"], 2, 2) as service:
        free, ring = service.free_blocks(), service.prefill.ring
        await service.prefill.reserve(
            Reserve(
                turn_id="lost",
                attempt=1,
                kv_id="c",
                match_tokens=0,
                num_tokens=20,
                deadline_seconds=600.0,
                source_incarnation="",
                sampling=SamplingParameters(),
            )
        )
        ring.report_lost(Unavailable("a rank is gone"), ring.incarnation)
        await eventually(lambda: ring.state == "ready" and service.prefill.num_turns == 0)
        await is_idle(service, free)
        assert "never settled" not in caplog.text, "the router need not"


async def test_a_full_queue_refuses_at_once_with_a_hint_and_takes_turns_again(
    model_paths: Mapping[str, Path],
) -> None:
    scheduling = PrefillScheduling(max_queue_work=3000.0)
    async with Service(model_paths["llama_gqa"], 2, 2, scheduling=scheduling) as service:
        free = service.free_blocks()
        async with held_until_waiting(service, 1) as tasks:
            tasks.append(asyncio.create_task(service.answer(service.request(random_tokens(800), max_tokens=1))))
            await eventually(lambda: loop_of(service).scheduler.num_waiting == 1)
            with pytest.raises(CapacityExceeded, match=r"work units are waiting.*at most 3000 are allowed") as refused:
                await service.answer(service.request(random_tokens(500), max_tokens=1))
            assert refused.value.retry_after_seconds is not None
            assert refused.value.retry_after_seconds > 0
            status = await service.prefill.get_status()
            assert (status.num_requests_running, status.num_requests_waiting) == (0, 1)
            assert 800 < status.waiting_work <= status.max_waiting_work == 3000.0
        await tasks[0]
        await service.answer(service.request(random_tokens(500), max_tokens=1))
        await is_idle(service, free)
        assert (await service.prefill.get_status()).waiting_work == 0


async def test_more_turns_than_a_ring_may_have_are_refused_with_a_hint(model_paths: Mapping[str, Path]) -> None:
    async with Service(model_paths["llama_gqa"], 2, 2, max_waiting=2) as service:
        free = service.free_blocks()
        async with held_until_waiting(service, 2) as tasks:
            requests = [service.request(random_tokens(40, seed), max_tokens=1) for seed in (1, 2)]
            tasks += [asyncio.create_task(service.answer(request)) for request in requests]
            await eventually(lambda: loop_of(service).scheduler.num_waiting == 2)
            with pytest.raises(CapacityExceeded, match="prefill ring prefill-0: 2 turns are under way") as refused:
                await service.answer(service.request([1], max_tokens=1))
            assert refused.value.retry_after_seconds is not None
            assert refused.value.retry_after_seconds > 0
        await asyncio.gather(*tasks)
        await is_idle(service, free)


async def test_a_turn_whose_client_leaves_in_the_middle_of_a_long_prompt_frees_its_room(
    model_paths: Mapping[str, Path],
) -> None:
    async with Service(model_paths["llama_gqa"], 2, 2, chunk_tokens=16) as service:
        free, loop = service.free_blocks(), loop_of(service)
        turn = asyncio.create_task(service.answer(service.request(random_tokens(4000), max_tokens=1)))
        await eventually(lambda: service.prefill.is_computing)
        turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)
        await is_idle(service, free)
        assert loop.scheduler.load == 0


@pytest.mark.parametrize("num_prefill", [1, 2, 3])
async def test_short_turns_overtake_the_step_of_a_lone_long_one_between_its_layers(
    num_prefill: int, model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    oracle = oracles["llama_gqa"]
    prompts = [random_tokens(count, seed=count) for count in (400, 7, 1, 30)]
    async with Service(
        model_paths["llama_gqa"], num_prefill, 2, scheduling=PrefillScheduling(min_chunk_tokens=8)
    ) as service:
        free, loop = service.free_blocks(), loop_with_long_steps(service)
        is_begun, num_within = asyncio.Event(), 0
        rank = service.prefill_ranks.made[0]
        compute, compute_within = rank.prefill, rank.prefill_within

        async def held(step: PrefillStep, timeout: float) -> PrefillOutput:
            if not is_begun.is_set():
                is_begun.set()
                await eventually(lambda: all(each.worker._inbox.is_waiting for each in service.prefill_ranks.made))
            return await compute(step, timeout)

        async def counted(step: PrefillStep, timeout: float) -> PrefillOutput | None:
            nonlocal num_within
            output = await compute_within(step, timeout)
            num_within += output is not None
            return output

        rank.prefill, rank.prefill_within = held, counted  # type: ignore[method-assign]
        tasks = [asyncio.create_task(service.answer(service.request(prompts[0])))]
        await is_begun.wait()
        async with asyncio.TaskGroup() as group:
            tasks += [group.create_task(service.answer(service.request(prompt))) for prompt in prompts[1:]]
        long = await tasks[0]
        assert num_within >= 1
        assert [(len(chunk.tokens), chunk.num_turns) for chunk in long.report.chunks] == [(400, 1)]
        for prompt, task in zip(prompts, tasks, strict=True):
            answer = task.result()
            assert answer.token_ids == oracle.greedy(prompt, 5)
            assert answer.report.prefill_seconds > 0
            assert answer.report.queue_seconds >= 0
        service.check_integrity()
        await is_idle(service, free)
        assert loop.scheduler.load == 0


@pytest.mark.parametrize("num_prefill", [1, 2])
async def test_a_short_turn_that_is_too_late_for_a_long_step_has_the_next_one_and_counts_once(
    num_prefill: int, model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [random_tokens(count, seed=count) for count in (400, 7)]
    async with Service(
        model_paths["llama_gqa"], num_prefill, 2, scheduling=PrefillScheduling(min_chunk_tokens=8)
    ) as service:
        free, loop = service.free_blocks(), loop_with_long_steps(service)
        has_ended, taken_back = asyncio.Event(), list[tuple[ScheduledStep, float]]()
        rank = service.prefill_ranks.made[0]
        compute, take_back = rank.prefill, loop.scheduler.take_back

        async def held(step: PrefillStep, timeout: float) -> PrefillOutput:
            output = await compute(step, timeout)
            if step.yields:
                has_ended.set()
                await eventually(lambda: bool(taken_back))
            return output

        def noted(step: ScheduledStep) -> None:
            counted = loop.scheduler._debt
            take_back(step)
            taken_back.append((step, counted - loop.scheduler._debt))

        rank.prefill = held  # type: ignore[method-assign]
        monkeypatch.setattr(loop.scheduler, "take_back", noted)
        long = asyncio.create_task(service.answer(service.request(prompts[0])))
        await has_ended.wait()
        answers = await asyncio.gather(long, service.answer(service.request(prompts[1])))
        (step, debt), *others = taken_back
        assert not others
        assert debt == pytest.approx(AGE_SHARE * step.work)
        assert [answer.token_ids for answer in answers] == [oracles["llama_gqa"].greedy(each, 5) for each in prompts]
        service.check_integrity()
        await is_idle(service, free)
        assert loop.scheduler.load == 0


async def test_the_step_of_a_lone_turn_ends_between_two_layers_when_the_turn_is_aborted(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    prompt = random_tokens(50)
    async with Service(model_paths["llama_gqa"], 2, 2, scheduling=PrefillScheduling(min_chunk_tokens=8)) as service:
        free, loop = service.free_blocks(), loop_with_long_steps(service)
        is_begun = asyncio.Event()
        rank = service.prefill_ranks.made[0]
        compute, compute_within = rank.prefill, rank.prefill_within
        ends: list[PrefillOutput | None] = []

        async def held(step: PrefillStep, timeout: float) -> PrefillOutput:
            if not is_begun.is_set():
                is_begun.set()
                await eventually(lambda: all(each.worker._inbox.is_waiting for each in service.prefill_ranks.made))
            return await compute(step, timeout)

        async def noted(step: PrefillStep, timeout: float) -> PrefillOutput | None:
            assert not step.sequences
            ends.append(await compute_within(step, timeout))
            return ends[-1]

        rank.prefill, rank.prefill_within = held, noted  # type: ignore[method-assign]
        aborted = service.request(random_tokens(400))
        task = asyncio.create_task(service.answer(aborted))
        await is_begun.wait()
        await service.router.abort_requests([aborted.request_id])
        with pytest.raises(TurnCancelled):
            await task
        await eventually(lambda: ends == [PrefillOutput()])
        assert (await service.answer(service.request(prompt))).token_ids == oracles["llama_gqa"].greedy(prompt, 5)
        service.check_integrity()
        await is_idle(service, free)
        assert loop.scheduler.load == 0
