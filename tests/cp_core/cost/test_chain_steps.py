"""Cuts without a search are nearly the best, and predictions of chain steps are near their closed form."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.systems.chain_cuts import best_cuts
from ringserve.cp_core.cost.chain import (
    ChainPredictor,
    ChainRates,
    Cuts,
    chain_closed_form,
    chain_order,
    chain_rates,
    chain_seconds,
    quick_cuts,
    step_seconds,
)
from ringserve.cp_core.cost.model import CHAIN, PASS_KV, PrefillRates
from ringserve.cp_core.cost.steps import StepPredictor
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


def bisected(num_tokens: int, cached: int, rates: ChainRates, empty: int) -> Cuts:
    """Return the cuts of `empty` idle positions and others that work equally long, found by halving an interval."""
    num_ranks, byte_seconds = rates.num_ranks, rates.kv_bytes / rates.link_bytes_per_second

    def filled(seconds: float) -> list[float]:
        most, cuts = max(0.0, seconds / byte_seconds - cached * (num_ranks - empty - 1) / num_ranks), [0.0]
        for place in range(empty, num_ranks):
            work = max(0.0, seconds - rates.lateness[place] / rates.num_layers) * rates.speeds[place]
            b = rates.token_seconds + rates.pair_seconds * (cached + cuts[-1])
            cut = cuts[-1] + 2 * work / (b + (b * b + 2 * rates.pair_seconds * work) ** 0.5)
            cuts.append(cut if place == num_ranks - 1 else max(cuts[-1], min(cut, most)))
        return [0.0] * empty + cuts

    low, high = (
        0.0,
        max(rates.lateness) + num_tokens * (rates.token_seconds + rates.pair_seconds * (cached + num_tokens)),
    )
    high /= min(rates.speeds)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if filled(middle)[-1] < num_tokens else (low, middle)
    return (0, *(min(num_tokens, round(cut)) for cut in filled(high)[1:-1]), num_tokens)


@given(
    speeds=st.lists(st.sampled_from([1.0, 1.0, 2.0, 0.5]), min_size=1, max_size=8),
    link=st.sampled_from([1e8, 3e9, 20e9, 300e9]),
    num_tokens=st.integers(1, 40_000),
    cached=st.integers(0, 100_000),
    late=st.sampled_from([0.0, 0.0, 0.01]),
)
def test_cuts_are_those_that_halving_an_interval_for_every_number_of_idle_ranks_finds(
    speeds: list[float], link: float, num_tokens: int, cached: int, late: float
) -> None:
    lateness = (0.0,) * (len(speeds) - 1) + (late,)
    rates = replace(chain(len(speeds), link), speeds=tuple(speeds), lateness=lateness)
    found = chain_closed_form(quick_cuts(num_tokens, cached, rates), cached, rates)
    thorough = (bisected(num_tokens, cached, rates, empty) for empty in range(len(speeds)))
    least = min(chain_closed_form(cuts, cached, rates) for cuts in thorough)
    # A cut may be rounded to the other side, by which a rank has a token more.
    rounded = rates.num_layers * (rates.token_seconds + rates.pair_seconds * (cached + num_tokens)) / min(speeds)
    rounded += rates.num_layers * rates.kv_bytes / link
    assert abs(found - least) <= 2 * len(speeds) * rounded


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


def test_messages_that_do_not_overlap_add_to_the_time_of_the_rank_that_sends_them() -> None:
    """The first rank sends for as long as it computes. The slower second one sends nothing, so it adds nothing."""
    rates = chain(2, 3e9)
    stage = 2000 * rates.token_seconds + 2000 * 1000 * rates.pair_seconds
    rates = replace(rates, kv_bytes=stage * 3e9 / 2000)
    hidden, half, none = (replace(rates, overlap=overlap) for overlap in (1.0, 0.5, 0.0))
    hops = rates.num_layers - 1
    for share, cost in ((0.5, half), (1.0, none)):
        more = chain_closed_form((0, 2000, 2100), 0, cost) - chain_closed_form((0, 2000, 2100), 0, hidden)
        assert more == pytest.approx(share * hops * stage)
    busy_last = (0, 500, 8000)
    assert chain_closed_form(busy_last, 0, none) == chain_closed_form(busy_last, 0, hidden)


@pytest.mark.parametrize("overlap", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("link", [3e9, 10e9, 40e9])
def test_cuts_are_nearly_the_best_of_all_where_messages_do_not_hide(link: float, overlap: float) -> None:
    for num_tokens, cached in product((600, 4000), (0, 3000)):
        rates = replace(chain(2, link), overlap=overlap)
        every = range(0, num_tokens, num_tokens // 200)
        least = min(step_seconds((0, cut, num_tokens), cached, rates) for cut in every)
        assert step_seconds(quick_cuts(num_tokens, cached, rates), cached, rates) <= 1.04 * least


def test_ranks_that_share_one_core_gain_nothing_by_being_several() -> None:
    """One rank computes four times as fast alone; so it does, where messages and overhead would only add."""
    alone = replace(chain(4, 40e9), lone_speed=4.0, overhead_seconds=1e-4)
    assert quick_cuts(8192, 0, alone) == (0, 0, 0, 0, 8192)
    assert len(set(quick_cuts(8192, 0, replace(alone, lone_speed=1.0)))) == 5


@pytest.mark.parametrize("lone_speed", [1.5, 2.0, 4.0])
def test_shared_cores_do_as_much_as_all_ranks_together(lone_speed: float) -> None:
    """Messages cost nothing: no cuts beat the work of all ranks that share, and even ones take as long."""
    rates = replace(chain(4, 1e15), lone_speed=lone_speed, message_seconds=0.0)
    tokens = 16_384
    work = tokens * rates.token_seconds + tokens * tokens / 2 * rates.pair_seconds
    floor = rates.num_layers * work / 4 + rates.head_seconds
    seconds = [chain_closed_form(cuts, 0, rates) for cuts in ((0, 0, 0, 0, tokens), quick_cuts(tokens, 0, rates))]
    assert min(seconds) == seconds[1] >= floor * (1.0 - 1e-9)
    lone = work * rates.num_layers / lone_speed + rates.head_seconds
    assert seconds[0] == pytest.approx(lone, rel=1e-6)


def test_the_overhead_of_a_layer_is_that_of_the_ranks_that_take_part() -> None:
    rates = replace(chain(4, 40e9), lone_speed=2.0)
    assert rates.busy_share((0, 10, 20, 30, 40)) == 1.0
    assert rates.busy_share((0, 0, 0, 30, 40)) == 0.5
    assert rates.busy_share((0, 0, 0, 0, 40)) == 0.5, "a rank has a core at most"
    assert replace(rates, lone_speed=1.0).busy_share((0, 0, 0, 0, 40)) == 1.0
