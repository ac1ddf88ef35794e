"""KV blocks of the sequences on one ring.

A sequence is *active* while a turn has it pinned and *retained* afterwards. Retained sequences are a cache: the pool
evicts the least recently used first when blocks are needed, or when retained blocks exceed their limit. The end of a
sequence is evicted before its beginning, because later prompts are likelier to share the beginning. The ring's leader
alone reserves and releases, and it releases only after the ranks have stopped using the blocks.

Sequences forked from one history share its full blocks. A shared block is never written: the first `make_room` of a
turn replaces the shared blocks that the turn would write, from the first unwritten slot on, by blocks of the sequence's
own. If the beginning of a replaced block is filled, `SequenceKv.copies` lists the copy from the shared block to the own
one. The caller of `make_room` has the ranks copy before the first write, and then calls `copied`. From then on the turn
writes to its own blocks alone: a sequence that is forked from it gets a copy of each block that is filled in part.

Each rank has a `BlockAllocator`, which knows block numbers alone, no KV. It gives block tables runs of adjacent blocks.
A table that cannot grow in place goes on at the start of a free *extent*, a fixed range of blocks. The other blocks of
the extent stay free and count as free. But as long as other extents are free, no other table takes blocks of this one,
so the table grows in place to the extent's end. Without a free extent any free block serves.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ringserve.cp_core.errors import Busy, CapacityExceeded, NotFound
from ringserve.cp_core.layout.shards import ShardMap
from ringserve.orchestration.protocol.inventory import SequenceOnRing
from ringserve.views import RankKvUsage

EXTENT_TOKENS = 128
"""Least tokens of an extent: over shorter runs, attention spends more time on its calls than on the tokens."""
MAX_EXTENTS = 64
"""Most extents of a rank: one with many blocks has larger extents, and so longer runs."""
MAX_PARTS = 8
"""Most parts in which a sequence is evicted."""
PARTS = ("end", "whole")
"""What an eviction takes of a sequence: its end, or the whole sequence."""


class BlockAllocator:
    """Allocator of block numbers 0..num_blocks-1. It prefers long runs: attention reads adjacent blocks as one view.

    Extent i are the blocks [i * extent_blocks, (i + 1) * extent_blocks).
    """

    def __init__(self, num_blocks: int, extent_blocks: int = 1) -> None:
        assert extent_blocks >= 1, f"an extent of {extent_blocks} blocks"
        self.num_blocks = num_blocks
        self._extent_blocks = extent_blocks
        self._free: list[tuple[int, int]] = []  # free runs [start, stop), ascending
        self._by_length: list[tuple[int, int]] = []  # (length, start) of each of them, ascending
        # For each free run with a whole extent: (blocks from its first extent boundary to its end, that boundary),
        # ascending.
        self._whole: list[tuple[int, int]] = []
        self.num_free = num_blocks
        if num_blocks:
            self._replace(0, 0, [(0, num_blocks)])
        self._extra_holders: dict[int, int] = {}  # by block with several holders: how many beyond the first

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` blocks: from the run that follows block `after`, else from free extents, else from any run.

        The shortest run that is long enough is taken. If none is, the blocks come from several runs. More than
        `num_free` is a bug: AssertionError.
        """
        assert count <= self.num_free, f"asked for {count} blocks of {self.num_free} free"
        taken: list[int] = []
        if after is not None:
            index = bisect_left(self._free, (after + 1, 0))
            if index < len(self._free) and self._free[index][0] == after + 1:
                taken += self._take(index, after + 1, count)
        while len(taken) < count:
            missing = count - len(taken)
            taken += self._take(*self._place_for(missing), missing)
        return taken

    def _place_for(self, count: int) -> tuple[int, int]:
        """Return a free run, by its index, and the block in it at which `count` blocks are taken.

        It is the shortest run with so many blocks from the start of a free extent on; else the shortest run with so
        many blocks; else the longest run.
        """
        at = bisect_left(self._whole, (max(count, self._extent_blocks), 0))
        if at < len(self._whole):
            _, first = self._whole[at]
        else:
            _, first = self._by_length[min(bisect_left(self._by_length, (count, 0)), len(self._by_length) - 1)]
        return bisect_left(self._free, (first + 1, 0)) - 1, first

    def _take(self, index: int, first: int, count: int) -> list[int]:
        """Take `count` blocks of a free run from block `first` on; if the run has fewer there, take all of them."""
        start, stop = self._free[index]
        end = min(stop, first + count)
        self._replace(index, index + 1, [(low, high) for low, high in ((start, first), (end, stop)) if low < high])
        self.num_free -= end - first
        return list(range(first, end))

    def _replace(self, first: int, last: int, runs: Sequence[tuple[int, int]]) -> None:
        """Replace the free runs [first, last) by `runs`.

        Places in the lists by length are found by bisection: a full cache has thousands of runs.
        """
        for run in self._free[first:last]:
            for lengths, entry in self._entries(run):
                del lengths[bisect_left(lengths, entry)]
        self._free[first:last] = runs
        for run in runs:
            for lengths, entry in self._entries(run):
                insort(lengths, entry)

    def _entries(self, run: tuple[int, int]) -> list[tuple[list[tuple[int, int]], tuple[int, int]]]:
        """Return the lists by length that have a free run, each with the run's entry."""
        start, stop = run
        extent = self._extent_blocks
        aligned = -(-start // extent) * extent
        entries = [(self._by_length, (stop - start, start))]
        if stop - aligned >= extent:
            entries.append((self._whole, (stop - aligned, aligned)))
        return entries

    def share(self, blocks: Iterable[int]) -> None:
        """Add a holder to each of these blocks, which are held already."""
        for block in blocks:
            self._extra_holders[block] = self._extra_holders.get(block, 0) + 1

    def num_holders(self, block: int) -> int:
        """Return the number of holders of a block that is not free."""
        return 1 + self._extra_holders.get(block, 0)

    @property
    def num_shared(self) -> int:
        """Number of further blocks that the holders would need if they shared none."""
        return sum(self._extra_holders.values())

    def free(self, blocks: Iterable[int]) -> None:
        """Remove a holder from each of these blocks. Freeing a free or unknown block is a bug: AssertionError."""
        freed = []
        for block in blocks:
            more = self._extra_holders.pop(block, 0)
            if not more:
                freed.append(block)
            elif more > 1:
                self._extra_holders[block] = more - 1
        freed.sort()
        first = 0
        for place, block in enumerate(freed, 1):
            if place == len(freed) or freed[place] != block + 1:
                self._make_free(freed[first], block + 1)
                first = place

    def _make_free(self, start: int, stop: int) -> None:
        """Enter blocks [start, stop) into the free runs, joined with the runs before and after them."""
        assert start >= 0, f"block {start} does not exist"
        assert stop <= self.num_blocks, f"block {stop - 1} does not exist"
        num_freed = stop - start
        first = last = bisect_left(self._free, (start, 0))
        if first:
            before = self._free[first - 1]
            assert before[1] <= start, f"block {start} is free already"
            if before[1] == start:
                first, start = first - 1, before[0]
        if last < len(self._free):
            after = self._free[last]
            assert after[0] >= stop, f"block {after[0]} is free already"
            if after[0] == stop:
                last, stop = last + 1, after[1]
        self._replace(first, last, [(start, stop)])
        self.num_free += num_freed

    def check_integrity(self, used: Iterable[int]) -> None:
        """Assert that each block is either free, or in `used` exactly once for each of its holders."""
        holders = Counter(used)
        all_blocks = sorted([*holders, *(block for start, stop in self._free for block in range(start, stop))])
        assert all_blocks == list(range(self.num_blocks)), "a block is lost or held twice"
        assert all(count == self.num_holders(block) for block, count in holders.items()), (
            "a holder holds a block twice, or is not counted"
        )
        assert self._extra_holders.keys() <= holders.keys(), "a free block has holders"
        assert self.num_free == sum(stop - start for start, stop in self._free), "free count is off"
        entries = [each for run in self._free for each in self._entries(run)]
        for lengths in (self._by_length, self._whole):
            assert lengths == sorted(entry for listed, entry in entries if listed is lengths), (
                "a free run is not listed"
            )


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy of block `source` to block `destination`, to be made on every process of cp rank `rank`."""

    rank: int
    source: int
    destination: int


@dataclass(slots=True)
class SequenceKv:
    """KV of one sequence on this ring. While it is pinned, `blocks[r]` may have room beyond `shards.held[r]`.

    `last_turn` is the turn that wrote the newest retained token. `num_before` counts the tokens that were here when the
    sequence was pinned.

    `copies` lists the block copies that the ranks have not made yet. Until a copy is made, the sequence also holds its
    source. `is_forking` is True from the fork to the first `settle`.
    """

    kv_id: str
    shards: ShardMap
    blocks: list[list[int]]
    pinned_by: str | None = None
    copies: list[BlockCopy] = field(default_factory=list)
    is_forking: bool = False
    last_turn: str = ""
    num_before: int = 0

    def table(self, rank: int) -> tuple[int, ...]:
        """Return the block table of a rank."""
        return tuple(self.blocks[rank])

    def filled_table(self, rank: int) -> list[int]:
        """Return the table as it was before the copies that are not made yet."""
        sources = {copy.destination: copy.source for copy in self.copies if copy.rank == rank}
        return [sources.get(block, block) for block in self.blocks[rank]]


class KvPool:
    """Blocks and sequences of one ring incarnation. At most `kept_fraction` of a rank's blocks are retained.

    Retained sequences are evicted in parts of at least `part_tokens` tokens, the end first.
    """

    def __init__(
        self,
        num_ranks: int,
        num_blocks: int,
        block_tokens: int,
        *,
        kept_fraction: float = 1.0,
        part_tokens: int = EXTENT_TOKENS,
    ) -> None:
        self.num_ranks = num_ranks
        self._part_tokens = part_tokens
        self.block_tokens = block_tokens
        self.evictions = Counter[str]()  # by PARTS
        self._max_retained = int(num_blocks * kept_fraction)
        extent = max(-(-EXTENT_TOKENS // block_tokens), -(-num_blocks // MAX_EXTENTS))
        self._ranks = [BlockAllocator(num_blocks, extent) for _ in range(num_ranks)]
        self._sequences: OrderedDict[str, SequenceKv] = OrderedDict()
        # Kept apart, because a full cache has thousands of sequences, and few of them are pinned.
        self._pinned: dict[str, SequenceKv] = {}
        self._settled: dict[str, asyncio.Event] = {}  # by sequence that somebody waits to see unpinned

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the whole ring can hold."""
        return sum(rank.num_blocks for rank in self._ranks) * self.block_tokens

    @property
    def free_tokens(self) -> int:
        """Tokens that the ring could still hold if it evicted all retained sequences.

        The fullest rank decides, because tokens lie evenly over the ranks. A block that two pinned sequences share
        counts twice, so the number is a lower bound.
        """
        free = (
            allocator.num_blocks - sum(len(item.blocks[rank]) for item in self._pinned.values())
            for rank, allocator in enumerate(self._ranks)
        )
        return max(0, min(free, default=0)) * self.num_ranks * self.block_tokens

    @property
    def spare_tokens(self) -> int:
        """Tokens that the ring could retain without evicting any sequence; the fullest rank decides."""
        spare = (min(rank.free_blocks, self._max_retained - rank.kept_blocks) for rank in self.usage())
        return max(0, min(spare, default=0)) * self.num_ranks * self.block_tokens

    @property
    def shared_tokens(self) -> int:
        """Further tokens of room that the sequences would need if they shared no blocks."""
        return sum(rank.num_shared for rank in self._ranks) * self.block_tokens

    def get(self, kv_id: str) -> SequenceKv | None:
        """Return a sequence, if it is here."""
        return self._sequences.get(kv_id)

    def num_retained(self, kv_id: str) -> int:
        """Return the number of a sequence's tokens whose KV is here."""
        sequence = self._sequences.get(kv_id)
        return 0 if sequence is None else sequence.shards.num_tokens

    def pin(self, kv_id: str, turn_id: str, match_tokens: int, *, shares: str = "") -> SequenceKv:
        """Pin a sequence for a turn, cut to its first `match_tokens` tokens; a new sequence starts empty.

        With `shares` the sequence is new and begins with the first `match_tokens` tokens of sequence `shares`, as in
        `fork`. Raises Busy while another turn has the sequence pinned, even if that turn has ended and will settle
        soon.
        """
        if shares:
            return self.fork(shares, kv_id, turn_id, match_tokens)
        sequence = self._sequences.get(kv_id)
        if sequence is None:
            sequence = self._add(kv_id)
        if sequence.pinned_by not in (None, turn_id):
            raise Busy(
                f"conversation_id: {kv_id!r} is busy until turn {sequence.pinned_by!r} has settled; retry in a moment"
            )
        is_again = sequence.pinned_by is not None
        self._pin(sequence, turn_id)
        self._sequences.move_to_end(kv_id)
        self._cut(sequence, match_tokens)
        if not is_again:
            sequence.num_before = sequence.shards.num_tokens
        return sequence

    def hold(self, kv_id: str, holder: str, num_tokens: int) -> SequenceKv:
        """Pin a retained sequence as it is, for a reader of its first `num_tokens` tokens; `settle` releases it.

        Raises NotFound if fewer tokens of it are here, Busy while another holder has it pinned.
        """
        sequence = self._sequences.get(kv_id)
        if sequence is None or sequence.shards.num_tokens < num_tokens:
            raise NotFound(
                f"sequence {kv_id!r}: {num_tokens} tokens are asked for, {self.num_retained(kv_id)} are cached"
            )
        if sequence.pinned_by is not None:
            raise Busy(f"sequence {kv_id!r} is in use by {sequence.pinned_by!r}; retry in a moment")
        self._pin(sequence, holder)
        sequence.num_before = sequence.shards.num_tokens
        return sequence

    async def until_unpinned(self, kv_id: str, seconds: float) -> None:
        """Wait until a sequence's holder, if it has one, has settled; `seconds` at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                # Several may wait, and the first may pin the sequence again at once.
                while (sequence := self._sequences.get(kv_id)) is not None and sequence.pinned_by is not None:
                    await self._settled.setdefault(kv_id, asyncio.Event()).wait()

    def take_in(self, kv_id: str, holder: str, held: Sequence[int]) -> SequenceKv:
        """Pin a new sequence with room for `held[r]` tokens on each rank r, whose KV comes from another ring.

        It replaces an earlier sequence of the same id and evicts no other. Raises CapacityExceeded if there is no
        spare room, Busy while the earlier sequence is pinned.
        """
        old = self._sequences.get(kv_id)
        if old is not None and old.pinned_by is not None:
            raise Busy(f"sequence {kv_id!r} is in use by {old.pinned_by!r}; retry in a moment")
        if old is not None:
            self._drop(old)
        for rank, usage in enumerate(self.usage()):
            need, spare = self._blocks_for(held[rank]), min(usage.free_blocks, self._max_retained - usage.kept_blocks)
            if need > spare:
                raise CapacityExceeded(
                    f"kv cache: {need} blocks of {self.block_tokens} tokens are needed on rank {rank} and {spare} are "
                    f"spare"
                )
        sequence = self._add(kv_id)
        self._pin(sequence, holder)
        self.make_room(sequence, held)
        return sequence

    def fork(self, source_id: str, kv_id: str, turn_id: str, num_tokens: int) -> SequenceKv:
        """Pin a new sequence that begins with another's first `num_tokens` tokens, as far as they are here.

        It shares the other's full blocks and gets a copy of a block filled in part (`copies`). An earlier sequence of
        the new id is dropped first. Raises Busy if that one is pinned; it stays. Raises CapacityExceeded if there is no
        room for the copies; then no sequence of the new id is left.
        """
        old = self._sequences.get(kv_id)
        if old is not None and old.pinned_by is not None:
            raise Busy(f"conversation_id: {kv_id!r} is busy until {old.pinned_by!r} has settled; retry")
        if old is not None:
            self._drop(old)
        source = self._sequences.get(source_id)
        sequence = self._add(kv_id)
        self._pin(sequence, turn_id)
        sequence.is_forking = True
        if source is None:
            return sequence
        sequence.shards = source.shards.truncate(num_tokens)
        # If a turn runs on the source, `last_turn` is the turn before that one, and the fork may have more tokens than
        # it wrote.
        sequence.last_turn, sequence.num_before = source.last_turn, sequence.shards.num_tokens
        for rank, held in enumerate(sequence.shards.held):
            sequence.blocks[rank] = source.filled_table(rank)[: self._blocks_for(held)]
            self._ranks[rank].share(sequence.blocks[rank])
        self._sequences.move_to_end(source_id)
        try:
            self.make_room(sequence, sequence.shards.held)
        except CapacityExceeded:
            self._drop(sequence)
            raise
        return sequence

    def make_room(self, sequence: SequenceKv, held: Sequence[int]) -> None:
        """Give a pinned sequence blocks for `held[r]` tokens on each rank r, evicting retained sequences if needed.

        On every rank, shared blocks from the first unwritten slot on are exchanged for the sequence's own (`copies`).
        Raises CapacityExceeded with the numbers, having changed nothing, if the blocks do not suffice.
        """
        shared = [self._shared_room(sequence, rank) for rank in range(self.num_ranks)]
        needs = [
            max(0, self._blocks_for(tokens) - len(table)) + len(places)
            for tokens, table, places in zip(held, sequence.blocks, shared, strict=True)
        ]
        self._evict_for(needs)
        for rank, (need, places) in enumerate(zip(needs, shared, strict=True)):
            if need:
                self._grow(sequence, rank, need, places)

    def _shared_room(self, sequence: SequenceKv, rank: int) -> list[int]:
        """Return the places in a rank's table whose blocks will be written and have another holder."""
        table = sequence.blocks[rank]
        first = sequence.shards.held[rank] // self.block_tokens
        return [place for place in range(first, len(table)) if self._is_shared(sequence, rank, table[place])]

    def _is_shared(self, sequence: SequenceKv, rank: int, block: int) -> bool:
        """Return whether another holder needs slots of the block that this sequence may write.

        A fork that has yet to copy the block does not: it copies slots that are filled already, then releases the
        block.
        """
        others = self._ranks[rank].num_holders(block) - 1
        if not others:
            return False
        held = sequence.shards.held[rank]
        forks = (item for item in self._sequences.values() if item.is_forking and item.shards.held[rank] <= held)
        return others > sum(copy.rank == rank and copy.source == block for fork in forks for copy in fork.copies)

    def _evict_for(self, needs: Sequence[int]) -> None:
        """Evict until `needs[r]` blocks are free on each rank r. Raises CapacityExceeded, having changed nothing."""
        if all(need <= rank.num_free for need, rank in zip(needs, self._ranks, strict=True)):
            return
        oldest_first = (other for other in self._sequences.values() if other.pinned_by is None)
        tails = _tails_to_evict(oldest_first, self._ranks, needs, self.block_tokens, self._part_tokens)
        for other, num_tokens in tails:
            self._cut(other, num_tokens)
            if not num_tokens:
                self._drop(other)
            self.evictions["end" if num_tokens else "whole"] += 1

    def _grow(self, sequence: SequenceKv, rank: int, count: int, shared: Sequence[int]) -> None:
        """Take `count` free blocks: the first replace those at the `shared` places of the table, others extend it."""
        allocator, table = self._ranks[rank], sequence.blocks[rank]
        before = shared[0] if shared else len(table)
        fresh = allocator.allocate(count, after=table[before - 1] if before else None)
        filled = sequence.shards.held[rank]
        for place, block in zip(shared, fresh, strict=False):
            if place * self.block_tokens < filled:
                sequence.copies.append(BlockCopy(rank, table[place], block))
            else:
                allocator.free([table[place]])
            table[place] = block
        table += fresh[len(shared) :]

    def copied(self, sequence: SequenceKv) -> None:
        """Release the sources of the copies, which the ranks have made."""
        for copy in sequence.copies:
            self._ranks[copy.rank].free([copy.source])
        sequence.copies.clear()

    def _uncopy(self, sequence: SequenceKv) -> None:
        """Give up the copies that are not made.

        No rank has written to the new blocks, so the table gets the sources back.
        """
        for copy in sequence.copies:
            table = sequence.blocks[copy.rank]
            table[table.index(copy.destination)] = copy.source
            self._ranks[copy.rank].free([copy.destination])
        sequence.copies.clear()

    def settle(self, kv_id: str, turn_id: str, retain_tokens: int, *, is_guest: bool = False) -> None:
        """End a turn's pin, retain the first `retain_tokens` tokens and release the other blocks. Idempotent.

        Copies that are not made yet are given up: the caller guarantees that no rank is making them. `is_guest`:
        another ring retained the sequence before, or retains it as well. Until a turn uses it here, it is the first to
        be evicted.
        """
        sequence = self._sequences.get(kv_id)
        if sequence is None or sequence.pinned_by not in (None, turn_id):
            return
        self._uncopy(sequence)
        if sequence.pinned_by is not None:
            if retain_tokens > sequence.num_before:
                sequence.last_turn = sequence.pinned_by
            sequence.pinned_by, sequence.is_forking = None, False
            del self._pinned[kv_id]
            if (settled := self._settled.pop(kv_id, None)) is not None:
                settled.set()
            self._sequences.move_to_end(kv_id, last=not is_guest)  # else it is the most recently used
        self._cut(sequence, retain_tokens)
        if not sequence.shards.num_tokens:
            self._drop(sequence)
        self._bound_retained()

    def _bound_retained(self) -> None:
        """Drop retained sequences, the least recently used first, while a rank exceeds its limit."""
        if all(rank.num_blocks == self._max_retained for rank in self._ranks):
            return
        while any(usage.kept_blocks > self._max_retained for usage in self.usage()):
            oldest = next((other for other in self._sequences.values() if other.pinned_by is None), None)
            if oldest is None:
                return
            self._drop(oldest)

    def _pin(self, sequence: SequenceKv, holder: str) -> None:
        sequence.pinned_by = holder
        self._pinned[sequence.kv_id] = sequence

    def _add(self, kv_id: str) -> SequenceKv:
        empty = SequenceKv(kv_id, ShardMap.empty(self.num_ranks), [[] for _ in range(self.num_ranks)])
        self._sequences[kv_id] = empty
        return empty

    def _cut(self, sequence: SequenceKv, num_tokens: int) -> None:
        sequence.shards = sequence.shards.truncate(num_tokens)
        for rank, held in enumerate(sequence.shards.held):
            keep = self._blocks_for(held)
            self._ranks[rank].free(sequence.blocks[rank][keep:])
            del sequence.blocks[rank][keep:]

    def _drop(self, sequence: SequenceKv) -> None:
        self._uncopy(sequence)
        for allocator, table in zip(self._ranks, sequence.blocks, strict=True):
            allocator.free(table)
        del self._sequences[sequence.kv_id]
        self._pinned.pop(sequence.kv_id, None)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def usage(self) -> tuple[RankKvUsage, ...]:
        """Return free, active and retained blocks of every rank.

        A block that an active and a retained sequence share is active.
        """
        return tuple(self._usage_of(rank, allocator) for rank, allocator in enumerate(self._ranks))

    def _usage_of(self, rank: int, allocator: BlockAllocator) -> RankKvUsage:
        active = len({block for item in self._pinned.values() for block in self._blocks_of(item, rank)})
        total, free = allocator.num_blocks, allocator.num_free
        retained = total - free - active
        return RankKvUsage(total_blocks=total, free_blocks=free, active_blocks=active, kept_blocks=retained)

    def _blocks_of(self, sequence: SequenceKv, rank: int) -> list[int]:
        """Return every block that a sequence holds on a rank, with the sources of copies that are not made yet."""
        return [*sequence.blocks[rank], *(copy.source for copy in sequence.copies if copy.rank == rank)]

    def inventory(self) -> tuple[SequenceOnRing, ...]:
        """Return every sequence as it was before the turn that has it pinned."""
        return tuple(
            SequenceOnRing(
                kv_id=item.kv_id,
                last_turn=item.last_turn,
                shards=item.shards if item.pinned_by is None else item.shards.truncate(item.num_before),
            )
            for item in self._sequences.values()
        )

    def check_integrity(self) -> None:
        """Assert the pool's invariants.

        Every block is free or in the tables of exactly its holders. Every table has room for the tokens of its rank. No
        block that a sequence may write is shared.
        """
        for rank, allocator in enumerate(self._ranks):
            allocator.check_integrity(
                block for item in self._sequences.values() for block in self._blocks_of(item, rank)
            )
        pinned = {kv_id: item for kv_id, item in self._sequences.items() if item.pinned_by is not None}
        assert self._pinned == pinned, "a sequence in use is not listed"
        for item in self._sequences.values():
            for rank, (table, held) in enumerate(zip(item.blocks, item.shards.held, strict=True)):
                assert len(table) >= self._blocks_for(held), f"{item.kv_id} lacks room for its own tokens"
                room = table[self._blocks_for(held) :]
                assert all(self._ranks[rank].num_holders(block) == 1 for block in room), (
                    f"{item.kv_id} would write into a block of another"
                )


def _tails_to_evict(
    oldest_first: Iterable[SequenceKv],
    ranks: Sequence[BlockAllocator],
    needs: Sequence[int],
    block_tokens: int,
    part_tokens: int,
) -> list[tuple[SequenceKv, int]]:
    """Return sequences to be evicted until `needs[r]` blocks are free on rank r, each with how many tokens stay.

    The beginning of a sequence stays as long as its end is enough: later prompts are likelier to share it, and it is of
    no use to them without what precedes it. A block that several sequences hold is free when the last releases it.
    Sequences are evicted in parts of at least `part_tokens` tokens. Raises CapacityExceeded if evicting all of them
    would not be enough.
    """
    room = [rank.num_free for rank in ranks]
    released: Counter[tuple[int, int]] = Counter()  # by (rank, block): its holders that are to be evicted
    tails: list[tuple[SequenceKv, int]] = []
    # Only sequences that are evicted are looked at, each once: a full cache evicts at each growth.
    rest = iter(oldest_first)
    while any(need > blocks for need, blocks in zip(needs, room, strict=True)):
        other = next(rest, None)
        if other is None:
            rank = next(rank for rank, need in enumerate(needs) if need > room[rank])
            raise CapacityExceeded(
                f"kv cache: {needs[rank]} blocks of {block_tokens} tokens are needed on rank {rank} and "
                f"{room[rank]} of {ranks[rank].num_blocks} can be freed; retry when running turns have ended"
            )
        total = keep = other.shards.num_tokens
        parts = max(1, min(MAX_PARTS, total // part_tokens))
        ends = [len(table) for table in other.blocks]
        for part in reversed(range(parts)):
            keep = total * part // parts
            for rank, held in enumerate(other.shards.truncate(keep).held):
                first = -(-held // block_tokens)
                for block in other.blocks[rank][first : ends[rank]]:
                    released[rank, block] += 1
                    room[rank] += released[rank, block] == ranks[rank].num_holders(block)
                ends[rank] = min(ends[rank], first)
            if all(need <= blocks for need, blocks in zip(needs, room, strict=True)):
                break
        tails.append((other, keep))
    return tails
