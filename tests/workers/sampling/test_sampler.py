"""Draws depend on logits, temperature, seed and position, and on nothing else."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringserve.workers.sampling.parameters import SamplingParameters
from ringserve.workers.sampling.sampler import draw
from tests.workers.sampling.one_row import choose_token


def test_greedy_takes_the_largest_and_the_first_of_equals() -> None:
    assert choose_token(torch.tensor([0.0, 3.0, 1.0, 3.0]), SamplingParameters(), 5) == 1
    assert choose_token(torch.zeros(8), SamplingParameters(), 5) == 0


def test_draws_follow_the_softmax_of_the_logits() -> None:
    """Draw 20,000 tokens: each share is within four standard deviations (0.0142 at most) of its probability."""
    logits, temperature = torch.tensor([0.0, 1.0, 2.0, -1.0]), 1.3
    wanted = torch.softmax(logits.double() / temperature, 0)
    sampling = SamplingParameters(temperature=temperature, seed=11)
    counts = Counter(choose_token(logits, sampling, position) for position in range(20_000))
    for token, probability in enumerate(wanted.tolist()):
        assert counts[token] / 20_000 == pytest.approx(
            probability, abs=4 * (probability * (1 - probability) / 20_000) ** 0.5
        )


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**40))
def test_the_same_seed_and_position_draw_the_same_token(seed: int, position: int) -> None:
    logits = torch.linspace(-1, 1, 50)
    sampling = SamplingParameters(temperature=1.0, seed=seed)
    assert choose_token(logits, sampling, position) == choose_token(logits.clone(), sampling, position)


def test_other_seeds_and_other_positions_draw_otherwise() -> None:
    logits = torch.zeros(1000)
    by_position = {
        choose_token(logits, SamplingParameters(temperature=1.0, seed=3), position) for position in range(50)
    }
    by_seed = {choose_token(logits, SamplingParameters(temperature=1.0, seed=seed), 3) for seed in range(50)}
    assert len(by_position) > 40
    assert len(by_seed) > 40


@given(st.integers(0, 2**63 - 1))
def test_a_token_of_probability_zero_is_never_drawn(seed: int) -> None:
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf])
    assert choose_token(logits, SamplingParameters(temperature=1.0, seed=seed), 0) in (1, 3)


@given(
    st.lists(
        st.floats(-9, 9, width=32) | st.sampled_from([0.0, 1e-30, 2e-30, 3.0, -math.inf]), min_size=2, max_size=40
    ),
    st.integers(1, 45),
    st.sampled_from([0.3, 1.0]),
    st.sampled_from([0.0, 0.2]),
    st.integers(0, 2**63 - 1),
)
def test_a_draw_among_the_top_is_the_draw_from_all(
    values: list[float], top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    """Draw with equal logits at the k-th, with logits that a temperature rounds to it, and with less than k finite."""
    logits = torch.tensor([*values, 10.0])
    sampling = SamplingParameters(temperature=0.7, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    assert choose_token(logits, sampling, 3) == draw(logits.double().numpy(), sampling, 3)


def test_draws_hardly_hang_on_the_last_bits_of_the_logits() -> None:
    """Draw with noise of 1e-6, as between rings of different size: at most 1 in 1,000 tokens may differ."""
    logits = torch.randn(300, generator=torch.Generator().manual_seed(0))
    noise = 1e-6 * torch.randn(300, generator=torch.Generator().manual_seed(1))
    sampling = SamplingParameters(temperature=1.0, seed=5)
    changed = sum(
        choose_token(logits, sampling, position) != choose_token(logits + noise, sampling, position)
        for position in range(1000)
    )
    assert changed <= 1


@pytest.mark.parametrize("top_k", [0, 1, 3])
def test_the_least_top_p_draws_the_most_likely_token(top_k: int) -> None:
    """Draw by the smallest positive share, beside which 1 is not less, also among equals and from a single token."""
    sampling = SamplingParameters(temperature=1.0, top_p=5e-324, top_k=top_k, seed=3)
    assert choose_token(torch.tensor([0.0, 9.0, 1.0, 9.0]), sampling, 7) == 1
    assert choose_token(torch.zeros(4), sampling, 7) == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_broken_logits_have_no_token(temperature: float, broken: float) -> None:
    logits = torch.zeros(10)
    logits[4] = broken
    assert choose_token(logits, SamplingParameters(temperature=temperature), 7) is None


def test_among_impossible_tokens_there_is_none_to_take() -> None:
    assert choose_token(torch.full((4,), -torch.inf), SamplingParameters(), 7) is None
