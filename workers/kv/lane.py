"""Everything one rank sends to one destination rank: a queue, the thread that empties it, and a connection."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch

from cp_core.errors import RingserveError, Unavailable
from cp_core.transport.peer_tls import PeerTls
from workers.kv.cache import KvCache
from workers.kv.destination_connection import DestinationConnection
from workers.kv.frames import AbandonFrame, SettleFrame, checksum_of
from workers.kv.outgoing import OutgoingPart, OutgoingTransfer

# A lane without work lets its thread go; the next work starts another.
IDLE_SECONDS = 30.0
# How long `release` lets a frame finish before it breaks the connection under it.
GRACE_SECONDS = 0.5
JOIN_SECONDS = 10.0


class Lane:
    """Sends in the order of the calls; the calls return at once. Any thread may call anything.

    Frames of one transfer are sent one after the other by one thread, so `settle` asks for all that was sent before.
    A broken connection is replaced when there is something to send again; what it carried has failed.
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
        """Ask the destination to confirm what was sent so far."""
        self._put(lambda: self._settle(transfer))

    def release(self, transfer: OutgoingTransfer) -> None:
        """Return when this lane reads no block of a transfer that is over; its destination is told that it is.

        A frame in progress may finish for GRACE_SECONDS; then the connection is broken under it.
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
            # Also where a job ended in a bug: the next one gets a new thread.
            with self._changed:
                if self._thread is threading.current_thread():
                    self._thread = None

    def _next(self) -> Callable[[], None] | None:
        """The next job; None, and this is not the lane's thread any more, when there was none for a while."""
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
                # Under the lock that `release` waits with: a transfer that is over is not read any more.
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
            # The device failed, or a bug: whoever waits learns of it now, and the thread's end says where.
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
            # The connection is gone, and with it the destination's half of the transfer: told all the same.
            return

    def _connection_for(self, transfer: OutgoingTransfer) -> DestinationConnection | None:
        """A connection that carries the transfer; None, the transfer failed, where there is none to be had."""
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
