"""Outgoing transfers of a source rank, and the connection to one destination rank that carries them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import Enum, auto

from ringserve.cp_core.errors import ConfigError, RingserveError, StaleIncarnation, TransferError, Unavailable
from ringserve.cp_core.transport.peer_tls import PeerTls, reason_of
from ringserve.workers.kv.frames import (
    Frame,
    LayerFrame,
    LeaveFrame,
    ReachedFrame,
    ReadFrame,
    RefusedFrame,
    SettledFrame,
    TransferFrame,
    encode,
)
from ringserve.workers.kv.pulls import PullAgent
from ringserve.workers.kv.sockets import call
from ringserve.workers.protocol.transfers import TransferKey, TransferReport

# Interval for checking an idle connection that awaits a reply.
REPLY_SECONDS = 5.0
# An idle connection is closed after this time.
IDLE_SECONDS = 120.0


class OutgoingState(Enum):
    """State of an `OutgoingTransfer`, which draws the transitions."""

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

    def sent_part(self, payload_bytes: int) -> None:
        """Note that one (layer, destination) pair is sent."""
        with self._changed:
            self._unsent -= 1
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
            self._stream = call(endpoint, connect_seconds, stall_seconds, tls)
        except OSError as error:
            raise Unavailable(f"the KV receiver at {endpoint} cannot be reached: {reason_of(error)}") from error
        except ConfigError as error:
            raise Unavailable(f"the KV receiver at {endpoint} cannot be called: {error}") from error
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
        """Send one frame. The connection owns the slot that it names from now on, even if the send fails.

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
