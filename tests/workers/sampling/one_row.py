"""Sampling of one row without history, and the shares of all draws that a row's tokens have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from ringserve.cp_core.attention import native
from ringserve.workers.sampling import on_device
from ringserve.workers.sampling.parameters import SamplingParameters
from ringserve.workers.sampling.sampler import RowSampler, sample_rows


@dataclass
class Row:
    """Row of a sequence whose token at `next_position` is to be sampled."""

    sampler: RowSampler
    next_position: int


def choose_token(logits: Tensor, sampling: SamplingParameters, position: int) -> int | None:
    """Sample one token from logits[V]; None if they are not finite."""
    return sample_rows([Row(RowSampler(sampling), position)], logits[None])[0].token_id


def choose_natively(logits: Tensor, samplings: Sequence[SamplingParameters], uniforms: Sequence[float]) -> list[int]:
    """Choose as `on_device.choose` does, by the kernel of CPUs."""
    given = ((each.temperature, each.top_k, each.top_p, each.min_p) for each in samplings)
    return native.choose_tokens(logits, [(*each, uniform) for each, uniform in zip(given, uniforms, strict=True)])


def choose_by_torch(logits: Tensor, samplings: Sequence[SamplingParameters], uniforms: Sequence[float]) -> list[int]:
    chosen: list[int] = on_device.choose(logits, samplings, uniforms).tolist()
    return chosen


Choose = Callable[[Tensor, Sequence[SamplingParameters], Sequence[float]], list[int]]
WAYS: list[Any] = [
    choose_by_torch,
    pytest.param(
        choose_natively, marks=pytest.mark.skipif(native.library() is None, reason="the kernels were not compiled")
    ),
]


def assert_shares(
    choose: Choose, logits: Tensor, sampling: SamplingParameters, shares: npt.NDArray[np.float64], within: float = 1e-9
) -> None:
    """Assert that each token of logits[V] is drawn with its probability in shares[V].

    The tokens divide [0, 1) in their order. Each is drawn by the random number in the middle of its part, and by the
    numbers that lie `within` its two ends.
    """
    ends = np.cumsum(shares)
    tokens = [token for token in range(len(shares)) if shares[token] > 2 * within]
    uniforms = [
        uniform
        for token in tokens
        for uniform in (ends[token] - shares[token] + within, ends[token] - shares[token] / 2, ends[token] - within)
    ]
    chosen = choose(torch.stack([logits] * len(uniforms)), [sampling] * len(uniforms), uniforms)
    assert chosen == [token for token in tokens for _ in range(3)]
