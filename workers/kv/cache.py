"""KV cache of one rank: K and V of fixed blocks for each layer, flat over slots.

Shapes: S stored tokens (slots), T tokens written or read, K KV heads of this rank, D head dimension.

A rank's steps, sender and receiver share its cache. The leader owns the block tables; the cache never allocates blocks.
In every layer, a sequence's token with stored index j is in slot
blocks[j // block_tokens] * block_tokens + j % block_tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ringserve.cp_core.layout.step_plans import KvRun

Slots = npt.NDArray[np.int64]

ALL_HEADS = slice(None)

# Shorter runs are copied and attended together: a kernel call costs as much as copying this many bytes.
COPIED_BYTES = 512 << 10
# Limit on tokens per copy, so that the copy is still in the processor's cache when a kernel reads it.
MAX_COPIED_TOKENS = 1024

# Limit on runs copied one by one. For more runs, an index of every token is cheaper.
MAX_COPIES = 16


@dataclass(frozen=True, slots=True)
class SlotRun:
    """Slots [start, stop): stored tokens that are adjacent in memory."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def runs(blocks: Sequence[int], num_tokens: int, block_tokens: int, *, first: int = 0) -> tuple[SlotRun, ...]:
    """Return the slots of stored tokens [first, first + num_tokens) as maximal runs, in stored order.

    Example: blocks (3, 4, 9) of 16 tokens and 40 tokens give slots 48-79 and 144-151.
    """
    if not num_tokens:
        return ()
    last = first + num_tokens - 1
    low, high = first // block_tokens, last // block_tokens
    assert first >= 0, f"stored index {first} is negative"
    assert high < len(blocks), f"{len(blocks)} blocks of {block_tokens} do not hold {last + 1} tokens"
    joined: list[SlotRun] = []
    start = stop = -1
    for index in range(low, high + 1):
        slot = blocks[index] * block_tokens
        begin = slot + first % block_tokens if index == low else slot
        end = slot + last % block_tokens + 1 if index == high else slot + block_tokens
        if begin != stop:
            if start >= 0:
                joined.append(SlotRun(start, stop))
            start = begin
        stop = end
    joined.append(SlotRun(start, stop))
    return tuple(joined)


def slots_of(blocks: Sequence[int], stored: Slots, block_tokens: int) -> Slots:
    """Return the slot of each stored index."""
    table = np.asarray(blocks, dtype=np.int64)
    return table[stored // block_tokens] * block_tokens + stored % block_tokens


def runs_of(slots: Slots) -> tuple[SlotRun, ...]:
    """Join slots, in order, to maximal runs."""
    if not len(slots):
        return ()
    first = np.append(0, np.flatnonzero(np.diff(slots) != 1) + 1)
    last = np.append(first[1:], len(slots)) - 1
    return tuple(map(SlotRun, slots[first].tolist(), (slots[last] + 1).tolist()))


def newest_slots(where: Sequence[SlotRun], count: int) -> list[SlotRun]:
    """Return the last `count` slots of some runs."""
    newest: list[SlotRun] = []
    for run in reversed(where):
        if not count:
            break
        newest.insert(0, SlotRun(max(run.start, run.stop - count), run.stop))
        count -= len(newest[0])
    return newest


class KvCache:
    """K and V of `num_blocks` blocks for every layer, in `dtype` on `device`.

    `head_start` is the model-wide index of this rank's first KV head (0 without tensor parallelism). Memory is
    untouched until it is written, so a large cache only costs the memory in use. `poisoned` fills it with NaN, so that
    tests catch reads of slots that were never written.

    Threads: no caller reads a slot while another thread writes it. The leader's block tables ensure this.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_tokens: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        head_start: int = 0,
        poisoned: bool = False,
    ) -> None:
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.head_start = head_start
        self.dtype = dtype
        self.device = torch.device(device)
        self.joins_runs = self.device.type == "cuda"
        # After the blocks is one slot for the KV of padding rows. Nobody reads it.
        self.spare_slot = num_blocks * block_tokens
        shape = (self.spare_slot + 1, num_kv_heads, head_dim)

        def allocate() -> Tensor:
            if poisoned:
                return torch.full(shape, torch.nan, dtype=dtype, device=self.device)
            return torch.empty(shape, dtype=dtype, device=self.device)

        self.k_layers = tuple(allocate() for _ in range(num_layers))
        self.v_layers = tuple(allocate() for _ in range(num_layers))

    @property
    def dtype_name(self) -> str:
        """Dtype as model configurations name it: `float32`, `bfloat16` or `float16`."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def heads(self) -> range:
        """Model-wide indices of the KV heads held here."""
        return range(self.head_start, self.head_start + self.num_kv_heads)

    def runs(self, blocks: Sequence[int], num_tokens: int, *, first: int = 0) -> tuple[SlotRun, ...]:
        """Return `runs` for this cache's block size."""
        return runs(blocks, num_tokens, self.block_tokens, first=first)

    def views(self, layer: int, where: Sequence[SlotRun]) -> list[KvRun]:
        """Return views (k[S,K,D], v[S,K,D]) of each run in a layer."""
        k, v = self.k_layers[layer], self.v_layers[layer]
        return [KvRun(k[run.start : run.stop], v[run.start : run.stop]) for run in where]

    def pieces(self, where: Sequence[SlotRun]) -> list[SlotRun | Tensor]:
        """Join neighbouring short runs to slot indices int64[T]. A step does this once for all layers."""
        short = COPIED_BYTES // (2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize)
        pieces: list[SlotRun | Tensor] = []
        for is_short, group in groupby(where, lambda run: len(run) < short):
            some = list(group)
            if is_short and len(some) > 1:
                pieces += self.index(some).split(MAX_COPIED_TOKENS)
            else:
                pieces += some
        return pieces

    def joined(self, where: Sequence[SlotRun]) -> list[SlotRun | Tensor]:
        """Return runs as pieces for many-query kernels: on a GPU one index of all runs, on a CPU `pieces`.

        Launching a kernel costs the host of a GPU more than copying costs the device.
        """
        return [self.index(where)] if self.joins_runs and len(where) > 1 else self.pieces(where)

    def scattered(self, where: Sequence[SlotRun]) -> Tensor | None:
        """Return an index of the runs if there are too many to write one by one. A step asks once for all layers."""
        return self.index(where) if len(where) > MAX_COPIES else None

    def gathered(self, layer: int, pieces: Sequence[SlotRun | Tensor]) -> list[KvRun]:
        """Return k[S,K,D] and v[S,K,D] of each piece in a layer: a view for a run, a copy for an index."""
        k, v = self.k_layers[layer], self.v_layers[layer]
        return [
            KvRun(k[piece.start : piece.stop], v[piece.start : piece.stop])
            if isinstance(piece, SlotRun)
            else KvRun(k.index_select(0, piece), v.index_select(0, piece))
            for piece in pieces
        ]

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return views (k[P,G,K,D], v[P,G,K,D]) of a layer: P blocks of G tokens."""
        shape = (self.num_blocks, self.block_tokens, self.num_kv_heads, self.head_dim)
        k, v = self.k_layers[layer], self.v_layers[layer]
        return k[: self.spare_slot].view(shape), v[: self.spare_slot].view(shape)

    def write(self, layer: int, blocks: Sequence[int], stored_start: int, k: Tensor, v: Tensor) -> None:
        """Store k[T,K,D] and v[T,K,D] as stored tokens [stored_start, stored_start + T)."""
        self.write_runs(layer, self.runs(blocks, k.shape[0], first=stored_start), k, v)

    def write_runs(
        self, layer: int, where: Sequence[SlotRun], k: Tensor, v: Tensor, *, heads: slice = ALL_HEADS
    ) -> None:
        """Store k[T,K,D] and v[T,K,D] in runs of T slots in total. `heads` counts from this rank's first head."""
        if len(where) > MAX_COPIES:
            self.write_slots(layer, self.index(where), k, v, heads=heads)
            return
        begin = 0
        for run in where:
            end = begin + len(run)
            self.k_layers[layer][run.start : run.stop, heads] = k[begin:end]
            self.v_layers[layer][run.start : run.stop, heads] = v[begin:end]
            begin = end

    def write_slots(self, layer: int, slots: Tensor, k: Tensor, v: Tensor, *, heads: slice = ALL_HEADS) -> None:
        """Store k[T,K,D] and v[T,K,D] in slots[T] (int64, on this device), as decode steps do.

        Slots differ, except that the spare slot may occur several times.
        """
        k_shd, v_shd = self.k_layers[layer], self.v_layers[layer]
        if heads is not ALL_HEADS:
            k_shd, v_shd = k_shd[:, heads], v_shd[:, heads]
        k_shd.index_copy_(0, slots, k)
        v_shd.index_copy_(0, slots, v)

    def read(self, layer: int, blocks: Sequence[int], stored_start: int, count: int) -> KvRun:
        """Copy k[T,K,D] and v[T,K,D] of stored tokens [stored_start, stored_start + count)."""
        return self.read_runs(layer, self.runs(blocks, count, first=stored_start))

    def read_runs(self, layer: int, where: Sequence[SlotRun], *, heads: slice = ALL_HEADS) -> KvRun:
        """Copy k[T,K,D] and v[T,K,D] of runs of T slots in total. `heads` counts from this rank's first head."""
        k, v = self.k_layers[layer][:, heads], self.v_layers[layer][:, heads]
        if len(where) > MAX_COPIES:
            slots = self.index(where)
            return KvRun(k.index_select(0, slots), v.index_select(0, slots))
        cuts = [(run.start, run.stop) for run in where] or [(0, 0)]
        return KvRun(torch.cat([k[a:b] for a, b in cuts]), torch.cat([v[a:b] for a, b in cuts]))

    def copy_runs(
        self,
        layer: int,
        where: Sequence[SlotRun],
        k: Tensor,
        v: Tensor,
        *,
        heads: slice = ALL_HEADS,
        index: Tensor | None = None,
    ) -> None:
        """Copy runs of T slots in total to k[T,K,D] and v[T,K,D]. `index` is the runs' `copy_index`."""
        for stored, out in ((self.k_layers[layer][:, heads], k), (self.v_layers[layer][:, heads], v)):
            if index is not None:
                torch.index_select(stored, 0, index, out=out)
                continue
            begin = 0
            for run in where:
                out[begin : begin + len(run)] = stored[run.start : run.stop]
                begin += len(run)

    def copy_index(self, where: Sequence[SlotRun]) -> Tensor | None:
        """Return the index for copying all runs in one call, or None if run-by-run copies are cheaper."""
        return self.index(where) if len(where) > (1 if self.device.type == "cuda" else MAX_COPIES) else None

    def index(self, where: Sequence[SlotRun]) -> Tensor:
        """Return every slot of the runs, in order, as int64[T] on this device."""
        # Built on the host: on a GPU each run would need a kernel.
        slots = torch.from_numpy(np.concatenate([np.arange(run.start, run.stop, dtype=np.int64) for run in where]))
        return slots.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else slots

    def copy_block(self, source: int, destination: int) -> None:
        """Copy one block to another in every layer, including slots that were never written."""
        size = self.block_tokens
        for tensor in (*self.k_layers, *self.v_layers):
            tensor[destination * size : (destination + 1) * size] = tensor[source * size : (source + 1) * size]

    def fill_random(self, seed: int) -> None:
        """Fill every slot with numbers in [-1, 1), the same for the same seed and device."""
        generator = torch.Generator(self.device).manual_seed(seed)
        for tensor in (*self.k_layers, *self.v_layers):
            tensor.uniform_(-1.0, 1.0, generator=generator)

    def settle(self) -> None:
        """Wait until the device has done all work that this thread queued, so that clocks measure it."""
        done = self.fence()
        if done is not None:
            done.synchronize()

    def fence(self) -> torch.Event | None:
        """Return an event after all work that this thread queued on the device; None on a CPU, whose calls block."""
        if self.device.type != "cuda":
            return None
        event: torch.Event = torch.cuda.current_stream(self.device).record_event()
        return event
