"""KV lane from a rank to one destination rank: its thread, its connection, and the payload carrier.

A payload follows its header on the socket, or lies in an out slot that the destination reads by NIXL.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

from ringserve.cp_core.errors import RingserveError, Unavailable
from ringserve.cp_core.transport.peer_tls import PeerTls
from ringserve.workers.kv.cache import KvCache
from ringserve.workers.kv.cutting import FRAME_BYTES, CopyStream, FrameLayout, OutgoingPart, digest_of
from ringserve.workers.kv.frames import AbandonFrame, Reach, SettleFrame, checksum_of
from ringserve.workers.kv.outgoing import DestinationConnection, OutgoingTransfer
from ringserve.workers.kv.pulls import PullAgent

logger = logging.getLogger(__name__)

# Idle time after which a lane's thread ends. Later work starts a new thread.
IDLE_SECONDS = 30.0
# Time that `release` gives a frame to finish before it breaks the connection.
GRACE_SECONDS = 0.5
JOIN_SECONDS = 10.0


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


class Carrier(Protocol):
    """Path for KV to one destination rank: `Lane` over TCP, or `InProcessLane`. `Lane` documents the calls."""

    def send_layer(
        self, transfer: OutgoingTransfer, part: OutgoingPart, layer: int, ready: torch.Event | None
    ) -> None: ...
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

    def send_layer(self, transfer: OutgoingTransfer, part: OutgoingPart, layer: int, ready: torch.Event | None) -> None:
        """Send one layer of a part after the device has reached event `ready`."""
        self._put(lambda: self._send_layer(transfer, part, layer, ready))

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
        """Wait for the next job. Return None after IDLE_SECONDS without one: the thread then leaves the lane."""
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
            by_nixl = self._is_by_nixl(connection, transfer)
            with self._copies.copying():
                frames = part.frames(self._slots.out.slot_bytes if by_nixl else FRAME_BYTES)
            for layout in frames:
                send = self._send_slot if by_nixl else self._send_inline
                num_bytes = send(connection, transfer, layout, layer, ready)
                if not num_bytes:
                    return
                self._counts.sent(num_bytes, by_nixl=by_nixl)
                sent += num_bytes
            transfer.sent_part(sent)
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
        layer: int,
        ready: torch.Event | None,
    ) -> int:
        """Send a frame with its payload. Return the payload bytes, or 0 if the transfer is over."""
        if not self._begin_reading(transfer):
            return 0
        with self._copies.copying(ready):
            payload = layout.payload(layer, self._cache)
        connection.send(layout.of_layer(transfer.key, layer, self._cache, checksum_of(payload)), payload)
        return layout.num_bytes(self._cache)

    def _send_slot(
        self,
        connection: DestinationConnection,
        transfer: OutgoingTransfer,
        layout: FrameLayout,
        layer: int,
        ready: torch.Event | None,
    ) -> int:
        """Pack a frame into a slot and send the slot's place. Return the payload bytes, or 0 if the transfer is over.

        Blocks are read only while packing, so `release` does not wait for the destination.
        """
        out = self._slots.out
        slot = connection.take_slot()
        try:
            if not self._begin_reading(transfer):
                connection.free_slot(slot)
                return 0
            with out.writing(slot), self._copies.copying(ready):
                packed = out.fill(slot, layout, layer, self._cache)
                checksum = digest_of(packed)
            self._end_reading()
        except BaseException:
            connection.free_slot(slot)
            raise
        ref = out.ref(slot, packed.nbytes)
        connection.send(layout.of_layer(transfer.key, layer, self._cache, checksum, ref), [])
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
    def _slots(self) -> PullAgent:
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
