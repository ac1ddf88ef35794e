"""KV pool: pinned sequences hold their KV always, retained ones as long as there are blocks."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ringserve.cp_core.errors import Busy, CapacityExceeded, NotFound
from ringserve.cp_core.layout.shards import ShardMap, TokenRange, spread
from ringserve.orchestration.ring.kv_pool import BlockAllocator, KvPool, SequenceKv

BLOCK_TOKENS = 4


def fill(pool: KvPool, sequence: SequenceKv, num_tokens: int) -> None:
    """Make room for `num_tokens` tokens in all and enter the missing ones evenly."""
    retained = sequence.shards.num_tokens
    filled = sequence.shards.extend(spread(retained, num_tokens - retained, sequence.shards.held))
    pool.make_room(sequence, filled.held)
    sequence.shards = filled


def retain(pool: KvPool, name: str, num_tokens: int) -> None:
    """Run a turn that retains `num_tokens` tokens of a sequence."""
    fill(pool, pool.pin(name, f"turn of {name}", 0), num_tokens)
    pool.settle(name, f"turn of {name}", num_tokens)


def known(pool: KvPool, names: str) -> str:
    return "".join(name for name in names if pool.get(name) is not None)


class Turns(RuleBasedStateMachine):
    """Turns that pin, fill and settle sequences; `last_use` orders the retained ones."""

    @initialize(num_ranks=st.integers(1, 3), num_blocks=st.integers(1, 12))
    def begin(self, num_ranks: int, num_blocks: int) -> None:
        self.pool = KvPool(num_ranks, num_blocks, BLOCK_TOKENS)
        self.pinned: dict[str, SequenceKv] = {}
        self.retained: dict[str, int] = {}  # tokens, least recently used first

    @rule(name=st.sampled_from("abcdef"), match=st.integers(0, 60))
    def pin(self, name: str, match: int) -> None:
        if name in self.pinned:
            with pytest.raises(Busy, match=f"{name!r} is busy until turn '{name}' has settled"):
                self.pool.pin(name, "another", match)
            return
        sequence = self.pool.pin(name, name, match)
        assert sequence.shards.num_tokens == min(match, self.retained.pop(name, 0))
        self.pinned[name] = sequence

    @rule(data=st.data(), more=st.integers(0, 60))
    def fill(self, data: st.DataObject, more: int) -> None:
        if not self.pinned:
            return
        sequence = self.pinned[data.draw(st.sampled_from(sorted(self.pinned)))]
        before = self._tables()
        try:
            fill(self.pool, sequence, sequence.shards.num_tokens + more)
        except CapacityExceeded:
            assert self._tables() == before, "a refusal changes nothing"
            return
        gone = [name for name in self.retained if self.pool.get(name) is None]
        assert gone == list(self.retained)[: len(gone)], "the least recently used go first"
        for name in gone:
            del self.retained[name]

    @rule(data=st.data(), retain_tokens=st.integers(0, 60))
    def settle(self, data: st.DataObject, retain_tokens: int) -> None:
        if not self.pinned:
            return
        name = data.draw(st.sampled_from(sorted(self.pinned)))
        left = min(retain_tokens, self.pinned.pop(name).shards.num_tokens)
        self.pool.settle(name, "someone else", 0)  # not its sequence: nothing happens
        for _ in range(2):  # a second call is harmless
            self.pool.settle(name, name, retain_tokens)
        if left:
            self.retained[name] = left
        else:
            assert self.pool.get(name) is None

    def _tables(self) -> dict[str, list[list[int]]]:
        sequences = {name: self.pool.get(name) for name in (*self.pinned, *self.retained)}
        return {name: [list(table) for table in found.blocks] for name, found in sequences.items() if found}

    @invariant()
    def holds_what_it_should(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        assert {name: len(self._held(name)) for name in self.retained} == self.retained
        for name, sequence in self.pinned.items():
            assert self.pool.get(name) is sequence, "a pinned sequence is never evicted"
        for rank, usage in enumerate(self.pool.usage()):
            assert usage.free_blocks + usage.active_blocks + usage.kept_blocks == usage.total_blocks
            assert usage.active_blocks == sum(len(sequence.blocks[rank]) for sequence in self.pinned.values())

    def _held(self, name: str) -> TokenRange:
        found = self.pool.get(name)
        assert found is not None
        found.shards.check(TokenRange(0, found.shards.num_tokens))
        return TokenRange(0, found.shards.num_tokens)


TestTurns = Turns.TestCase
TestTurns.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def test_the_least_recently_used_sequence_makes_room() -> None:
    pool = KvPool(1, 4, BLOCK_TOKENS)
    for name in "abcd":
        retain(pool, name, 4)
    pool.pin("a", "again", 4)
    pool.settle("a", "again", 4)
    fill(pool, pool.pin("e", "turn", 0), 8)
    assert known(pool, "abcd") == "ad"


@pytest.mark.parametrize(("need", "left"), [(1, 12), (2, 8), (4, 0), (5, 0)])
def test_the_end_of_a_sequence_makes_room_before_its_beginning(need: int, left: int) -> None:
    pool = KvPool(1, 8, BLOCK_TOKENS, part_tokens=BLOCK_TOKENS)
    retain(pool, "a", 16)
    retain(pool, "b", 16)
    fill(pool, pool.pin("c", "turn", 0), need * BLOCK_TOKENS)
    pool.check_integrity()
    assert pool.num_retained("a") == left
    assert pool.num_retained("b") == (12 if need == 5 else 16)


def test_a_sequence_counts_as_used_until_its_turn_settles() -> None:
    pool = KvPool(1, 3, BLOCK_TOKENS)
    fill(pool, pool.pin("long", "turn", 0), 4)
    retain(pool, "short", 4)
    pool.settle("long", "turn", 4)
    fill(pool, pool.pin("new", "other", 0), 8)
    assert pool.get("long") is not None
    assert pool.get("short") is None


def test_more_than_can_be_freed_is_refused_with_the_numbers() -> None:
    pool = KvPool(2, 8, BLOCK_TOKENS)
    fill(pool, pool.pin("pinned", "turn", 0), 24)
    retain(pool, "retained", 8)
    with pytest.raises(CapacityExceeded, match=r"6 blocks of 4 tokens .* on rank 0 and 5 of 8 can be freed"):
        fill(pool, pool.pin("new", "other", 0), 48)
    assert pool.get("retained") is not None


def test_room_beyond_what_is_held_goes_back_when_the_turn_settles() -> None:
    pool = KvPool(2, 8, BLOCK_TOKENS)
    sequence = pool.pin("a", "turn", 0)
    pool.make_room(sequence, [32, 32])
    sequence.shards = spread(0, 9, (0, 0))
    assert [usage.free_blocks for usage in pool.usage()] == [0, 0]
    pool.settle("a", "turn", 9)
    assert [usage.kept_blocks for usage in pool.usage()] == [2, 1]
    pool.check_integrity()


def test_a_pin_cuts_to_what_still_matches() -> None:
    pool = KvPool(2, 8, BLOCK_TOKENS)
    retain(pool, "a", 24)
    sequence = pool.pin("a", "turn", 5)
    assert sequence.shards == ShardMap.of(((TokenRange(0, 5),), ()))
    assert [len(table) for table in sequence.blocks] == [2, 0]
    pool.check_integrity()


def test_pinning_again_for_the_same_turn_is_harmless() -> None:
    pool = KvPool(1, 8, BLOCK_TOKENS)
    retain(pool, "a", 8)
    assert pool.pin("a", "turn", 8) is pool.pin("a", "turn", 8)


def test_a_table_without_room_for_its_tokens_breaks_integrity() -> None:
    pool = KvPool(1, 8, BLOCK_TOKENS)
    sequence = pool.pin("a", "turn", 0)
    sequence.shards = spread(0, 5, (0,))
    with pytest.raises(AssertionError, match="a lacks room"):
        pool.check_integrity()


def test_capacity_counts_every_rank() -> None:
    assert KvPool(3, 8, BLOCK_TOKENS).capacity_tokens == 96


def test_a_guest_takes_spare_room_only_and_is_the_first_to_go_until_a_turn_uses_it() -> None:
    pool = KvPool(1, 8, BLOCK_TOKENS)
    for name in "ab":
        retain(pool, name, 2 * BLOCK_TOKENS)
    assert pool.spare_tokens == 4 * BLOCK_TOKENS
    with pytest.raises(CapacityExceeded, match="5 blocks of 4 tokens are needed on rank 0 and 4 are spare"):
        pool.take_in("g", "move", [5 * BLOCK_TOKENS])
    assert known(pool, "abg") == "ab"
    for name in "gh":
        guest = pool.take_in(name, "move", [BLOCK_TOKENS])
        guest.shards = spread(0, BLOCK_TOKENS, (0,))
        pool.settle(name, "move", BLOCK_TOKENS, is_guest=True)
    pool.pin("h", "turn", BLOCK_TOKENS)
    pool.settle("h", "turn", BLOCK_TOKENS)
    fill(pool, pool.pin("c", "turn", 0), 3 * BLOCK_TOKENS)
    assert known(pool, "abghc") == "abhc"
    pool.check_integrity()


def test_a_guest_stays_within_the_bound_of_retained_kv() -> None:
    pool = KvPool(1, 8, BLOCK_TOKENS, kept_fraction=0.5)
    retain(pool, "a", 3 * BLOCK_TOKENS)
    assert pool.spare_tokens == BLOCK_TOKENS
    with pytest.raises(CapacityExceeded, match="1 are spare"):
        pool.take_in("g", "move", [2 * BLOCK_TOKENS])
    pool.take_in("g", "move", [BLOCK_TOKENS])
    pool.check_integrity()


def test_a_held_sequence_is_neither_cut_nor_evicted_nor_held_twice() -> None:
    pool = KvPool(1, 4, BLOCK_TOKENS)
    retain(pool, "a", 3 * BLOCK_TOKENS)
    with pytest.raises(NotFound, match="13 tokens are asked for, 12 are cached"):
        pool.hold("a", "move", 13)
    assert pool.hold("a", "move", 12).shards.num_tokens == 12
    with pytest.raises(Busy, match="in use by 'move'"):
        pool.hold("a", "another", 1)
    with pytest.raises(Busy, match="in use by 'move'"):
        pool.take_in("a", "another", [1])
    with pytest.raises(CapacityExceeded):
        fill(pool, pool.pin("b", "turn", 0), 2 * BLOCK_TOKENS)
    pool.settle("a", "", 0)
    assert pool.num_retained("a") == 12, "what is held is freed by its holder"
    pool.settle("a", "move", 12)
    fill(pool, pool.pin("b", "turn", 0), 2 * BLOCK_TOKENS)
    assert known(pool, "ab") == "b"
    pool.check_integrity()


def test_growth_in_a_full_cache_looks_at_what_it_evicts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the blocks looked at, not the time: a full cache evicts at each growth."""
    pool = KvPool(2, 1024, BLOCK_TOKENS)
    for number in range(1023):
        sequence = pool.pin(f"old-{number}", "t", 0)
        pool.make_room(sequence, [BLOCK_TOKENS] * 2)
        sequence.shards = spread(0, 2 * BLOCK_TOKENS, (0, 0))
        pool.settle(f"old-{number}", "t", 2 * BLOCK_TOKENS)
    growing, looked = pool.pin("growing", "g", 0), 0
    num_holders = BlockAllocator.num_holders

    def counted(self: BlockAllocator, block: int) -> int:
        nonlocal looked
        looked += 1
        return num_holders(self, block)

    monkeypatch.setattr(BlockAllocator, "num_holders", counted)
    for blocks in range(1, 101):
        pool.make_room(growing, [blocks * BLOCK_TOKENS] * 2)
    assert pool.evictions.total() == 99
    assert pool.get("old-98") is None
    assert pool.get("old-99") is not None
    assert looked < 100 * 2 * 100, "all blocks of the cache would be 200,000"
    pool.check_integrity()
