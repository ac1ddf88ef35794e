"""Plans of prefill and decode steps, which every rank knows before the step: the tokens and rows of each rank.

Shapes: S stored tokens, K key/value heads, D head dimension; B sequences (rows) of a decode batch with one new token
each, N ranks. Every rank derives the same plan of a decode step, so lengths are exact and no batch ids are sent with
the queries (arXiv 2411.01783, algorithm 4, sends them).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from ringserve.cp_core.errors import InvalidRequest
from ringserve.cp_core.layout.shards import PrefillLayout, ShardMap, TokenRange
from ringserve.cp_core.layout.sparsity import Sparsity


@dataclass(frozen=True, slots=True)
class KvRun:
    """Views of the cache: k[S, K, D] and v[S, K, D] of tokens stored side by side."""

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """Query rows [start, stop) of a sequence's new tokens on a rank."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of one sequence: the number of cached tokens, and the positions of its new tokens, ascending."""

    cached: int
    ranges: tuple[TokenRange, ...]

    @property
    def new(self) -> int:
        return sum(map(len, self.ranges))

    @property
    def stored(self) -> int:
        """Tokens whose K and V the rank holds in this step."""
        return self.cached + self.new


@dataclass(frozen=True, slots=True)
class SeenKeys:
    """Query rows `rows` that see the first `count` of a shard's new keys in stored order: the same for all rows.

    A rank's rows see its own new keys causally: row i sees keys 0..i, and `count` is the number of rows.
    """

    rows: Rows
    count: int


def seen_keys(queries: Shard, keys: Shard) -> tuple[SeenKeys, ...]:
    """Return what all query rows of a sequence on one rank see of the new keys on another, or the same, rank.

    Each range of positions sees the stored keys below its start; neighbours that see equally many are one item.
    """
    if queries.ranges == keys.ranges:
        return (SeenKeys(Rows(0, queries.new), keys.new),) if queries.new else ()
    seen: list[SeenKeys] = []
    row = 0
    for own in queries.ranges:
        count = sum(len(each) for each in keys.ranges if each.stop <= own.start)
        first = seen.pop().rows.start if seen and seen[-1].count == count else row
        row += len(own)
        seen.append(SeenKeys(Rows(first, row), count))
    return tuple(seen)


def seen_rows(queries: Shard, keys: Shard) -> tuple[Rows, ...]:
    """Return the query rows that see any key of `keys`, as ranges that see equally much. None is empty."""
    return tuple(each.rows for each in seen_keys(queries, keys) if each.count or keys.cached)


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """Layout of a sequence's new tokens; `cached[r]` tokens of it lie on rank r, in any order of position.

    `stored` says which rank stores the new tokens where it is not the one that computes them: a chain alone has it.
    With a `sparsity` other than an exact one not all keys reach other ranks; None: all do.
    """

    layout: PrefillLayout
    cached: tuple[int, ...]
    stored: ShardMap | None = None
    sparsity: Sparsity | None = None

    def __post_init__(self) -> None:
        if len(self.cached) != self.layout.num_ranks or min(self.cached) < 0:
            raise InvalidRequest(
                f"cached is {self.cached}; allowed is one count >= 0 for each of {self.layout.num_ranks}"
            )

    @property
    def is_sparse(self) -> bool:
        """True if other ranks get less than all keys in some layers."""
        return self.sparsity is not None and not self.sparsity.is_exact

    def shard(self, rank: int) -> Shard:
        return Shard(self.cached[rank], self.layout.ranges[rank])

    def stores(self, rank: int, source: int) -> bool:
        """Return whether a rank stores any token that another one, `source`, computes."""
        if self.stored is None:
            return False
        return any(len(own.intersect(each)) for own in self.stored.ranks[rank] for each in self.layout.ranges[source])

    def thinned(self, rank: int) -> Shard:
        """Return the lengths of what other ranks get of a rank's shard in a layer that is sparse."""
        shard, sparsity = self.shard(rank), self.sparsity
        if sparsity is None or sparsity.is_exact:
            return shard
        return Shard(sparsity.chosen(shard.cached), sparsity.thinned(shard.ranges))


@dataclass(frozen=True)
class PrefillPlan:
    """Sequences of a step, in the order in which every rank packs their tokens. Made once a step, not a layer.

    `order` are the ranks along a chain; empty: as they are numbered. `num_segments` are those of head-parallel prefill.
    """

    sequences: tuple[SequencePlan, ...]
    order: tuple[int, ...] = ()
    num_segments: int = 1

    @cached_property
    def shards(self) -> tuple[tuple[Shard, ...], ...]:
        """Shard of every sequence by rank: `shards[rank][sequence]`."""
        ranks = {sequence.layout.num_ranks for sequence in self.sequences}
        assert len(ranks) <= 1, f"sequences of rings of {ranks} ranks in one step"
        return tuple(
            tuple(sequence.shard(rank) for sequence in self.sequences) for rank in range(max(ranks, default=0))
        )

    @cached_property
    def thinned(self) -> tuple[tuple[Shard, ...], ...]:
        """Shards as `shards` has them, with what other ranks get of them in a layer that is sparse."""
        return tuple(tuple(sequence.thinned(rank) for sequence in self.sequences) for rank in range(len(self.shards)))

    @cached_property
    def seen(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Sequences of which the queries of a rank see keys of another: `seen[rank][source]`; none of its own."""
        return tuple(
            tuple(
                tuple(
                    index
                    for index, (queries, keys) in enumerate(zip(of_rank, of_source, strict=True))
                    if rank != source and seen_rows(queries, keys)
                )
                for source, of_source in enumerate(self.shards)
            )
            for rank, of_rank in enumerate(self.shards)
        )

    @cached_property
    def kv_reach(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that the KV of a rank travels on along the ring, by rank and sequence: the last one sees any of it."""
        return self._reach(lambda rank, other: self.seen[other][rank])

    @cached_property
    def query_reach(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that the queries of a rank travel on, by rank and sequence: they see keys of the last one."""
        return self._reach(lambda rank, other: self.seen[rank][other])

    def _reach(self, sent: Callable[[int, int], tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        """Return the last hop for each rank and sequence; `sent(rank, other)` are the sequences that `other` needs."""
        size = len(self.shards)
        return tuple(
            tuple(
                max((hop for hop in range(1, size) if index in sent(rank, (rank + hop) % size)), default=0)
                for index in range(len(self.sequences))
            )
            for rank in range(size)
        )

    def of_rank(self, rank: int) -> tuple[Shard, ...]:
        """Return the shards of one rank, one for each sequence."""
        return self.shards[rank] if self.sequences else ()

    def new_on(self, rank: int) -> int:
        """Return the new tokens of all sequences on a rank: the rows of its packed q."""
        return sum(shard.new for shard in self.of_rank(rank))

    def kv_at(self, rank: int, hop: int) -> tuple[int, ...]:
        """Return the sequences of which the KV of `rank` is in its message `hop` ranks further on."""
        return tuple(index for index, reach in enumerate(self.kv_reach[rank]) if reach >= hop)

    def queries_at(self, rank: int, hop: int) -> tuple[int, ...]:
        """Return the sequences of which the queries of `rank` are in their message `hop` ranks further on."""
        return tuple(index for index, reach in enumerate(self.query_reach[rank]) if reach >= hop)


def split_new(rows: torch.Tensor, shards: Sequence[Shard]) -> tuple[torch.Tensor, ...]:
    """Return views of each sequence's rows of a packed q, k, v or out [T, ...]."""
    return rows.split([shard.new for shard in shards]) if shards else ()


class RowIndices:
    """Indices of rows on a device, each made once a step: a list as an index would be uploaded in every layer."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], torch.Tensor] = {}

    def of(self, rows: Sequence[int], device: torch.device) -> torch.Tensor:
        """Return int64[R] on the device. The upload does not wait for the device."""
        key = tuple(rows)
        if key not in self._made:
            # The allocator of pinned memory holds it until the copy is done.
            index = torch.tensor(key, dtype=torch.int64, pin_memory=device.type == "cuda")
            self._made[key] = index.to(device, non_blocking=True)
        return self._made[key]


@dataclass(frozen=True)
class DecodePlan:
    """Owner of each row and its tokens by rank. Made once a step, not a layer.

    `owners[i]` computes row i and stores its new token; `held[i][r]` tokens of it, with the new one, lie on rank r.
    """

    num_ranks: int
    owners: tuple[int, ...]
    held: tuple[tuple[int, ...], ...]
    indices: RowIndices = field(default_factory=RowIndices, compare=False, repr=False)

    def __post_init__(self) -> None:
        assert len(self.owners) == len(self.held), f"{len(self.owners)} owners of {len(self.held)} sequences"
        assert all(len(held) == self.num_ranks for held in self.held), "one count a rank"
        assert all(0 <= owner < self.num_ranks for owner in self.owners), "owners are ranks of the ring"

    def __len__(self) -> int:
        return len(self.owners)

    @cached_property
    def holders(self) -> tuple[list[int], ...]:
        """Rows of which each rank holds any token, by rank, ascending."""
        return tuple(self.held_by(rank, range(len(self))) for rank in range(self.num_ranks))

    def rows_of(self, rank: int) -> list[int]:
        """Return the rows that a rank computes, ascending."""
        return [row for row, owner in enumerate(self.owners) if owner == rank]

    def held_by(self, rank: int, rows: Sequence[int]) -> list[int]:
        """Return the rows among `rows` of which the rank holds any token: it has a part of no others."""
        return [row for row in rows if self.held[row][rank]]

    def sent_on(self, source: int, hop: int) -> list[int]:
        """Return the rows of `source` whose queries reach rank source + hop: it, or one behind it, holds their keys."""
        later = [(source + step) % self.num_ranks for step in range(max(hop, 1), self.num_ranks)]
        return [row for row in self.rows_of(source) if hop == 0 or any(self.held[row][rank] for rank in later)]


@dataclass(frozen=True, slots=True)
class Visit:
    """Queries of `source` at one rank: `rows` of the batch, in the order of the message.

    `answered` and `onward` are places in the message: of queries that this rank attends, and that it sends on.
    """

    source: int
    rows: tuple[int, ...]
    answered: tuple[int, ...]
    onward: tuple[int, ...]


class PassQRoute:
    """Work of one rank in every layer of a pass-Q step, derived once a step.

    `visits[j]` is hop j of N; the first is the rank's own queries. `returns[p]` are the places, among the rank's own
    rows, of those that rank p answers.
    """

    def __init__(self, plan: DecodePlan, rank: int) -> None:
        size = plan.num_ranks
        self.rank = rank
        self.batch = len(plan)
        self.indices = plan.indices
        self.own = plan.rows_of(rank)
        self.visits = [_visit(plan, rank, (rank - hop) % size, hop) for hop in range(size)]
        place = {row: index for index, row in enumerate(self.own)}
        self.returns = [[place[row] for row in plan.held_by(peer, self.own)] for peer in range(size)]


def _visit(plan: DecodePlan, rank: int, source: int, hop: int) -> Visit:
    rows = plan.sent_on(source, hop)
    onward = set(plan.sent_on(source, hop + 1))
    answered = set(plan.held_by(rank, rows))
    return Visit(
        source,
        tuple(rows),
        tuple(place for place, row in enumerate(rows) if row in answered),
        tuple(place for place, row in enumerate(rows) if row in onward),
    )
