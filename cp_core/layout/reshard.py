"""Reshard plans: move KV from any ring layout to any other (N to M ranks, tp to tp') exactly once. No torch.

Leaders plan KV transfers by it; pure functions. Ranks are numbered cp_rank * tp + tp_rank. Tensor parallelism divides
the KV heads evenly: tp rank t of tp holds heads [t * K / tp, (t + 1) * K / tp) of the model's K heads. A plan serves
every layer.

A long decode leaves one-token ranges, since consecutive tokens lie on different ranks, so a plan may have as many
pieces as tokens. Intervals are therefore cut, matched and proved as numpy columns. Objects are made once, at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from ringserve.cp_core.errors import ReshardError
from ringserve.cp_core.layout.shards import ShardMap, TokenRange, coalesce

Column = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class KvPiece:
    """Consecutive tokens at consecutive stored indices of the source rank, for KV heads [head_start, head_stop).

    Head numbers are model-wide. Stored indices count from the start of the source rank's shard.
    """

    tokens: TokenRange
    source_stored: int
    head_start: int
    head_stop: int


@dataclass(frozen=True, slots=True)
class Route:
    """Pieces that one source rank sends to one destination rank, by ascending position. Never empty."""

    source: int
    destination: int
    pieces: tuple[KvPiece, ...]


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """Routes of one reshard, ordered by source, then destination. Only `plan_reshard` makes plans; it proves each."""

    routes: tuple[Route, ...]

    @property
    def pieces(self) -> dict[tuple[int, int], tuple[KvPiece, ...]]:
        """Pieces by (source rank, destination rank)."""
        return {(route.source, route.destination): route.pieces for route in self.routes}


def plan_reshard(
    source: ShardMap,
    destination: ShardMap,
    tokens: TokenRange,
    *,
    num_kv_heads: int,
    source_tp: int = 1,
    destination_tp: int = 1,
) -> ReshardPlan:
    """Plan the move of positions `tokens` between two rings.

    `source` may hold more than `tokens`. `destination` holds exactly `tokens` (see `ShardMap.within`). Both maps list
    cp ranks; all tp ranks of a cp rank hold the same tokens. Raises ReshardError with the first fault unless every
    (token, head) arrives exactly once on the destination rank that wants it.

    Example: with 4 tokens, ranks ((0, 1), (2, 3)) to one rank makes two routes of one piece each.
    """
    have = Intervals.of(source).clip(tokens)
    want = Intervals.of(destination)
    have.check_covers(tokens, "source")
    want.check_covers(tokens, "destination")
    source_heads = _head_ranges(num_kv_heads, source_tp)
    destination_heads = _head_ranges(num_kv_heads, destination_tp)

    # Both sides tile `tokens`, so each stretch between two cuts has one source and one destination.
    starts = np.union1d(have.start, want.start)
    stops = np.append(starts[1:], tokens.stop)[: len(starts)]
    giver, taker = have.index_at(starts), want.index_at(starts)
    moved = Intervals(have.rank[giver], starts, stops, have.stored[giver] + starts - have.start[giver])
    wanted_by = want.rank[taker]

    routes: list[Route] = []
    for source_cp, destination_cp in product(range(source.num_ranks), range(destination.num_ranks)):
        pair = moved.take((moved.rank == source_cp) & (wanted_by == destination_cp)).joined()
        if not len(pair.start):
            continue
        for source_rank, destination_rank in product(range(source_tp), range(destination_tp)):
            head_start = max(source_heads[source_rank].start, destination_heads[destination_rank].start)
            head_stop = min(source_heads[source_rank].stop, destination_heads[destination_rank].stop)
            if head_start < head_stop:
                giver_rank = source_cp * source_tp + source_rank
                taker_rank = destination_cp * destination_tp + destination_rank
                routes.append(Route(giver_rank, taker_rank, tuple(_pieces(pair, head_start, head_stop))))
    routes.sort(key=lambda route: (route.source, route.destination))
    plan = ReshardPlan(tuple(routes))
    prove(plan, source, destination, num_kv_heads=num_kv_heads, source_tp=source_tp, destination_tp=destination_tp)
    return plan


def prove(
    plan: ReshardPlan,
    source: ShardMap,
    destination: ShardMap,
    *,
    num_kv_heads: int,
    source_tp: int = 1,
    destination_tp: int = 1,
) -> None:
    """Check a finished plan against both maps, independently of the way it was made.

    Raises ReshardError unless each destination rank receives every head of every token it wants exactly once, from a
    source rank that stores this head and token at the named stored index.
    """
    source_heads = _head_ranges(num_kv_heads, source_tp)
    destination_heads = _head_ranges(num_kv_heads, destination_tp)
    stored_by = [Intervals.of(ShardMap.of((ranges,))).joined() for ranges in source.ranks]
    arrived: dict[tuple[int, int, int], list[Intervals]] = {}
    for route in plan.routes:
        holder = stored_by[route.source // source_tp]
        heads = source_heads[route.source % source_tp]
        for head_range, pieces in _by_heads(route.pieces):
            if not (heads.start <= head_range.start < head_range.stop <= heads.stop):
                fault = f"KV heads [{head_range.start}, {head_range.stop})"
                raise ReshardError(f"source rank {route.source} does not hold {fault}")
            holder.check_stores(pieces, route.source)
            arrived.setdefault((route.destination, head_range.start, head_range.stop), []).append(pieces)

    for rank, tp_rank in product(range(destination.num_ranks), range(destination_tp)):
        wanted = coalesce(destination.ranks[rank])
        number = rank * destination_tp + tp_rank
        parts = sorted((start, stop) for destination_rank, start, stop in arrived if destination_rank == number)
        if not wanted and not parts:
            continue
        head = destination_heads[tp_rank].start
        for start, stop in parts:
            if start != head:
                raise ReshardError(f"KV head {min(start, head)} reaches destination rank {number} twice or never")
            head = stop
            got = Intervals.merge(arrived[number, start, stop])
            got.check_equals(wanted, number)
        if head != destination_heads[tp_rank].stop:
            raise ReshardError(f"KV head {head} never reaches destination rank {number}")


def _head_ranges(num_kv_heads: int, tensor_parallel: int) -> tuple[range, ...]:
    """Return the heads of each tp rank. Raises ReshardError if they do not divide evenly."""
    if tensor_parallel < 1 or num_kv_heads % tensor_parallel:
        allowed = [size for size in range(1, num_kv_heads + 1) if num_kv_heads % size == 0]
        raise ReshardError(f"tp {tensor_parallel} does not divide {num_kv_heads} KV heads: allowed are {allowed}")
    share = num_kv_heads // tensor_parallel
    return tuple(range(rank * share, (rank + 1) * share) for rank in range(tensor_parallel))


def _pieces(intervals: Intervals, head_start: int, head_stop: int) -> Iterator[KvPiece]:
    columns = (intervals.start.tolist(), intervals.stop.tolist(), intervals.stored.tolist())
    for start, stop, stored in zip(*columns, strict=True):
        yield KvPiece(TokenRange(start, stop), stored, head_start, head_stop)


def _by_heads(pieces: Sequence[KvPiece]) -> Iterator[tuple[range, Intervals]]:
    """Yield the pieces of each head range as columns. A planned route has one head range."""
    for start, stop in sorted({(piece.head_start, piece.head_stop) for piece in pieces}):
        alike = [piece for piece in pieces if (piece.head_start, piece.head_stop) == (start, stop)]
        starts = _column(piece.tokens.start for piece in alike)
        stops = _column(piece.tokens.stop for piece in alike)
        stored = _column(piece.source_stored for piece in alike)
        yield range(start, stop), Intervals(np.zeros_like(starts), starts, stops, stored)


def _column(values: Iterable[int]) -> Column:
    return np.fromiter(values, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Intervals:
    """Position ranges as columns: positions [start, stop) lie on `rank`, from stored index `stored`. None is empty."""

    rank: Column
    start: Column
    stop: Column
    stored: Column

    @classmethod
    def of(cls, shards: ShardMap) -> Intervals:
        """Return a map's ranges by ascending position. Raises ReshardError if a rank's order is not ascending."""
        columns: list[Intervals] = []
        for rank, ranges in enumerate(shards.ranks):
            start = _column(item.start for item in ranges)
            stop = _column(item.stop for item in ranges)
            backwards = np.flatnonzero(start[1:] < stop[:-1])
            if len(backwards):
                at = int(backwards[0])
                raise ReshardError(f"rank {rank} stores position {start[at + 1]} after position {stop[at] - 1}")
            stored = np.cumsum(stop - start) - (stop - start)
            columns.append(Intervals(np.full_like(start, rank), start, stop, stored))
        return cls.merge(columns)

    @classmethod
    def merge(cls, columns: Sequence[Intervals]) -> Intervals:
        """Return all intervals in ascending position, without empty ones."""
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
        """Return the parts inside `tokens`. Stored indices still count from the start of the shard."""
        start, stop = np.maximum(self.start, tokens.start), np.minimum(self.stop, tokens.stop)
        clipped = Intervals(self.rank, start, stop, self.stored + start - self.start)
        return clipped.take(start < stop)

    def joined(self) -> Intervals:
        """Join neighbours if both their positions and their stored indices are consecutive."""
        if len(self.start) < 2:
            return self
        touches = self.start[1:] == self.stop[:-1]
        runs_on = touches & (self.stored[1:] - self.stored[:-1] == self.start[1:] - self.start[:-1])
        first = np.flatnonzero(np.append(True, ~runs_on))
        last = np.append(first[1:] - 1, len(self.start) - 1)
        return Intervals(self.rank[first], self.start[first], self.stop[last], self.stored[first])

    def index_at(self, positions: Column) -> Column:
        """Return the index of the interval that holds each position. The intervals must cover all positions."""
        return np.searchsorted(self.start, positions, side="right").astype(np.int64) - 1

    def check_covers(self, tokens: TokenRange, side: str) -> None:
        """Raise ReshardError with the first fault unless the intervals hold each of `tokens` once, and nothing else."""
        expected = np.append(tokens.start, self.stop)
        found = np.append(self.start, tokens.stop)
        faults = np.flatnonzero(expected != found)
        if not len(faults):
            return
        wanted, got = int(expected[faults[0]]), int(found[faults[0]])
        fault = "is missing" if got > wanted else "is held twice or lies outside"
        raise ReshardError(f"position {min(wanted, got)} {fault} on the {side} side of [{tokens.start}, {tokens.stop})")

    def check_stores(self, pieces: Intervals, rank: int) -> None:
        """Raise ReshardError unless these intervals of a source rank store the pieces at their stored indices."""
        at = self.index_at(pieces.start)
        inside = at >= 0
        if inside.all():
            stored = self.stored[at] + pieces.start - self.start[at]
            inside &= (pieces.stop <= self.stop[at]) & (pieces.stored == stored)
        if not inside.all():
            position = int(pieces.start[np.flatnonzero(~inside)[0]])
            raise ReshardError(f"source rank {rank} does not store position {position} at the planned index")

    def check_equals(self, wanted: Sequence[TokenRange], rank: int) -> None:
        """Raise ReshardError unless these intervals cover exactly `wanted`, without overlap."""
        overlaps = np.flatnonzero(self.start[1:] < self.stop[:-1])
        if len(overlaps):
            raise ReshardError(f"position {self.start[overlaps[0] + 1]} reaches destination rank {rank} twice")
        breaks = np.flatnonzero(self.start[1:] != self.stop[:-1])
        starts = self.start[np.append(0, breaks + 1)] if len(self.start) else self.start
        stops = self.stop[np.append(breaks, len(self.stop) - 1)] if len(self.stop) else self.stop
        right_starts = np.array_equal(starts, _column(item.start for item in wanted))
        if not right_starts or not np.array_equal(stops, _column(item.stop for item in wanted)):
            raise ReshardError(f"destination rank {rank} receives other tokens than it expects")
