"""Sparse prefill: how many keys of a partition reach the queries of other ranks. Pure Python.

Step plans, the router's plans and cost models use it. A *partition* is one contiguous part of a sequence on one rank:
its cached tokens, or one range of its new tokens. A rank sees its own partitions whole, and only the chosen keys of
other partitions (CSPS, arXiv 2409.15104, with two segment levels: the rank and the whole ring). The number of chosen
keys follows from the partition's length, so message lengths are known. Each layer and KV head chooses its own keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ringserve import views
from ringserve.cp_core.errors import InvalidRequest
from ringserve.cp_core.layout.shards import PrefillLayout, TokenRange


@dataclass(frozen=True, kw_only=True, slots=True)
class Sparsity(views.Sparsity):
    """Share of keys that reach other ranks: above 0, up to 1. 1 is exact."""

    def check(self) -> None:
        """Raise InvalidRequest if a value is out of range."""
        if not 0.0 < self.keep <= 1.0:
            raise InvalidRequest(f"keep is {self.keep}; allowed are numbers above 0, up to 1")
        if self.sinks < 0 or self.window < 1:
            raise InvalidRequest(
                f"sinks is {self.sinks} and window {self.window}; allowed are 0 or more, and 1 or more"
            )

    @property
    def is_exact(self) -> bool:
        """True if every key reaches every rank that sees it."""
        return self.keep == 1.0

    def chosen(self, num_tokens: int) -> int:
        """Return how many keys of a partition of `num_tokens` tokens reach other ranks."""
        # Rounded first: 0.1 * 30 is slightly above 3 in floating point and would keep a fourth key.
        share = -int(-round(self.keep * num_tokens, 6) // 1)
        return min(num_tokens, max(share, self.sinks + self.window))

    def thinned(self, ranges: tuple[TokenRange, ...]) -> tuple[TokenRange, ...]:
        """Shrink each range to its number of chosen keys, keeping its end: visibility checks use only the end."""
        return tuple(TokenRange(each.stop - self.chosen(len(each)), each.stop) for each in ranges)


LATEST, STRIDED = 64, 64
"""Queries sampled in each step to rank keys by importance: the step's last queries, and others at even distances."""


def sampled_positions(layout: PrefillLayout) -> list[int]:
    """Return the positions of a step's sampled queries, ascending, at most LATEST + STRIDED of them."""
    start, stop = layout.start, layout.tokens.stop
    latest = max(start, stop - LATEST)
    strided = {start + (latest - start) * place // STRIDED for place in range(STRIDED if latest > start else 0)}
    return sorted(strided | set(range(latest, stop)))


def sampled_rows(layout: PrefillLayout, rank: int) -> Iterator[tuple[int, int]]:
    """Yield (row among the rank's new tokens, position) for each sampled query on a rank, ascending."""
    positions = sampled_positions(layout)
    row = 0
    for each in layout.ranges[rank]:
        for position in positions:
            if each.start <= position < each.stop:
                yield row + position - each.start, position
        row += len(each)
