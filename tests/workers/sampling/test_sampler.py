"""Draws depend on logits, temperature, seed and position, and on nothing else."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ringserve.cp_core.attention import native
from ringserve.workers.sampling.parameters import SamplingParameters
from tests.workers.sampling.one_row import WAYS, Choose, assert_shares, choose_natively, choose_token


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [1, 7, 255, 256, 257, 5000])
@pytest.mark.parametrize("choose", WAYS)
def test_vocabularies_of_any_size_have_the_shares_of_their_softmax(
    choose: Choose, size: int, dtype: torch.dtype
) -> None:
    logits = (2.0 * torch.randn(size, generator=torch.Generator().manual_seed(size))).to(dtype)
    for top_k, top_p, min_p in [(0, 1.0, 0.0), (3, 1.0, 0.0), (300, 0.9, 0.0), (0, 0.7, 0.0), (0, 0.95, 0.05)]:
        sampling = SamplingParameters(temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p)
        assert_shares(choose, logits, sampling, shares_of(logits, sampling))


def shares_of(logits: Tensor, sampling: SamplingParameters) -> npt.NDArray[np.float64]:
    """Return the shares by sorting all: equal logits of the k-th stay, of those at the boundary of top_p the first."""
    scaled = logits.double().numpy() / sampling.temperature
    weights = np.exp(scaled - scaled.max())
    falling = np.argsort(-scaled, kind="stable")
    if 0 < sampling.top_k < len(scaled):
        weights[scaled < scaled[falling[sampling.top_k - 1]]] = 0.0
    if sampling.top_p < 1.0:
        before = np.cumsum(weights[falling]) - weights[falling]
        weights[falling[before >= sampling.top_p * weights.sum()]] = 0.0
    weights[weights < sampling.min_p] = 0.0
    shares: npt.NDArray[np.float64] = weights / weights.sum()
    return shares


@pytest.mark.skipif(native.library() is None, reason="the kernels were not compiled")
@pytest.mark.parametrize("top_p", [0.5, 0.95, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 50, 1000])
@pytest.mark.parametrize("spread", [0.0, 1e-3, 3.0, 300.0])
def test_rows_of_a_real_vocabulary_are_drawn_from_as_by_sorting(spread: float, top_k: int, top_p: float) -> None:
    """Draw from equal logits, from nearly equal ones, and from some that are farther apart than buckets reach."""
    logits = spread * torch.randn(3, 49_152, generator=torch.Generator().manual_seed(4))
    logits[1, ::3] = -torch.inf
    sampling = SamplingParameters(temperature=0.9, top_k=top_k, top_p=top_p)
    uniforms = [0.0, 0.2971, 0.9993]
    wanted = []
    for row, uniform in zip(logits, uniforms, strict=True):
        ends = np.cumsum(shares_of(row, sampling))
        wanted.append(int(np.searchsorted(ends, uniform * ends[-1], side="right")))
    rows = logits.repeat(1, 2)[:, :49_152]  # rows of other strides than their size
    assert choose_natively(rows, [sampling] * 3, uniforms) == wanted


@pytest.mark.parametrize("choose", WAYS)
def test_the_largest_random_number_draws_the_last_token_that_is_possible(choose: Choose) -> None:
    logits = torch.zeros(1, 1000)
    logits[0, 900:] = -torch.inf
    assert choose(logits, [SamplingParameters(temperature=1.0)], [1.0 - 2.0**-53]) == [899]


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
