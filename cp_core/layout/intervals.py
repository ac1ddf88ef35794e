"""Position ranges as numpy columns, for plans with as many pieces as tokens. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cp_core.errors import ReshardError
from cp_core.layout.shards import ShardMap, TokenRange

Column = npt.NDArray[np.int64]


def column(values: Iterable[int]) -> Column:
    return np.fromiter(values, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Intervals:
    """Position ranges as columns: positions [start, stop) lie on `rank` from stored index `stored` on. No empties."""

    rank: Column
    start: Column
    stop: Column
    stored: Column

    @classmethod
    def of(cls, shards: ShardMap) -> Intervals:
        """All ranges of a map in ascending position. Raises ReshardError where a rank's own order is not ascending."""
        columns: list[Intervals] = []
        for rank, ranges in enumerate(shards.ranks):
            start = column(item.start for item in ranges)
            stop = column(item.stop for item in ranges)
            backwards = np.flatnonzero(start[1:] < stop[:-1])
            if len(backwards):
                at = int(backwards[0])
                raise ReshardError(f"rank {rank} stores position {start[at + 1]} after position {stop[at] - 1}")
            stored = np.cumsum(stop - start) - (stop - start)
            columns.append(Intervals(np.full_like(start, rank), start, stop, stored))
        return cls.merge(columns)

    @classmethod
    def merge(cls, columns: Sequence[Intervals]) -> Intervals:
        """Many into one, in ascending position, empties dropped."""
        none = np.zeros(0, np.int64)
        joined = cls(
            np.concatenate([none, *(item.rank for item in columns)]),
            np.concatenate([none, *(item.start for item in columns)]),
            np.concatenate([none, *(item.stop for item in columns)]),
            np.concatenate([none, *(item.stored for item in columns)]),
        )
        order = np.argsort(joined.start, kind="stable")
        return joined.take(order[joined.start[order] < joined.stop[order]])

    def take(self, which: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> Intervals:
        return Intervals(self.rank[which], self.start[which], self.stop[which], self.stored[which])

    def clip(self, tokens: TokenRange) -> Intervals:
        """The parts inside `tokens`; stored indices still count from the beginning of the shard."""
        start, stop = np.maximum(self.start, tokens.start), np.minimum(self.stop, tokens.stop)
        clipped = Intervals(self.rank, start, stop, self.stored + start - self.start)
        return clipped.take(start < stop)

    def joined(self) -> Intervals:
        """Neighbours made one, where both position and stored index run on."""
        if len(self.start) < 2:
            return self
        touches = self.start[1:] == self.stop[:-1]
        runs_on = touches & (self.stored[1:] - self.stored[:-1] == self.start[1:] - self.start[:-1])
        first = np.flatnonzero(np.append(True, ~runs_on))
        last = np.append(first[1:] - 1, len(self.start) - 1)
        return Intervals(self.rank[first], self.start[first], self.stop[last], self.stored[first])

    def index_at(self, positions: Column) -> Column:
        """Which interval holds each position; the intervals must cover them."""
        return np.searchsorted(self.start, positions, side="right").astype(np.int64) - 1

    def check_covers(self, tokens: TokenRange, side: str) -> None:
        """Raise ReshardError, naming the first fault, unless every position of `tokens` is held once, and no other."""
        expected = np.append(tokens.start, self.stop)
        found = np.append(self.start, tokens.stop)
        faults = np.flatnonzero(expected != found)
        if not len(faults):
            return
        wanted, got = int(expected[faults[0]]), int(found[faults[0]])
        fault = "is missing" if got > wanted else "is held twice or lies outside"
        raise ReshardError(f"position {min(wanted, got)} {fault} on the {side} side of [{tokens.start}, {tokens.stop})")

    def check_stores(self, pieces: Intervals, rank: int) -> None:
        """Raise ReshardError unless these intervals of one source rank store the pieces at the stored indices named."""
        at = self.index_at(pieces.start)
        inside = at >= 0
        if inside.all():
            stored = self.stored[at] + pieces.start - self.start[at]
            inside &= (pieces.stop <= self.stop[at]) & (pieces.stored == stored)
        if not inside.all():
            position = int(pieces.start[np.flatnonzero(~inside)[0]])
            raise ReshardError(f"source rank {rank} does not store position {position} where the plan says")

    def check_equals(self, wanted: Sequence[TokenRange], rank: int) -> None:
        """Raise ReshardError unless these intervals, none overlapping, make up exactly `wanted`."""
        overlaps = np.flatnonzero(self.start[1:] < self.stop[:-1])
        if len(overlaps):
            raise ReshardError(f"position {self.start[overlaps[0] + 1]} reaches destination rank {rank} twice")
        breaks = np.flatnonzero(self.start[1:] != self.stop[:-1])
        starts = self.start[np.append(0, breaks + 1)] if len(self.start) else self.start
        stops = self.stop[np.append(breaks, len(self.stop) - 1)] if len(self.stop) else self.stop
        right_starts = np.array_equal(starts, column(item.start for item in wanted))
        if not right_starts or not np.array_equal(stops, column(item.stop for item in wanted)):
            raise ReshardError(f"the tokens that reach destination rank {rank} are not those it expects")
