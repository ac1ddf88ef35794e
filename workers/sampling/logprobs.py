"""Log-probabilities of tokens by the model's raw logits, before penalties, temperature and filters, as in vLLM."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from workers.sampling.parameters import TokenLogprobs
from workers.sampling.processors import Logits


def logprobs_of(logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Return one token's log-probability for each row of logits[R, V], with those of the `num_top` most likely."""
    rows = logits.double().cpu().numpy()
    return [_logprobs(row, token_id, num_top) for row, token_id in zip(rows, token_ids, strict=True)]


def _logprobs(logits: Logits, token_id: int, num_top: int) -> TokenLogprobs:
    highest = logits.max()
    # log softmax(l) = l - max - log sum exp(l - max)
    normalizer = highest + np.log(np.exp(logits - highest).sum())
    top = _largest(logits, min(num_top, len(logits)))
    return TokenLogprobs(
        token_id=token_id,
        logprob=float(logits[token_id] - normalizer),
        rank=int(np.count_nonzero(logits > logits[token_id])) + 1,
        top_ids=tuple(top.tolist()),
        top_logprobs=tuple((logits[top] - normalizer).tolist()),
    )


def _largest(logits: Logits, count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.intp]]:
    """Return the ids of the `count` largest logits, descending; equal logits by ascending id."""
    if not count:
        return np.empty(0, np.intp)
    smallest = np.partition(logits, -count)[-count]
    above = np.flatnonzero(logits > smallest)
    found = np.concatenate([above, np.flatnonzero(logits == smallest)[: count - len(above)]])
    return found[np.lexsort((found, -logits[found]))]
