"""Sampling on a GPU: the formulas of `workers.sampling.sampler` as tensor operations, and one read of what they chose.

Sums are of fp64 in the order of the tokens, as on the host. Where a draw falls within the last rounding of such a sum
(1e-16 of it), a GPU may choose the neighbouring token; the random number itself comes from the host.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import methodcaller

import torch
from torch import Tensor

from ringserve.workers.sampling.parameters import NO_TOKEN, Sampled, SamplingParameters

BROKEN = -1
"""Word of a row whose logits are not finite, in place of its token."""


class ChosenRows:
    """Tokens that a device has chosen or was sent, and their copy on its way to the host. The device may go on."""

    def __init__(self, words: Tensor) -> None:
        """Take int64[R] of the device: the token of each row, or BROKEN."""
        self._words = self._on_host = words
        self._arrived: torch.Event | None = None
        if words.is_cuda:
            self._on_host = torch.empty_like(words, device="cpu", pin_memory=True).copy_(words, non_blocking=True)
            self._arrived = torch.cuda.current_stream(words.device).record_event()

    @property
    def token_ids(self) -> Tensor:
        """Tokens int64[R] on the device; 0 for a broken row, which the next step may look up."""
        return self._words.clamp(min=0)

    def read(self, wait: Callable[[torch.Event], None] = methodcaller("synchronize")) -> list[Sampled]:
        """Wait for the tokens, and for nothing that the device was given after them. The only read of a step."""
        if self._arrived is not None:
            wait(self._arrived)
        return [NO_TOKEN if word == BROKEN else Sampled(word) for word in self._on_host.tolist()]


def words_of(largest: Tensor, tokens: Tensor) -> Tensor:
    """Return the words of rows with these largest logits [R], NaN or infinite where a row is broken, and tokens [R]."""
    return torch.where(largest.isfinite(), tokens, BROKEN)


def choose(logits: Tensor, samplings: Sequence[SamplingParameters], uniforms: Sequence[float]) -> Tensor:
    """Return int64[R] on the device: the token of each row of logits[R, V], or BROKEN where they are not finite.

    `uniforms` are the rows' random numbers in [0, 1). Rows are drawn from their logits as they are: bias, penalties and
    masks are the caller's.
    """
    largest, tokens = logits.max(dim=-1)
    drawn = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0.0]
    if drawn:
        index = _upload(drawn, torch.int64, logits.device)
        numbers = _upload([_numbers(samplings[row], uniforms[row]) for row in drawn], torch.float64, index.device)
        temperature, top_k, top_p, min_p, uniform = numbers.t()[..., None]
        # (l - max) / t, as the host has it: a temperature near 0 makes any distance infinite.
        scaled = (logits[index].double() - largest[index].double()[:, None]) / temperature
        weights = scaled.exp()
        filtered = [place for place, row in enumerate(drawn) if samplings[row].filters]
        if filtered:
            some = _upload(filtered, torch.int64, index.device)
            weights[some] = _filtered(scaled[some], top_k[some], top_p[some], min_p[some])
        tokens[index] = _drawn(weights, uniform)
    # max treats NaN as the largest value.
    return words_of(largest, tokens)


def _filtered(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return exp(scaled[R, V]) with 0 for tokens that top_k, top_p or min_p (each [R, 1]) remove."""
    size = scaled.shape[1]
    # Equal logits keep the order of their ids, so that the smaller ones stay at the boundary of top_p.
    values, ids = scaled.sort(dim=-1, descending=True, stable=True)
    is_limited = (top_k > 0) & (top_k < size)
    smallest = values.gather(1, (top_k.long() - 1).clamp(0, size - 1))
    weights = values.exp().masked_fill(is_limited & (values < smallest), 0.0)
    # Sum of a token's share and all smaller ones: those up to 1 - top_p are removed, but for the largest.
    tails = (weights / weights.sum(dim=-1, keepdim=True)).flip(-1).cumsum(-1).flip(-1)
    is_outside = (top_p < 1.0) & (tails <= 1.0 - top_p)
    is_outside[:, 0] = False
    # The largest weight is exp(0) = 1.
    is_outside |= values.exp() < min_p
    return torch.empty_like(weights).scatter_(1, ids, weights.masked_fill(is_outside, 0.0))


def _drawn(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return the tokens [R] that uniform[R, 1] draws from weights[R, V], which need not sum to 1."""
    # A single row would be summed by an algorithm of CUDA's whose rounding differs from run to run.
    rows = weights.expand(2, -1) if weights.shape[0] == 1 else weights
    cumulative = rows.cumsum(-1)[: weights.shape[0]].contiguous()
    # right=True never lands on a token of weight zero.
    return torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)[:, 0]


def _numbers(sampling: SamplingParameters, uniform: float) -> list[float]:
    return [sampling.temperature, float(sampling.top_k), sampling.top_p, sampling.min_p, uniform]


def _upload(values: Sequence[int] | Sequence[list[float]], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy numbers to the device without waiting for it."""
    on_host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)
