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
LEAST_ROWS = 8
LEAST_WIDTH = 16


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Views of the buffers for one step, valid until the next `fill`.

    `token_ids` and `positions` int64[R] are the model's, `slots` int64[A] where new KV goes, `stored` int64[A] the
    places of those rows among the computed ones. `table` int32[B, M] and `lengths` int32[B] are this rank's shards.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    stored: Tensor
    lengths: Tensor
    table: Tensor


class InputBuffers:
    """Persistent buffers of a loop's steps. Their addresses change only when a batch or a table outgrows them.

    On a CPU the host's memory is the device's, and nothing is copied unless `is_staged`, as in tests of the copy.
    """

    def __init__(self, device: torch.device, *, is_staged: bool = False) -> None:
        self._device = device
        self._is_staged = is_staged or device.type == "cuda"
        self._copied: torch.Event | None = None
        # Sign of the buffers' memory, which no other memory ever has: recorded steps read one of them.
        self.allocation = object()
        self._allocate(LEAST_ROWS, LEAST_WIDTH)

    def fill(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        slots: Sequence[int],
        stored: Sequence[int],
        blocks: Sequence[list[int]] = (),
        lengths: Sequence[int] = (),
    ) -> StepInputs:
        """Fill the buffers and start their copy to the device.

        `blocks` are the block tables of all rows, lists that only grow while a sequence is in the batch: a table that
        is in its place already is not written again.
        """
        rows, width = max(len(token_ids), len(slots), len(lengths)), max(map(len, blocks), default=0)
        if self._copied is not None:
            self._copied.synchronize()
        if rows > self._rows or width > self._width:
            self._allocate(max(rows, self._rows), max(width, self._width))
        for array, values in zip(self._words, (token_ids, positions, slots, stored), strict=True):
            array[: len(values)] = values
        self._lengths[: len(lengths)] = lengths
        for row, table in enumerate(blocks):
            if self._placed[row] is not table or self._num_placed[row] != len(table):
                self._table[row, : len(table)] = table
                self._placed[row], self._num_placed[row] = table, len(table)
        self._copy(len(blocks))
        computed, appended, batch = len(token_ids), len(slots), len(lengths)
        ids, at, to, places = self._on_device[: WORD_ARRAYS * self._rows].view(WORD_ARRAYS, self._rows)
        narrow = self._on_device[WORD_ARRAYS * self._rows :].view(torch.int32)
        return StepInputs(
            token_ids=ids[:computed],
            positions=at[:computed],
            slots=to[:appended],
            stored=places[:appended],
            lengths=narrow[:batch],
            table=narrow[self._rows :].view(self._rows, self._width)[:batch],
        )

    def _allocate(self, rows: int, width: int) -> None:
        """Make buffers of powers of two of rows and blocks, so that they are seldom made anew."""
        self.allocation = object()
        self._rows, self._width = (1 << (size - 1).bit_length() for size in (rows, width))
        words = WORD_ARRAYS * self._rows
        size = words + (self._rows * (1 + self._width)) // 2
        self._on_host = torch.zeros(size, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        self._on_device = torch.zeros_like(self._on_host, device=self._device) if self._is_staged else self._on_host
        host = self._on_host.numpy()
        self._words = host[:words].reshape(WORD_ARRAYS, self._rows)
        narrow = host[words:].view(np.int32)
        self._lengths, self._table = narrow[: self._rows], narrow[self._rows :].reshape(self._rows, self._width)
        # Table that each row holds, and how many of its blocks: a list that is in its place is not written again.
        self._placed: list[list[int] | None] = [None] * self._rows
        self._num_placed = [0] * self._rows

    def _copy(self, num_tables: int) -> None:
        """Copy the words, the lengths and the tables of the batch."""
        if not self._is_staged:
            return
        used = WORD_ARRAYS * self._rows + (self._rows + num_tables * self._width + 1) // 2
        self._on_device[:used].copy_(self._on_host[:used], non_blocking=True)
        if self._device.type == "cuda":
            self._copied = torch.cuda.current_stream(self._device).record_event()
