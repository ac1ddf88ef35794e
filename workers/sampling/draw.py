"""Next token of every row of a batch, from the model's logits.

A draw is keyed by (seed, position) and nothing else. So a sequence gets the same tokens on a ring of any size, in any
batch, and again after its turn moved to another ring. Rows without special demands are sampled together: one argmax for
the greedy ones, one cumulative sum for the drawn ones. R rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from workers.sampling.logprobs import logprobs_of
from workers.sampling.parameters import Sampled, SamplingParameters, TokenLogprobs
from workers.sampling.processors import Logits, RowSampler, filtered

SIXTY_FOUR_BITS = 0xFFFF_FFFF_FFFF_FFFF
CACHED_NUMBERS = 1 << 16
"""Most logits of rows that are drawn together: more would not stay in a processor's cache."""


class SampledRow(Protocol):
    """Row of a sequence whose token at `next_position` is to be sampled."""

    @property
    def sampler(self) -> RowSampler: ...
    @property
    def next_position(self) -> int: ...


def sample_rows(rows: Sequence[SampledRow], logits: Tensor) -> list[Sampled]:
    """Sample the next token of each row of logits[R, V], any float dtype.

    A token depends on its own row, sampling parameters, history and position only. Raises FloatingPointError if a logit
    is NaN or the largest is infinite: the model or the cache is broken, and no token of it may reach a client.
    """
    if not rows:
        return []
    # max treats NaN as the largest value, so the winner shows any NaN; of equal values it takes the first.
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


def draw(logits: Logits, sampling: SamplingParameters, position: int) -> int:
    """Draw the token at `position` from [V] processed logits whose largest is finite."""
    scaled = logits - logits.max()
    # A temperature near 0 makes any distance infinite, as it should be.
    with np.errstate(over="ignore"):
        scaled /= sampling.temperature
    if not sampling.filters:
        # In place: newly allocated pages cost more than the arithmetic.
        np.exp(scaled, out=scaled)
        return pick(np.cumsum(scaled, out=scaled), sampling.seed, position)
    scaled = filtered(scaled, sampling)
    possible = np.flatnonzero(scaled > -np.inf)
    return int(possible[pick(np.cumsum(np.exp(scaled[possible])), sampling.seed, position)])


def draw_plain(logits: npt.NDArray[np.float64], samplings: list[SamplingParameters], positions: list[int]) -> list[int]:
    """Draw for all rows of [R, V] logits without filters at once; the tokens are those of `draw`."""
    scaled = logits - logits.max(axis=1, keepdims=True)
    with np.errstate(over="ignore"):
        scaled /= np.array([[sampling.temperature] for sampling in samplings])
    cumulative = np.cumsum(np.exp(scaled), axis=1)
    return [
        pick(row, sampling.seed, position)
        for row, sampling, position in zip(cumulative, samplings, positions, strict=True)
    ]


def pick(cumulative: npt.NDArray[np.float64], seed: int, position: int) -> int:
    """Pick a token from a cumulative distribution [V] in token order, which need not end at 1."""
    # Philox is counter-based: seed and position are its key, so no state is carried from token to token.
    key = ((position & SIXTY_FOUR_BITS) << 64) | (seed & SIXTY_FOUR_BITS)
    uniform = np.random.Generator(np.random.Philox(key=key)).random()
    # side="right" never lands on a token of probability zero.
    return int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
