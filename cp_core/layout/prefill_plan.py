"""Plan of one prefill step, known to all ranks before it starts: the tokens of each sequence on each rank.

Shapes: S stored tokens, K key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from cp_core.errors import InvalidRequest
from cp_core.layout.shards import PrefillLayout


@dataclass(frozen=True, slots=True)
class KvRun:
    """Views of the cache: k[S, K, D] and v[S, K, D] of tokens stored side by side."""

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of one sequence, in tokens. Its new tokens are chunks `slot` (low) and 2N-1-slot (high)."""

    slot: int
    cached: int
    low: int
    high: int

    @property
    def new(self) -> int:
        return self.low + self.high

    @property
    def stored(self) -> int:
        """Tokens whose K and V the rank holds in this step."""
        return self.cached + self.low + self.high


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """Layout of a sequence's new tokens; `cached[r]` tokens of it lie on rank r, in any order of position."""

    layout: PrefillLayout
    cached: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.cached) != self.layout.num_ranks or min(self.cached) < 0:
            raise InvalidRequest(
                f"cached is {self.cached}; allowed is one count >= 0 for each of {self.layout.num_ranks}"
            )

    def shard(self, rank: int) -> Shard:
        low, high = self.layout.chunks(rank)
        return Shard(self.layout.slots[rank], self.cached[rank], len(low), len(high))


@dataclass(frozen=True)
class PrefillPlan:
    """Sequences of a step, in the order in which every rank packs their tokens. Made once a step, not a layer."""

    sequences: tuple[SequencePlan, ...]

    @cached_property
    def shards(self) -> tuple[tuple[Shard, ...], ...]:
        """Shard of every sequence by rank: `shards[rank][sequence]`."""
        ranks = {sequence.layout.num_ranks for sequence in self.sequences}
        assert len(ranks) <= 1, f"sequences of rings of {ranks} ranks in one step"
        return tuple(
            tuple(sequence.shard(rank) for sequence in self.sequences) for rank in range(max(ranks, default=0))
        )

    def of_rank(self, rank: int) -> tuple[Shard, ...]:
        """Return the shards of one rank, one for each sequence."""
        return self.shards[rank] if self.sequences else ()

    def new_on(self, rank: int) -> int:
        """Return the new tokens of all sequences on a rank: the rows of its packed q."""
        return sum(shard.new for shard in self.of_rank(rank))

    def stored_on(self, rank: int) -> int:
        """Return the cached and new tokens of all sequences on a rank: the rows of its packed KV message."""
        return sum(shard.stored for shard in self.of_rank(rank))


def split_new(rows: torch.Tensor, shards: Sequence[Shard]) -> tuple[torch.Tensor, ...]:
    """Return views of each sequence's rows of a packed q, k, v or out [T, ...]."""
    return rows.split([shard.new for shard in shards]) if shards else ()
