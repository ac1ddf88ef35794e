"""Cuts without a search are nearly the best, and predictions of chain steps are near their closed form."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest

from cp_core.cost.chain import chain_closed_form, chain_seconds
from cp_core.cost.chain_cuts import best_cuts
from cp_core.cost.chain_steps import ChainPredictor, chain_order, chain_rates, quick_cuts
from cp_core.cost.model import CHAIN, PASS_KV, PrefillRates, StepPredictor
from tests.cp_core.cost.hardware import LLAMA_8B, chain, prefill_rates


def unlike(link: float) -> PrefillRates:
    """Return rates of four ranks of which the second is half as fast as the others."""
    rates = prefill_rates(link)
    slow = replace(rates.ring, gemm_flops=rates.ring.gemm_flops / 2, attention_flops=rates.ring.attention_flops / 2)
    return replace(rates, ring=replace(slow, speeds=(2.0, 1.0, 2.0, 2.0)))


@pytest.mark.parametrize("num_layers", [4, 32])
@pytest.mark.parametrize("link", [1e8, 1e9, 3e9, 40e9, 300e9])
def test_cuts_without_a_search_are_within_4_percent_of_the_best(link: float, num_layers: int) -> None:
    for num_ranks, num_tokens, ratio in product((2, 4), (512, 8192), (0, 1, 4)):
        rates = replace(chain(num_ranks, link), num_layers=num_layers)
        quick = quick_cuts(num_tokens, ratio * num_tokens, rates)
        best = best_cuts(num_tokens, ratio * num_tokens, rates)
        seconds, least = (chain_seconds(cuts, ratio * num_tokens, rates) for cuts in (quick, best))
        assert seconds <= 1.04 * least, (quick, best)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_cuts_of_any_number_of_tokens_ascend_from_0(num_ranks: int) -> None:
    for num_tokens, cached, link in product((1, 2, 7, 8, 9, 1000), (0, 3, 100_000), (1e6, 40e9)):
        cuts = quick_cuts(num_tokens, cached, chain(num_ranks, link))
        assert (len(cuts), cuts[0], cuts[-1]) == (num_ranks + 1, 0, num_tokens)
        assert list(cuts) == sorted(cuts)


def test_slow_ranks_stand_last_and_compute_less() -> None:
    alike = prefill_rates(300e9).ring
    slow = replace(alike, speeds=(2.0, 1.0, 2.0, 3.0))
    assert chain_order(slow, [(5, 0), (5, 0), (6, 0), (5, 0)]) == (3, 2, 0, 1)
    assert chain_order(alike, [(0, 0)] * 3) == (0, 1, 2)
    assert chain_order(alike, [(4, 2), (4, 9), (5, 0)]) == (2, 1, 0)
    assert chain_order(replace(slow, speeds=(1.0,) * 3), [(0, 0)] * 4) == (0, 1, 2, 3), "speeds of another ring"
    rates = chain_rates(LLAMA_8B, unlike(300e9), 4)
    assert rates.speeds == (2.0, 2.0, 2.0, 1.0)
    cuts = quick_cuts(16_000, 0, rates)
    counts = [stop - start for start, stop in pairwise(cuts)]
    assert counts[3] < 0.6 * counts[2]


def test_a_late_rank_stands_last_and_computes_less() -> None:
    quiet = prefill_rates(300e9)
    late = replace(quiet, ring=replace(quiet.ring, lateness=(0.0, 0.2, 0.0, 0.0), step_seconds=0.25))
    assert chain_order(late.ring, [(0, 0)] * 4) == (0, 2, 3, 1)
    rates = chain_rates(LLAMA_8B, late, 4)
    assert rates.lateness == (0.0, 0.0, 0.0, 0.2)
    cuts = quick_cuts(24_000, 0, rates)
    counts = [stop - start for start, stop in pairwise(cuts)]
    assert counts[3] < 0.7 * counts[2]


def test_a_ring_waits_for_its_late_rank_and_a_chain_hides_most_of_it() -> None:
    """Every step's seconds have the lateness in them; a chain's prediction counts it once."""
    quiet = prefill_rates(300e9)
    late = replace(quiet, ring=replace(quiet.ring, lateness=(0.0, 0.2, 0.0, 0.0), step_seconds=0.2))
    before, after = (StepPredictor(LLAMA_8B, rates, 4).seconds(24_000, 0) for rates in (quiet, late))
    assert after[PASS_KV] - before[PASS_KV] == pytest.approx(0.2)
    assert 0.0 < after[CHAIN] - before[CHAIN] < 0.1


@pytest.mark.parametrize("link", [3e9, 40e9, 300e9])
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_predictions_between_the_entries_of_the_table_are_near(num_ranks: int, link: float) -> None:
    predictor = ChainPredictor(LLAMA_8B, prefill_rates(link), num_ranks)
    rates = chain_rates(LLAMA_8B, prefill_rates(link), num_ranks)
    for new, cached in product((1, 777, 3000, 20_000), (0, 500, 10_001, 300_000)):
        exact = chain_closed_form(quick_cuts(new, cached, rates), cached, rates)
        starts = (num_ranks - 1) * rates.num_layers * rates.message_seconds
        assert predictor.seconds(new, cached) - starts == pytest.approx(exact, rel=0.07)


def test_a_chain_gains_where_messages_do_not_hide_and_nothing_where_they_do() -> None:
    """Section 0 of the predictions: up to 2.7 times at 40 GB/s for short first prompts, 0.98 to 1 where all hides."""
    for link, new, least, most in ((3e9, 4096, 1.5, 3.3), (40e9, 2048, 1.2, 2.8), (300e9, 65_536, 0.95, 1.02)):
        seconds = StepPredictor(LLAMA_8B, prefill_rates(link), 4).seconds(new, 0)
        assert least <= seconds[PASS_KV] / seconds[CHAIN] <= most


def test_a_slow_rank_costs_a_chain_less_than_a_ring() -> None:
    for name, most in ((CHAIN, 1.25), (PASS_KV, 2.1)):
        slow, quiet = (
            StepPredictor(LLAMA_8B, rates, 4).seconds(16_384, 0)[name] for rates in (unlike(40e9), prefill_rates(40e9))
        )
        assert slow <= most * quiet
        assert name == CHAIN or slow > 1.8 * quiet


def test_messages_that_do_not_overlap_add_their_time() -> None:
    rates = prefill_rates(3e9)
    half = replace(rates, ring=replace(rates.ring, overlap=0.5))
    with_overlap, without = (StepPredictor(LLAMA_8B, each, 4).seconds(8192, 0)[CHAIN] for each in (rates, half))
    assert 1.1 * with_overlap < without < 1.6 * with_overlap
