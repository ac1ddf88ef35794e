"""What is done to the logits of one position before a token is drawn, in fp64.

In this order, which is that of transformers' generate (its `SequenceBias`, `RepetitionPenalty`, `MinNewTokensLength`,
`Temperature`, `TopK`, `TopP` and `MinP` processors), with OpenAI's two penalties after the repetition penalty, as vLLM
has them:

    bias          l += bias(token)
    repetition    l = l / r if l > 0 else l * r      for tokens of prompt and answer
    frequency     l -= f * count                     count of the token in the answer
    presence      l -= p                             for tokens of the answer
    min_tokens    l = -inf                           for stop tokens, while the answer is shorter
    temperature   l /= t
    top_k         keeps l >= the k-th largest l      all equals of the k-th stay
    top_p         keeps the smallest set of largest l whose probability reaches top_p
    min_p         keeps probability >= min_p * that of the most likely token

A greedy choice takes the largest logit after the first five. V the vocabulary.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from workers.sampling.parameters import NO_HISTORY, SamplingParameters, TokenHistory

Logits = npt.NDArray[np.float64]


class RowSampler:
    """How one sequence's tokens are drawn: its sampling, and as much of its past as that looks at.

    Every rank of a decode ring keeps one a row, told of every token, since any of them may have to draw.
    """

    def __init__(self, sampling: SamplingParameters, history: TokenHistory = NO_HISTORY) -> None:
        self.sampling = sampling
        self.num_generated = history.num_generated
        # Whether the row's logits have to be looked at by themselves.
        self.is_special = sampling.changes_logits or (sampling.temperature > 0.0 and sampling.filters)
        self.is_drawn = sampling.temperature > 0.0
        self._unseen_prompt = history.prompt_ids
        self._uncounted = list(history.answer_ids)
        self._in_prompt: npt.NDArray[np.bool_] | None = None  # [V]
        self._counts: npt.NDArray[np.int64] | None = None  # [V]

    def push(self, token_id: int) -> None:
        """The answer has a token more."""
        self.num_generated += 1
        if self.sampling.looks_at_answer:
            self._uncounted.append(token_id)

    def process(self, logits: Logits) -> Logits:
        """What a greedy choice takes the largest of: a new [V], or `logits` itself where nothing is asked for."""
        sampling = self.sampling
        if not sampling.changes_logits:
            return logits
        logits = logits.copy()
        for item in sampling.logit_bias:
            logits[item.token_id] += item.bias
        if sampling.looks_at_answer:
            self._penalize(logits)
        if self.num_generated < sampling.min_tokens:
            logits[list(sampling.stop_token_ids)] = -np.inf
        return logits

    def _penalize(self, logits: Logits) -> None:
        sampling = self.sampling
        counts = self._count(len(logits))
        said = counts > 0
        if sampling.repetition_penalty != 1.0:
            assert self._in_prompt is not None
            seen = said | self._in_prompt
            repeated, penalty = logits[seen], sampling.repetition_penalty
            logits[seen] = np.where(repeated < 0, repeated * penalty, repeated / penalty)
        if sampling.frequency_penalty or sampling.presence_penalty:
            logits[said] -= sampling.frequency_penalty * counts[said]
            logits[said] -= sampling.presence_penalty

    def _count(self, vocab_size: int) -> npt.NDArray[np.int64]:
        """How often the answer holds each token, [V]: the vocabulary's size is known when the first logits come."""
        if self._counts is None:
            self._counts = np.zeros(vocab_size, np.int64)
            self._in_prompt = np.zeros(vocab_size, np.bool_)
            self._in_prompt[list(self._unseen_prompt)] = True
            self._unseen_prompt = ()
        np.add.at(self._counts, self._uncounted, 1)
        self._uncounted.clear()
        return self._counts


def filtered(logits: Logits, sampling: SamplingParameters) -> Logits:
    """[V] logits after temperature with -inf for tokens that are not to be drawn.

    Of tokens with equal logits at the border of top_p the one with the smaller id stays.
    """
    if sampling.top_k and sampling.top_k < len(logits):
        smallest_kept = np.partition(logits, -sampling.top_k)[-sampling.top_k]
        logits = np.where(logits < smallest_kept, -np.inf, logits)
    if sampling.top_p < 1.0:
        logits = _nucleus(logits, sampling.top_p)
    if sampling.min_p > 0.0:
        shares = np.exp(logits - logits.max())  # of the most likely token's probability
        logits = np.where(shares < sampling.min_p, -np.inf, logits)
    return logits


def _nucleus(logits: Logits, top_p: float) -> Logits:
    shares = np.exp(logits - logits.max())
    shares /= shares.sum()
    # Tokens of at most this share go together, as together they have at most 1 - top_p; what is left is sorted, which
    # in a real distribution is little.
    smallest_sorted = (1.0 - top_p) / len(logits)
    candidates = np.sort(logits[shares > smallest_sorted])
    probabilities = np.exp(candidates - candidates[-1])
    probabilities *= shares.max()
    cumulative = shares[shares <= smallest_sorted].sum() + np.cumsum(probabilities)
    num_removed = min(int(np.searchsorted(cumulative, 1.0 - top_p, side="right")), len(candidates) - 1)
    border = candidates[num_removed]
    is_kept = logits > border
    num_equals = len(candidates) - num_removed - np.count_nonzero(is_kept)
    is_kept[np.flatnonzero(logits == border)[:num_equals]] = True
    return np.where(is_kept, logits, -np.inf)
