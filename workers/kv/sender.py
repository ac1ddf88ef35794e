"""Sender of KV from this rank's cache to ranks of other rings, layer by layer, behind the computation."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from cp_core.errors import RingserveError, StaleIncarnation, TransferError, Unavailable
from cp_core.transport.peer_tls import PeerTls
from workers.kv.cache import KvCache
from workers.kv.frames import (
    AbandonFrame,
    OutgoingPart,
    SettleFrame,
    checksum_of,
)
from workers.kv.outgoing import DestinationConnection, OutgoingTransfer
from workers.protocol.transfers import KvSend, TransferKey, TransferReport

# Longest idle time of a lane's thread; later work starts another thread.
IDLE_SECONDS = 30.0
# Time that `release` gives a frame to finish before it breaks the connection.
GRACE_SECONDS = 0.5
JOIN_SECONDS = 10.0


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


class Carrier(Protocol):
    """Way of a rank's KV to one destination rank: `Lane` over TCP, or `InProcessLane`. `Lane` describes the calls."""

    def send_layer(
        self, transfer: OutgoingTransfer, part: OutgoingPart, layer: int, ready: torch.Event | None
    ) -> None: ...
    def settle(self, transfer: OutgoingTransfer) -> None: ...
    def release(self, transfer: OutgoingTransfer) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Share:
    """Share that one `begin` adds to a transfer, such as a prefill chunk. `waiting` are the layers not written yet."""

    parts: tuple[tuple[Carrier, OutgoingPart], ...]
    waiting: set[int]


@dataclass(frozen=True, slots=True)
class _Sending:
    """Transfer and its shares, oldest first."""

    transfer: OutgoingTransfer
    shares: list[_Share]


class KvSender:
    """Sender with one lane for each destination rank. Thread-safe.

    For each step call `begin` with the step's share of a transfer, then `layer_ready` after each layer; after all steps
    call `finish`. Blocks are read between `begin` and the return of `finish` or `abandon`, never after it. A
    destination that takes no byte for `stall_seconds` counts as gone. `open_lane` makes the lane to an endpoint, by
    default over TCP, encrypted with `tls`.
    """

    def __init__(
        self,
        cache: KvCache,
        incarnation: str,
        *,
        connect_seconds: float = 5.0,
        stall_seconds: float = 30.0,
        checksums: bool = True,
        tls: PeerTls | None = None,
        open_lane: Callable[[str], Carrier] | None = None,
    ) -> None:
        def open_tcp(endpoint: str) -> Carrier:
            return Lane(
                endpoint,
                cache,
                connect_seconds=connect_seconds,
                stall_seconds=stall_seconds,
                checksums=checksums,
                tls=tls,
            )

        self._cache = cache
        self._incarnation = incarnation
        self._open_lane = open_lane or open_tcp
        self._lock = threading.Lock()
        self._sending: dict[TransferKey, _Sending] = {}
        self._lanes: dict[str, Carrier] = {}
        self._is_closed = False

    @property
    def num_open(self) -> int:
        """Number of transfers begun and neither finished nor abandoned."""
        with self._lock:
            return len(self._sending)

    def begin(self, send: KvSend) -> None:
        """Begin a share of a transfer; none of its layers is ready yet. A share without parts is allowed.

        Raises StaleIncarnation where it names another incarnation of this ring, Unavailable after `close`.
        """
        if send.key.source != self._incarnation:
            raise StaleIncarnation(
                f"transfer {send.key.transfer_id!r} is to leave {send.key.source!r}, this is {self._incarnation!r}"
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
            sending.shares.append(_Share(parts, set(range(self._cache.num_layers))))
            sending.transfer.add(len(parts) * self._cache.num_layers)

    def layer_ready(self, key: TransferKey, layer: int) -> None:
        """Send a layer of the oldest share that still waits for it: its KV is written. Returns at once.

        Nothing is sent for a transfer that has failed or was abandoned, and nothing is raised: the step continues for
        the other sequences.
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
            # Inside the lock, so that the layers of all shares enter a lane in the order of these calls.
            for lane, part in share.parts:
                lane.send_layer(sending.transfer, part, layer, ready)

    def finish(self, key: TransferKey, timeout: float) -> TransferReport:
        """Wait until all layers of all shares are sent and confirmed by every destination; then drop the transfer.

        Raises TransferError with the destination's reason, or when `timeout` seconds are over; StaleIncarnation where
        the destination was rebuilt; Unavailable where it cannot be reached or is lost. In every case the transfer is
        over and no block of it is read after the return; on an error its destinations are told.
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
        """Abandon a transfer in any state; idempotent. No block of it is read after the return."""
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
        """Abandon everything and end the threads; idempotent."""
        with self._lock:
            self._is_closed = True
            keys = list(self._sending)
            lanes = list(self._lanes.values())
        for key in keys:
            self.abandon(key)
        for lane in lanes:
            lane.close()

    def _lane(self, endpoint: str) -> Carrier:
        """Return the lane to a destination rank; the lock is held."""
        if endpoint not in self._lanes:
            self._lanes[endpoint] = self._open_lane(endpoint)
        return self._lanes[endpoint]
