"""The paper's selectors on its table 4 (arXiv 2411.01783), and fitted to turns measured with both algorithms."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.papers.published import table_4
from bench.papers.selectors import (
    Comparison,
    EmpiricalFit,
    algorithm_1,
    algorithm_5,
    comparisons,
    empirical,
    fit_compute_per_byte,
    fit_empirical,
    hiding_length,
)
from ringserve.cp_core.cost.model import PASS_KV, PASS_Q
from ringserve.cp_core.cost.selector import Selection, Turn, choose_fastest
from ringserve.cp_core.cost.steps import StepPredictor
from ringserve.cp_core.errors import ConfigError
from tests.cp_core.cost.test_selector import fitted_rates, llama_405b

TURNS = comparisons([row.sample for row in table_4()])


def comparison(new: int, cached: int, kv: float, q: float) -> Comparison:
    turn = Turn(new_tokens=new, cached_tokens=cached, num_ranks=4)
    return Comparison(turn=turn, pass_kv_seconds=kv, pass_q_seconds=q)


def num_right(chosen: list[str], turns: list[Comparison]) -> int:
    return sum((each.advantage > 0) == (name == "pass_kv") for each, name in zip(turns, chosen, strict=True))


@pytest.mark.parametrize(
    ("compute", "link", "right_of_1", "right_of_5"),
    [
        (800e12, 50e9, 12, 11),
        (515e12, 26e9, 13, 12),
        # Both are right everywhere for C / BW in (42667, 51200].
        (42_668e9, 1e9, 14, 14),
        (46_000e9, 1e9, 14, 14),
        (51_200e9, 1e9, 14, 14),
        (51_201e9, 1e9, 13, 14),
    ],
)
def test_algorithms_1_and_5_on_table_4(compute: float, link: float, right_of_1: int, right_of_5: int) -> None:
    model = llama_405b()
    assert num_right([algorithm_1(each.turn, model, compute, link).algorithm for each in TURNS], TURNS) == right_of_1
    assert num_right([algorithm_5(each.turn, model, compute, link).algorithm for each in TURNS], TURNS) == right_of_5


def test_the_printed_empirical_constants_do_not_reproduce_table_4() -> None:
    natural = EmpiricalFit(alpha=-1.059, beta=1.145, gamma=12.112)
    decimal = EmpiricalFit(alpha=-1.059 / math.log(10), beta=1.145 / math.log(10), gamma=12.112)
    refitted = EmpiricalFit(alpha=-1.059, beta=1.145, gamma=12.68)
    assert num_right([empirical(each.turn, natural).algorithm for each in TURNS], TURNS) == 4
    assert num_right([empirical(each.turn, decimal).algorithm for each in TURNS], TURNS) == 10
    assert num_right([empirical(each.turn, refitted).algorithm for each in TURNS], TURNS) == 14


def test_auto_never_costs_more_than_2_percent_on_table_4() -> None:
    predictor = StepPredictor(llama_405b(8), fitted_rates(), 4)
    chosen = []
    for each in TURNS:
        seconds = predictor.seconds(each.turn.new_tokens, each.turn.cached_tokens)
        chosen.append(choose_fastest(each.turn, {name: seconds[name] for name in (PASS_KV, PASS_Q)}).algorithm)
    assert num_right(chosen, TURNS) == 12
    for name, each in zip(chosen, TURNS, strict=True):
        taken = each.pass_kv_seconds if name == PASS_KV else each.pass_q_seconds
        assert taken <= 1.02 * min(each.pass_kv_seconds, each.pass_q_seconds)


def test_equation_2_by_hand() -> None:
    """N C K e / (2 H BW) = 4 * 800e12 * 8 * 2 / (2 * 128 * 50e9) = 4000."""
    turn = Turn(new_tokens=1, cached_tokens=0, num_ranks=4)
    assert hiding_length(turn, llama_405b(), 800e12, 50e9) == 4000.0


def test_reasons_are_words_with_numbers() -> None:
    model = llama_405b(8)
    short, long = (
        Turn(new_tokens=100, cached_tokens=9900, num_ranks=4),
        Turn(new_tokens=64000, cached_tokens=0, num_ranks=4),
    )
    assert algorithm_1(short, model, 800e12, 50e9).reason == (
        "Algorithm 1: T=100 P=9900 N=4, miss rate 0.01, T < 4000, so KV messages would not hide, and miss rate < 0.125"
    )
    assert algorithm_1(long, model, 800e12, 50e9).reason == (
        "Algorithm 1: T=64000 P=0 N=4, miss rate 1, T >= 4000, so KV messages hide behind attention"
    )
    assert "h = " in empirical(short, EmpiricalFit(alpha=1.0, beta=1.0, gamma=0.0)).reason


@given(
    new_tokens=st.integers(1, 200_000),
    cached_tokens=st.integers(0, 1_000_000),
    num_ranks=st.integers(2, 16),
    link=st.floats(1e8, 1e12),
)
def test_algorithm_5_prefers_pass_kv_wherever_algorithm_1_does(
    new_tokens: int, cached_tokens: int, num_ranks: int, link: float
) -> None:
    turn = Turn(new_tokens=new_tokens, cached_tokens=cached_tokens, num_ranks=num_ranks)
    if algorithm_1(turn, llama_405b(), 500e12, link).algorithm == "pass_kv":
        assert algorithm_5(turn, llama_405b(), 500e12, link).algorithm == "pass_kv"


@pytest.mark.parametrize("rule", [algorithm_1, algorithm_5])
def test_a_ring_of_one_takes_pass_kv_because_nothing_is_sent(rule: Callable[..., Selection]) -> None:
    turn = Turn(new_tokens=1, cached_tokens=100_000, num_ranks=1)
    assert rule(turn, llama_405b(), 800e12, 50e9) == Selection("pass_kv", "a ring of one rank sends no messages")
    assert empirical(turn, EmpiricalFit(alpha=-1.0, beta=0.0, gamma=0.0)).algorithm == "pass_kv"


def test_fitted_on_table_4_all_three_rules_are_right_everywhere() -> None:
    turns, model = TURNS, llama_405b()
    fit = fit_empirical(turns)
    assert num_right([empirical(each.turn, fit).algorithm for each in turns], turns) == 14
    for rule in (algorithm_1, algorithm_5):
        ratio = fit_compute_per_byte(rule, model, turns)
        assert num_right([rule(each.turn, model, ratio, 1.0).algorithm for each in turns], turns) == 14


@given(threshold=st.integers(2, 60), cached=st.integers(0, 100_000))
def test_a_threshold_in_the_number_of_new_tokens_is_found(threshold: int, cached: int) -> None:
    turns = [
        comparison(1000 * step, cached, 1.0, 1.0 + (0.002 if step >= threshold else -0.002)) for step in range(1, 64, 2)
    ]
    fit = fit_empirical(turns)
    assert num_right([empirical(each.turn, fit).algorithm for each in turns], turns) == len(turns)


def test_a_turn_that_was_measured_wrong_does_not_move_the_threshold_to_where_most_time_is_lost() -> None:
    """One short turn has pass-KV a little faster, against five that have pass-Q faster."""
    turns = [comparison(1000 * step, 100_000, 2.0, 1.8 if step < 6 else 2.2) for step in range(1, 12)]
    turns[2] = comparison(3000, 100_000, 1.99, 2.0)
    fit = fit_empirical(turns)
    chosen = [empirical(each.turn, fit).algorithm for each in turns]
    assert chosen == ["pass_q"] * 5 + ["pass_kv"] * 6


def test_where_one_algorithm_always_wins_it_is_always_taken() -> None:
    turns = [comparison(100 * step, 1000, 1.0, 2.0) for step in range(1, 9)]
    fit = fit_empirical(turns)
    assert {empirical(each.turn, fit).algorithm for each in turns} == {"pass_kv"}


def test_nothing_to_fit_to_is_refused() -> None:
    with pytest.raises(ConfigError, match="1 comparisons cannot fit the empirical selector"):
        fit_empirical(TURNS[:1])
    with pytest.raises(ConfigError, match="0 comparisons cannot fit C / BW"):
        fit_compute_per_byte(algorithm_1, llama_405b(), [])
