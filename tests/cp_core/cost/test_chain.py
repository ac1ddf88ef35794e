"""The time model of chain prefill follows its recurrence, and its closed form stays near."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest

from bench.systems.chain_cuts import best_cuts, equal_work_cuts
from ringserve.cp_core.cost.chain import ChainRates, chain_closed_form, chain_seconds
from ringserve.cp_core.cost.model import PASS_KV
from ringserve.cp_core.cost.steps import StepPredictor
from ringserve.cp_core.errors import ConfigError
from tests.cp_core.cost.hardware import LLAMA_8B, chain, prefill_rates


def layer_by_layer(cuts: Sequence[int], rates: ChainRates) -> float:
    """Return the seconds without cached tokens, by the recurrence as it is written down, to the last layer."""
    byte_seconds = rates.kv_bytes / rates.link_bytes_per_second
    ends, links = list(rates.lateness), list(rates.lateness)
    for _ in range(rates.num_layers):
        arrived = 0.0
        for place, (start, stop) in enumerate(pairwise(cuts)):
            if start == cuts[-1]:
                break  # nothing goes to ranks behind the last tokens
            count, speed = stop - start, rates.speeds[place]
            ready = ends[place] + count * rates.projection_seconds / speed
            own = ready + count**2 / 2 * rates.pair_seconds / speed
            sent = max(links[place], ready) + count * byte_seconds
            links[place] = max(sent, own, arrived) + start * byte_seconds if start else sent
            ends[place] = (
                max(own, arrived)
                + count * start * rates.pair_seconds / speed
                + count * (rates.token_seconds - rates.projection_seconds) / speed
                + rates.layer_seconds
            )
            arrived = links[place] + rates.message_seconds if stop else 0.0
    used = [end for end, (start, stop) in zip(ends, pairwise(cuts), strict=True) if stop and start < cuts[-1]]
    return max(used) + rates.head_seconds


GRID = list(product((1, 2, 3, 4, 8), (3e9, 40e9, 300e9), (512, 4096, 32768)))


@pytest.mark.parametrize(("num_ranks", "link", "num_tokens"), GRID)
def test_seconds_are_those_of_every_layer_one_after_the_other(num_ranks: int, link: float, num_tokens: int) -> None:
    speeds = tuple(0.5 if place == 1 else 1.0 for place in range(num_ranks))
    lateness = tuple(0.05 if place == num_ranks - 2 else 0.0 for place in range(num_ranks))
    for rates in (chain(num_ranks, link), chain(num_ranks, link, speeds=speeds, lateness=lateness, layer_seconds=1e-4)):
        for cuts in (equal_work_cuts(num_tokens, 0, rates), best_cuts(num_tokens, 0, rates)):
            assert chain_seconds(cuts, 0, rates) == pytest.approx(layer_by_layer(cuts, rates), rel=1e-9)


def test_the_closed_form_is_within_three_percent_below_the_recurrence() -> None:
    for num_ranks, link, num_tokens in GRID:
        for start in (0.0, 1e-4):
            rates = chain(num_ranks, link, start)
            for cuts in (equal_work_cuts(num_tokens, 0, rates), best_cuts(num_tokens, 0, rates)):
                ratio = chain_closed_form(cuts, 0, rates) / chain_seconds(cuts, 0, rates)
                assert 1 - 0.029 <= ratio <= 1 + 0.002, (rates, cuts)


@pytest.mark.parametrize("ratio", [1, 4, 16])
def test_with_cached_tokens_the_closed_form_is_near_and_no_more_than_5_percent_low(ratio: int) -> None:
    for num_ranks, link, num_tokens in GRID:
        rates = chain(num_ranks, link)
        cuts = equal_work_cuts(num_tokens, ratio * num_tokens, rates)
        cached = ratio * num_tokens
        most = 1.1 if num_tokens > 512 else 1.3
        assert 0.95 <= chain_closed_form(cuts, cached, rates) / chain_seconds(cuts, cached, rates) <= most


def test_a_late_rank_at_the_end_costs_a_chain_a_third_of_what_it_costs_a_ring() -> None:
    num_tokens, quiet = 25_200, chain(4, 40e9)
    late, slow = replace(quiet, lateness=(0.0, 0.0, 0.0, 0.1)), replace(quiet, speeds=(1.0, 1.0, 1.0, 0.5))
    alone, behind, half = (chain_seconds(best_cuts(num_tokens, 0, rates), 0, rates) for rates in (quiet, late, slow))
    ring = StepPredictor(LLAMA_8B, prefill_rates(40e9), 4).seconds(num_tokens, 0)[PASS_KV]
    # A ring meets in every layer: it waits for the late rank, and takes twice as long with one at half speed.
    assert behind - alone <= 0.1 / 3
    assert half - alone <= ring / 3
    # The papers' prototype: 0.328, 0.350 and 0.374 to 0.380 s.
    assert (alone, behind, half) == pytest.approx((0.328, 0.350, 0.377), rel=0.01)


@pytest.mark.parametrize("cuts", [(0, 4), (0, 5, 4, 8), (1, 4, 6, 8)])
def test_cuts_that_are_none_are_refused(cuts: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="cuts of a chain of 3 are"):
        chain_seconds(cuts, 0, chain(3, 1e9))


@pytest.mark.parametrize(
    "changes", [{"speeds": (1.0, 0.0)}, {"lateness": (1.0,)}, {"lateness": (0.0, -1.0)}, {"link_bytes_per_second": 0.0}]
)
def test_rates_that_are_none_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="allowed"):
        chain(2, 1e9, **changes)
