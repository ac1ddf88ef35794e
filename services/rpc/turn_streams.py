"""Events of turns on their way from decode leaders to a gateway. Only events that wait are held here.

The gateway has one stream per leader, which carries all turns that it reads there:

    turns of a leader -- TurnsWriter -- StreamTurns (a message is all that waits) -- TurnsStream -- a gateway's readings

gRPC's asyncio takes the same time for each message, however much the message holds (docs/decisions/0037). Each turn is
read as if it had its own stream: reading begins after the tokens that the reader already has, and the turn's error or
end concerns no other turn. If its client is slow it is held: its tokens wait at the leader, which stores the answer in
any case, and hold up no other turn.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from functools import partial
from itertools import count
from typing import Any

import grpc
import numpy as np

from ringserve.cp_core.errors import CapacityExceeded, RingserveError, Unavailable, Unreachable
from ringserve.orchestration.protocol.ports import DecodePort
from ringserve.orchestration.protocol.turns import FinishedEvent, TokensEvent, TurnEvent
from ringserve.services.rpc.errors import error_from, make_error
from ringserve.services.rpc.wire.contract import event_from, event_to
from ringserve.v1 import rings_pb2, rings_pb2_grpc

log = logging.getLogger(__name__)

SILENT_TICKS = 4
"""Ticks into which the longest allowed silence of a stream is divided; see `Silence`."""
ADMITTED = (("ringserve-admitted", "1"),)
"""Initial metadata of a stream that the leader has admitted. Only then does the gateway write to it: if a write meets
the end of a refused call, gRPC reports an internal error in place of the refusal."""
IDLE_SECONDS = 10.0
"""Seconds that a stream stays open once none of its turns is read, for the next turn. Opening another would cost both
ends some milliseconds, just while the ranks compute that turn's prompt."""
MOST_WAITING = 4096
"""Tokens of a turn that wait for its client at the gateway, or for the network at the leader, before it is held."""


class Silence:
    """Watch over a stream of events, whose call it cancels when none has come for `seconds`.

    If this process itself was suspended for longer, it counts only one tick for the pause, and then reads the events
    that have arrived.
    """

    def __init__(self, call: Any, seconds: float) -> None:
        self.is_over = False
        self._call = call
        self._ticks = 0
        self._loop = asyncio.get_running_loop()
        self._tick_seconds = seconds / SILENT_TICKS
        self._timer = self._loop.call_later(self._tick_seconds, self._tick)

    @property
    def is_long(self) -> bool:
        """True if no event has come for half the time: the peer stands still, or the way to it is cut."""
        return self._ticks > SILENT_TICKS // 2

    def note_event(self) -> None:
        """Start the silence anew: an event has come."""
        self._ticks = 0

    def _tick(self) -> None:
        self._ticks += 1
        if self._ticks > SILENT_TICKS:
            self.is_over = True
            self._call.cancel()
        else:
            self._timer = self._loop.call_later(self._tick_seconds, self._tick)

    def close(self) -> None:
        self._timer.cancel()


class _Reading:
    """Events of one turn that its reader has not taken; tokens that wait are joined. Then the error, if any."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.error: BaseException | None = None
        self.is_held = False
        self.num_tokens = 0
        self._events: deque[TurnEvent] = deque()
        self._plain: list[int] = []  # tokens that came last
        self._waits: asyncio.Future[None] | None = None

    def add_tokens(self, token_ids: list[int]) -> None:
        self._plain.extend(token_ids)
        self.num_tokens += len(token_ids)
        self._wake()

    def add(self, event: TurnEvent) -> None:
        if self._plain:
            self._events.append(TokensEvent(token_ids=self._take_plain()))
        self._events.append(event)
        self.num_tokens += len(event.token_ids) if isinstance(event, TokensEvent) else 0
        self._wake()

    def fail(self, error: BaseException) -> None:
        self.error = error
        self._wake()

    def _take_plain(self) -> tuple[int, ...]:
        taken, self._plain = tuple(self._plain), []
        return taken

    def _wake(self) -> None:
        if self._waits is not None and not self._waits.done():
            self._waits.set_result(None)

    async def next(self) -> TurnEvent:
        """Return the next event. Raises the error that ended the turn or the stream."""
        while not self._events and not self._plain:
            if self.error is not None:
                raise self.error
            self._waits = asyncio.get_running_loop().create_future()
            await self._waits
        event = self._events.popleft() if self._events else TokensEvent(token_ids=self._take_plain())
        if isinstance(event, TokensEvent):
            self.num_tokens -= len(event.token_ids)
        return event


_Asked = asyncio.Queue[rings_pb2.TurnReading | None]
"""Requests to a leader, in order; None when the call has ended."""


class TurnsStream:
    """Stream of a leader's turns to this process, open while one of them is read, and for IDLE_SECONDS afterwards.

    `name` is the leader's in errors. Without a message for `lost_seconds` it counts as lost.
    """

    def __init__(
        self,
        stub: rings_pb2_grpc.RingServiceStub,
        metadata: tuple[tuple[str, str], ...],
        name: str,
        lost_seconds: float,
    ) -> None:
        self._stub: Any = stub
        self._metadata = metadata
        self._name = name
        self._lost_seconds = lost_seconds
        self._numbers = count(1)
        self._readings: dict[int, _Reading] = {}
        self._asked: _Asked = asyncio.Queue()
        self._receiving: asyncio.Task[None] | None = None
        self._ending: asyncio.TimerHandle | None = None

    async def read(self, turn_id: str, after: int, interval: float) -> AsyncGenerator[TurnEvent, None]:
        """Yield a turn's events; see `GrpcDecodeRing.stream_turn`."""
        request = rings_pb2.ReadTurn(turn_id=turn_id, after=after, interval_seconds=interval)
        reading, asked, readings = self._begin(request)
        try:
            while True:
                event = await reading.next()
                if reading.is_held and not reading.num_tokens:
                    reading.is_held = False
                    asked.put_nowait(rings_pb2.TurnReading(number=reading.number, is_held=False))
                yield event
                if isinstance(event, FinishedEvent):
                    return
        finally:
            if readings.pop(reading.number, None) is not None:
                asked.put_nowait(rings_pb2.TurnReading(number=reading.number, left=rings_pb2.Left()))
            if not readings and readings is self._readings and self._receiving is not None:
                self._ending = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._end)

    def _begin(self, request: rings_pb2.ReadTurn) -> tuple[_Reading, _Asked, dict[int, _Reading]]:
        """Ask for a turn; the stream is opened if there is none."""
        self._stay()
        if self._receiving is None:
            self._asked, self._readings = asyncio.Queue(), {}
            self._receiving = asyncio.create_task(self._receive(self._asked, self._readings))
        reading = _Reading(next(self._numbers))
        self._readings[reading.number] = reading
        self._asked.put_nowait(rings_pb2.TurnReading(number=reading.number, read=request))
        return reading, self._asked, self._readings

    def _stay(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None

    def _end(self) -> None:
        self._stay()
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None

    async def close(self) -> None:
        """End the stream: the leader's turns are read no longer."""
        if (receiving := self._receiving) is not None:
            self._end()
            await asyncio.wait([receiving])

    def _error_of(self, failure: BaseException, silence: Silence) -> BaseException:
        """Translate the failure of a call; a cancellation by others is returned as it is."""
        if isinstance(failure, grpc.aio.AioRpcError):
            error = error_from(failure, self._name)
            return Unavailable(str(error)) if isinstance(error, Unreachable) and silence.is_long else error
        task = asyncio.current_task()
        if not silence.is_over or (task is not None and task.cancelling()):
            return failure
        return Unavailable(f"{self._name} sent no heartbeat for {self._lost_seconds:g} s")

    async def _receive(self, asked: _Asked, readings: dict[int, _Reading]) -> None:
        """Give every reading its events, until the call ends; then give all the error."""
        admitted = asyncio.Event()
        call = self._stub.StreamTurns(_take(asked, admitted), metadata=self._metadata)
        silence = Silence(call, self._lost_seconds)
        error: BaseException = Unavailable(f"{self._name} ended the stream of turns before they did")
        try:
            if ADMITTED[0][0] in dict(await call.initial_metadata()):
                admitted.set()
            async for message in call:
                silence.note_event()
                self._spread(message, asked, readings)
        except grpc.aio.AioRpcError as failure:
            error = self._error_of(failure, silence)
        except asyncio.CancelledError as failure:
            error = self._error_of(failure, silence)
            if error is failure:
                raise
        except Exception:  # nobody awaits this task: its readers get a short error, and the log the traceback
            log.exception("the stream of turns met an internal error")
        finally:
            silence.close()
            call.cancel()
            # If the call has ended by itself, gRPC's task that takes requests still waits in `_take`: let it end.
            admitted.set()
            asked.put_nowait(None)
            if readings is self._readings:
                self._receiving = None
            for reading in readings.values():
                reading.fail(error)
            readings.clear()

    def _spread(
        self,
        message: rings_pb2.TurnsEvents,
        asked: _Asked,
        readings: dict[int, _Reading],
    ) -> None:
        if message.numbers:
            start, token_ids = 0, np.frombuffer(message.token_ids, dtype="<i4").tolist()
            numbers, counts = (np.frombuffer(each, dtype="<u4").tolist() for each in (message.numbers, message.counts))
            for number, length in zip(numbers, counts, strict=True):
                reading = readings.get(number)
                if reading is not None:  # else it has left
                    reading.add_tokens(token_ids[start : start + length])
                    _hold_slow(reading, asked)
                start += length
        for other in message.others:
            reading = readings.get(other.number)
            if reading is None:
                continue
            if other.HasField("failure"):
                reading.fail(_error_of(other.failure))
                del readings[other.number]
                continue
            reading.add(event_from(other.event))
            _hold_slow(reading, asked)


async def _take(asked: _Asked, admitted: asyncio.Event) -> AsyncIterator[rings_pb2.TurnReading]:
    await admitted.wait()
    while (reading := await asked.get()) is not None:
        yield reading


def _hold_slow(reading: _Reading, asked: _Asked) -> None:
    if reading.num_tokens > MOST_WAITING and not reading.is_held:
        log.info("reading %d waits for a slow client, with %d tokens", reading.number, reading.num_tokens)
        reading.is_held = True
        asked.put_nowait(rings_pb2.TurnReading(number=reading.number, is_held=True))


def _error_of(failure: rings_pb2.ReadingFailure) -> RingserveError:
    error = make_error(failure.error, failure.message)
    if isinstance(error, CapacityExceeded) and failure.HasField("retry_after_seconds"):
        error.retry_after_seconds = failure.retry_after_seconds
    return error


class TurnsWriter:
    """Writer of a leader's turns to one gateway, with a heartbeat each `heartbeat` seconds."""

    def __init__(self, leader: DecodePort, heartbeat: float) -> None:
        self._leader = leader
        self._heartbeat = heartbeat
        self._pumps: dict[int, asyncio.Task[None]] = {}
        self._held: set[int] = set()
        self._tokens: dict[int, list[int]] = {}
        self._others: dict[int, list[TurnEvent | RingserveError]] = {}
        self._has_news = asyncio.Event()
        self._has_moved = asyncio.Event()
        self._ends_idle = False

    def end_idle(self) -> None:
        """End the messages once no turn is read."""
        self._ends_idle = True
        self._has_news.set()

    async def messages(
        self, asked: AsyncIterator[rings_pb2.TurnReading]
    ) -> AsyncGenerator[rings_pb2.TurnsEvents, None]:
        """Yield messages with the events of the turns that are asked for.

        Closing this generator closes the turns' streams at the leader.
        """
        asking = asyncio.create_task(self._follow(asked))
        asking.add_done_callback(self._on_asked)
        try:
            while not (asking.done() or self._ends_idle) or self._pumps or self._others or self._tokens:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._heartbeat):
                        await self._has_news.wait()
                self._has_news.clear()
                yield self._take()
        finally:
            tasks = [asking, *self._pumps.values()]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def _on_asked(self, asking: asyncio.Task[None]) -> None:
        self._has_news.set()
        if not asking.cancelled() and asking.exception() is not None:
            log.info("a gateway asks for no more turns: %s", asking.exception())

    async def _follow(self, asked: AsyncIterator[rings_pb2.TurnReading]) -> None:
        async for each in asked:
            what = each.WhichOneof("asked")
            if what == "read":
                self._pumps[each.number] = pump = asyncio.create_task(self._pump(each.number, each.read))
                pump.add_done_callback(partial(self._on_pumped, each.number))
            elif what == "is_held":
                (self._held.add if each.is_held else self._held.discard)(each.number)
                self._move()
            elif each.number in self._pumps:
                self._pumps[each.number].cancel()

    async def _pump(self, number: int, request: rings_pb2.ReadTurn) -> None:
        """Put a turn's events into the next message, unless it is held."""
        try:
            events = self._leader.stream_turn(request.turn_id, request.after, request.interval_seconds)
            async with aclosing(events):
                async for event in events:
                    self._put(number, event)
                    while number in self._held or len(self._tokens.get(number, ())) > MOST_WAITING:
                        await self._has_moved.wait()
        except RingserveError as error:
            self._put(number, error)
        except Exception:  # the last place before the network: logged whole, shown as one sentence
            log.exception("the stream of turn %s met an internal error", request.turn_id)
            self._put(number, Unavailable("internal error; the leader's log has the details"))

    def _on_pumped(self, number: int, _: asyncio.Task[None]) -> None:
        del self._pumps[number]
        self._held.discard(number)
        if self._ends_idle:
            self._has_news.set()

    def _put(self, number: int, event: TurnEvent | RingserveError) -> None:
        if isinstance(event, TokensEvent) and not event.logprobs and number not in self._others:
            self._tokens.setdefault(number, []).extend(event.token_ids)
        else:
            others = self._others.setdefault(number, [])
            if number in self._tokens:
                others.append(TokensEvent(token_ids=tuple(self._tokens.pop(number))))
            others.append(event)
        self._has_news.set()

    def _move(self) -> None:
        moved, self._has_moved = self._has_moved, asyncio.Event()
        moved.set()

    def _take(self) -> rings_pb2.TurnsEvents:
        """Return all waiting events as one message."""
        tokens, self._tokens = self._tokens, {}
        others, self._others = self._others, {}
        self._move()
        message = rings_pb2.TurnsEvents(
            others=[_told(number, event) for number, events in others.items() for event in events]
        )
        if tokens:
            message.numbers = np.array(list(tokens), dtype="<u4").tobytes()
            message.counts = np.array([len(each) for each in tokens.values()], dtype="<u4").tobytes()
            message.token_ids = np.array([token for each in tokens.values() for token in each], dtype="<i4").tobytes()
        return message


def _told(number: int, event: TurnEvent | RingserveError) -> rings_pb2.ReadingEvent:
    if not isinstance(event, RingserveError):
        return rings_pb2.ReadingEvent(number=number, event=event_to(event))
    failure = rings_pb2.ReadingFailure(error=type(event).__name__, message=str(event))
    if isinstance(event, CapacityExceeded) and event.retry_after_seconds is not None:
        failure.retry_after_seconds = event.retry_after_seconds
    return rings_pb2.ReadingEvent(number=number, failure=failure)
