"""Decode batch of every rank: its rows, and the owners and slots of new tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringserve.workers.decode.batch import BatchState
from ringserve.workers.decode.messages import BatchChange
from ringserve.workers.kv.cache import runs
from ringserve.workers.protocol.steps import GrowSequence
from tests.cp_core.layout.decoded import decoded
from tests.workers.decode.admissions import admission

BLOCK_TOKENS = 4


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple), st.integers(0, 30))
def test_ranks_agree_who_stores_what_and_stay_within_a_token(held: tuple[int, ...], num_steps: int) -> None:
    batches = [BatchState(rank, len(held), BLOCK_TOKENS) for rank in range(len(held))]
    for batch in batches:
        batch.advance((), BatchChange(admitted=(admission("a", held),)))
    for step in range(num_steps):
        writers = [len(batch.append().slots) for batch in batches]
        assert sum(writers) == 1, "one rank stores each token"
        for batch in batches:
            batch.advance((step,), BatchChange())
    wanted = decoded(sum(held), num_steps, held)
    for rank, batch in enumerate(batches):
        row = batch.rows[0]
        assert row.position == sum(held) + num_steps
        assert row.held[rank] - held[rank] == sum(len(item) for item in wanted.ranks[rank])
        assert tuple(row.runs) == runs(row.blocks, row.held[rank], BLOCK_TOKENS)
    grown = [a for a, b in zip(batches[0].rows[0].held, held, strict=True) if a > b]
    assert max(grown, default=0) - min(grown, default=0) <= 1


def test_rows_leave_before_others_join_and_keep_their_order() -> None:
    batch = BatchState(0, 2, BLOCK_TOKENS)
    batch.advance((), BatchChange(admitted=(admission("a"), admission("b"), admission("c"))))
    batch.advance((1, 2, 3), BatchChange(removed=("b",), admitted=(admission("d"),)))
    assert [(row.sequence_id, row.token_id, row.position) for row in batch.rows] == [
        ("a", 1, 6),
        ("c", 3, 6),
        ("d", 9, 5),
    ]


def test_tables_grow_and_new_tokens_go_there() -> None:
    batch = BatchState(1, 2, BLOCK_TOKENS)
    join = admission(held=(5, 3), blocks=((0, 1), (7,)))
    growth = GrowSequence(sequence_id="a", blocks=((2,), (8, 3)))
    batch.advance((), BatchChange(admitted=(join,), grown=(growth,)))
    slots = []
    for step in range(12):
        slots += batch.append().slots
        batch.advance((step,), BatchChange())
    # Slots of blocks 7, 8 and 3 after the three stored tokens.
    assert slots == [31, 32, 33, 34, 35, 12, 13]
    assert [len(run) for run in batch.rows[0].runs] == [8, 2]


def test_a_sequence_that_outgrows_its_blocks_is_a_bug_and_says_so() -> None:
    batch = BatchState(0, 1, BLOCK_TOKENS)
    batch.advance((), BatchChange(admitted=(admission(held=(4,), blocks=((0,),)),)))
    with pytest.raises(AssertionError, match="a row of the batch has no free slot"):
        batch.append()


def test_the_owners_of_a_step_are_spread_over_ranks_as_its_plan_says() -> None:
    """Eight level sequences on four ranks: two rows a rank, in every step."""
    batches = [BatchState(rank, 4, BLOCK_TOKENS) for rank in range(4)]
    for batch in batches:
        batch.advance((), BatchChange(admitted=tuple(admission(name, held=(2, 2, 2, 2)) for name in "abcdefgh")))
    for step in range(8):
        stored = [batch.append() for batch in batches]
        plans = [batch.plan() for batch in batches]
        assert [len(each.tokens) for each in stored] == [2] * 4
        assert all(plan == plans[0] for plan in plans)
        assert [plans[0].rows_of(rank) for rank in range(4)] == [each.tokens for each in stored]
        for batch in batches:
            batch.advance([step] * 8, BatchChange())
