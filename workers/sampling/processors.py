"""Processing of one position's logits before a token is drawn, in fp64.

The order is that of transformers' generate (its `SequenceBias`, `RepetitionPenalty`, `MinNewTokensLength`,
`Temperature`, `TopK`, `TopP` and `MinP` processors), with OpenAI's two penalties after the repetition penalty, as in
vLLM:

    bias          l += bias(token)
    repetition    l = l / r if l > 0 else l * r      for tokens of prompt and answer
    frequency     l -= f * count                     count of the token in the answer
    presence      l -= p                             for tokens of the answer
    min_tokens    l = -inf                           for stop tokens, while the answer is shorter
    temperature   l /= t
    top_k         l >= the k-th largest l stay       with all equals of the k-th
    top_p         the smallest set of largest l stays whose probability reaches top_p
    min_p         tokens stay with a probability >= min_p * that of the most likely token

A greedy choice takes the largest logit after the first five steps. V vocabulary.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from workers.sampling.parameters import NO_HISTORY, SamplingParameters, TokenHistory

Logits = npt.NDArray[np.float64]


class RowSampler:
    """Sampler of one sequence: its parameters, and the history that they look back at.

    Every rank of a decode ring has a sampler for each row and pushes every token to it, since any rank may draw.
    """

    def __init__(self, sampling: SamplingParameters, history: TokenHistory = NO_HISTORY) -> None:
        self.sampling = sampling
        self.num_generated = history.num_generated
        # True if the row's logits need processing of their own.
        self.is_special = sampling.changes_logits or (sampling.temperature > 0.0 and sampling.filters)
        self.is_drawn = sampling.temperature > 0.0
        self._unseen_prompt = history.prompt_ids
        self._uncounted = list(history.answer_ids)
        self._in_prompt: npt.NDArray[np.bool_] | None = None  # [V]
        self._counts: npt.NDArray[np.int64] | None = None  # [V]

    def push(self, token_id: int) -> None:
        """Append a token to the answer."""
        self.num_generated += 1
        if self.sampling.looks_at_answer:
            self._uncounted.append(token_id)

    def process(self, logits: Logits) -> Logits:
        """Return logits with bias, penalties and min_tokens: a new [V], or `logits` itself where nothing changes."""
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
        """Count each token in the answer, [V]: the vocabulary's size is known from the first logits."""
        if self._counts is None:
            self._counts = np.zeros(vocab_size, np.int64)
            self._in_prompt = np.zeros(vocab_size, np.bool_)
            self._in_prompt[list(self._unseen_prompt)] = True
            self._unseen_prompt = ()
        np.add.at(self._counts, self._uncounted, 1)
        self._uncounted.clear()
        return self._counts


def filtered(logits: Logits, sampling: SamplingParameters) -> Logits:
    """Return [V] logits after temperature with -inf for tokens that are never drawn.

    Among equal logits at the boundary of top_p the smaller ids stay.
    """
    if sampling.top_k and sampling.top_k < len(logits):
        smallest = np.partition(logits, -sampling.top_k)[-sampling.top_k]
        logits = np.where(logits < smallest, -np.inf, logits)
    if sampling.top_p < 1.0:
        logits = _nucleus(logits, sampling.top_p)
    if sampling.min_p > 0.0:
        shares = np.exp(logits - logits.max())  # of the most likely token's probability
        logits = np.where(shares < sampling.min_p, -np.inf, logits)
    return logits


def _nucleus(logits: Logits, top_p: float) -> Logits:
    shares = np.exp(logits - logits.max())
    shares /= shares.sum()
    # Tokens of at most this share are removed together, as their sum is at most 1 - top_p. The others are sorted; in a
    # real distribution they are few.
    smallest_sorted = (1.0 - top_p) / len(logits)
    candidates = np.sort(logits[shares > smallest_sorted])
    probabilities = np.exp(candidates - candidates[-1])
    probabilities *= shares.max()
    cumulative = shares[shares <= smallest_sorted].sum() + np.cumsum(probabilities)
    num_removed = min(int(np.searchsorted(cumulative, 1.0 - top_p, side="right")), len(candidates) - 1)
    boundary = candidates[num_removed]
    stays = logits > boundary
    num_equals = len(candidates) - num_removed - np.count_nonzero(stays)
    stays[np.flatnonzero(logits == boundary)[:num_equals]] = True
    return np.where(stays, logits, -np.inf)
