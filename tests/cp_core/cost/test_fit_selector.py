"""Selectors fitted to turns that were measured with both algorithms."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.papers.reproduction import comparisons
from ringserve.cp_core.cost.fit_selector import Comparison, fit_compute_per_byte, fit_empirical
from ringserve.cp_core.cost.selector import Turn, algorithm_1, algorithm_5, empirical
from ringserve.cp_core.errors import ConfigError
from tests.cp_core.cost.test_selector import llama_405b


def comparison(new: int, cached: int, kv: float, q: float) -> Comparison:
    turn = Turn(new_tokens=new, cached_tokens=cached, num_ranks=4)
    return Comparison(turn=turn, pass_kv_seconds=kv, pass_q_seconds=q)


def num_right(chosen: list[str], turns: list[Comparison]) -> int:
    return sum((each.advantage > 0) == (name == "pass_kv") for each, name in zip(turns, chosen, strict=True))


def test_fitted_on_table_4_all_three_rules_are_right_everywhere() -> None:
    turns, model = comparisons(), llama_405b()
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
        fit_empirical(comparisons()[:1])
    with pytest.raises(ConfigError, match="0 comparisons cannot fit C / BW"):
        fit_compute_per_byte(algorithm_1, llama_405b(), [])
