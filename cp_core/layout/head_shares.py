"""Attention heads of each rank in head-parallel prefill. Pure Python.

The algorithm sp_ntp and its cost model use it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from ringserve.cp_core.layout.shards import TokenRange, even_share


@dataclass(frozen=True, slots=True)
class HeadShare:
    """Query heads [start, stop) of one rank, and the KV heads that they read.

    If the query heads of one KV head belong to two ranks, both ranks read that KV head. Query heads are never
    replicated. Example: 6 query heads, 2 KV heads, 2 ranks: rank 0 has query heads 0-2 and KV head 0.
    """

    heads: TokenRange
    kv_heads: TokenRange
    group: int

    @classmethod
    @lru_cache(maxsize=4096)  # a fit of the cost model asks for few shares, a million times
    def of_rank(cls, rank: int, num_ranks: int, num_heads: int, num_kv_heads: int) -> HeadShare:
        """Return one rank's share. Shares differ by at most one query head."""
        start, stop = even_share(num_heads, rank, num_ranks)
        group = num_heads // num_kv_heads
        return cls(TokenRange(start, stop), TokenRange(start // group, max(start // group, -(-stop // group))), group)

    def runs(self) -> Iterator[tuple[TokenRange, TokenRange]]:
        """Yield (query heads, KV heads) of each run of KV heads with the same number of the share's query heads.

        There are up to three runs: a part of a group at the share's start, whole groups, and a part of a group at its
        end. Both ranges count from the first head of the share.
        """
        start, stop = self.heads.start, self.heads.stop
        first, last = -(-start // self.group) * self.group, stop // self.group * self.group
        borders = sorted({start, stop, *(border for border in (first, last) if start < border < stop)})
        for begin, end in pairwise(borders):
            kv_begin, kv_end = begin // self.group, -(-end // self.group)
            yield (
                TokenRange(begin - start, end - start),
                TokenRange(kv_begin - self.kv_heads.start, kv_end - self.kv_heads.start),
            )


def head_shares(num_ranks: int, num_heads: int, num_kv_heads: int) -> list[HeadShare]:
    """Return the share of every rank."""
    return [HeadShare.of_rank(rank, num_ranks, num_heads, num_kv_heads) for rank in range(num_ranks)]
