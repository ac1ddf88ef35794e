"""Shards of decoded tokens of a lone sequence."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ringserve.cp_core.layout.shards import ShardMap, appended, assign_owners


def lone_owners(held: Sequence[int], num_tokens: int) -> list[int]:
    """Return the rank of each of `num_tokens` decoded tokens of a batch of one row."""
    counts, owners = list(held), []
    for _ in range(num_tokens):
        owners += assign_owners([counts], [[sys.maxsize] * len(counts)])
        counts[owners[-1]] += 1
    return owners


def decoded(start: int, num_tokens: int, held: Sequence[int]) -> ShardMap:
    """Lay `num_tokens` decoded tokens of a lone sequence from position `start` over ranks."""
    return appended(start, lone_owners(held, num_tokens), len(held))
