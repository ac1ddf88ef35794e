"""A gateway reads all turns of a leader by one stream: each has its own events, error, end and pace."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from ringserve.cp_core.errors import CapacityExceeded, NotFound, TurnCancelled, Unavailable, Unreachable
from ringserve.orchestration.protocol.turns import FinishedEvent, PrefillReport, TokensEvent, TurnEvent
from ringserve.services.rpc import turn_streams
from ringserve.services.rpc.peers import GrpcPeers
from ringserve.services.rpc.server import GrpcServer
from ringserve.services.rpc.servicers import DecodeServicer
from ringserve.workers.protocol.steps import FinishReason
from ringserve.workers.sampling.parameters import TokenLogprobs
from tests.waiting import WAIT_SECONDS, eventually

END = FinishedEvent(finish_reason=FinishReason.LENGTH, migrated_bytes=1, migration_seconds=0.5, handoff_seconds=0.25)


def tokens(*token_ids: int) -> TokensEvent:
    return TokensEvent(token_ids=token_ids)


def pending_requests() -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if "_consume_request_iterator" in repr(task.get_coro())]


class Leader:
    """Decode leader whose turns tell what a test adds to them, the tokens that wait as one event."""

    def __init__(self) -> None:
        self.told: dict[str, deque[TurnEvent | Exception]] = {}
        self.news = asyncio.Event()
        self.asked: list[tuple[str, int, float]] = []
        self.closed: list[str] = []

    def tell(self, turn_id: str, *events: TurnEvent | Exception) -> None:
        self.told.setdefault(turn_id, deque()).extend(events)
        news, self.news = self.news, asyncio.Event()
        news.set()

    async def stream_turn(self, turn_id: str, after: int = 0, interval: float = 0.0) -> AsyncGenerator[TurnEvent, None]:
        self.asked.append((turn_id, after, interval))
        left = self.told.setdefault(turn_id, deque())
        try:
            while True:
                while left:
                    event = left.popleft()
                    if isinstance(event, Exception):
                        raise event
                    yield event
                    if isinstance(event, FinishedEvent):
                        return
                await self.news.wait()
        finally:
            self.closed.append(turn_id)


class Service:
    """Leader behind a port, and the peers of a gateway. `num_streams` were opened, and `num_ended` of them ended."""

    def __init__(self) -> None:
        self.leader = Leader()
        self.peers = GrpcPeers()
        self.server = GrpcServer()
        self.num_streams = self.num_ended = 0
        self.endpoint = ""

    async def start(self, listen: str = "127.0.0.1:0") -> None:
        counted = self

        class Servicer(DecodeServicer):
            async def StreamTurns(self, asked: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
                counted.num_streams += 1
                try:
                    async with aclosing(super().StreamTurns(asked, context)) as messages:  # type: ignore[type-var]
                        async for message in messages:
                            yield message
                finally:
                    counted.num_ended += 1

        self.server = GrpcServer()
        self.servicer = Servicer(self.leader)  # type: ignore[arg-type]
        self.servicer.register(self.server)
        self.endpoint = await self.server.start(listen)

    def read(self, turn_id: str, after: int = 0, interval: float = 0.0) -> AsyncGenerator[TurnEvent, None]:
        return self.peers.leader("decode", self.endpoint).stream_turn(turn_id, after, interval)

    async def all_of(self, turn_id: str) -> list[TurnEvent]:
        async with aclosing(self.read(turn_id)) as events:
            return [event async for event in events]


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    made = Service()
    await made.start()
    async with asyncio.timeout(WAIT_SECONDS):
        yield made
    await made.peers.close()
    await made.server.stop(0)


async def test_turns_share_a_stream_and_each_gets_its_own_events_in_order(service: Service) -> None:
    scored = TokensEvent(token_ids=(7,), logprobs=(TokenLogprobs(token_id=7, logprob=-1.0, rank=1),))
    expected: dict[str, list[TurnEvent]] = {
        "plain": [PrefillReport(queue_seconds=0.5), tokens(1, 2), tokens(-1 + 2**31), END],
        "scored": [tokens(5), scored, tokens(6), END],
        "empty": [END],
    }
    for name, events in expected.items():
        service.leader.tell(name, *events)
    found = await asyncio.gather(*map(service.all_of, expected))
    for (name, events), got in zip(expected.items(), found, strict=True):
        assert joined(got) == joined(events), name
    assert service.num_streams == 1
    assert sorted(service.leader.closed) == sorted(expected)


def joined(events: list[TurnEvent]) -> list[TurnEvent]:
    """Return events with neighbouring tokens without log-probabilities as one."""
    found: list[TurnEvent] = []
    for event in events:
        before = found[-1] if found else None
        if all(isinstance(each, TokensEvent) and not each.logprobs for each in (before, event)):
            assert isinstance(before, TokensEvent)
            assert isinstance(event, TokensEvent)
            found[-1] = tokens(*before.token_ids, *event.token_ids)
        else:
            found.append(event)
    return found


async def test_a_turn_is_read_behind_the_tokens_that_the_reader_has(service: Service) -> None:
    async with aclosing(service.read("t", after=3, interval=0.5)) as events:
        service.leader.tell("t", tokens(9))
        assert await anext(events) == tokens(9)
    assert service.leader.asked == [("t", 3, 0.5)]


async def test_the_error_of_a_turn_ends_that_turn_alone(service: Service) -> None:
    async with aclosing(service.read("other")) as other:
        service.leader.tell("other", tokens(1))
        assert await anext(other) == tokens(1)
        for error in (NotFound("no such turn"), TurnCancelled("the client went away")):
            service.leader.tell("failing", tokens(4), error)
            async with aclosing(service.read("failing")) as failing:
                assert await anext(failing) == tokens(4)
                with pytest.raises(type(error), match=str(error)):
                    await anext(failing)
        service.leader.tell("full", CapacityExceeded("no room", retry_after_seconds=2.5))
        with pytest.raises(CapacityExceeded) as full:
            await anext(service.read("full"))
        assert full.value.retry_after_seconds == 2.5
        service.leader.tell("odd", ZeroDivisionError("secret"))
        with pytest.raises(Unavailable, match="internal error; the leader's log has the details"):
            await anext(service.read("odd"))
        service.leader.tell("other", tokens(2))
        assert await anext(other) == tokens(2)
    assert service.num_streams == 1


async def test_a_reader_that_leaves_closes_its_turn_at_the_leader_and_no_other(service: Service) -> None:
    async with aclosing(service.read("stays")) as stays:
        async with aclosing(service.read("leaves")) as leaves:
            service.leader.tell("leaves", tokens(1))
            await anext(leaves)
        await eventually(lambda: service.leader.closed == ["leaves"])
        service.leader.tell("stays", tokens(2))
        assert await anext(stays) == tokens(2)
    await eventually(lambda: service.leader.closed == ["leaves", "stays"])


async def test_a_slow_reader_holds_its_turn_at_the_leader_and_holds_up_no_other(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn_streams, "MOST_WAITING", 8)
    async with aclosing(service.read("slow")) as slow, aclosing(service.read("quick")) as quick:
        service.leader.tell("slow", tokens(0))
        assert await anext(slow) == tokens(0)
        number = 0

        async def exchange() -> None:
            """Let both turns make a token more, and read the quick one."""
            nonlocal number
            number += 1
            service.leader.tell("slow", tokens(number))
            service.leader.tell("quick", tokens(number))
            assert await anext(quick) == tokens(number)

        while not len(service.leader.told["slow"]) > 20:
            await exchange()
            assert number < 1000, "the turn is held"
        found: list[int] = []
        while len(found) < number:
            event = await anext(slow)
            assert isinstance(event, TokensEvent)
            found += event.token_ids
        assert found == list(range(1, number + 1)), "nothing is lost, and nothing comes twice"


async def test_a_stream_serves_one_turn_after_another_until_it_is_idle_for_long(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn_streams, "IDLE_SECONDS", 0.05)
    for name in "abc":
        service.leader.tell(name, tokens(1), END)
        assert await service.all_of(name) == [tokens(1), END]
    assert (service.num_streams, service.num_ended) == (1, 0)
    await eventually(lambda: service.num_ended == 1)
    service.leader.tell("d", tokens(1), END)
    assert await service.all_of("d") == [tokens(1), END]
    assert service.num_streams == 2


async def test_a_leader_that_stops_ends_streams_once_none_of_their_turns_is_read(service: Service) -> None:
    service.leader.tell("a", tokens(1), END)
    await service.all_of("a")
    async with aclosing(service.read("b")) as events:
        service.leader.tell("b", tokens(2))
        assert await anext(events) == tokens(2)
        service.servicer.end_idle()
        service.leader.tell("b", tokens(3), END)
        assert [event async for event in events] == [tokens(3), END]
    await service.server.stop(WAIT_SECONDS)
    assert (service.num_streams, service.num_ended) == (1, 1), "the server did not wait for an idle stream"


async def test_a_stream_that_breaks_is_lost_for_all_its_turns_and_the_next_reader_opens_another(
    service: Service,
) -> None:
    readers = [service.read(name) for name in ("a", "b")]
    for name, reader in zip("ab", readers, strict=True):
        service.leader.tell(name, tokens(1))
        assert await anext(reader) == tokens(1)
    await service.server.stop(0)
    for reader in readers:
        with pytest.raises(Unreachable, match=f"decode leader at {service.endpoint} cannot be reached"):
            await anext(reader)
    await eventually(lambda: not pending_requests())  # asyncio logs a task that is dropped as an error
    await service.start(service.endpoint)
    service.leader.tell("a", tokens(2), END)
    async with aclosing(service.read("a", after=1)) as events:
        assert [event async for event in events] == [tokens(2), END]
    assert service.num_streams == 2
    assert service.leader.asked[-1] == ("a", 1, 0.0)
