"""Block allocator compared with a set of free blocks, over any sequence of calls."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ringserve.orchestration.ring.kv_pool import BlockAllocator


def runs(blocks: set[int]) -> list[list[int]]:
    """Return the runs of adjacent blocks, ascending."""
    found: list[list[int]] = []
    for block in sorted(blocks):
        if found and found[-1][-1] == block - 1:
            found[-1].append(block)
        else:
            found.append([block])
    return found


class Allocations(RuleBasedStateMachine):
    """Tables that take blocks and return some or all of them; `free` are the blocks that should be free."""

    @initialize(num_blocks=st.integers(0, 40), extent=st.integers(1, 9))
    def begin(self, num_blocks: int, extent: int) -> None:
        self.allocator = BlockAllocator(num_blocks, extent)
        self.free = set(range(num_blocks))
        self.tables: list[list[int]] = []

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, len(self.free)))
        before = runs(self.free)
        table = self.allocator.allocate(count)
        self._took(table, count)
        if any(len(run) >= count > 0 for run in before):
            assert len(runs(set(table))) == 1, "a run that holds all of them was free"
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        count = data.draw(st.integers(0, len(self.free)))
        follows = bool(table) and table[-1] + 1 in self.free
        more = self.allocator.allocate(count, after=table[-1] if table else None)
        self._took(more, count)
        if follows and count:
            assert more[0] == table[-1] + 1, "the table could have grown in place"
        table += more

    def _took(self, blocks: list[int], count: int) -> None:
        assert len(set(blocks)) == len(blocks) == count
        assert set(blocks) <= self.free
        self.free -= set(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        keep = data.draw(st.integers(0, len(table)))
        self.allocator.free(table[keep:])
        self.free |= set(table[keep:])
        del table[keep:]

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def free_twice(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.free)))
        with pytest.raises(AssertionError, match=f"block {block} is free already"):
            self.allocator.free([block])

    @invariant()
    def is_whole(self) -> None:
        if hasattr(self, "allocator"):
            assert self.allocator.num_free == len(self.free)
            self.allocator.check_integrity(block for table in self.tables for block in table)


TestAllocations = Allocations.TestCase
TestAllocations.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(st.integers(1, 30), st.randoms(use_true_random=False))
def test_blocks_freed_in_any_order_become_one_run_again(num_blocks: int, chance: object) -> None:
    allocator = BlockAllocator(num_blocks)
    blocks = allocator.allocate(num_blocks)
    chance.shuffle(blocks)  # type: ignore[attr-defined]
    allocator.free(blocks)
    assert allocator.allocate(num_blocks) == list(range(num_blocks))


def test_the_shortest_run_that_holds_all_is_taken_wherever_it_is() -> None:
    allocator = BlockAllocator(12)
    allocator.allocate(12)
    allocator.free([11, 9, 1, 2, 3, 4, 10, 7, 6])
    assert allocator.allocate(2) == [6, 7]
    assert allocator.allocate(3) == [9, 10, 11]
    allocator.free([6, 7, 9])
    assert allocator.allocate(6) == [1, 2, 3, 4, 6, 7]


def test_tables_that_grow_in_turn_get_runs_of_whole_extents() -> None:
    allocator = BlockAllocator(48, extent_blocks=8)
    tables: list[list[int]] = [[], [], []]
    for _ in range(16):
        for table in tables:
            table += allocator.allocate(1, after=table[-1] if table else None)
    assert allocator.num_free == 0
    for table in tables:
        assert all(len(run) % 8 == 0 and run[0] % 8 == 0 for run in runs(set(table)))


def test_without_a_free_extent_any_free_block_serves() -> None:
    allocator = BlockAllocator(20, extent_blocks=8)
    first, second = allocator.allocate(2), allocator.allocate(3)
    assert (first, second) == ([0, 1], [8, 9, 10])
    assert allocator.num_free == 15, "the blocks of an extent that are not in use are free"
    assert allocator.allocate(5) == [2, 3, 4, 5, 6]
    assert allocator.allocate(2, after=1) == [11, 12]
    assert allocator.allocate(8) == [13, 14, 15, 16, 17, 18, 19, 7]
    allocator.check_integrity(range(20))


def test_asking_for_more_than_is_free_is_a_bug_and_takes_nothing() -> None:
    allocator = BlockAllocator(3)
    with pytest.raises(AssertionError, match="asked for 4 blocks of 3 free"):
        allocator.allocate(4)
    allocator.check_integrity([])


@pytest.mark.parametrize("block", [-1, 3])
def test_a_block_that_does_not_exist_cannot_be_freed(block: int) -> None:
    with pytest.raises(AssertionError, match=f"block {block} does not exist"):
        BlockAllocator(3).free([block])


def test_a_lost_block_and_a_doubled_one_break_integrity() -> None:
    allocator = BlockAllocator(4)
    taken = allocator.allocate(2)
    with pytest.raises(AssertionError, match="lost or held twice"):
        allocator.check_integrity(taken[:1])
    with pytest.raises(AssertionError, match="lost or held twice"):
        allocator.check_integrity([*taken, 3])
