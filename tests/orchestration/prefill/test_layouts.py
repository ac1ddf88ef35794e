"""Layouts of a step's pieces: chains that store level, fall back to level cuts without room, and segments."""

from __future__ import annotations

import pytest

from ringserve.cp_core.cost.chain import ChainRates
from ringserve.cp_core.errors import CapacityExceeded
from ringserve.cp_core.layout.shards import ShardMap, TokenRange, balanced_layout
from ringserve.orchestration.prefill.scheduler import PieceLayout, StepForm, lay_out
from ringserve.orchestration.protocol.plans import LayoutFallback
from ringserve.orchestration.ring.kv_pool import KvPool, SequenceKv

BLOCK = 4


def chain(num_ranks: int, link: float, speeds: tuple[float, ...] = ()) -> StepForm:
    """Return the form of a chain in which a token's products take 1 ms a layer and its KV 1 / `link` seconds."""
    rates = ChainRates(
        token_seconds=1e-3,
        projection_seconds=2e-4,
        pair_seconds=1e-5,
        layer_seconds=0.0,
        num_layers=24,
        head_seconds=0.0,
        kv_bytes=1.0,
        link_bytes_per_second=link,
        message_seconds=1e-4,
        speeds=speeds or (1.0,) * num_ranks,
    )
    return StepForm(tuple(range(num_ranks))[::-1], rates)


def pool_with(num_ranks: int, room: int, retained: ShardMap | None = None) -> tuple[KvPool, SequenceKv]:
    pool = KvPool(num_ranks, room // BLOCK, BLOCK)
    sequence = pool.pin("a", "turn", 0)
    if retained is not None:
        pool.make_room(sequence, retained.held)
        sequence.shards = retained
    return pool, sequence


def placed(
    pool: KvPool, sequence: SequenceKv, stop: int, form: StepForm, *, num_left: int = 0, whole_on: int | None = None
) -> PieceLayout:
    start = sequence.shards.num_tokens
    load = (0,) * pool.num_ranks
    piece = TokenRange(start, stop)
    found = lay_out(pool, sequence, piece, num_left=num_left, load=load, whole_on=whole_on, form=form)
    found.kv.check(piece)
    for rank, held in enumerate(sequence.shards.extend(found.kv).held):
        assert len(sequence.blocks[rank]) * BLOCK >= held, "the sequence has room for what it stores"
    return found


def test_on_a_fast_link_earlier_ranks_compute_more_and_all_store_as_much() -> None:
    pool, sequence = pool_with(3, 400)
    found = placed(pool, sequence, 300, chain(3, 1e9))
    computed = [found.layout.tokens_on(rank) for rank in (2, 1, 0)]
    assert computed == sorted(computed, reverse=True)
    assert computed[0] > 110
    assert found.kv.held == (100, 100, 100)
    assert found.stored is not None


def test_after_uneven_tokens_a_chain_stores_what_a_ring_would() -> None:
    retained = ShardMap.of(((TokenRange(0, 9),), (TokenRange(9, 10),), ()))
    pool, sequence = pool_with(3, 400, retained)
    found = placed(pool, sequence, 31, chain(3, 1e9))
    assert found.kv.held == balanced_layout(10, 21, retained.held).shard_map().held


def test_on_a_slow_link_the_last_rank_takes_all_where_it_has_room() -> None:
    pool, sequence = pool_with(2, 400)
    found = placed(pool, sequence, 300, chain(2, 10.0))
    assert (found.layout.tokens_on(1), found.layout.tokens_on(0)) == (0, 300)
    assert found.stored is None
    assert found.fallback is None
    assert found.kv.held == (300, 0)


@pytest.mark.parametrize(("room", "num_left"), [(160, 0), (400, 400)])
def test_without_room_for_uneven_shares_the_cuts_are_level(room: int, num_left: int) -> None:
    """Room for the rest of the turn counts too: later chunks never find less than was reserved. The layout says so."""
    pool, sequence = pool_with(2, room)
    found = placed(pool, sequence, 300, chain(2, 10.0), num_left=num_left)
    assert (found.layout.tokens_on(1), found.layout.tokens_on(0)) == (150, 150)
    assert found.kv.held == (150, 150)
    assert found.fallback is LayoutFallback.LEVEL_CUTS


@pytest.mark.parametrize("form", [StepForm(), StepForm(num_segments=4), chain(2, 1e9)])
def test_a_short_prompt_that_does_not_fit_one_rank_is_spread_and_says_so(form: StepForm) -> None:
    pool, sequence = pool_with(2, 160)
    found = placed(pool, sequence, 300, form, whole_on=1)
    assert found.kv.held == (150, 150)
    assert found.fallback is LayoutFallback.SPREAD


def test_a_piece_for_which_no_layout_has_room_is_refused() -> None:
    pool, sequence = pool_with(2, 100)
    with pytest.raises(CapacityExceeded):
        placed(pool, sequence, 300, chain(2, 10.0))


def test_a_slow_rank_at_the_end_of_a_chain_computes_less() -> None:
    pool, sequence = pool_with(2, 400)
    found = placed(pool, sequence, 300, chain(2, 1e9, (2.0, 1.0)))
    assert found.layout.tokens_on(0) < 0.55 * found.layout.tokens_on(1)
    assert found.kv.held == (150, 150)


def test_segments_give_each_rank_its_even_share_of_each() -> None:
    pool, sequence = pool_with(2, 400)
    found = placed(pool, sequence, 300, StepForm(num_segments=4))
    assert [len(ranges) for ranges in found.layout.ranges] == [4, 4]
    assert found.kv.held == (150, 150)


def test_a_whole_prompt_stays_whole_in_a_chain() -> None:
    pool, sequence = pool_with(2, 400)
    assert placed(pool, sequence, 30, chain(2, 1e9), whole_on=1).kv.held == (0, 30)
