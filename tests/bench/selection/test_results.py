"""Arithmetic of the losses of selection policies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.papers.selectors import EmpiricalFit
from bench.selection.results import (
    OWN_RATES,
    JudgedCell,
    judge,
    judged_cells,
    noise_loss,
    score_policies,
)
from ringserve.cp_core.cost.model import PASS_KV, PASS_Q, ModelShape
from ringserve.cp_core.cost.profile import read_profile
from ringserve.cp_core.cost.selector import POLICIES
from ringserve.cp_core.cost.steps import StepPredictor
from ringserve.cp_core.errors import ConfigError
from ringserve.services.offline.calibration.measurement import Cell

SHAPE = ModelShape(
    num_layers=4,
    hidden_size=512,
    intermediate_size=1408,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=259,
    element_bytes=4,
)


def cell(tokens: int, pass_kv: list[float], pass_q: list[float], auto: str) -> JudgedCell:
    return JudgedCell(
        cell=Cell(cached_tokens=0, new_tokens=tokens),
        seconds={PASS_KV: tuple(pass_kv), PASS_Q: tuple(pass_q)},
        predicted={PASS_KV: 1.0, PASS_Q: 1.0},
        chosen={"auto": auto, PASS_KV: PASS_KV, PASS_Q: PASS_Q},
    )


CELLS = [
    cell(1, [1.0, 9.0, 1.0], [2.0, 2.0, 2.0], PASS_KV),
    cell(2, [5.0, 5.0, 5.0], [4.0, 4.0, 4.0], PASS_KV),
    cell(3, [3.0, 3.0, 3.0], [1.0, 1.0, 1.0], PASS_Q),
]


def test_a_policy_loses_the_excess_of_its_choices_over_the_better_algorithm_of_each_cell_by_medians() -> None:
    ways = {way.name: way for way in score_policies(CELLS)}
    assert list(ways) == ["best of each cell", "auto", PASS_KV, PASS_Q]
    assert [way.seconds for way in ways.values()] == pytest.approx([6.0, 7.0, 9.0, 7.0])
    assert [way.loss for way in ways.values()] == pytest.approx([0.0, 1 / 6, 0.5, 1 / 6])
    assert [[wrong.new_tokens for wrong in way.wrong] for way in ways.values()] == [[], [2], [2, 3], [1]]


def test_noise_is_the_loss_of_a_choice_by_earlier_measurements() -> None:
    steady = [cell(1, [1.0, 1.0], [2.0, 2.0], PASS_KV)]
    assert noise_loss(steady) == 0.0
    # The two rounds contradict each other: the choice by either is wrong in the other.
    torn = [cell(1, [1.0, 3.0], [2.0, 2.0], PASS_KV)]
    assert noise_loss(torn) == pytest.approx(((2.0 - 1.0) + (3.0 - 2.0)) / 3.0)
    assert noise_loss([cell(1, [1.0], [2.0], PASS_KV)]) is None


def test_judged_cells_differ_from_fitted_ones() -> None:
    fitted = [Cell(cached_tokens=10, new_tokens=2)]
    assert len(judged_cells([1, 2], [0, 20], fitted)) == 4
    with pytest.raises(ConfigError, match="2 tokens after 10 are also a cell of --fit-new and --fit-cached"):
        judged_cells([1, 2], [0, 10], fitted)


def test_each_policy_chooses_by_the_fitted_profile_and_auto_also_by_the_rates_before() -> None:
    """Fit links that are slower than probed: `auto` turns from pass-KV to pass-Q."""
    gtt = read_profile("gtt")
    fit = EmpiricalFit(alpha=0.0, beta=0.0, gamma=1.0)
    rates = replace(gtt.prefill, gemm_flops=1e9, attention_flops=1e9, link_latency_seconds=1e-6)
    fast, slow = (replace(gtt, prefill=replace(rates, link_bytes_per_second=link)) for link in (1e10, 1e3))
    judged = judge(SHAPE, fast, slow, 2, Cell(cached_tokens=4096, new_tokens=16), {PASS_KV: [1.0], PASS_Q: [2.0]}, fit)
    assert judged.chosen.keys() == {*POLICIES, "alg1", "alg5", "empirical", OWN_RATES}
    assert (judged.chosen["auto"], judged.chosen[OWN_RATES]) == (PASS_Q, PASS_KV)
    assert judged.chosen["empirical"] == PASS_KV, "its h is always above 0"
    assert (judged.chosen[PASS_KV], judged.chosen[PASS_Q]) == (PASS_KV, PASS_Q)
    expected = StepPredictor(SHAPE, slow.prefill.rates(2, is_cached=True), 2).cost(PASS_Q, 16, 4096)
    assert judged.predicted[PASS_Q] == pytest.approx(expected.total_seconds)
    assert judged.predicted[PASS_Q] == min(judged.predicted.values())
    assert judged.best == PASS_KV
