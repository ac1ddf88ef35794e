"""Turns that lose a ring while they run. Their clients get the tokens of a turn that lost none, and no error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from ringserve.cp_core.errors import DeadlineExceeded, Unavailable
from ringserve.orchestration.decode.leader import DecodeLeader
from ringserve.orchestration.prefill.leader import PrefillLeader
from ringserve.orchestration.protocol.plans import PromptMode
from ringserve.orchestration.protocol.rings import RingState
from ringserve.orchestration.protocol.turns import (
    BegunTurn,
    EndingEvent,
    FinishedEvent,
    LostTurn,
    ScoredEvent,
    TokensEvent,
    TurnEvent,
    TurnRequest,
)
from ringserve.orchestration.router import registry
from ringserve.services.gateway.turn_stream import MAX_FAILOVERS, FailedOver, LastingTurn
from ringserve.workers.protocol.steps import FinishReason
from ringserve.workers.protocol.transfers import TransferKey, TransferReport
from ringserve.workers.sampling.parameters import SamplingParameters, TokenLogprobs
from tests.orchestration.service import Service, is_idle
from tests.waiting import eventually
from tests.workers.models import VOCAB_SIZE, Oracle, random_tokens, save_model
from tests.workers.thread_ranks import ThreadRanks

PROMPT = random_tokens(150)
NUM_TOKENS = 240
PROCESSED = SamplingParameters(
    max_tokens=NUM_TOKENS,
    temperature=0.9,
    seed=7,
    top_p=0.95,
    repetition_penalty=1.2,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    min_tokens=220,
    stop_token_ids=tuple(range(0, VOCAB_SIZE, 30)),
    logprobs=2,
    prompt_logprobs=1,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama_gqa", tmp_path_factory.mktemp("llama_gqa"))


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return Oracle(model)


@dataclass
class Seen:
    """Events of a turn, as its gateway gets them."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[tuple[TokenLogprobs, ...]] = field(default_factory=list)
    failovers: list[FailedOver] = field(default_factory=list)
    finished: FinishedEvent | None = None

    def take(self, event: TurnEvent | FailedOver) -> None:
        if isinstance(event, FailedOver):
            self.failovers.append(event)
        elif isinstance(event, TokensEvent):
            self.tokens.extend(event.token_ids)
            self.logprobs.extend(event.logprobs)
        elif isinstance(event, ScoredEvent):
            self.prompt_logprobs.append(event.logprobs)
        elif isinstance(event, FinishedEvent):
            self.finished = event


Act = Callable[[TurnEvent | FailedOver, Seen], object]


async def run(service: Service, request: TurnRequest, act: Act = lambda event, seen: None) -> Seen:
    """Run one turn as a gateway does; `act` is called with every event, and may return something to wait for."""
    begun = await service.router.begin_turn(request)
    turn = LastingTurn(
        request, begun, service.router.begin_turn, lambda endpoint: service.peers.leader("decode", endpoint)
    )
    seen = Seen()
    async with aclosing(turn.events()) as events:
        async for event in events:
            seen.take(event)
            waits = act(event, seen)
            if asyncio.iscoroutine(waits):
                await waits
            if isinstance(event, EndingEvent):
                await turn.finish(len(seen.tokens))
    return seen


async def kill(service: Service, name: str, rank: int = 0) -> None:
    """Kill a rank of a ring, whose leader lives and notices at once."""
    ring = service.peers.leaders[name].ring
    factory, incarnation = ring._factory, ring.incarnation
    assert isinstance(factory, ThreadRanks)
    ring.report_lost(Unavailable("a rank was killed"), incarnation)
    await factory.made[rank].kill()


async def all_ready(service: Service) -> None:
    await eventually(lambda: all(leader.ring.state == "ready" for leader in service.peers.leaders.values()))


def decoding(service: Service) -> str:
    """Return the name of the decode ring that has the only turn."""
    (name,) = (
        name for name, leader in service.peers.leaders.items() if isinstance(leader, DecodeLeader) and leader.num_turns
    )
    return name


def killing_at(service: Service, *counts: int) -> Act:
    """Kill a rank of the turn's decode ring when its client has so many tokens, once for each count.

    Tokens of a ring that is dead already may still come.
    """
    left = list(counts)

    def act(event: TurnEvent | FailedOver, seen: Seen) -> object:
        has_gone_on = len(seen.failovers) == len(counts) - len(left)
        if left and has_gone_on and isinstance(event, TokensEvent) and len(seen.tokens) >= left[0]:
            left.pop(0)
            return kill(service, decoding(service), 1)
        return None

    return act


async def undisturbed(model: Path, sampling: SamplingParameters) -> Seen:
    async with Service(model, 2, 2) as service:
        return await run(service, service.request(PROMPT, sampling=sampling))


@pytest.mark.parametrize(("prefill", "decode", "other"), [(2, 3, 2), (3, 2, 4), (1, 2, 1)])
async def test_a_turn_whose_decode_ring_dies_goes_on_elsewhere(
    prefill: int, decode: int, other: int, model: Path, oracle: Oracle
) -> None:
    async with Service(model, prefill, decode, other_decode=[other]) as service:
        free = service.free_blocks()
        seen = await run(service, service.request(PROMPT, max_tokens=NUM_TOKENS), killing_at(service, 5))
        assert seen.tokens == oracle.greedy(PROMPT, NUM_TOKENS)
        assert seen.finished
        assert seen.finished.finish_reason is FinishReason.LENGTH
        (failover,) = seen.failovers
        plan = failover.begun.plan
        assert (failover.begun.lost_role, plan.decode_ring) == ("decode", "decode-1")
        assert plan.cached_tokens >= len(PROMPT) - 1, "the prefill ring retained the prompt"
        assert plan.new_tokens + plan.cached_tokens < len(PROMPT) + NUM_TOKENS
        await eventually(lambda: service.router.num_running == 0)
        await all_ready(service)
        await is_idle(service, free)


async def test_processed_tokens_and_their_scores_are_those_of_a_turn_without_a_loss(model: Path) -> None:
    wanted = await undisturbed(model, PROCESSED)
    async with Service(model, 2, 3, other_decode=[2]) as service:
        free = service.free_blocks()
        seen = await run(service, service.request(PROMPT, sampling=PROCESSED), killing_at(service, 1, 60))
        assert len(seen.failovers) == 2
        await is_idle(service, free)
    assert seen.tokens == wanted.tokens
    assert [each.token_id for each in seen.logprobs] == seen.tokens
    for one, other in zip(seen.logprobs, wanted.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert one.top_ids == other.top_ids
    assert len(seen.prompt_logprobs) == 1, "they are delivered once"
    assert [each.token_id for each in seen.prompt_logprobs[0]] == PROMPT[1:]


async def test_the_only_ring_of_a_role_is_waited_for(model: Path, oracle: Oracle) -> None:
    async with Service(model, 2, 2) as service:
        free = service.free_blocks()
        seen = await run(service, service.request(PROMPT, max_tokens=NUM_TOKENS), killing_at(service, 4))
        assert seen.tokens == oracle.greedy(PROMPT, NUM_TOKENS)
        assert service.decode.ring.rebuilds == 1
        await is_idle(service, free)


async def test_a_prompt_that_is_being_computed_is_computed_on_another_ring(model: Path, oracle: Oracle) -> None:
    prompt = random_tokens(1500)
    async with Service(model, 2, 2, chunk_tokens=64, other_prefill=[3]) as service:
        free = service.free_blocks()
        turn = asyncio.create_task(run(service, service.request(prompt, max_tokens=5, conversation="c")))
        rings = {name: leader for name, leader in service.peers.leaders.items() if isinstance(leader, PrefillLeader)}
        await eventually(lambda: any(leader.is_computing for leader in rings.values()))
        (killed,) = (name for name, leader in rings.items() if leader.is_computing)
        await kill(service, killed, 1)
        seen = await turn
        assert seen.tokens == oracle.greedy(prompt, 5)
        (failover,) = seen.failovers
        assert failover.begun.lost_role == "prefill"
        assert failover.begun.plan.prefill_ring != killed
        follow = await run(service, service.request([1, 2], conversation="c", mode=PromptMode.APPEND))
        assert follow.tokens == oracle.greedy([*prompt, *seen.tokens, 1, 2], 5)
        await all_ready(service)
        await service.router.delete_conversation("c")
        await is_idle(service, free)


async def test_chunks_that_were_computed_before_the_decode_ring_died_are_not_computed_again(
    model: Path, oracle: Oracle
) -> None:
    prompt = random_tokens(1500)
    async with Service(model, 2, 3, chunk_tokens=64, other_decode=[3]) as service:
        free = service.free_blocks()
        turn = asyncio.create_task(run(service, service.request(prompt, max_tokens=5)))
        await eventually(lambda: service.prefill.is_computing)
        pool = service.prefill.ring.pool
        await eventually(lambda: any(128 <= item.shards.num_tokens < 640 for item in pool._sequences.values()))
        await kill(service, decoding(service), 1)
        seen = await turn
        assert seen.tokens == oracle.greedy(prompt, 5)
        (failover,) = seen.failovers
        assert failover.begun.lost_role == "decode"
        assert 128 <= failover.begun.plan.cached_tokens < len(prompt)
        await all_ready(service)
        await is_idle(service, free)


async def test_a_turn_whose_kv_is_on_its_way_goes_on(
    model: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Service(model, 2, 2, other_prefill=[2], other_decode=[3]) as service:
        free = service.free_blocks()
        rank, sending = service.prefill_ranks.made[0], asyncio.Event()
        finish_sends = rank.finish_sends

        async def finish_never_first(key: TransferKey, timeout: float) -> TransferReport:
            if sending.is_set():
                return await finish_sends(key, timeout)
            sending.set()
            await asyncio.Event().wait()
            raise AssertionError("cancelled")

        monkeypatch.setattr(rank, "finish_sends", finish_never_first)
        turn = asyncio.create_task(run(service, service.request(PROMPT, max_tokens=NUM_TOKENS)))
        await sending.wait()
        await kill(service, decoding(service))
        seen = await turn
        assert seen.tokens == oracle.greedy(PROMPT, NUM_TOKENS)
        assert len(seen.failovers) == 1
        await all_ready(service)
        await eventually(lambda: service.router.num_running == 0)
        await is_idle(service, free)


async def test_the_conversation_is_the_turns_until_it_ends_and_goes_on_after_it(model: Path, oracle: Oracle) -> None:
    async with Service(model, 2, 2, other_decode=[3]) as service:
        free = service.free_blocks()
        first = await run(service, service.request(PROMPT, max_tokens=8, conversation="c"))
        history = [*PROMPT, *first.tokens]
        waiting: list[asyncio.Task[Seen]] = []
        kill_at = killing_at(service, 6)

        def act(event: TurnEvent | FailedOver, seen: Seen) -> object:
            if not waiting:
                follow = service.request([3, 4], conversation="c", mode=PromptMode.APPEND, wait=True)
                waiting.append(asyncio.create_task(run(service, follow)))
            return kill_at(event, seen)

        append = service.request([1, 2], conversation="c", mode=PromptMode.APPEND, max_tokens=NUM_TOKENS)
        second = await run(service, append, act)
        assert second.tokens == oracle.greedy([*history, 1, 2], NUM_TOKENS)
        history += [1, 2, *second.tokens]
        assert len(second.failovers) == 1
        third = await waiting[0]
        assert third.tokens == oracle.greedy([*history, 3, 4], 5)
        assert (await service.router.get_conversation("c")).num_turns == 3
        await all_ready(service)
        await service.router.delete_conversation("c")
        await is_idle(service, free)


async def test_a_turn_that_fails_for_good_leaves_its_conversation_as_it_was(model: Path, oracle: Oracle) -> None:
    """It gets no token further on any ring, so it may be what ends them."""
    async with Service(model, 2, 2, other_decode=[3]) as service:
        first = await run(service, service.request(PROMPT, max_tokens=8, conversation="c"))
        history = [*PROMPT, *first.tokens]

        async def act_again(event: TurnEvent | FailedOver) -> None:
            if isinstance(event, FailedOver):
                ring = service.peers.decode(event.begun.decode_endpoint).ring
                ring.report_lost(Unavailable("a rank was killed"), ring.incarnation)

        kill_at = killing_at(service, 6)

        def act(event: TurnEvent | FailedOver, seen: Seen) -> object:
            return act_again(event) if isinstance(event, FailedOver) else kill_at(event, seen)

        append = service.request([1, 2], conversation="c", mode=PromptMode.APPEND, max_tokens=500)
        with pytest.raises(Unavailable, match=f"lost a ring {MAX_FAILOVERS + 1} times after .* is not tried again"):
            await run(service, append, act)
        await service.router.abort_requests([append.request_id])  # as the gateway does
        await all_ready(service)
        follow = await run(service, service.request([3, 4], conversation="c", mode=PromptMode.APPEND))
        assert follow.tokens == oracle.greedy([*history, 3, 4], 5)
        service.check_integrity()


async def test_an_answer_that_was_complete_is_committed_without_decoding_on(
    model: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stop string is in the text: the gateway says where the answer ends, and the ring does not hear of it."""
    async with Service(model, 2, 2) as service:
        free = service.free_blocks()
        sampling = SamplingParameters(max_tokens=NUM_TOKENS, ends_by_text=True)
        request = service.request(PROMPT, sampling=sampling, conversation="c")
        begun = await service.router.begin_turn(request)
        begins: list[TurnRequest] = []

        async def begin(again: TurnRequest) -> BegunTurn:
            begins.append(again)
            return await service.router.begin_turn(again)

        turn = LastingTurn(request, begun, begin, lambda endpoint: service.peers.leader("decode", endpoint))
        seen, count = Seen(), 7

        async def lost(turn_id: str, num_tokens: int) -> None:
            await kill(service, "decode-0")
            raise Unavailable("the leader cannot be reached")

        monkeypatch.setattr(service.decode, "finish_turn", lost)
        async with aclosing(turn.events()) as events:
            async for event in events:
                seen.take(event)
                if len(seen.tokens) >= count:
                    await turn.finish(count)
        (again,) = begins
        assert again.resume is not None
        assert again.resume.is_complete
        assert seen.finished is not None
        history = [*PROMPT, *seen.tokens[:count]]
        monkeypatch.undo()
        await all_ready(service)
        follow = await run(service, service.request([1], conversation="c", mode=PromptMode.APPEND))
        assert follow.tokens == oracle.greedy([*history, 1], 5)
        await service.router.delete_conversation("c")
        await is_idle(service, free)


async def test_an_answer_that_ended_before_its_stream_was_lost_is_not_committed_twice(
    model: Path, oracle: Oracle
) -> None:
    async with Service(model, 2, 2) as service:
        request = service.request(PROMPT, max_tokens=6, conversation="c")
        begun = await service.router.begin_turn(request)
        await eventually(lambda: service.router.num_running == 0)
        lost = LostTurn(turn_id=begun.turn_id, token_ids=tuple(oracle.greedy(PROMPT, 2)), prompt_tokens=len(PROMPT))
        again = await service.router.begin_turn(replace(request, resume=lost))
        assert again.ended is not None
        assert list(again.ended.token_ids) == oracle.greedy(PROMPT, 6)
        assert (await service.router.get_conversation("c")).num_turns == 1


async def test_a_turn_whose_gateway_does_not_come_back_ends(
    model: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "FAILOVER_SECONDS", 0.05)
    async with Service(model, 2, 2) as service:
        first = await run(service, service.request(PROMPT, max_tokens=8, conversation="c"))
        append = service.request([1, 2], conversation="c", mode=PromptMode.APPEND, max_tokens=500)
        await service.router.begin_turn(append)
        await eventually(lambda: service.decode.num_running == 1)
        await kill(service, "decode-0")
        await eventually(lambda: service.router.num_running == 0)
        await all_ready(service)
        follow = await run(service, service.request([3], conversation="c", mode=PromptMode.APPEND, wait=True))
        assert follow.tokens == oracle.greedy([*PROMPT, *first.tokens, 3], 5)
        service.check_integrity()


async def test_a_turn_that_finds_no_ring_again_ends_at_its_deadline(model: Path) -> None:
    async with Service(model, 2, 2) as service:
        request = service.request(PROMPT, max_tokens=500)
        begun = await service.router.begin_turn(request)
        await eventually(lambda: service.decode.num_running == 1)
        service.decode.ring.state = RingState.STARTING
        await service.decode.fail_all(Unavailable("the ring was lost"))
        lost = LostTurn(turn_id=begun.turn_id, token_ids=(1, 2), prompt_tokens=len(PROMPT))
        with pytest.raises(DeadlineExceeded, match="lost a decode ring and could not go on within its deadline"):
            await service.router.begin_turn(replace(request, deadline_seconds=0.6, resume=lost))
        await eventually(lambda: service.router.num_running == 0)
