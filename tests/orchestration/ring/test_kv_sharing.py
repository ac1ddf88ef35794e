"""Forked sequences share blocks, and none of them ever reads another's tokens.

The state machine replaces the ranks: it writes a number into each slot of a token's KV, and copies blocks when the pool
asks for it. Every sequence must read its own history at any time.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ringserve.cp_core.errors import Busy, CapacityExceeded
from ringserve.cp_core.layout.shards import spread
from ringserve.orchestration.ring.kv_pool import BlockCopy, KvPool, SequenceKv

BLOCK_TOKENS = 4
NAMES = "abcdef"


class Forks(RuleBasedStateMachine):
    """Sequences and slots: `histories` are the numbers that each sequence must read, `memory` those in the slots."""

    @initialize(
        num_ranks=st.integers(1, 3),
        num_blocks=st.integers(2, 24),
        kept_fraction=st.sampled_from([1.0, 1.0, 0.6]),
        part_tokens=st.sampled_from([1, 5, 128]),
    )
    def begin(self, num_ranks: int, num_blocks: int, kept_fraction: float, part_tokens: int) -> None:
        self.pool = KvPool(num_ranks, num_blocks, BLOCK_TOKENS, kept_fraction=kept_fraction, part_tokens=part_tokens)
        self.max_retained = int(num_blocks * kept_fraction)
        self.memory: dict[tuple[int, int], int] = {}
        self.histories: dict[str, list[int]] = {}
        self.pinned: dict[str, SequenceKv] = {}
        self.forking: dict[str, SequenceKv] = {}
        self.has_room: set[str] = set()
        self.next_number = 0

    @rule(name=st.sampled_from(NAMES), match=st.integers(0, 40))
    def pin(self, name: str, match: int) -> None:
        if name in self.pinned or name in self.forking:
            return
        self.pinned[name] = self.pool.pin(name, name, match)
        self.histories[name] = self.histories.get(name, [])[:match]

    @rule(name=st.sampled_from(NAMES), match=st.integers(0, 40), more=st.integers(1, 20), keep=st.integers(0, 60))
    def run_a_turn(self, name: str, match: int, more: int, keep: int) -> None:
        if name not in self.pinned and name not in self.forking:
            self.pin(name, match)
            self.write_to(name, more, is_copied=True)
            self.settle_one(name, keep)

    @rule(data=st.data(), more=st.integers(0, 30), is_copied=st.booleans())
    def write(self, data: st.DataObject, more: int, is_copied: bool) -> None:
        if self.pinned:
            self.write_to(data.draw(st.sampled_from(sorted(self.pinned))), more, is_copied)

    def write_to(self, name: str, more: int, is_copied: bool) -> None:
        """Give a turn room; its ranks copy and write, or it is given up before they do."""
        sequence = self.pinned[name]
        retained = sequence.shards.num_tokens
        filled = sequence.shards.extend(spread(retained, more, sequence.shards.held))
        try:
            self.pool.make_room(sequence, filled.held)
        except CapacityExceeded:
            self.forget_evicted()
            return
        self.forget_evicted()
        if name in self.has_room:
            assert not sequence.copies, "from its first room on a turn writes to blocks of its own"
        if not is_copied:
            return
        self.copy(sequence)
        self.has_room.add(name)
        for rank, ranges in enumerate(filled.ranks):
            first = sequence.shards.held[rank]
            positions = [position for item in ranges for position in range(item.start, item.stop)]
            for index in range(first, len(positions)):
                block, offset = self.slot(sequence, rank, index)
                tables = [item.blocks[rank] for item in map(self.pool.get, NAMES) if item is not None]
                assert sum(block in table for table in tables) == 1, "a shared block is never written"
                self.memory[rank, block * BLOCK_TOKENS + offset] = self.next_number + positions[index]
        self.histories[name] += range(self.next_number + retained, self.next_number + retained + more)
        self.next_number += 1000
        sequence.shards = filled

    @rule(data=st.data(), keep=st.integers(0, 60))
    def settle(self, data: st.DataObject, keep: int) -> None:
        if self.pinned:
            self.settle_one(data.draw(st.sampled_from(sorted(self.pinned))), keep)

    def settle_one(self, name: str, keep: int) -> None:
        del self.pinned[name]
        self.has_room.discard(name)
        self.pool.settle(name, name, keep)
        self.histories[name] = self.histories[name][:keep]
        self.forget_evicted()
        assert all(usage.kept_blocks <= self.max_retained for usage in self.pool.usage())

    @rule(data=st.data(), new=st.sampled_from(NAMES), num_tokens=st.integers(1, 40))
    def begin_fork(self, data: st.DataObject, new: str, num_tokens: int) -> None:
        sources = sorted(
            name for name, history in self.histories.items() if history and name != new and name not in self.forking
        )
        if not sources:
            return
        source = data.draw(st.sampled_from(sources))
        if new in self.pinned or new in self.forking:
            with pytest.raises(Busy, match=f"'{new}' is busy"):
                self.pool.fork(source, new, "fork", num_tokens)
            return
        try:
            sequence = self.pool.fork(source, new, "fork", num_tokens)
        except CapacityExceeded:
            assert self.pool.get(new) is None
        else:
            self.histories[new] = self.histories[source][: sequence.shards.num_tokens]
            assert len(self.histories[new]) == min(num_tokens, len(self.histories[source]))
            self.forking[new] = sequence
        self.forget_evicted()

    @rule(data=st.data(), is_copied=st.booleans())
    def end_fork(self, data: st.DataObject, is_copied: bool) -> None:
        """End a fork; one given up before the copies are made retains nothing."""
        if not self.forking:
            return
        name = data.draw(st.sampled_from(sorted(self.forking)))
        sequence = self.forking.pop(name)
        if is_copied:
            self.copy(sequence)
        self.pool.settle(name, "fork", 60 if is_copied else 0)
        self.forget_evicted()

    def copy(self, sequence: SequenceKv) -> None:
        for copy in sequence.copies:
            for offset in range(BLOCK_TOKENS):
                number = self.memory.get((copy.rank, copy.source * BLOCK_TOKENS + offset), -1)
                self.memory[copy.rank, copy.destination * BLOCK_TOKENS + offset] = number
        self.pool.copied(sequence)

    def slot(self, sequence: SequenceKv, rank: int, index: int) -> tuple[int, int]:
        place, offset = divmod(index, BLOCK_TOKENS)
        return sequence.filled_table(rank)[place], offset

    def forget_evicted(self) -> None:
        for name in [name for name in self.histories if self.pool.get(name) is None]:
            assert name not in self.pinned | self.forking, "a pinned sequence is never evicted"
            del self.histories[name]
        for name in self.histories.keys() - self.pinned.keys() - self.forking.keys():  # the end may be evicted
            self.histories[name] = self.histories[name][: self.pool.num_retained(name)]

    @invariant()
    def everyone_reads_its_own_history(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        for name, history in self.histories.items():
            sequence = self.pool.get(name)
            assert sequence is not None
            assert sequence.shards.num_tokens == len(history)
            for rank, ranges in enumerate(sequence.shards.ranks):
                positions = [position for item in ranges for position in range(item.start, item.stop)]
                for index, position in enumerate(positions):
                    block, offset = self.slot(sequence, rank, index)
                    assert self.memory[rank, block * BLOCK_TOKENS + offset] == history[position]


TestForks = Forks.TestCase
TestForks.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def retained(pool: KvPool, name: str, num_tokens: int) -> SequenceKv:
    sequence = pool.pin(name, "turn", 0)
    shards = spread(0, num_tokens, (0,) * pool.num_ranks)
    pool.make_room(sequence, shards.held)
    sequence.shards = shards
    pool.settle(name, "turn", num_tokens)
    return sequence


def forked(pool: KvPool, source: str, name: str, num_tokens: int) -> SequenceKv:
    sequence = pool.fork(source, name, "fork", num_tokens)
    pool.copied(sequence)
    pool.settle(name, "fork", num_tokens)
    return sequence


def test_a_fork_shares_full_blocks_and_gets_its_own_of_the_one_that_is_filled_in_part() -> None:
    pool = KvPool(1, 8, BLOCK_TOKENS)
    source = retained(pool, "a", 10)
    fork = pool.fork("a", "b", "fork", 10)
    assert fork.blocks[0][:2] == source.blocks[0][:2]
    assert fork.copies == [BlockCopy(0, source.blocks[0][2], fork.blocks[0][2])]
    assert [usage.free_blocks for usage in pool.usage()] == [4]


def test_shared_blocks_are_counted_once_for_each_further_holder() -> None:
    pool = KvPool(2, 16, BLOCK_TOKENS)
    retained(pool, "a", 32)
    assert pool.shared_tokens == 0
    for name in "bc":
        forked(pool, "a", name, 16)
    assert pool.shared_tokens == 32
    pool.settle("a", "", 0)
    assert pool.shared_tokens == 16


def test_the_end_of_one_fork_frees_nothing_of_the_other() -> None:
    pool = KvPool(2, 8, BLOCK_TOKENS)
    retained(pool, "a", 20)
    forked(pool, "a", "b", 20)
    pool.settle("a", "", 0)
    assert pool.num_retained("a") == 0
    assert pool.num_retained("b") == 20
    pool.check_integrity()
    pool.settle("b", "", 0)
    assert [usage.free_blocks for usage in pool.usage()] == [8, 8]


def test_a_fork_of_a_cut_history_copies_before_it_writes_where_the_other_has_written() -> None:
    pool = KvPool(1, 8, BLOCK_TOKENS)
    source = retained(pool, "a", 8)
    forked(pool, "a", "b", 8)
    cut = pool.pin("b", "turn", 6)
    assert cut.blocks == source.blocks
    pool.make_room(cut, [9])
    assert cut.copies == [BlockCopy(0, source.blocks[0][1], cut.blocks[0][1])]
    assert cut.blocks[0][1] != source.blocks[0][1]
    pool.check_integrity()


def test_a_turn_given_up_before_its_copies_were_made_leaves_the_table_as_it_was() -> None:
    pool = KvPool(1, 8, BLOCK_TOKENS)
    source = retained(pool, "a", 8)
    forked(pool, "a", "b", 8)
    cut = pool.pin("b", "turn", 6)
    pool.make_room(cut, [9])
    pool.settle("b", "turn", 6)
    assert cut.blocks == source.blocks
    assert not cut.copies
    pool.check_integrity()


def test_a_turn_that_grows_while_it_is_forked_stays_in_its_own_blocks() -> None:
    pool = KvPool(1, 8, BLOCK_TOKENS)
    retained(pool, "a", 10)
    source = pool.pin("a", "turn", 10)
    pool.make_room(source, [12])
    table = list(source.blocks[0])
    fork = pool.fork("a", "b", "fork", 10)  # its copy is under way
    pool.make_room(source, [16])
    assert not source.copies
    assert source.blocks[0][:3] == table
    pool.copied(fork)
    pool.settle("b", "fork", 10)
    pool.check_integrity()


def test_what_two_retained_forks_share_counts_as_room_that_can_be_freed() -> None:
    pool = KvPool(1, 4, BLOCK_TOKENS)
    retained(pool, "a", 16)
    forked(pool, "a", "b", 16)
    new = pool.pin("new", "turn", 0)
    pool.make_room(new, [16])
    assert (pool.num_retained("a"), pool.num_retained("b")) == (0, 0)
    pool.check_integrity()


def test_what_a_running_turn_shares_with_a_retained_fork_does_not_count_as_room() -> None:
    pool = KvPool(1, 6, BLOCK_TOKENS)
    retained(pool, "a", 16)
    forked(pool, "a", "b", 16)
    pool.pin("a", "turn", 16)
    with pytest.raises(CapacityExceeded, match=r"3 blocks of 4 tokens .* and 2 of 6 can be freed"):
        pool.make_room(pool.pin("new", "other", 0), [12])
    assert pool.num_retained("b") == 16
    assert [usage.active_blocks for usage in pool.usage()] == [4]


def test_a_fork_of_what_is_not_here_keeps_nothing() -> None:
    pool = KvPool(1, 4, BLOCK_TOKENS)
    assert pool.fork("nobody", "b", "fork", 8).shards.num_tokens == 0
    pool.settle("b", "fork", 8)
    assert pool.get("b") is None


def test_retained_kv_has_a_bound_and_the_least_recently_used_goes_first() -> None:
    pool = KvPool(1, 10, BLOCK_TOKENS, kept_fraction=0.5)
    for name in "abc":
        retained(pool, name, 8)
    assert [pool.num_retained(name) for name in "abc"] == [0, 8, 8]
    pool.pin("b", "turn", 8)  # blocks of a pinned sequence do not count
    retained(pool, "d", 8)
    assert [pool.num_retained(name) for name in "bcd"] == [8, 8, 8]
    pool.settle("b", "turn", 8)
    assert [pool.num_retained(name) for name in "bcd"] == [8, 0, 8]


def test_a_bound_of_nothing_keeps_nothing() -> None:
    pool = KvPool(2, 10, BLOCK_TOKENS, kept_fraction=0.0)
    retained(pool, "a", 8)
    assert pool.get("a") is None
    assert [usage.free_blocks for usage in pool.usage()] == [10, 10]
