"""Lane from one source rank to one destination rank: a queue, the thread that empties it, and a connection."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch

from cp_core.errors import ConfigError, RingserveError, StaleIncarnation, TransferError, Unavailable
from cp_core.transport.peer_tls import PeerTls, reason_of
from workers.kv.cache import KvCache
from workers.kv.frames import (
    AbandonFrame,
    Frame,
    OutgoingPart,
    RefusedFrame,
    SettledFrame,
    SettleFrame,
    checksum_of,
    encode,
)
from workers.kv.sender import OutgoingTransfer
from workers.kv.sockets import call
from workers.protocol.transfers import TransferKey

# Longest wait for a reply on an idle connection before checking whether the connection is broken.
REPLY_SECONDS = 5.0
# Longest idle time of a lane's thread; later work starts another thread.
IDLE_SECONDS = 30.0
# Time that `release` gives a frame to finish before it breaks the connection.
GRACE_SECONDS = 0.5
JOIN_SECONDS = 10.0


class DestinationConnection:
    """TCP connection to a KV receiver, from construction until `is_broken`; a thread of its own reads the replies.

    One thread at a time may send; `break_off` may be called from any thread. When the connection ends, every transfer
    that it carried fails unless it is confirmed.
    """

    def __init__(
        self, endpoint: str, *, connect_seconds: float, stall_seconds: float, tls: PeerTls | None = None
    ) -> None:
        """Connect. Raises Unavailable for a malformed endpoint, and where no KV receiver of ours answers."""
        self._endpoint = endpoint
        try:
            self._stream = call(endpoint, connect_seconds, stall_seconds, tls)
        except OSError as error:
            raise Unavailable(f"the KV receiver at {endpoint} cannot be reached: {reason_of(error)}") from error
        except ConfigError as error:
            raise Unavailable(f"the KV receiver at {endpoint} cannot be called: {error}") from error
        self._lock = threading.Lock()
        self._carried: dict[TransferKey, tuple[OutgoingTransfer, int]] = {}
        self._end_reason: str | None = None
        self._hearing = threading.Thread(target=self._hear, name=f"kv-replies-{endpoint}", daemon=True)
        self._hearing.start()

    @property
    def is_broken(self) -> bool:
        with self._lock:
            return self._end_reason is not None

    def carry(self, transfer: OutgoingTransfer) -> bool:
        """Bind a transfer to this connection: they fail together. Return False if the connection is broken already."""
        with self._lock:
            if self._end_reason is not None:
                return False
            self._carried.setdefault(transfer.key, (transfer, 0))
            return True

    def send(self, frame: Frame, payload: list[memoryview]) -> None:
        """Send one frame. Raises Unavailable when the connection breaks or stalls; it is broken then."""
        payload_bytes = sum(buffer.nbytes for buffer in payload)
        with self._lock:
            if frame.key in self._carried:
                transfer, before = self._carried[frame.key]
                self._carried[frame.key] = (transfer, before + payload_bytes)
        try:
            self._stream.send([memoryview(encode(frame, payload_bytes)), *payload])
        except OSError as error:
            raise self._end(reason_of(error)) from error

    def forget(self, transfer: OutgoingTransfer) -> bool:
        """Unbind an abandoned transfer. Return True if it was bound."""
        with self._lock:
            return self._carried.pop(transfer.key, None) is not None

    def break_off(self, reason: str) -> None:
        """End the connection; a `send` in progress returns at once with an error."""
        self._end(reason)

    def join(self, seconds: float) -> None:
        """Wait for the end of the thread that reads replies."""
        self._hearing.join(seconds)

    def _hear(self) -> None:
        reason = "it was broken off"
        try:
            while not self.is_broken:
                if self._stream.wait_readable(REPLY_SECONDS):
                    frame, _ = self._stream.receive_frame()
                    self._take(frame)
        except OSError as error:
            reason = reason_of(error)
        except TransferError as error:
            reason = str(error)
        finally:
            self._end(reason)
            self._stream.close()

    def _take(self, frame: Frame) -> None:
        if not isinstance(frame, SettledFrame | RefusedFrame):
            raise TransferError(f"a destination sent {type(frame).__name__}")
        with self._lock:
            transfer, payload_bytes = self._carried.pop(frame.key, (None, 0))
        if transfer is None:
            # The transfer was abandoned while the reply was under way.
            return
        if isinstance(frame, RefusedFrame):
            refusal = StaleIncarnation if frame.is_stale else TransferError
            transfer.fail(refusal(frame.reason))
        elif frame.payload_bytes != payload_bytes:
            transfer.fail(TransferError(f"{transfer}: {frame.payload_bytes} of {payload_bytes} bytes arrived"))
        else:
            transfer.confirmed(self._endpoint)

    def _end(self, reason: str) -> Unavailable:
        """End the connection once -> the error with the first reason."""
        with self._lock:
            if self._end_reason is None:
                self._end_reason = reason
            carried, self._carried = self._carried, {}
            error = Unavailable(f"the KV receiver at {self._endpoint} is gone: {self._end_reason}")
        self._stream.shut()
        for transfer, _ in carried.values():
            transfer.fail(error)
        return error


class Lane:
    """Queue of frames to one destination rank, sent in the order of the calls. The calls return at once; thread-safe.

    One thread sends the frames of a transfer one after the other, so `settle` covers everything sent before it. A
    broken connection is replaced when there is something to send again; the transfers that it carried have failed.
    """

    def __init__(
        self,
        endpoint: str,
        cache: KvCache,
        *,
        connect_seconds: float,
        stall_seconds: float,
        checksums: bool = True,
        tls: PeerTls | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._cache = cache
        self._checksums = checksums
        self._tls = tls
        self._connect_seconds = connect_seconds
        self._stall_seconds = stall_seconds
        self._jobs: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._connection: DestinationConnection | None = None
        self._reading: OutgoingTransfer | None = None
        self._is_closed = False

    def send_layer(self, transfer: OutgoingTransfer, part: OutgoingPart, layer: int, ready: torch.Event | None) -> None:
        """Send one layer of a part, once the device has reached `ready`."""
        self._put(lambda: self._send_layer(transfer, part, layer, ready))

    def settle(self, transfer: OutgoingTransfer) -> None:
        """Ask the destination to confirm everything sent so far."""
        self._put(lambda: self._settle(transfer))

    def release(self, transfer: OutgoingTransfer) -> None:
        """Wait until this lane reads no block of a transfer that is over, then tell the destination.

        A frame in progress may finish within GRACE_SECONDS; then the connection is broken.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._reading is not transfer, GRACE_SECONDS):
                assert self._connection is not None, "a frame is being sent over no connection"
                self._connection.break_off(f"a frame of {transfer} did not finish")
                is_released = self._changed.wait_for(lambda: self._reading is not transfer, JOIN_SECONDS)
                assert is_released, "a frame outlived its connection"
        self._put(lambda: self._tell(transfer))

    def close(self) -> None:
        """End the thread and the connection; idempotent."""
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
            # After a job that failed with a bug too: the next job gets a new thread.
            with self._changed:
                if self._thread is threading.current_thread():
                    self._thread = None

    def _next(self) -> Callable[[], None] | None:
        """Wait for the next job; None after IDLE_SECONDS without one, and this thread is the lane's no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._is_closed, IDLE_SECONDS)
            if self._jobs:
                return self._jobs.popleft()
            self._thread = None
            return None

    def _send_layer(
        self, transfer: OutgoingTransfer, part: OutgoingPart, layer: int, ready: torch.Event | None
    ) -> None:
        connection = self._connection_for(transfer)
        if connection is None:
            return
        sent = 0
        try:
            if ready is not None:
                ready.synchronize()
            for frame in part.frames:
                # Under the lock that `release` waits with: a transfer that is over is never read.
                with self._changed:
                    if not transfer.is_sending:
                        return
                    self._reading = transfer
                payload = frame.payload(layer, self._cache)
                checksum = checksum_of(payload) if self._checksums else None
                connection.send(frame.of_layer(transfer.key, layer, self._cache, checksum), payload)
                sent += sum(buffer.nbytes for buffer in payload)
                del payload
            transfer.sent_part(sent)
        except RingserveError as error:
            transfer.fail(error)
        except Exception as error:
            # The device failed, or a bug: waiting callers get an error now, and the thread's traceback names the place.
            transfer.fail(Unavailable(f"KV of {transfer} could not be read: {error}"))
            raise
        finally:
            with self._changed:
                self._reading = None
                self._changed.notify_all()

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
            # The connection is gone, so the destination has ended its half of the transfer too.
            return

    def _connection_for(self, transfer: OutgoingTransfer) -> DestinationConnection | None:
        """Return a connection that carries the transfer; None if none can be made, and the transfer fails."""
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
