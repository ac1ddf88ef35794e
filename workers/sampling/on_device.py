"""Sampling on a GPU: the formulas of `workers.sampling.sampler` as tensor operations, with one read of the result.

Sums are fp64 in token order, as on the host. If a draw falls within the rounding error of such a sum (1e-16 relative),
a GPU may choose the neighbouring token. The random number comes from the host. Decode steps and the sampler of rows on
a GPU call it.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import methodcaller

import torch
from torch import Tensor

from ringserve.workers.sampling.parameters import NO_TOKEN, Sampled, SamplingParameters

BROKEN = -1
"""Word for a row with non-finite logits, instead of its token."""


class ChosenRows:
    """Tokens on a device, and their copy in progress to the host. The device may continue meanwhile."""

    def __init__(self, words: Tensor) -> None:
        """`words` is int64[R] on the device: each row's token, or BROKEN."""
        self._words = self._on_host = words
        self._arrived: torch.Event | None = None
        if words.is_cuda:
            self._on_host = torch.empty_like(words, device="cpu", pin_memory=True).copy_(words, non_blocking=True)
            self._arrived = torch.cuda.current_stream(words.device).record_event()

    @property
    def token_ids(self) -> Tensor:
        """Tokens int64[R] on the device, with 0 for a broken row, so that the next step can look them up."""
        return self._words.clamp(min=0)

    def read(self, wait: Callable[[torch.Event], None] = methodcaller("synchronize")) -> list[Sampled]:
        """Wait for the tokens, but not for work that was queued later. The only read of a step."""
        if self._arrived is not None:
            wait(self._arrived)
        return [NO_TOKEN if word == BROKEN else Sampled(word) for word in self._on_host.tolist()]


def words_of(largest: Tensor, tokens: Tensor) -> Tensor:
    """Return each row's word: its token [R], or BROKEN if its largest logit [R] is NaN or infinite."""
    return torch.where(largest.isfinite(), tokens, BROKEN)


def choose(logits: Tensor, samplings: Sequence[SamplingParameters], uniforms: Sequence[float]) -> Tensor:
    """Return int64[R] on the device: the token of each row of logits[R, V], or BROKEN if its logits are not finite.

    `uniforms` has the rows' random numbers in [0, 1). Rows are drawn from the given logits: the caller applies bias,
    penalties and masks.
    """
    largest, tokens = logits.max(dim=-1)
    drawn = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0.0]
    if drawn:
        index = _upload(drawn, torch.int64, logits.device)
        numbers = _upload([_numbers(samplings[row], uniforms[row]) for row in drawn], torch.float64, index.device)
        temperature, top_k, top_p, min_p, uniform = numbers.t()[..., None]
        # (l - max) / t, as on the host: a temperature near 0 makes any distance infinite.
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
    """Return exp(scaled[R, V]), with 0 for tokens that top_k, top_p or min_p (each [R, 1]) remove."""
    size = scaled.shape[1]
    # Equal logits keep the order of their ids, so that the smaller ids stay at the boundary of top_p.
    values, ids = scaled.sort(dim=-1, descending=True, stable=True)
    is_limited = (top_k > 0) & (top_k < size)
    smallest = values.gather(1, (top_k.long() - 1).clamp(0, size - 1))
    weights = values.exp().masked_fill(is_limited & (values < smallest), 0.0)
    # Sum of a token's share and all smaller shares. A token is removed if this sum is at most 1 - top_p; the most
    # likely token always stays.
    tails = (weights / weights.sum(dim=-1, keepdim=True)).flip(-1).cumsum(-1).flip(-1)
    is_outside = (top_p < 1.0) & (tails <= 1.0 - top_p)
    is_outside[:, 0] = False
    # The largest weight is exp(0) = 1.
    is_outside |= values.exp() < min_p
    return torch.empty_like(weights).scatter_(1, ids, weights.masked_fill(is_outside, 0.0))


def _drawn(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw tokens [R] with uniform[R, 1] from weights[R, V], which need not sum to 1."""
    # CUDA would sum a single row by an algorithm whose rounding differs from run to run.
    rows = weights.expand(2, -1) if weights.shape[0] == 1 else weights
    cumulative = rows.cumsum(-1)[: weights.shape[0]].contiguous()
    # right=True never lands on a token of weight zero.
    return torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)[:, 0]


def _numbers(sampling: SamplingParameters, uniform: float) -> list[float]:
    return [sampling.temperature, float(sampling.top_k), sampling.top_p, sampling.min_p, uniform]


def _upload(values: Sequence[int] | Sequence[list[float]], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy numbers to the device without waiting."""
    on_host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)
