"""Outgoing transfer of a source rank: its parts, their frames, and the confirmations.

Shapes: T tokens of a frame, K its KV heads, D head dimension.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property

import numpy as np
import torch

from cp_core.errors import RingserveError, TransferError
from cp_core.layout.reshard import KvPiece
from workers.kv.cache import MAX_COPIES, KvCache, SlotRun, runs_of, slots_of
from workers.kv.frames import MAX_PIECES, Column, LayerFrame
from workers.protocol.transfers import TransferKey, TransferReport

# Payload bytes of one frame: large enough that its fixed cost is negligible, small enough to stay in a CPU cache in the
# receiver's staging buffer (docs/decisions/0003-kv-carrier.md).
FRAME_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FrameLayout:
    """Content of one frame and its slots here, the same for every layer. `heads` counts this rank's heads from 0."""

    starts: Column
    counts: Column
    head_start: int
    head_stop: int
    heads: slice
    runs: tuple[SlotRun, ...]

    def of_layer(self, key: TransferKey, layer: int, cache: KvCache, checksum: int | None = None) -> LayerFrame:
        """Return the frame of one layer."""
        return LayerFrame(
            key, layer, cache.dtype_name, self.head_start, self.head_stop, self.starts, self.counts, checksum
        )

    def payload(self, layer: int, cache: KvCache) -> list[memoryview]:
        """Return K, then V of the frame's tokens: the cache's own memory where possible, else one packed copy."""
        is_whole = self.heads == slice(0, cache.num_kv_heads)
        if is_whole and cache.device.type == "cpu" and len(self.runs) <= MAX_COPIES:
            views = cache.views(layer, self.runs)
            return [*(_bytes(view.k) for view in views), *(_bytes(view.v) for view in views)]
        packed = cache.read_runs(layer, self.runs, heads=self.heads)
        return [_bytes(packed.k.contiguous().cpu()), _bytes(packed.v.contiguous().cpu())]


def _bytes(tensor: torch.Tensor) -> memoryview:
    # As bytes, because numpy knows no bfloat16.
    return tensor.reshape(-1).view(torch.uint8).numpy().data


class OutgoingPart:
    """Share of one source rank for one destination: pieces cut into frames."""

    def __init__(self, pieces: tuple[KvPiece, ...], blocks: tuple[int, ...], cache: KvCache) -> None:
        self._pieces = pieces
        self._blocks = blocks
        self._cache = cache

    @cached_property
    def frames(self) -> tuple[FrameLayout, ...]:
        """Frames of the pieces, cut once by the thread that sends the first layer: decode shards have a piece a token.

        Raises TransferError where a piece is not in this rank's blocks and heads, or pieces do not ascend.
        """
        return tuple(
            frame
            for heads in sorted({(piece.head_start, piece.head_stop) for piece in self._pieces})
            for frame in self._cut(*heads)
        )

    def _cut(self, head_start: int, head_stop: int) -> Iterator[FrameLayout]:
        cache = self._cache
        pieces = [piece for piece in self._pieces if (piece.head_start, piece.head_stop) == (head_start, head_stop)]
        counts = np.array([len(piece.tokens) for piece in pieces], dtype=np.int64)
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        positions = np.repeat(np.array([piece.tokens.start for piece in pieces], dtype=np.int64), counts) + within
        stored = np.repeat(np.array([piece.source_stored for piece in pieces], dtype=np.int64), counts) + within
        if (np.diff(positions) <= 0).any():
            raise TransferError(f"the pieces to send do not ascend from position {positions[0]} on")
        if stored.min() < 0 or stored.max() >= len(self._blocks) * cache.block_tokens:
            raise TransferError(
                f"{len(self._blocks)} blocks do not hold the stored indices {stored.min()} to {stored.max()}"
            )
        if head_start < cache.heads.start or head_stop > cache.heads.stop or head_start >= head_stop:
            raise TransferError(f"KV heads [{head_start}, {head_stop}) are not on this rank")
        slots = slots_of(self._blocks, stored, cache.block_tokens)
        heads = slice(head_start - cache.head_start, head_stop - cache.head_start)
        token_bytes = 2 * (head_stop - head_start) * cache.head_dim * cache.dtype.itemsize
        step = max(1, min(FRAME_BYTES // token_bytes, MAX_PIECES))
        for first in range(0, len(positions), step):
            # Runs of positions are pieces on the wire, runs of slots are views of memory: they need not coincide.
            spans = runs_of(positions[first : first + step])
            starts = np.array([span.start for span in spans], dtype=np.int64)
            lengths = np.array([len(span) for span in spans], dtype=np.int64)
            runs = runs_of(slots[first : first + step])
            yield FrameLayout(starts, lengths, head_start, head_stop, heads, runs)


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
