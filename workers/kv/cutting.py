"""Frame layouts, the same for all layers, and a layer's payload: packing, copies, checksums.

Shapes: T tokens of a frame, K its KV heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from ringserve.cp_core.errors import TransferError
from ringserve.cp_core.layout.reshard import KvPiece
from ringserve.workers.kv.cache import KvCache, SlotRun, runs_of, slots_of
from ringserve.workers.kv.frames import MAX_PIECES, Column, LayerFrame, SlotRef, checksum_of
from ringserve.workers.protocol.transfers import TransferKey

# Payload bytes per frame: large enough that the fixed cost is negligible, small enough that the receiver's staging
# buffer stays in a CPU cache (docs/decisions/0003-kv-carrier.md).
FRAME_BYTES = 1 << 20

# An odd number with well-spread bits, so that neighbouring words have very different weights.
WEIGHT = 0x3C6EF35F


@dataclass(frozen=True, slots=True)
class FrameLayout:
    """Content of one frame and its slots here, the same for every layer. `heads` counts from this rank's first head.

    `index` has every slot of `runs`, as int64[T] on the cache's device, if there are too many runs to copy one by one.
    """

    starts: Column
    counts: Column
    head_start: int
    head_stop: int
    heads: slice
    runs: tuple[SlotRun, ...]
    index: torch.Tensor | None

    def of_layer(
        self, key: TransferKey, layer: int, cache: KvCache, checksum: int | None = None, slot: SlotRef | None = None
    ) -> LayerFrame:
        """Return the frame of one layer."""
        heads = (self.head_start, self.head_stop)
        return LayerFrame(key, layer, cache.dtype_name, *heads, self.starts, self.counts, checksum, slot)

    def payload(self, layer: int, cache: KvCache) -> list[memoryview]:
        """Return K, then V of the frame's tokens: the cache's own memory if possible, else one packed copy.

        On a GPU, copies are queued on the current stream, and the bytes are valid when the stream has done them.
        """
        is_whole = self.heads == slice(0, cache.num_kv_heads)
        if is_whole and cache.device.type == "cpu" and self.index is None:
            views = cache.views(layer, self.runs)
            return [*(_bytes(view.k) for view in views), *(_bytes(view.v) for view in views)]
        packed = self.pack(layer, cache, torch.empty(self.num_bytes(cache), dtype=torch.uint8, device=cache.device))
        if cache.device.type == "cuda":
            packed = torch.empty(packed.shape, dtype=torch.uint8, pin_memory=True).copy_(packed, non_blocking=True)
        return [packed.numpy().data]

    def pack(self, layer: int, cache: KvCache, out: torch.Tensor) -> torch.Tensor:
        """Copy K[T,K,D], then V[T,K,D] to the start of `out` (bytes, on the cache's device) and return that part."""
        packed = out[: self.num_bytes(cache)]
        k, v = packed.view(cache.dtype).view(2, -1, self.head_stop - self.head_start, cache.head_dim)
        cache.copy_runs(layer, self.runs, k, v, heads=self.heads, index=self.index)
        return packed

    def num_bytes(self, cache: KvCache) -> int:
        """Return the payload bytes of one layer."""
        return int(self.counts.sum()) * _token_bytes(cache, self.head_start, self.head_stop)


def _token_bytes(cache: KvCache, head_start: int, head_stop: int) -> int:
    return 2 * (head_stop - head_start) * cache.head_dim * cache.dtype.itemsize


def _bytes(tensor: torch.Tensor) -> memoryview:
    # As bytes, because numpy has no bfloat16.
    return tensor.reshape(-1).view(torch.uint8).numpy().data


class OutgoingPart:
    """Pieces from one source rank to one destination, cut into frames."""

    def __init__(self, pieces: tuple[KvPiece, ...], blocks: tuple[int, ...], cache: KvCache) -> None:
        self._pieces = pieces
        self._blocks = blocks
        self._cache = cache
        self._cut_to = 0
        self._frames: tuple[FrameLayout, ...] = ()

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer."""
        pieces = self._pieces
        return sum(len(each.tokens) * _token_bytes(self._cache, each.head_start, each.head_stop) for each in pieces)

    def frames(self, frame_bytes: int = FRAME_BYTES) -> tuple[FrameLayout, ...]:
        """Cut the pieces into frames of at most `frame_bytes`, or of one token.

        The thread that sends the first layer cuts the frames for all layers: decode shards may have a piece per token.
        Raises TransferError if a piece is not in this rank's blocks and heads, or if pieces do not ascend.
        """
        if frame_bytes != self._cut_to:
            heads = sorted({(piece.head_start, piece.head_stop) for piece in self._pieces})
            self._frames = tuple(frame for start, stop in heads for frame in self._cut(start, stop, frame_bytes))
            self._cut_to = frame_bytes
        return self._frames

    def _cut(self, head_start: int, head_stop: int, frame_bytes: int) -> Iterator[FrameLayout]:
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
        step = max(1, min(frame_bytes // _token_bytes(cache, head_start, head_stop), MAX_PIECES))
        for first in range(0, len(positions), step):
            # Runs of positions are pieces on the wire. Runs of slots are views of memory. They may differ.
            spans = runs_of(positions[first : first + step])
            starts = np.array([span.start for span in spans], dtype=np.int64)
            lengths = np.array([len(span) for span in spans], dtype=np.int64)
            runs = runs_of(slots[first : first + step])
            yield FrameLayout(starts, lengths, head_start, head_stop, heads, runs, cache.copy_index(runs))


class CopyStream:
    """GPU stream for one thread's copies, beside computation. On a CPU, copies are done when calls return."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def copying(self, ready: torch.Event | None = None) -> Iterator[None]:
        """Queue the `with` block's copies after event `ready`, and wait for them at the end."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            if ready is not None:
                self._stream.wait_event(ready)
            yield
            self._stream.synchronize()


def digest_of(payload: torch.Tensor) -> int:
    """Return a payload's checksum: CRC-32 on the host, `weighted_sum` on a GPU."""
    return checksum_of([payload.numpy().data]) if payload.device.type == "cpu" else weighted_sum(payload)


def weighted_sum(payload: torch.Tensor) -> int:
    """Return the sum modulo 2**32 of 4-byte words, each times an odd factor that depends on its position.

    Odd factors make every change of one word visible, and different factors make swapped words visible.
    """
    words = payload.view(torch.int32)
    weights = torch.arange(len(words), dtype=torch.int32, device=payload.device).mul_(WEIGHT).bitwise_or_(1)
    return int(weights.mul_(words).sum(dtype=torch.int64)) & 0xFFFF_FFFF
