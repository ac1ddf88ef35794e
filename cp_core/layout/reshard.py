"""How KV moves from any ring layout to any other: N to M ranks, tp to tp', exactly once. Pure Python and numpy.

A rank is numbered cp_rank * tp + tp_rank. Tensor parallelism cuts the KV heads evenly: tp rank t of tp holds heads
[t * K / tp, (t + 1) * K / tp) of the K heads of the model. Layers are not planned: every layer moves in the same way.

A long decode leaves shards of one-token ranges (consecutive tokens lie on different ranks), so a plan may have as many
pieces as tokens. Intervals are therefore cut, matched and proved as numpy columns; objects are made once, at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from cp_core.errors import ReshardError
from cp_core.layout.intervals import Intervals, column
from cp_core.layout.shards import ShardMap, TokenRange, coalesce


@dataclass(frozen=True, slots=True)
class KvPiece:
    """Consecutive tokens that lie at consecutive stored indices of the source rank; KV heads [head_start, head_stop).

    Heads are numbered as in the whole model, stored indices from the beginning of the source rank's shard.
    """

    tokens: TokenRange
    source_stored: int
    head_start: int
    head_stop: int


@dataclass(frozen=True, slots=True)
class Route:
    """What one source rank sends to one destination rank, in ascending position. Never empty."""

    source: int
    destination: int
    pieces: tuple[KvPiece, ...]


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """Every route of one reshard, ordered by source, then destination. Only `plan_reshard` makes one: it is proved."""

    routes: tuple[Route, ...]

    @property
    def pieces(self) -> dict[tuple[int, int], tuple[KvPiece, ...]]:
        """The same by (source rank, destination rank)."""
        return {(route.source, route.destination): route.pieces for route in self.routes}

    def from_rank(self, source: int) -> tuple[Route, ...]:
        """What one source rank has to send."""
        return tuple(route for route in self.routes if route.source == source)


def plan_reshard(
    source: ShardMap,
    destination: ShardMap,
    tokens: TokenRange,
    *,
    num_kv_heads: int,
    source_tp: int = 1,
    destination_tp: int = 1,
) -> ReshardPlan:
    """Plan the move of the KV of positions `tokens` between two rings.

    `source` may hold more than `tokens`; `destination` holds exactly them (see `ShardMap.within`). Maps are of cp
    ranks; the tp ranks of one cp rank hold the same tokens. Raises ReshardError, naming what is wrong, unless every
    (token, head) of `tokens` arrives exactly once on the destination rank that wants it.
    """
    have = Intervals.of(source).clip(tokens)
    want = Intervals.of(destination)
    have.check_covers(tokens, "source")
    want.check_covers(tokens, "destination")
    source_heads = _head_ranges(num_kv_heads, source_tp)
    destination_heads = _head_ranges(num_kv_heads, destination_tp)

    # Both sides tile `tokens`, so between two neighbouring cuts there is one source and one destination.
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
    """Check a finished plan against the two maps, independently of how it was made.

    Raises ReshardError unless each destination rank gets each of its heads of each of its tokens exactly once, from a
    source rank that stores that head of that token at the stored index named.
    """
    source_heads = _head_ranges(num_kv_heads, source_tp)
    destination_heads = _head_ranges(num_kv_heads, destination_tp)
    stored_by = [Intervals.of(ShardMap((ranges,))).joined() for ranges in source.ranks]
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
    """The heads of each tp rank. Raises ReshardError where they do not divide evenly."""
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
    """Pieces as columns, one group for each head range (a planned route has one)."""
    for start, stop in sorted({(piece.head_start, piece.head_stop) for piece in pieces}):
        group = [piece for piece in pieces if (piece.head_start, piece.head_stop) == (start, stop)]
        starts = column(piece.tokens.start for piece in group)
        stops = column(piece.tokens.stop for piece in group)
        stored = column(piece.source_stored for piece in group)
        yield range(start, stop), Intervals(np.zeros_like(starts), starts, stops, stored)
