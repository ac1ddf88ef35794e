"""Sender of KV from this rank's cache to ranks of other rings, layer by layer, behind the computation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

import torch

from cp_core.errors import RingserveError, StaleIncarnation, TransferError, Unavailable
from cp_core.transport.peer_tls import PeerTls
from workers.kv.cache import KvCache
from workers.kv.frames import OutgoingPart
from workers.kv.lane import Lane
from workers.protocol.transfers import KvSend, TransferKey, TransferReport


class OutgoingState(Enum):
    """State of an `OutgoingTransfer`, which draws the transitions."""

    SENDING = auto()
    SETTLED = auto()
    FAILED = auto()
    ABANDONED = auto()


class OutgoingTransfer:
    """Transfer with counts of the parts still to be sent and confirmed.

        SENDING ──all sent and confirmed──> SETTLED
           ├──refused, or a connection broke──> FAILED
           └──abandoned here──> ABANDONED

    The blocks are the leader's; they may be read from `begin` until the state is not SENDING any more and no
    connection is in the middle of a frame (`Lane.release` waits for that).
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
        """Note that a connection to `endpoint` is about to send a part, and has to confirm it."""
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
        """Note that the destination has everything."""
        with self._changed:
            self._unconfirmed.discard(endpoint)
            self._ended = time.monotonic()
            self._changed.notify_all()

    def fail(self, error: RingserveError) -> None:
        """Stop sending and raise `error` in waiting calls."""
        self._end(OutgoingState.FAILED, error)

    def abandon(self) -> None:
        """Stop sending: the source rank gives the transfer up."""
        self._end(OutgoingState.ABANDONED, TransferError(f"{self} was abandoned"))

    def wait_sent(self, deadline: float) -> frozenset[str]:
        """Wait until every layer is sent to every destination -> the endpoints that have to confirm.

        `deadline` is on the monotonic clock. Raises the error that ended the transfer, TransferError at the deadline.
        """
        with self._changed:
            self._wait(lambda: self._unsent == 0, deadline)
            if self._unsent:
                raise TransferError(f"{self} has {self._unsent} parts that are not sent in time")
            return frozenset(self._unconfirmed)

    def wait_confirmed(self, deadline: float) -> TransferReport:
        """Wait until every destination confirmed; the transfer is SETTLED then. Raises as `wait_sent` does."""
        with self._changed:
            self._wait(lambda: not self._unconfirmed, deadline)
            if self._unconfirmed:
                raise TransferError(f"{self} is not confirmed in time by {', '.join(sorted(self._unconfirmed))}")
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
