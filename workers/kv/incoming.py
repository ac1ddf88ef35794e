"""Incoming transfers on a destination rank: expected KV, arrived KV, and each transfer's end.

The leader opens and drops transfers, and the receiver's connections store their frames. They write only to slots of
open transfers.

Shapes: T tokens of a frame, K its KV heads, D head dimension.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
import numpy.typing as npt
import torch

from ringserve.cp_core.errors import RingserveError, StaleIncarnation, TransferError
from ringserve.cp_core.layout.shards import coalesce
from ringserve.workers.kv.arrivals import EndedTransfers
from ringserve.workers.kv.cache import KvCache, SlotRun, runs_of, slots_of
from ringserve.workers.kv.frames import LayerFrame, digest_of
from ringserve.workers.protocol.transfers import KvEnd, KvEnds, KvExpect, TransferKey, TransferReport


class TransferState(Enum):
    """State of an `IncomingTransfer`; its docstring shows the transitions."""

    RESERVED = auto()
    STREAMING = auto()
    SEALED = auto()
    ABORTED = auto()


@dataclass(frozen=True, slots=True)
class _Place:
    """Place of a frame's tokens: their indices among the expected tokens, and their slots.

    `index` has the slots if there are too many runs to write one by one.
    """

    tokens: npt.NDArray[np.int64] | slice
    runs: tuple[SlotRun, ...]
    index: torch.Tensor | None


class IncomingTransfer:
    """Transfer whose frames are written to the cache, each (layer, head, token) exactly once.

        RESERVED ──first frame──> STREAMING ──all arrived──> SEALED
            │                         │
            └───────── abort ─────────┴──────────────────> ABORTED

    A transfer that expects no tokens begins SEALED. Bytes are written only in RESERVED and STREAMING, under the lock
    that every transition takes, so the transfer writes nothing after `abort` or `wait_sealed` returns. The leader owns
    the blocks throughout. In RESERVED and STREAMING only this object writes to their slots. `on_end` is called once,
    under the lock, when the transfer becomes SEALED or ABORTED.
    """

    def __init__(self, expect: KvExpect, cache: KvCache, on_end: Callable[[KvEnd], None] | None = None) -> None:
        self.key = expect.key
        self._cache = cache
        self._on_end = on_end
        self._ranges = coalesce(expect.ranges)
        self._starts = np.array([item.start for item in self._ranges], dtype=np.int64)
        self._stops = np.array([item.stop for item in self._ranges], dtype=np.int64)
        sizes = self._stops - self._starts
        self._offsets = np.cumsum(sizes) - sizes
        num_tokens = int(sizes.sum())
        self._slots = self._reserved_slots(expect, num_tokens)
        self._left = num_tokens * cache.num_layers * cache.num_kv_heads
        self._state = TransferState.RESERVED if self._left else TransferState.SEALED
        # One byte per (layer, head, token), 1/256 of its KV if heads have 64 two-byte numbers. The array's zero pages
        # take no memory until KV arrives.
        self._arrived: npt.NDArray[np.bool_] = np.zeros((cache.num_layers, cache.num_kv_heads, num_tokens), np.bool_)
        self._places: dict[tuple[bytes, bytes], _Place] = {}
        self._error: RingserveError | None = None
        self._payload_bytes = 0
        self._began = self._ended = self._fed = 0.0
        self._changed = threading.Condition()

    @property
    def state(self) -> TransferState:
        with self._changed:
            return self._state

    @property
    def is_open(self) -> bool:
        return self.state in (TransferState.RESERVED, TransferState.STREAMING)

    @property
    def stalled_seconds(self) -> float:
        """Seconds since a STREAMING transfer received its last bytes; 0 in other states."""
        with self._changed:
            return time.monotonic() - self._fed if self._state is TransferState.STREAMING else 0.0

    def admit(self, frame: LayerFrame, payload_bytes: int) -> None:
        """Check a frame before its payload is read. The first frame makes the transfer STREAMING.

        Raises the error that ended the transfer, or TransferError if the frame does not fit this cache's shape.
        """
        with self._changed:
            self._check_open()
            try:
                self._check_shape(frame, payload_bytes)
            except TransferError as error:
                self._abort(error)
                raise
            if self._state is TransferState.RESERVED:
                self._state = TransferState.STREAMING
                self._began = self._fed = time.monotonic()

    def store(self, frame: LayerFrame, payload: torch.Tensor) -> None:
        """Copy a frame's payload to its slots, and wait for the device.

        The payload is 2*T*K*D elements per layer: the keys, then the values. The last frame seals the transfer. Raises
        the error that ended it. If the checksum is wrong, or tokens are unexpected or have arrived already, nothing is
        written, the transfer is aborted, and TransferError is raised.
        """
        cache = self._cache
        is_whole = frame.checksum is None or frame.checksum == digest_of(payload.view(torch.uint8))
        whole = payload.view(frame.num_layers, 2, -1, frame.num_heads, cache.head_dim)
        layers = dict(zip(frame.layers, whole.to(cache.device, non_blocking=True), strict=True))
        heads = slice(frame.head_start - cache.head_start, frame.head_stop - cache.head_start)
        with self._changed:
            self._check_open()
            try:
                if not is_whole:
                    raise TransferError(
                        f"KV of {_layers(frame)} from position {frame.starts[0]} on is damaged in {self}: "
                        f"its checksum is wrong"
                    )
                place = self._place_of(frame)
                arrived = self._arrived[frame.layer : frame.layers.stop, heads]
                if arrived[:, :, place.tokens].any():
                    raise TransferError(
                        f"KV of {_layers(frame)} from position {frame.starts[0]} on arrived twice in {self}"
                    )
            except TransferError as error:
                self._abort(error)
                raise
            for layer, (k, v) in layers.items():
                if place.index is None:
                    cache.write_runs(layer, place.runs, k, v, heads=heads)
                else:
                    cache.write_slots(layer, place.index, k, v, heads=heads)
            # Wait under the lock, so that no write queued on this thread's device stream runs after `abort` has
            # returned.
            cache.settle()
            arrived[:, :, place.tokens] = True
            self._payload_bytes += payload.nbytes
            self._fed = time.monotonic()
            self._left -= frame.num_layers * frame.num_tokens * frame.num_heads
            if not self._left:
                self._seal()

    def abort(self, error: RingserveError) -> None:
        """End the transfer unless it is over. After the return it writes nothing to the cache."""
        with self._changed:
            if self._state in (TransferState.RESERVED, TransferState.STREAMING):
                self._abort(error)

    def check_alive(self) -> None:
        """Raise the error that aborted the transfer, if one did."""
        with self._changed:
            self._check_alive()

    def wait_sealed(self, timeout: float) -> TransferReport:
        """Wait until every layer, head and token is in the cache.

        If the transfer is aborted, raises that error at once. Raises TransferError if it is not sealed after `timeout`
        seconds; it is still open then.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._state in (TransferState.SEALED, TransferState.ABORTED), timeout)
            self._check_alive()
            if self._state is not TransferState.SEALED:
                total = self._arrived.size
                arrived = total - self._left
                raise TransferError(f"{self} has {arrived} of {total} (layer, head, token) after {timeout:g} s")
            return self._report()

    def _report(self) -> TransferReport:
        return TransferReport(payload_bytes=self._payload_bytes, seconds=self._ended - self._began)

    def __str__(self) -> str:
        return f"transfer {self.key.transfer_id!r} attempt {self.key.attempt}"

    def _reserved_slots(self, expect: KvExpect, num_tokens: int) -> npt.NDArray[np.int64]:
        """Return the slot of each expected token. Raises TransferError if the blocks cannot hold the transfer."""
        cache = self._cache
        if any(before.stop > after.start for before, after in zip(expect.ranges, expect.ranges[1:], strict=False)):
            raise TransferError(f"{self} expects ranges that are not ascending")
        if len(set(expect.blocks)) != len(expect.blocks):
            raise TransferError(f"{self} names a block twice")
        if any(not 0 <= block < cache.num_blocks for block in expect.blocks):
            raise TransferError(f"{self} names a block outside 0 to {cache.num_blocks - 1}")
        stop = expect.stored_start + num_tokens
        if expect.stored_start < 0 or stop > len(expect.blocks) * cache.block_tokens:
            held = f"{len(expect.blocks)} blocks of {cache.block_tokens}"
            raise TransferError(f"{self} expects stored indices {expect.stored_start} to {stop} in {held}")
        return slots_of(expect.blocks, np.arange(expect.stored_start, stop, dtype=np.int64), cache.block_tokens)

    def _check_alive(self) -> None:
        if self._error is not None:
            # A new object each time, because several threads may raise the error, and each adds its traceback.
            raise type(self._error)(str(self._error))

    def _check_open(self) -> None:
        self._check_alive()
        if self._state is TransferState.SEALED:
            raise TransferError(f"{self} is sealed already")

    def _check_shape(self, frame: LayerFrame, payload_bytes: int) -> None:
        cache = self._cache
        if frame.layers.stop > cache.num_layers:
            raise TransferError(f"{_layers(frame)} of {self}: this cache has {cache.num_layers} layers")
        if frame.dtype != cache.dtype_name:
            raise TransferError(f"KV of {self} is {frame.dtype}, this cache is {cache.dtype_name}")
        if frame.head_start < cache.heads.start or frame.head_stop > cache.heads.stop:
            heads = f"[{frame.head_start}, {frame.head_stop})"
            raise TransferError(f"KV heads {heads} of {self} are not in [{cache.heads.start}, {cache.heads.stop})")
        needed = 2 * frame.num_tokens * frame.num_heads * cache.head_dim * cache.dtype.itemsize * frame.num_layers
        if payload_bytes != needed:
            raise TransferError(f"a frame of {self} has {payload_bytes} bytes, but its pieces need {needed}")

    def _place_of(self, frame: LayerFrame) -> _Place:
        """Return the place of a frame's tokens.

        Frames of different layers carry the same position ranges (`starts`, `counts`), so the place is computed once
        for each set of ranges.
        """
        ranges = (frame.starts.tobytes(), frame.counts.tobytes())
        if ranges not in self._places:
            tokens = self._tokens_of(frame)
            runs = runs_of(self._slots[tokens])
            self._places[ranges] = _Place(tokens, runs, self._cache.copy_index(runs))
        return self._places[ranges]

    def _tokens_of(self, frame: LayerFrame) -> npt.NDArray[np.int64] | slice:
        """Return the indices of a frame's tokens among the expected tokens. Raises TransferError."""
        stops = frame.starts + frame.counts
        home = np.searchsorted(self._starts, frame.starts, side="right") - 1
        if (home < 0).any() or (stops > self._stops[home]).any():
            raise TransferError(f"{self} does not expect all positions from {frame.starts[0]} to {stops[-1]}")
        first = self._offsets[home] + frame.starts - self._starts[home]
        if len(first) == 1:
            return slice(int(first[0]), int(first[0] + frame.counts[0]))
        within = np.arange(frame.num_tokens) - np.repeat(np.cumsum(frame.counts) - frame.counts, frame.counts)
        return np.repeat(first, frame.counts) + within

    def _seal(self) -> None:
        self._ended = time.monotonic()
        self._state = TransferState.SEALED
        self._forget()

    def _abort(self, error: RingserveError) -> None:
        self._error = error
        self._state = TransferState.ABORTED
        self._forget()

    def _forget(self) -> None:
        self._slots = self._slots[:0].copy()
        self._arrived = self._arrived[:, :, :0].copy()
        self._places.clear()
        self._changed.notify_all()
        self.tell_end()

    def tell_end(self) -> None:
        """Report the end. The table calls it for a transfer that is complete from the start."""
        if self._on_end is not None:
            report = self._report() if self._state is TransferState.SEALED else None
            self._on_end(KvEnd(key=self.key, report=report, error=self._error))


def _layers(frame: LayerFrame) -> str:
    return f"layer {frame.layer}" if frame.num_layers == 1 else f"layers {frame.layer} to {frame.layers.stop - 1}"


# Limit on remembered keys of ended transfers, so that a late `expect` cannot revive one. The oldest are forgotten.
MAX_DROPPED = 1 << 14
# If the table has more transfers than this, it forgets the older half of the sealed ones, which then no longer answer
# `wait_sealed`. So leaders need not drop sealed transfers.
MAX_SEALED = 1 << 12


class TransferTable:
    """Transfers into one cache, each from `expect` to `drop`. Thread-safe."""

    def __init__(self, cache: KvCache, incarnation: str) -> None:
        self._cache = cache
        self._incarnation = incarnation
        self._transfers: dict[TransferKey, IncomingTransfer] = {}
        self._dropped: OrderedDict[TransferKey, None] = OrderedDict()
        self._lock = threading.Lock()
        self._ended = EndedTransfers()

    @property
    def num_open(self) -> int:
        """Number of transfers that may still receive bytes."""
        with self._lock:
            transfers = list(self._transfers.values())
        return sum(transfer.is_open for transfer in transfers)

    @property
    def stalled_seconds(self) -> float:
        """Longest time that any STREAMING transfer has received no byte; 0 if there is none."""
        with self._lock:
            transfers = list(self._transfers.values())
        return max((transfer.stalled_seconds for transfer in transfers), default=0.0)

    def expect(self, expect: KvExpect) -> None:
        """Open a transfer, so that its frames are accepted.

        Raises StaleIncarnation if it names another incarnation of this ring, TransferError if its key was used before
        or its blocks cannot hold it.
        """
        self._check_destination(expect.key)
        transfer = IncomingTransfer(expect, self._cache, self._ended.add)
        with self._lock:
            if expect.key in self._transfers:
                raise TransferError(f"{transfer} is expected already")
            if expect.key in self._dropped:
                raise TransferError(f"{transfer} was dropped: a new attempt is needed")
            self._transfers[expect.key] = transfer
            if len(self._transfers) > MAX_SEALED:
                self._forget_sealed()
            if not transfer.is_open:  # it expects no tokens, so no connection will report its end
                transfer.tell_end()

    def poll_ended(self, after: int, timeout: float) -> KvEnds:
        """Return transfer ends from number `after` on. Wait up to `timeout` seconds for the first."""
        return self._ended.poll(after, timeout)

    def wait_sealed(self, key: TransferKey, timeout: float) -> TransferReport:
        """See `IncomingTransfer.wait_sealed`. Raises TransferError also if the transfer is unknown."""
        return self.find(key).wait_sealed(timeout)

    def drop(self, key: TransferKey) -> None:
        """Drop a transfer in any state. After the return it never writes to the cache."""
        with self._lock:
            transfer = self._transfers.pop(key, None)
            self._remember(key)
        if transfer is not None:
            transfer.abort(TransferError(f"{transfer} was dropped by its destination"))

    def find(self, key: TransferKey) -> IncomingTransfer:
        """Return the transfer with exactly this key. Raises StaleIncarnation or TransferError, naming the mismatch."""
        self._check_destination(key)
        with self._lock:
            transfer = self._transfers.get(key)
            if transfer is not None:
                return transfer
            others = [other for other in self._transfers if other.transfer_id == key.transfer_id]
        for other in others:
            if other.source != key.source:
                raise StaleIncarnation(
                    f"transfer {key.transfer_id!r} is expected from {other.source!r}, not {key.source!r}"
                )
            raise TransferError(f"transfer {key.transfer_id!r} is at attempt {other.attempt}, not {key.attempt}")
        raise TransferError(f"transfer {key.transfer_id!r} attempt {key.attempt} is not expected here")

    def abort_all(self, error: RingserveError) -> None:
        """End every open transfer, because the rank is stopping."""
        with self._lock:
            transfers = list(self._transfers.values())
        for transfer in transfers:
            transfer.abort(error)
        self._ended.close()

    def _forget_sealed(self) -> None:
        """Drop the older half of the sealed transfers. The caller holds the lock."""
        sealed = [key for key, transfer in self._transfers.items() if transfer.state is TransferState.SEALED]
        for key in sealed[: (len(sealed) + 1) // 2]:
            del self._transfers[key]
            self._remember(key)

    def _remember(self, key: TransferKey) -> None:
        self._dropped[key] = None
        while len(self._dropped) > MAX_DROPPED:
            self._dropped.popitem(last=False)

    def is_own(self, destination: str) -> bool:
        """Return True if `destination` names this incarnation of the ring."""
        return destination == self._incarnation

    def _check_destination(self, key: TransferKey) -> None:
        if not self.is_own(key.destination):
            # The error does not reveal our incarnation: a caller who does not know it may be a stranger.
            raise StaleIncarnation(f"transfer {key.transfer_id!r} is meant for {key.destination!r}, which is not here")
