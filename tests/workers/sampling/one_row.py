"""Sampling of one row without history."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

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
