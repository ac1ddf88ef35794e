"""The cuts of a chain that a search finds are the best."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement, pairwise

import pytest

from bench.systems.chain_cuts import best_cuts, equal_work_cuts
from ringserve.cp_core.cost.chain import ChainRates, chain_seconds
from tests.cp_core.cost.hardware import chain


@pytest.mark.parametrize("link", [3e9, 40e9, 300e9])
@pytest.mark.parametrize(("num_ranks", "num_tokens"), [(2, 2048), (3, 1024), (4, 640)])
def test_the_search_finds_the_best_of_all_cuts(num_ranks: int, num_tokens: int, link: float) -> None:
    rates = chain(num_ranks, link)
    all_cuts = [
        (0, *inner, num_tokens) for inner in combinations_with_replacement(range(0, num_tokens + 1, 32), num_ranks - 1)
    ]
    least = min(chain_seconds(cuts, 0, rates) for cuts in all_cuts)
    assert chain_seconds(best_cuts(num_tokens, 0, rates), 0, rates) == pytest.approx(least, rel=1e-12)


def test_leading_positions_are_empty_where_messages_cost_more_than_they_save() -> None:
    slow = best_cuts(512, 0, chain(4, 0.3e9, start=1e-3))
    assert slow == (0, 0, 0, 0, 512)
    some = best_cuts(2048, 0, chain(4, 3e9))
    assert some[:2] == (0, 0)
    assert some[-2] < 2048
    fast = best_cuts(4096, 0, chain(4, 300e9))
    assert all(stop > start for start, stop in pairwise(fast))


def test_equal_work_gives_earlier_positions_more_tokens_and_slow_ones_their_share() -> None:
    rates = chain(4, 300e9)
    cuts = equal_work_cuts(16384, 0, rates)
    counts = [stop - start for start, stop in pairwise(cuts)]
    assert counts == sorted(counts, reverse=True)
    work = [
        count * rates.token_seconds + (count**2 / 2 + count * start) * rates.pair_seconds
        for count, start in zip(counts, cuts, strict=False)
    ]
    assert work == pytest.approx([work[0]] * 4, rel=1e-3)
    slow = equal_work_cuts(16384, 0, replace(rates, speeds=(1.0, 1.0, 1.0, 0.5)))
    assert 2 * (slow[4] - slow[3]) == pytest.approx(counts[3], rel=0.25)
    assert equal_work_cuts(3, 0, rates)[-1] == 3


def test_masked_products_and_one_message_are_those_of_kv_runahead() -> None:
    """Settings under which the grid gives the paper's figure 6, of 1,440 tried; times in products of one token."""
    rates = ChainRates(
        token_seconds=1.0,
        projection_seconds=0.25,
        pair_seconds=1 / 32,
        layer_seconds=0.0,
        num_layers=3,
        head_seconds=0.0,
        kv_bytes=1.5,
        link_bytes_per_second=1.0,
        message_seconds=20.0,
        speeds=(1.0, 1.0, 1.0),
        is_masked=True,
        is_one_message=True,
    )
    assert best_cuts(96, 0, rates, strides=(8, 4, 2)) == (0, 28, 70, 96)
