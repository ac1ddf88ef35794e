"""Inputs of a decode step on the device: one copy from pinned memory fills them, which the host does not wait for.

Shapes: B sequences (rows), R rows that this rank computes, A rows whose newest token it stores, M blocks of the longest
table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Rows of four int64 arrays (token ids, positions, slots, stored rows); lengths and table are int32 behind them.
WORD_ARRAYS = 4
# A step with drafts has so many rows at least: recorded steps are forgotten if it makes the buffers anew.
LEAST_ROWS = 16
LEAST_WIDTH = 16


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Views of the buffers for one step, valid until the next `fill`.

    `token_ids` and `positions` int64[R] are the model's, `slots` int64[A] where new KV goes, `stored` int64[A] the
    places of those rows among the computed ones. `table` int32[B, M] and `lengths` int32[B] are this rank's shards.
    `firsts[w]` int32[B] has the first token of its shard that each row sees in layers with the loop's window number w.
    `ends` int32[E] has the number behind each sequence's last row, if some have several rows.
    `allocation` is the sign of the buffers' memory, which no other memory has: recorded steps read one of them.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    stored: Tensor
    lengths: Tensor
    table: Tensor
    firsts: tuple[Tensor, ...]
    ends: Tensor | None
    allocation: object


class _HostBuffer:
    """Inputs of a step on the host: `words` int64[WORD_ARRAYS, rows], then int32 bounds[2 + W, rows] and the table.

    It knows which table lies in each row and how many blocks of it: what is in its place is not written again.
    """

    def __init__(self, rows: int, width: int, num_windows: int, *, is_pinned: bool) -> None:
        words, bounds = WORD_ARRAYS * rows, rows * (2 + num_windows)
        self.memory = torch.zeros(words + (bounds + rows * width) // 2, dtype=torch.int64, pin_memory=is_pinned)
        self.words = self.memory[:words].numpy().reshape(WORD_ARRAYS, rows)
        narrow = self.memory[words:].numpy().view(np.int32)
        self.lengths, self.ends, *self.firsts = narrow[:bounds].reshape(-1, rows)
        self.table = narrow[bounds:].reshape(rows, width)
        # Event behind the copy of this memory, which is not written before.
        self.copied: torch.Event | None = None
        self._placed: list[list[int] | None] = [None] * rows
        self._num_placed = [0] * rows

    def place(self, tables: Sequence[list[int]]) -> None:
        """Write the block tables of all rows."""
        for row, table in enumerate(tables):
            if self._placed[row] is not table or self._num_placed[row] != len(table):
                self.table[row, : len(table)] = table
                self._placed[row], self._num_placed[row] = table, len(table)


class InputBuffers:
    """Persistent buffers of a loop's steps. Their addresses change only when a batch or a table outgrows them.

    On a CPU the host's memory is the device's, and nothing is copied unless `is_staged`, as in tests of the copy. A
    device is filled from two buffers of the host in turn: the inputs of a step may be written while it has yet to copy
    those of the step before.
    """

    def __init__(self, device: torch.device, num_windows: int = 0, *, is_staged: bool = False) -> None:
        """Make buffers for a model whose layers have so many different windows that the kernel reads from tables."""
        self._device = device
        self._num_windows = num_windows
        self._is_staged = is_staged or device.type == "cuda"
        self._allocate(LEAST_ROWS, LEAST_WIDTH)

    def fill(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        slots: Sequence[int],
        stored: Sequence[int],
        blocks: Sequence[list[int]] = (),
        lengths: Sequence[int] = (),
        widest: int = 0,
        firsts: Sequence[Sequence[int]] = (),
        ends: Sequence[int] = (),
    ) -> StepInputs:
        """Fill the buffers and start their copy to the device.

        `blocks` are the block tables of all rows, lists that only grow while a sequence is in the batch: a table that
        is in its place already is not written again. `widest` counts the blocks of the longest table on any rank: so
        the buffers of all ranks are made anew in the same step.
        """
        rows, width = max(len(token_ids), len(slots), len(lengths)), max(widest, *map(len, blocks), 0)
        if rows > self._rows or width > self._width:
            self._allocate(max(rows, self._rows), max(width, self._width))
        self._hosts.reverse()
        host = self._hosts[0]
        if host.copied is not None:
            host.copied.synchronize()
        for array, values in zip(host.words, (token_ids, positions, slots, stored), strict=True):
            array[: len(values)] = values
        host.lengths[: len(lengths)] = lengths
        host.ends[: len(ends)] = ends
        for array, bounds in zip(host.firsts, firsts, strict=True):
            array[: len(bounds)] = bounds
        host.place(blocks)
        if self._is_staged:
            num_bounds = self._rows * (2 + self._num_windows)
            used = WORD_ARRAYS * self._rows + (num_bounds + len(blocks) * self._width + 1) // 2
            host.copied = self._copy(self._on_device[:used], host.memory[:used])
        computed, appended, batch = len(token_ids), len(slots), len(lengths)
        ids, at, to, places = self._on_device[: WORD_ARRAYS * self._rows].view(WORD_ARRAYS, self._rows)
        narrow = self._on_device[WORD_ARRAYS * self._rows :].view(torch.int32)
        counts, tables = narrow.tensor_split([self._rows * (2 + self._num_windows)])
        held, last_rows, *first_seen = counts.view(-1, self._rows)
        return StepInputs(
            token_ids=ids[:computed],
            positions=at[:computed],
            slots=to[:appended],
            stored=places[:appended],
            lengths=held[:batch],
            table=tables.view(self._rows, self._width)[:batch],
            firsts=tuple(each[:batch] for each in first_seen),
            ends=last_rows[: len(ends)] if ends else None,
            allocation=self._allocation,
        )

    def _allocate(self, rows: int, width: int) -> None:
        """Make buffers of powers of two of rows and blocks, so that they are seldom made anew."""
        self._allocation = object()
        self._rows, self._width = (1 << (size - 1).bit_length() for size in (rows, width))
        is_pinned = self._device.type == "cuda"
        count = 2 if self._is_staged else 1
        self._hosts = [
            _HostBuffer(self._rows, self._width, self._num_windows, is_pinned=is_pinned) for _ in range(count)
        ]
        memory = self._hosts[0].memory
        self._on_device = torch.zeros_like(memory, device=self._device) if self._is_staged else memory

    def _copy(self, on_device: Tensor, on_host: Tensor) -> torch.Event | None:
        """Start a copy to the device. Return the event behind it; None if it is done."""
        on_device.copy_(on_host, non_blocking=True)
        return torch.cuda.current_stream(self._device).record_event() if on_device.is_cuda else None
