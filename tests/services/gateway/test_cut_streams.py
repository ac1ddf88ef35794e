"""Streams that break between a gateway and a decode leader that both live: the turn goes on where it was."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from ringserve.cp_core.errors import NotFound, RingserveError, TurnCancelled, Unavailable, Unreachable
from ringserve.orchestration.decode.leader import DecodeLeader
from ringserve.orchestration.protocol.rings import RingState
from ringserve.orchestration.protocol.turns import BegunTurn, LostTurn, TokensEvent, TurnEvent, TurnRequest
from ringserve.services.gateway.turn_stream import LastingTurn
from ringserve.workers.protocol.steps import FinishReason
from tests.orchestration.service import Service, is_idle
from tests.services.gateway.test_failover import PROCESSED, Seen, undisturbed
from tests.waiting import eventually
from tests.workers.models import Oracle, random_tokens, save_model

PROMPT = random_tokens(150)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama_gqa", tmp_path_factory.mktemp("llama_gqa"))


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return Oracle(model)


class BreakingLeader:
    """Way to a decode leader on which a stream breaks when `breaks` says so of an event and the tokens so far."""

    def __init__(self, leader: DecodeLeader, breaks: Callable[[TurnEvent, int], bool]) -> None:
        self._leader = leader
        self._breaks = breaks
        self.asked: list[int] = []

    async def stream_turn(self, turn_id: str, after: int = 0, interval: float = 0.0) -> AsyncGenerator[TurnEvent, None]:
        self.asked.append(after)
        num_tokens = after
        async with aclosing(self._leader.stream_turn(turn_id, after, interval)) as events:
            async for event in events:
                if self._breaks(event, num_tokens):
                    raise Unreachable("the connection broke")
                num_tokens += len(event.token_ids) if isinstance(event, TokensEvent) else 0
                yield event

    async def finish_turn(self, turn_id: str, num_tokens: int) -> None:
        await self._leader.finish_turn(turn_id, num_tokens)


async def run(service: Service, request: TurnRequest, way: BreakingLeader) -> Seen:
    async def begin_again(again: TurnRequest) -> BegunTurn:
        raise AssertionError("no attempt is spent")

    begun = await service.router.begin_turn(request)
    turn = LastingTurn(request, begun, begin_again, lambda endpoint: way)  # type: ignore[arg-type,return-value]
    seen = Seen()
    async with aclosing(turn.events()) as events:
        async for event in events:
            seen.take(event)
    return seen


def once_at(*counts: int) -> Callable[[TurnEvent, int], bool]:
    left = list(counts)

    def breaks(event: TurnEvent, num_tokens: int) -> bool:
        if left and isinstance(event, TokensEvent) and num_tokens >= left[0]:
            left.pop(0)
            return True
        return False

    return breaks


async def test_a_turn_whose_stream_breaks_goes_on_where_it_was(model: Path) -> None:
    """Before the first token, and within the answer. Tokens and scores come once; no ring computes anything again."""
    wanted = await undisturbed(model, PROCESSED)
    async with Service(model, 2, 3, orphan_timeout=30.0) as service:
        free = service.free_blocks()
        way = BreakingLeader(service.decode, once_at(0, 3, 60))
        seen = await run(service, service.request(PROMPT, sampling=PROCESSED), way)
        assert seen.tokens == wanted.tokens
        assert len(way.asked) == 4
        assert [after >= least for after, least in zip(way.asked, (0, 0, 3, 60), strict=True)] == [True] * 4
        assert [each.token_id for each in seen.logprobs] == seen.tokens
        assert seen.prompt_logprobs[-1] == seen.prompt_logprobs[0]
        assert [each.token_id for each in seen.prompt_logprobs[0]] == PROMPT[1:]
        await is_idle(service, free)


async def test_an_answer_that_ended_while_its_stream_was_cut_is_read_afterwards(model: Path, oracle: Oracle) -> None:
    async with Service(model, 2, 2, orphan_timeout=30.0) as service:

        class Waiting(BreakingLeader):
            async def stream_turn(
                self, turn_id: str, after: int = 0, interval: float = 0.0
            ) -> AsyncGenerator[TurnEvent, None]:
                if self.asked:
                    await eventually(lambda: service.router.num_running == 0)
                async with aclosing(super().stream_turn(turn_id, after, interval)) as events:
                    async for event in events:
                        yield event

        way = Waiting(service.decode, once_at(2))
        seen = await run(service, service.request(PROMPT, max_tokens=12), way)
        assert seen.tokens == oracle.greedy(PROMPT, 12)
        assert seen.finished is not None
        assert seen.finished.finish_reason is FinishReason.LENGTH
        assert service.decode.num_turns == 0, "a drain does not wait for it"


async def test_a_turn_that_no_reader_comes_back_to_ends(model: Path) -> None:
    async with Service(model, 2, 2, orphan_timeout=0.05) as service:
        free = service.free_blocks()
        begun = await service.router.begin_turn(service.request(PROMPT, max_tokens=800))
        async with aclosing(service.decode.stream_turn(begun.turn_id)) as events:
            await anext(events)
        await eventually(lambda: service.router.num_running == 0)
        await is_idle(service, free)
        await eventually(lambda: is_forgotten(service, begun.turn_id))


def is_forgotten(service: Service, turn_id: str) -> bool:
    try:
        service.decode._turns.read(turn_id, 0)
    except NotFound:
        return True
    return False


async def test_another_reader_takes_the_place_of_one_that_is_not_gone(model: Path, oracle: Oracle) -> None:
    """The leader of a link that was cut may not know of it yet. The later reader gets what it lacks, and the end."""
    async with Service(model, 2, 2, orphan_timeout=0.0) as service:
        begun = await service.router.begin_turn(service.request(PROMPT, max_tokens=300))
        errors: list[RingserveError] = []
        has_tokens = asyncio.Event()

        async def read_on() -> None:
            try:
                async with aclosing(service.decode.stream_turn(begun.turn_id)) as events:
                    async for event in events:
                        if isinstance(event, TokensEvent):
                            has_tokens.set()
            except RingserveError as error:
                errors.append(error)

        first = asyncio.create_task(read_on())
        await has_tokens.wait()
        tokens: list[int] = []
        async with aclosing(service.decode.stream_turn(begun.turn_id, 1)) as events:
            async for event in events:
                if isinstance(event, TokensEvent):
                    tokens.extend(event.token_ids)
        await first
        assert tokens == oracle.greedy(PROMPT, 300)[1:]
        assert [str(error) for error in errors] == [f"turn {begun.turn_id} is read by another stream"]
        assert not any(isinstance(error, TurnCancelled) for error in errors)


async def test_an_aborted_turn_does_not_go_on(model: Path) -> None:
    """It is aborted while no decode ring could take it."""
    async with Service(model, 2, 2) as service:
        request = service.request(PROMPT, max_tokens=500)
        begun = await service.router.begin_turn(request)
        await eventually(lambda: service.decode.num_running == 1)
        service.decode.ring.state = RingState.STARTING
        await service.decode.fail_all(Unavailable("the ring was lost"))
        lost = LostTurn(turn_id=begun.turn_id, token_ids=(1, 2), prompt_tokens=len(PROMPT))
        again = asyncio.create_task(service.router.begin_turn(replace(request, resume=lost)))
        await eventually(lambda: any(turn.recovery.lone_kv_id for turn in service.router._turns.of_tenant("")))
        assert await service.router.abort_requests([request.request_id]) == ([request.request_id], [])
        with pytest.raises(TurnCancelled):
            await again
        await eventually(lambda: service.router.num_running == 0)
