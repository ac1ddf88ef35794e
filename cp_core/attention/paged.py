"""Paged attention: a kernel that follows block tables attends a whole decode batch in one call.

Shapes: B sequences with one query each, P pages of a cache, G tokens a page, M pages of the longest table, H query
heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import ClassVar, Protocol, TypeGuard

import torch

from ringserve.cp_core.attention.partial import AttentionBackend, Partial, empty_partial
from ringserve.cp_core.layout.step_plans import RowIndices


@dataclass(frozen=True, slots=True)
class PagedShards:
    """One rank's shards of a batch: pages k[P, G, K, D] and v[P, G, K, D] of one layer, in any order.

    table[B, M] (int32, on the same device) lists each sequence's pages in stored order. Entries after the last page are
    never read, but must be valid page numbers. `stored` has each sequence's token count on this rank, possibly 0.
    `lengths` has the same counts as int32[B] on the device, for kernels that read them there.
    """

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    stored: tuple[int, ...]
    lengths: torch.Tensor

    def __len__(self) -> int:
        return len(self.stored)

    def of(self, rows: Sequence[int], indices: RowIndices) -> PagedShards:
        """Return the shards of some sequences. Rows must ascend. All rows need no copy."""
        if len(rows) == len(self):
            return self
        index = indices.of(rows, self.table.device)
        stored = tuple(self.stored[row] for row in rows)
        return PagedShards(self.k, self.v, self.table[index], stored, self.lengths[index])


class PagedBackend(AttentionBackend, Protocol):
    """Kernel that takes block tables. Its pages hold a multiple of `page_multiple` tokens.

    A kernel with `skips_empty` reads the lengths on the device and returns (0, -inf) for empty shards.
    """

    page_multiple: ClassVar[int]
    skips_empty: ClassVar[bool]

    def paged_attention(self, q: torch.Tensor, shards: PagedShards, *, scale: float) -> Partial:
        """Attend q[B, H, D], one query per sequence, over the sequence's shard.

        B is 1 or more, and so is every `stored` unless the backend has `skips_empty`. If a row's LSE is NaN, so is its
        out.
        """
        ...


def takes_pages(backend: AttentionBackend, page_tokens: int) -> TypeGuard[PagedBackend]:
    """Return whether the backend follows block tables over pages of `page_tokens` tokens."""
    multiple = getattr(backend, "page_multiple", 0)
    return bool(multiple) and page_tokens % multiple == 0


def attend_pages(
    backend: PagedBackend, q_bhd: torch.Tensor, shards: PagedShards, scale: float, indices: RowIndices
) -> Partial:
    """Return the part of q[B, H, D] over the shards. The LSE of an empty shard is -inf.

    A backend with `skips_empty` finds empty shards on the device, so one CUDA graph serves all lengths.
    """
    if backend.skips_empty and len(shards):
        return backend.paged_attention(q_bhd, shards, scale=scale)
    filled = [row for row, stored in enumerate(shards.stored) if stored]
    if not filled:
        return empty_partial(q_bhd)
    if len(filled) == len(shards):
        return backend.paged_attention(q_bhd, shards, scale=scale)
    part, index = empty_partial(q_bhd), indices.of(filled, q_bhd.device)
    some = backend.paged_attention(q_bhd[index], shards.of(filled, indices), scale=scale)
    part.out[index], part.lse[index] = some.out, some.lse
    return part


@lru_cache(maxsize=64)
def cumulative(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return the cumulative lengths int32[B + 1] that varlen kernels take: (2, 3) gives 0, 2, 5.

    All layers of a step ask for the same lengths. Only the first layer uploads them, without waiting for the device.
    """
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, pin_memory=device.type == "cuda")
    return ends.to(device, non_blocking=True)
