"""The one function that a step calls: the next token of every row.

Rows that ask for nothing special cost what they cost together: one argmax for the greedy ones, one cumulative sum for
the drawn ones. R rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from workers.sampling.draw import draw, draw_plain
from workers.sampling.logprobs import logprobs_of
from workers.sampling.parameters import Sampled, Sampling, TokenLogprobs
from workers.sampling.processors import RowSampler

CACHED_NUMBERS = 1 << 16
"""Rows of more numbers than this are drawn one by one: together they would not stay in a processor's cache."""


class SampledRow(Protocol):
    """A sequence whose next token, to stand at `next_position`, is wanted."""

    @property
    def sampler(self) -> RowSampler: ...
    @property
    def next_position(self) -> int: ...


def sample_rows(rows: Sequence[SampledRow], logits: Tensor) -> list[Sampled]:
    """The next token of each row of logits[R, V], any float dtype.

    Each depends on its own row, sampling, history and position only. Raises FloatingPointError if a logit is NaN or the
    largest is infinite: a broken model or cache, and no token chosen from it may reach a client.
    """
    if not rows:
        return []
    # max takes NaN for the largest value, so looking at the winner finds any; of equal values it takes the first.
    largest, winners = logits.max(dim=-1)
    for row, value in zip(rows, largest.tolist(), strict=True):
        if not math.isfinite(value):
            raise FloatingPointError(f"the largest logit for position {row.next_position} is {value}")
    tokens: list[int] = winners.tolist()
    _draw_plain_rows(rows, logits, tokens)
    for number, row in enumerate(rows):
        if row.sampler.is_special:
            tokens[number] = _choose(row, logits[number])
    return [Sampled(token, _logprobs(row, each, token)) for row, token, each in zip(rows, tokens, logits, strict=True)]


def choose_token(logits: Tensor, sampling: Sampling, position: int) -> int:
    """`sample_rows` of one row, logits[V], without a past."""
    return sample_rows([_Row(RowSampler(sampling), position)], logits[None])[0].token_id


class _Row:
    def __init__(self, sampler: RowSampler, next_position: int) -> None:
        self.sampler = sampler
        self.next_position = next_position


def _draw_plain_rows(rows: Sequence[SampledRow], logits: Tensor, tokens: list[int]) -> None:
    plain = [number for number, row in enumerate(rows) if row.sampler.is_drawn and not row.sampler.is_special]
    if not plain:
        return
    if len(plain) == 1 or len(plain) * logits.shape[1] > CACHED_NUMBERS:
        for number in plain:
            tokens[number] = _choose(rows[number], logits[number])
        return
    drawn = draw_plain(
        logits[plain].double().cpu().numpy(),
        [rows[number].sampler.sampling for number in plain],
        [rows[number].next_position for number in plain],
    )
    for number, token in zip(plain, drawn, strict=True):
        tokens[number] = token


def _choose(row: SampledRow, logits: Tensor) -> int:
    processed = row.sampler.process(logits.double().cpu().numpy())
    if not row.sampler.is_drawn:
        return int(processed.argmax())
    return draw(processed, row.sampler.sampling, row.next_position)


def _logprobs(row: SampledRow, logits: Tensor, token_id: int) -> TokenLogprobs | None:
    num_top = row.sampler.sampling.logprobs
    return None if num_top is None else logprobs_of(logits[None], [token_id], num_top)[0]
