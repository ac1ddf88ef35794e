"""Sender for KV from this rank's cache to ranks of other rings, layer by layer, hidden behind computation.

A rank's worker begins transfers, and its prefill steps report written layers. Each destination rank has a *lane*: a
thread, a connection, and the carrier of payloads. A payload follows its header on the socket, or lies in an out slot
that the destination reads by NIXL.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

import torch

from ringserve.cp_core.errors import ConfigError, RingserveError, StaleIncarnation, TransferError, Unavailable
from ringserve.cp_core.transport.peer_tls import PeerTls, reason_of
from ringserve.workers.kv.cache import KvCache
from ringserve.workers.kv.frames import (
    FRAME_BYTES,
    AbandonFrame,
    CopyStream,
    Frame,
    FrameLayout,
    LayerFrame,
    LeaveFrame,
    OutgoingPart,
    Reach,
    ReachedFrame,
    ReadFrame,
    RefusedFrame,
    SettledFrame,
    SettleFrame,
    TransferFrame,
    checksum_of,
    digest_of,
    encode,
)
from ringserve.workers.kv.pulls import PullAgent
from ringserve.workers.kv.sockets import connect
from ringserve.workers.protocol.transfers import KvSend, TransferKey, TransferReport

# Interval for checking an idle connection that awaits a reply.
REPLY_SECONDS = 5.0
# An idle connection is closed after this time.
IDLE_SECONDS = 120.0
logger = logging.getLogger(__name__)
# Idle time after which a lane's thread ends. Later work starts a new thread.
LANE_IDLE_SECONDS = 30.0
# Time that `release` gives a frame to finish before it breaks the connection.
GRACE_SECONDS = 0.5
JOIN_SECONDS = 10.0
HELD_BYTES = 16 << 20
"""Maximum bytes of written layers that a rank's sender holds back. Sending each layer by itself would wake threads here
and at the destination, and take time from the step: on two cores a fifth of the time of a prompt of 16 tokens."""


class OutgoingState(Enum):
    """State of an `OutgoingTransfer`; its docstring shows the transitions."""

    SENDING = auto()
    SETTLED = auto()
    FAILED = auto()
    ABANDONED = auto()


class OutgoingTransfer:
    """Transfer with counts of the parts that are still to be sent and confirmed.

        SENDING ──all sent and confirmed──> SETTLED
           ├──refused, or a connection broke──> FAILED
           └──abandoned here──> ABANDONED

    The leader owns the blocks. They may be read from `begin` until the state leaves SENDING and no connection is inside
    a frame (`Lane.release` waits for this).
    """

    def __init__(self, key: TransferKey) -> None:
        self.key = key
        self._state = OutgoingState.SENDING
        self._error: RingserveError | None = None
        self._unsent = 0
        self._unconfirmed: set[str] = set()
        self._payload_bytes = 0
        self._began: float | None = None
        self._ended = 0.0
        self._changed = threading.Condition()

    @property
    def is_sending(self) -> bool:
        with self._changed:
            return self._state is OutgoingState.SENDING

    def add(self, num_layer_parts: int) -> None:
        """Add (layer, destination) pairs to be sent."""
        with self._changed:
            self._unsent += num_layer_parts

    def begin_part(self, endpoint: str) -> None:
        """Note that a connection to `endpoint` will send a part, which the destination must confirm."""
        with self._changed:
            self._unconfirmed.add(endpoint)
            if self._began is None:
                self._began = time.monotonic()

    def sent_part(self, payload_bytes: int, num_layers: int) -> None:
        """Note that some layers are sent to one destination."""
        with self._changed:
            self._unsent -= num_layers
            self._payload_bytes += payload_bytes
            self._changed.notify_all()

    def confirmed(self, endpoint: str) -> None:
        """Note that the destination has received everything."""
        with self._changed:
            self._unconfirmed.discard(endpoint)
            self._ended = time.monotonic()
            self._changed.notify_all()

    def fail(self, error: RingserveError) -> None:
        """Stop sending and raise `error` in waiting calls."""
        self._end(OutgoingState.FAILED, error)

    def abandon(self) -> None:
        """Stop sending because the source rank gives up the transfer."""
        self._end(OutgoingState.ABANDONED, TransferError(f"{self} was abandoned"))

    def wait_sent(self, deadline: float) -> frozenset[str]:
        """Wait until every layer is sent to every destination. Return the endpoints that must still confirm.

        `deadline` is on the monotonic clock. Raises the error that ended the transfer, TransferError at the deadline.
        """
        with self._changed:
            self._wait(lambda: self._unsent == 0, deadline)
            if self._unsent:
                raise TransferError(f"{self} has {self._unsent} parts that were not sent in time")
            return frozenset(self._unconfirmed)

    def wait_confirmed(self, deadline: float) -> TransferReport:
        """Wait until every destination has confirmed and the transfer is SETTLED. Raises like `wait_sent`."""
        with self._changed:
            self._wait(lambda: not self._unconfirmed, deadline)
            if self._unconfirmed:
                raise TransferError(f"{self} was not confirmed in time by {', '.join(sorted(self._unconfirmed))}")
            self._state = OutgoingState.SETTLED
            seconds = 0.0 if self._began is None else self._ended - self._began
            return TransferReport(payload_bytes=self._payload_bytes, seconds=seconds)

    def __str__(self) -> str:
        return f"transfer {self.key.transfer_id!r} attempt {self.key.attempt}"

    def _wait(self, is_done: Callable[[], bool], deadline: float) -> None:
        self._changed.wait_for(lambda: self._error is not None or is_done(), max(0.0, deadline - time.monotonic()))
        if self._error is not None:
            raise type(self._error)(str(self._error))

    def _end(self, state: OutgoingState, error: RingserveError) -> None:
        with self._changed:
            if self._state is OutgoingState.SENDING:
                self._state = state
                self._error = error
                self._changed.notify_all()


class DestinationConnection:
    """TCP connection to a KV receiver, from construction until `is_broken`. Its own thread reads the replies.

    Only one thread at a time may send; any thread may call `break_off`. When the connection ends, every unconfirmed
    transfer on it fails. An idle connection ends after `idle_seconds`, or if its destination needs the place: only this
    side knows that no frame is in flight.

    With an `agent`, payloads lie in its out slots after `meet` has returned REACHED. A slot belongs to this connection
    from `take_slot` until the destination has read it or the connection ends. A destination that leaves a slot unread
    for `stall_seconds` counts as gone.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        connect_seconds: float,
        stall_seconds: float,
        idle_seconds: float = IDLE_SECONDS,
        tls: PeerTls | None = None,
        agent: PullAgent | None = None,
    ) -> None:
        """Connect. Raises Unavailable if the endpoint is malformed, or if no KV receiver of this cluster answers."""
        self._endpoint = endpoint
        try:
            self._stream = connect(endpoint, connect_seconds, stall_seconds, tls)
        except OSError as error:
            raise Unavailable(f"the KV receiver at {endpoint} cannot be reached: {reason_of(error)}") from error
        except ConfigError as error:
            raise Unavailable(f"the KV receiver at {endpoint} cannot be connected to: {error}") from error
        self._agent = agent
        self._stall_seconds = stall_seconds
        self._reached: ReachedFrame | None = None
        self._unread: dict[int, float] = {}
        self._changed = threading.Condition()
        self._carried: dict[TransferKey, tuple[OutgoingTransfer, int]] = {}
        self._end_reason: str | None = None
        self._idle_seconds = idle_seconds
        self._used_at = time.monotonic()
        self._hearing = threading.Thread(target=self._hear, name=f"kv-replies-{endpoint}", daemon=True)
        self._hearing.start()

    @property
    def is_broken(self) -> bool:
        with self._changed:
            return self._end_reason is not None

    def meet(self, destination: str) -> ReachedFrame:
        """Send the agent's card to the destination's incarnation, once, and wait for the answer. Raises Unavailable."""
        assert self._agent is not None, "a card without an agent"
        answer = self._reached
        if answer is None:
            with self._agent.expecting():
                self._write([memoryview(encode(self._agent.card(destination)))])
                with self._changed:
                    self._changed.wait_for(lambda: self._reached or self._end_reason, self._stall_seconds)
                    answer = self._reached
        if answer is None:
            raise self._end("it did not answer the card")
        return answer

    def take_slot(self) -> int:
        """Take an out slot. Raises Unavailable if none becomes free within `stall_seconds`."""
        assert self._agent is not None, "slots without an agent"
        return self._agent.out.take(self, self._stall_seconds, lambda: self._end_reason is not None)

    def free_slot(self, slot: int) -> None:
        """Free an out slot that no sent frame names."""
        assert self._agent is not None, "slots without an agent"
        self._agent.out.release(slot)

    def carry(self, transfer: OutgoingTransfer) -> bool:
        """Bind a transfer to this connection, so that they fail together. Return False if the connection is broken."""
        with self._changed:
            if self._end_reason is not None:
                return False
            self._carried.setdefault(transfer.key, (transfer, 0))
            return True

    def send(self, frame: TransferFrame, payload: list[memoryview]) -> None:
        """Send one frame. From now on the connection owns the slot that the frame names, even if the send fails.

        Raises Unavailable if the connection breaks or stalls. It is then broken.
        """
        payload_bytes = sum(buffer.nbytes for buffer in payload)
        slot = frame.slot if isinstance(frame, LayerFrame) else None
        with self._changed:
            if frame.key in self._carried:
                transfer, before = self._carried[frame.key]
                carried_bytes = payload_bytes if slot is None else slot.num_bytes
                self._carried[frame.key] = (transfer, before + carried_bytes)
            if slot is not None:
                self._unread[slot.number] = time.monotonic()
        self._write([memoryview(encode(frame, payload_bytes)), *payload])

    def _write(self, buffers: list[memoryview]) -> None:
        try:
            self._stream.send(buffers)
        except OSError as error:
            raise self._end(reason_of(error)) from error

    def forget(self, transfer: OutgoingTransfer) -> bool:
        """Unbind an abandoned transfer. Return whether it was bound."""
        with self._changed:
            return self._carried.pop(transfer.key, None) is not None

    def break_off(self, reason: str) -> None:
        """End the connection. A `send` in progress returns at once with an error."""
        self._end(reason)

    def join(self, seconds: float) -> None:
        """Wait until the reply thread has ended."""
        self._hearing.join(seconds)

    def _hear(self) -> None:
        reason = "it was broken off"
        try:
            while not self.is_broken:
                if self._stream.wait_readable(min(REPLY_SECONDS, self._idle_seconds, self._stall_seconds)):
                    frame, _ = self._stream.receive_frame()
                    self._take(frame)
                elif time.monotonic() - self._used_at >= self._idle_seconds:
                    self._leave("it was idle")
                self._check_slots()
        except OSError as error:
            reason = reason_of(error)
        except TransferError as error:
            reason = str(error)
        finally:
            self._end(reason)
            self._stream.close()

    def _check_slots(self) -> None:
        """Raise TransferError if a slot was left unread for too long."""
        with self._changed:
            oldest = min(self._unread.values(), default=None)
        if oldest is not None and time.monotonic() - oldest >= self._stall_seconds:
            raise TransferError(f"it left a slot unread for {self._stall_seconds:g} s")

    def _leave(self, reason: str) -> None:
        """End the connection if it is idle."""
        with self._changed:
            if not self._carried and self._end_reason is None:
                self._end_reason = reason

    def _take(self, frame: Frame) -> None:
        if isinstance(frame, LeaveFrame):
            self._leave("its place was needed")
            return
        if isinstance(frame, ReachedFrame):
            with self._changed:
                self._reached = frame
                self._changed.notify_all()
            return
        if isinstance(frame, ReadFrame):
            self._take_read(frame.slot)
            return
        if not isinstance(frame, SettledFrame | RefusedFrame):
            raise TransferError(f"a destination sent {type(frame).__name__}")
        with self._changed:
            transfer, payload_bytes = self._carried.pop(frame.key, (None, 0))
            self._used_at = time.monotonic()
        if transfer is None:
            # The transfer was abandoned before the reply arrived.
            return
        if isinstance(frame, RefusedFrame):
            refusal = StaleIncarnation if frame.is_stale else TransferError
            transfer.fail(refusal(frame.reason))
        elif frame.payload_bytes != payload_bytes:
            transfer.fail(TransferError(f"{transfer}: {frame.payload_bytes} of {payload_bytes} bytes arrived"))
        else:
            transfer.confirmed(self._endpoint)

    def _take_read(self, slot: int) -> None:
        with self._changed:
            if self._unread.pop(slot, None) is None:
                raise TransferError(f"it reports a read of slot {slot}, which was never sent to it")
        self.free_slot(slot)

    def _end(self, reason: str) -> Unavailable:
        """End the connection, if it has not ended yet. Return the error with the first reason."""
        with self._changed:
            if self._end_reason is None:
                self._end_reason = reason
            carried, self._carried = self._carried, {}
            unread, self._unread = self._unread, {}
            self._changed.notify_all()
            error = Unavailable(f"the KV receiver at {self._endpoint} is gone: {self._end_reason}")
        self._stream.shut()
        for slot in unread:
            self.free_slot(slot)
        if self._agent is not None:
            self._agent.out.wake()
        for transfer, _ in carried.values():
            transfer.fail(error)
        return error


class CarrierCounts:
    """Bytes that a rank sent by each carrier, and its fallbacks from NIXL to sockets, per connection. Thread-safe.

    With `kv_transfer.carrier: auto`, a connection falls back to its socket if NIXL does not reach the destination.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.nixl_bytes = 0
        self.socket_bytes = 0
        self.fallbacks = 0

    def sent(self, num_bytes: int, *, by_nixl: bool) -> None:
        """Count payload bytes."""
        with self._lock:
            if by_nixl:
                self.nixl_bytes += num_bytes
            else:
                self.socket_bytes += num_bytes

    def fell_back(self) -> None:
        """Count a connection that fell back to its socket."""
        with self._lock:
            self.fallbacks += 1


WrittenLayer = tuple[int, torch.Event | None]
"""Layer whose KV is written when the device has reached the event."""


def together(layers: Sequence[WrittenLayer], most: int) -> Iterator[tuple[range, torch.Event | None]]:
    """Yield neighbouring layers in groups of at most `most`, each with the event after which all of it is written."""
    start = 0
    for place, (layer, ready) in enumerate(layers, 1):
        is_last = place == len(layers) or layers[place][0] != layer + 1
        if is_last or place - start >= most:
            yield range(layers[start][0], layer + 1), ready
            start = place


class Carrier(Protocol):
    """Path for KV to one destination rank, such as `Lane`, which documents the calls."""

    def send_layers(self, transfer: OutgoingTransfer, part: OutgoingPart, layers: Sequence[WrittenLayer]) -> None: ...
    def settle(self, transfer: OutgoingTransfer) -> None: ...
    def release(self, transfer: OutgoingTransfer) -> None: ...
    def close(self) -> None: ...


class Lane:
    """Queue of frames to one destination rank, sent in call order. Calls return at once. Thread-safe.

    One thread sends the frames, so `settle` covers everything sent before it. A broken connection fails its transfers
    and is replaced at the next send. With an `agent`, payloads go by NIXL if it reaches the destination. `counts`
    records the bytes sent by each carrier.
    """

    def __init__(
        self,
        endpoint: str,
        cache: KvCache,
        *,
        connect_seconds: float,
        stall_seconds: float,
        tls: PeerTls | None = None,
        agent: PullAgent | None = None,
        counts: CarrierCounts | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._cache = cache
        self._tls = tls
        self._connect_seconds = connect_seconds
        self._stall_seconds = stall_seconds
        self._jobs: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._connection: DestinationConnection | None = None
        self._reading: OutgoingTransfer | None = None
        self._agent = agent
        self._counts = counts or CarrierCounts()
        self._fallen_back: DestinationConnection | None = None
        self._copies = CopyStream(cache.device)
        self._is_closed = False

    def send_layers(self, transfer: OutgoingTransfer, part: OutgoingPart, layers: Sequence[WrittenLayer]) -> None:
        """Send some layers of a part, each after it is written."""
        self._put(lambda: self._send_layers(transfer, part, layers))

    def settle(self, transfer: OutgoingTransfer) -> None:
        """Ask the destination to confirm everything sent so far."""
        self._put(lambda: self._settle(transfer))

    def release(self, transfer: OutgoingTransfer) -> None:
        """Wait until this lane no longer reads blocks of an ended transfer, then tell the destination.

        A frame in progress has GRACE_SECONDS to finish. Then the connection is broken off.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._reading is not transfer, GRACE_SECONDS):
                assert self._connection is not None, "a frame is being sent over no connection"
                self._connection.break_off(f"a frame of {transfer} did not finish")
                is_released = self._changed.wait_for(lambda: self._reading is not transfer, JOIN_SECONDS)
                assert is_released, "a frame outlived its connection"
        self._put(lambda: self._tell(transfer))

    def close(self) -> None:
        """End the thread and the connection. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._jobs.clear()
            self._changed.notify_all()
            thread, connection = self._thread, self._connection
        if connection is not None:
            connection.break_off("the KV sender is closed")
        if thread is not None:
            thread.join(JOIN_SECONDS)
        if connection is not None:
            connection.join(JOIN_SECONDS)

    def _put(self, job: Callable[[], None]) -> None:
        with self._changed:
            if self._is_closed:
                return
            self._jobs.append(job)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"kv-to-{self.endpoint}", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        try:
            while (job := self._next()) is not None:
                job()
        finally:
            # Even if a job failed with a bug: the next job gets a new thread.
            with self._changed:
                if self._thread is threading.current_thread():
                    self._thread = None

    def _next(self) -> Callable[[], None] | None:
        """Wait for the next job. Return None after LANE_IDLE_SECONDS without one: the thread then leaves the lane."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._is_closed, LANE_IDLE_SECONDS)
            if self._jobs:
                return self._jobs.popleft()
            self._thread = None
            return None

    def _send_layers(self, transfer: OutgoingTransfer, part: OutgoingPart, layers: Sequence[WrittenLayer]) -> None:
        connection = self._connection_for(transfer)
        if connection is None:
            return
        try:
            by_nixl = self._is_by_nixl(connection, transfer)
            most_bytes = self._required_agent.out.slot_bytes if by_nixl else FRAME_BYTES
            with self._copies.copying():
                frames = part.frames(most_bytes)
            # A frame takes time of both ends, however small it is: small layers share one.
            most = max(1, most_bytes // part.layer_bytes) if len(frames) == 1 else 1
            for some, ready in together(layers, most):
                sent = 0
                for layout in frames:
                    send = self._send_slot if by_nixl else self._send_inline
                    num_bytes = send(connection, transfer, layout, some, ready)
                    if not num_bytes:
                        return
                    self._counts.sent(num_bytes, by_nixl=by_nixl)
                    sent += num_bytes
                transfer.sent_part(sent, len(some))
        except RingserveError as error:
            transfer.fail(error)
        except Exception as error:
            # A device failure or a bug. Waiting callers get an error now; the thread's traceback shows the place.
            transfer.fail(Unavailable(f"KV of {transfer} could not be read: {error}"))
            raise
        finally:
            self._end_reading()

    def _send_inline(
        self,
        connection: DestinationConnection,
        transfer: OutgoingTransfer,
        layout: FrameLayout,
        layers: range,
        ready: torch.Event | None,
    ) -> int:
        """Send a frame with its payload. Return the payload bytes, or 0 if the transfer is over."""
        if not self._begin_reading(transfer):
            return 0
        with self._copies.copying(ready):
            payload = layout.payload(layers, self._cache)
        connection.send(layout.of_layers(transfer.key, layers, self._cache, checksum_of(payload)), payload)
        self._end_reading()  # if the transfer has been abandoned, the next frame is not begun
        return layout.num_bytes(self._cache, len(layers))

    def _send_slot(
        self,
        connection: DestinationConnection,
        transfer: OutgoingTransfer,
        layout: FrameLayout,
        layers: range,
        ready: torch.Event | None,
    ) -> int:
        """Pack a frame into a slot and send the slot's place. Return the payload bytes, or 0 if the transfer is over.

        Blocks are read only while packing, so `release` does not wait for the destination.
        """
        out = self._required_agent.out
        slot = connection.take_slot()
        try:
            if not self._begin_reading(transfer):
                connection.free_slot(slot)
                return 0
            with out.writing(slot), self._copies.copying(ready):
                packed = out.fill(slot, layout, layers, self._cache)
                checksum = digest_of(packed)
            self._end_reading()
        except BaseException:
            connection.free_slot(slot)
            raise
        ref = out.ref(slot, packed.nbytes)
        connection.send(layout.of_layers(transfer.key, layers, self._cache, checksum, ref), [])
        return ref.num_bytes

    def _begin_reading(self, transfer: OutgoingTransfer) -> bool:
        """Start reading blocks, under the lock that `release` waits with, so an ended transfer is never read."""
        with self._changed:
            if transfer.is_sending:
                self._reading = transfer
            return self._reading is transfer

    def _end_reading(self) -> None:
        with self._changed:
            self._reading = None
            self._changed.notify_all()

    @property
    def _required_agent(self) -> PullAgent:
        assert self._agent is not None, "slots without an agent"
        return self._agent

    def _is_by_nixl(self, connection: DestinationConnection, transfer: OutgoingTransfer) -> bool:
        """Return whether payloads go by NIXL. Raises Unavailable if NIXL is required but cannot reach the peer."""
        if self._agent is None:
            return False
        answer = connection.meet(transfer.key.destination)
        if answer.reach is Reach.REACHED:
            return True
        if answer.reach is not Reach.STALE and self._fallen_back is not connection:
            if self._agent.is_required:
                raise Unavailable(
                    f"the KV receiver at {self.endpoint} cannot read by NIXL, which kv_transfer.carrier requires: "
                    f"{answer.reason}"
                )
            if self._fallen_back is None:
                logger.warning("KV to %s falls back from NIXL to the socket: %s", self.endpoint, answer.reason)
            self._fallen_back = connection
            self._counts.fell_back()
        return False

    def _settle(self, transfer: OutgoingTransfer) -> None:
        connection = self._connection
        if connection is None or not transfer.is_sending:
            return
        try:
            connection.send(SettleFrame(transfer.key), [])
        except RingserveError as error:
            transfer.fail(error)

    def _tell(self, transfer: OutgoingTransfer) -> None:
        connection = self._connection
        if connection is None or not connection.forget(transfer):
            return
        try:
            connection.send(AbandonFrame(transfer.key, "it was abandoned"), [])
        except Unavailable:
            # The connection is gone, so the destination has ended the transfer on its side too.
            return

    def _connection_for(self, transfer: OutgoingTransfer) -> DestinationConnection | None:
        """Return a connection for the transfer, or fail the transfer and return None if none can be made."""
        if not transfer.is_sending:
            return None
        try:
            while True:
                if self._connection is None or self._connection.is_broken:
                    opened = DestinationConnection(
                        self.endpoint,
                        connect_seconds=self._connect_seconds,
                        stall_seconds=self._stall_seconds,
                        tls=self._tls,
                        agent=self._agent,
                    )
                    with self._changed:
                        self._connection = opened
                        if self._is_closed:
                            opened.break_off("the KV sender is closed")
                            raise Unavailable("the KV sender is closed")
                if self._connection.carry(transfer):
                    transfer.begin_part(self.endpoint)
                    return self._connection
        except RingserveError as error:
            transfer.fail(error)
            return None


@dataclass(frozen=True, slots=True)
class _Share:
    """Share that one `begin` adds to a transfer, for example a prefill chunk.

    `waiting` has the unwritten layers, and `held` the written layers that are not sent yet.
    """

    parts: tuple[tuple[Carrier, OutgoingPart], ...]
    waiting: set[int]
    layer_bytes: int
    held: list[WrittenLayer] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Sending:
    """Transfer and its shares, oldest first."""

    transfer: OutgoingTransfer
    shares: list[_Share]


class KvSender:
    """Sender with one lane per destination rank. Thread-safe.

    For each step, call `begin` with the step's share of a transfer, then `layer_ready` after each layer. After all
    steps, call `finish`. Blocks are read between `begin` and the return of `finish` or `abandon`, never later. A
    destination that accepts no byte for `stall_seconds` counts as gone. `open_lane` makes the lane to an endpoint, by
    default over TCP, encrypted with `tls`. With an `agent`, payloads go by NIXL; its owner closes it afterwards. Layers
    are sent together once they have `held_bytes`, or all are written.
    """

    def __init__(
        self,
        cache: KvCache,
        incarnation: str,
        *,
        connect_seconds: float = 5.0,
        stall_seconds: float = 30.0,
        tls: PeerTls | None = None,
        agent: PullAgent | None = None,
        open_lane: Callable[[str], Carrier] | None = None,
        held_bytes: int = 0,
    ) -> None:
        def open_tcp(endpoint: str) -> Carrier:
            return Lane(
                endpoint,
                cache,
                connect_seconds=connect_seconds,
                stall_seconds=stall_seconds,
                tls=tls,
                agent=agent,
                counts=self.counts,
            )

        self.counts = CarrierCounts()
        self._cache = cache
        self._held_bytes = held_bytes
        self._incarnation = incarnation
        self._open_lane = open_lane or open_tcp
        self._lock = threading.Lock()
        self._sending: dict[TransferKey, _Sending] = {}
        self._lanes: dict[str, Carrier] = {}
        self._is_closed = False

    @property
    def num_open(self) -> int:
        """Number of transfers that are begun and neither finished nor abandoned."""
        with self._lock:
            return len(self._sending)

    def begin(self, send: KvSend) -> None:
        """Begin a share of a transfer, with no layer ready yet. A share may have no parts.

        Raises StaleIncarnation if it names another incarnation of this ring, Unavailable after `close`.
        """
        if send.key.source != self._incarnation:
            raise StaleIncarnation(
                f"transfer {send.key.transfer_id!r} names source {send.key.source!r}, this is {self._incarnation!r}"
            )
        with self._lock:
            if self._is_closed:
                raise Unavailable("the KV sender is closed")
            parts = tuple(
                (self._lane(part.endpoint), OutgoingPart(part.pieces, send.blocks, self._cache))
                for part in send.parts
                if part.pieces
            )
            sending = self._sending.setdefault(send.key, _Sending(OutgoingTransfer(send.key), []))
            layer_bytes = sum(part.layer_bytes for _, part in parts)
            sending.shares.append(_Share(parts, set(range(self._cache.num_layers)), layer_bytes))
            sending.transfer.add(len(parts) * self._cache.num_layers)

    def layer_ready(self, key: TransferKey, layer: int) -> None:
        """Send a layer whose KV is written, for the oldest share that still waits for it, or hold it. Returns at once.

        If the transfer has failed or was abandoned, nothing is sent or raised: the step continues for other sequences.
        """
        ready = self._cache.fence()
        with self._lock:
            sending = self._sending.get(key)
            if sending is None:
                return
            share = next((share for share in sending.shares if layer in share.waiting), None)
            if share is None:
                raise TransferError(f"{sending.transfer} does not wait for layer {layer}")
            share.waiting.discard(layer)
            share.held.append((layer, ready))
            if share.waiting and len(share.held) * share.layer_bytes < self._held_bytes:
                return
            # Inside the lock, so that the layers of a share enter a lane in the order of these calls.
            for lane, part in share.parts:
                lane.send_layers(sending.transfer, part, tuple(share.held))
            share.held.clear()

    def finish(self, key: TransferKey, timeout: float) -> TransferReport:
        """Wait until every destination has confirmed all layers of all shares, then drop the transfer.

        Raises TransferError with the destination's reason or after `timeout` seconds, StaleIncarnation if the
        destination was rebuilt, Unavailable if it is lost or unreachable. In every case the transfer is over and its
        blocks are not read after the return. On an error, its destinations are told.
        """
        deadline = time.monotonic() + timeout
        with self._lock:
            sending = self._sending.get(key)
        if sending is None:
            raise TransferError(f"transfer {key.transfer_id!r} attempt {key.attempt} was not begun here, or is over")
        transfer = sending.transfer
        try:
            endpoints = transfer.wait_sent(deadline)
            with self._lock:
                lanes = [self._lane(endpoint) for endpoint in sorted(endpoints)]
            for lane in lanes:
                lane.settle(transfer)
            report = transfer.wait_confirmed(deadline)
        except RingserveError:
            self.abandon(key)
            raise
        with self._lock:
            self._sending.pop(key, None)
        return report

    def abandon(self, key: TransferKey) -> None:
        """Abandon a transfer in any state. Its blocks are not read after the return. Idempotent."""
        with self._lock:
            sending = self._sending.pop(key, None)
        if sending is None:
            return
        sending.transfer.abandon()
        for lane in {lane for share in sending.shares for lane, _ in share.parts}:
            lane.release(sending.transfer)

    def send_all(self, send: KvSend, timeout: float) -> TransferReport:
        """Send KV that is complete in the cache: `begin`, every layer, `finish`."""
        self.begin(send)
        for layer in range(self._cache.num_layers):
            self.layer_ready(send.key, layer)
        return self.finish(send.key, timeout)

    def close(self) -> None:
        """Abandon all transfers and end the threads. Idempotent."""
        with self._lock:
            self._is_closed = True
            keys = list(self._sending)
            lanes = list(self._lanes.values())
        for key in keys:
            self.abandon(key)
        for lane in lanes:
            lane.close()

    def _lane(self, endpoint: str) -> Carrier:
        """Return the lane to a destination rank. The caller holds the lock."""
        if endpoint not in self._lanes:
            self._lanes[endpoint] = self._open_lane(endpoint)
        return self._lanes[endpoint]
