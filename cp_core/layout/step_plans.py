"""Step plans for prefill and decode: the tokens and rows of each rank, known to every rank before the step.

Ring algorithms and the steps of ranks use them; attention kernels get their index tensors.

Shapes: S stored tokens, K key/value heads, D head dimension; B sequences (rows) of a decode batch with one new token
each, N ranks. Every rank derives the same decode plan, so message lengths are exact and queries carry no batch ids
(arXiv 2411.01783, algorithm 4, sends batch ids).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt
import torch

from ringserve.cp_core.errors import InvalidRequest
from ringserve.cp_core.layout.shards import PrefillLayout, ShardMap, TokenRange
from ringserve.cp_core.layout.sparsity import Sparsity


@dataclass(frozen=True, slots=True)
class KvRun:
    """Cache views k[S, K, D] and v[S, K, D] of tokens stored side by side."""

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """Query rows [start, stop) among a sequence's new tokens on a rank."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a sequence: its number of cached tokens, and its new tokens' positions, ascending.

    In a layer with a `window` a query sees only the newest `window` tokens up to itself (0: all). `cached` then counts
    only the cached tokens that some new token of the step sees, the last ones in stored order, and `tail` has their
    positions.
    """

    cached: int
    ranges: tuple[TokenRange, ...]
    window: int = 0
    tail: tuple[TokenRange, ...] = ()

    @property
    def new(self) -> int:
        return sum(map(len, self.ranges))

    @property
    def stored(self) -> int:
        """Tokens whose KV the rank holds in this step."""
        return self.cached + self.new


@dataclass(frozen=True, slots=True)
class SeenKeys:
    """Query rows that all see the first `count` new keys of a shard, in stored order.

    A rank's rows see its own new keys causally: row i sees keys 0..i, and `count` is the number of rows.
    """

    rows: Rows
    count: int


def seen_keys(queries: Shard, keys: Shard) -> tuple[SeenKeys, ...]:
    """Return which new keys of shard `keys` the query rows of shard `queries` see. Both may be the same rank's shard.

    Each range of query positions sees the keys below its start. Neighbouring ranges that see equally many keys are
    joined.
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


@dataclass(frozen=True, slots=True)
class Band:
    """Keys that query rows see in a layer with a window: row i sees keys [first[i], stop[i]), both ascending."""

    rows: Rows
    first: npt.NDArray[np.int64]
    stop: npt.NDArray[np.int64]
    _uploaded: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def bounds_on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (first, stop) for kernels of the device: int64 on a CPU, int32 elsewhere.

        All layers of a step ask for the same. Only the first uploads them, without waiting for the device.
        """
        if device not in self._uploaded:
            dtype = np.int64 if device.type == "cpu" else np.int32
            on_host = torch.from_numpy(np.stack([self.first, self.stop]).astype(dtype))
            on_host = on_host.pin_memory() if device.type == "cuda" else on_host
            first, stop = on_host.to(device, non_blocking=True)
            self._uploaded[device] = first, stop
        return self._uploaded[device]


@lru_cache(maxsize=64)
def bands(queries: Shard, keys: Shard) -> tuple[Band, ...] | None:
    """Return, for each range of queries, the keys of shard `keys` that it sees, numbered with the cached ones first.

    None if the layer has no window or it hides no key from these queries. Ranges of which no query sees any key have no
    band. Every layer with the same window asks for the same.

    Example: with a window of 4, queries 8-9 and keys 2-5 give row 0 key 5 alone and row 1 none.
    """
    if not keys.window:
        return None
    held = _positions((*keys.tail, *keys.ranges))
    found, row, is_cut = [], 0, False
    for own in queries.ranges:
        at = np.arange(own.start, own.stop)
        first, stop = (np.searchsorted(held, each, side="right") for each in (at - keys.window, at))
        is_cut |= bool(first[-1])
        if (first < stop).any():
            found.append(Band(Rows(row, row + len(own)), first, stop))
        row += len(own)
    return tuple(found) if is_cut else None


def _positions(ranges: Sequence[TokenRange]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.empty(0, np.int64), *(np.arange(each.start, each.stop) for each in ranges)])


def seen_rows(queries: Shard, keys: Shard) -> tuple[Rows, ...]:
    """Return the query rows that see any key of `keys`, split by the number of keys they see. None is empty.

    With a window that hides keys, a range of queries counts as a whole if any of them sees a key.
    """
    if (found := bands(queries, keys)) is not None:
        return tuple(each.rows for each in found)
    return tuple(each.rows for each in seen_keys(queries, keys) if each.count or keys.cached)


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """Layout of a sequence's new tokens. Rank r holds `cached[r]` earlier tokens, in any order of position.

    `stored` says which rank stores each new token if other ranks than the computing ones do: only chains set it.
    `sparsity` limits the keys that reach other ranks; None means all of them. `tail` has the positions of the newest
    cached tokens, which layers with a window need: of at least window - 1 tokens, or of all.
    """

    layout: PrefillLayout
    cached: tuple[int, ...]
    stored: ShardMap | None = None
    sparsity: Sparsity | None = None
    tail: ShardMap | None = None

    def __post_init__(self) -> None:
        if len(self.cached) != self.layout.num_ranks or min(self.cached) < 0:
            raise InvalidRequest(
                f"cached is {self.cached}; allowed is one count >= 0 for each of {self.layout.num_ranks}"
            )

    @property
    def is_sparse(self) -> bool:
        """True if other ranks get only some of the keys in some layers."""
        return self.sparsity is not None and not self.sparsity.is_exact

    def shard(self, rank: int, window: int = 0) -> Shard:
        """Return a rank's shard, in a layer with this window."""
        ranges, start = self.layout.ranges[rank], self.layout.start
        if not window:
            return Shard(self.cached[rank], ranges)
        reach = TokenRange(max(0, start - window + 1), start)
        tail = (self.tail or ShardMap.empty(self.layout.num_ranks)).within(reach)
        assert tail.num_tokens == len(reach), f"the plan has {tail.num_tokens} of {len(reach)} positions in the window"
        return Shard(tail.held[rank], ranges, window, tuple(tail.ranks[rank]))

    def stores(self, rank: int, source: int) -> bool:
        """Return whether `rank` stores any token that `source` computes."""
        if self.stored is None:
            return False
        return any(len(own.intersect(each)) for own in self.stored.ranks[rank] for each in self.layout.ranges[source])

    def thinned(self, rank: int) -> Shard:
        """Return the part of a rank's shard that other ranks get in a sparse layer."""
        shard, sparsity = self.shard(rank), self.sparsity
        if sparsity is None or sparsity.is_exact:
            return shard
        return Shard(sparsity.chosen(shard.cached), sparsity.thinned(shard.ranges))


@dataclass(frozen=True)
class PrefillPlan:
    """Sequences of a step, in the order in which every rank packs their tokens. Made once per step.

    `order` lists the ranks along a chain (empty: 0, 1, 2, ...). `num_segments` applies to head-parallel prefill.
    The plan is for all layers with this `window`; 0 means full attention.
    """

    sequences: tuple[SequencePlan, ...]
    order: tuple[int, ...] = ()
    num_segments: int = 1
    window: int = 0

    @cached_property
    def shards(self) -> tuple[tuple[Shard, ...], ...]:
        """Shards by rank and sequence: `shards[rank][sequence]`."""
        ranks = {sequence.layout.num_ranks for sequence in self.sequences}
        assert len(ranks) <= 1, f"sequences of rings of {ranks} ranks in one step"
        return tuple(
            tuple(sequence.shard(rank, self.window) for sequence in self.sequences)
            for rank in range(max(ranks, default=0))
        )

    @cached_property
    def thinned(self) -> tuple[tuple[Shard, ...], ...]:
        """The parts of `shards` that other ranks get in a sparse layer, by rank and sequence."""
        return tuple(tuple(sequence.thinned(rank) for sequence in self.sequences) for rank in range(len(self.shards)))

    @cached_property
    def seen(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """`seen[rank][source]`: sequences whose queries on `rank` see keys on `source`. Empty for the rank itself."""
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
        """Hops that a rank's KV travels along the ring, by rank and sequence: up to the last rank that sees it."""
        return self._reach(lambda rank, other: self.seen[other][rank])

    @cached_property
    def query_reach(self) -> tuple[tuple[int, ...], ...]:
        """Hops that a rank's queries travel, by rank and sequence: up to the last rank whose keys they see."""
        return self._reach(lambda rank, other: self.seen[rank][other])

    def _reach(self, sent: Callable[[int, int], tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        """Return the last hop by rank and sequence. `sent(rank, other)` lists the sequences that `other` needs."""
        size = len(self.shards)
        return tuple(
            tuple(
                max((hop for hop in range(1, size) if index in sent(rank, (rank + hop) % size)), default=0)
                for index in range(len(self.sequences))
            )
            for rank in range(size)
        )

    def of_rank(self, rank: int) -> tuple[Shard, ...]:
        """Return the shards of one rank, one per sequence."""
        return self.shards[rank] if self.sequences else ()

    def new_on(self, rank: int) -> int:
        """Return the number of new tokens on a rank over all sequences: the rows of its packed q."""
        return sum(shard.new for shard in self.of_rank(rank))

    def kv_at(self, rank: int, hop: int) -> tuple[int, ...]:
        """Return the sequences whose KV on `rank` is still in its message after `hop` hops."""
        return tuple(index for index, reach in enumerate(self.kv_reach[rank]) if reach >= hop)

    def queries_at(self, rank: int, hop: int) -> tuple[int, ...]:
        """Return the sequences whose queries on `rank` are still in its message after `hop` hops."""
        return tuple(index for index, reach in enumerate(self.query_reach[rank]) if reach >= hop)


def split_new(rows: torch.Tensor, shards: Sequence[Shard]) -> tuple[torch.Tensor, ...]:
    """Split a packed q, k, v or out [T, ...] into views of each sequence's rows."""
    return rows.split([shard.new for shard in shards]) if shards else ()


class RowIndices:
    """Row indices on a device, uploaded once per step. A Python list as an index would be uploaded in every layer."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], torch.Tensor] = {}

    def of(self, rows: Sequence[int], device: torch.device) -> torch.Tensor:
        """Return int64[R] on the device, without waiting for the device."""
        key = tuple(rows)
        if key not in self._made:
            # The pinned-memory allocator holds the host copy until the upload is done.
            index = torch.tensor(key, dtype=torch.int64, pin_memory=device.type == "cuda")
            self._made[key] = index.to(device, non_blocking=True)
        return self._made[key]


@dataclass(frozen=True)
class DecodePlan:
    """For each row, the rank that owns it, and its tokens by rank. Made once per step.

    `owners[i]` computes row i and stores its new token. Rank r holds `held[i][r]` tokens of row i, with the new one.
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
    def held_rows(self) -> tuple[list[int], ...]:
        """Rows with any token on a rank, by rank, ascending."""
        return tuple(self.held_by(rank, range(len(self))) for rank in range(self.num_ranks))

    def rows_of(self, rank: int) -> list[int]:
        """Return the rows that a rank computes, ascending."""
        return [row for row, owner in enumerate(self.owners) if owner == rank]

    def held_by(self, rank: int, rows: Sequence[int]) -> list[int]:
        """Return the rows of `rows` with any token on the rank. The rank contributes to no other row."""
        return [row for row in rows if self.held[row][rank]]

    def sent_on(self, source: int, hop: int) -> list[int]:
        """Return the rows of `source` whose queries travel at least `hop` hops, to a rank that holds their keys."""
        later = [(source + step) % self.num_ranks for step in range(max(hop, 1), self.num_ranks)]
        return [row for row in self.rows_of(source) if hop == 0 or any(self.held[row][rank] for rank in later)]


@dataclass(frozen=True, slots=True)
class Visit:
    """Queries of `source` that arrive at one rank: batch rows, in message order.

    `answered` and `onward` are places in the message: the queries that this rank attends, and those it sends on.
    """

    source: int
    rows: tuple[int, ...]
    answered: tuple[int, ...]
    onward: tuple[int, ...]


class PassQRoute:
    """One rank's work in every layer of a pass-Q step, derived once per step.

    `visits[j]` describes hop j of N; hop 0 has the rank's own queries. `returns[p]` lists the places, among the rank's
    own rows, that rank p answers.
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
