"""Next token of every row of a batch, from the model's logits: processing, filters, draw and log-probabilities.

Logits are processed in fp64. The order is that of transformers' generate (its `SequenceBias`, `RepetitionPenalty`,
`MinNewTokensLength`, `Temperature`, `TopK`, `TopP` and `MinP` processors), with OpenAI's two penalties after the
repetition penalty, as in vLLM:

    bias          l += bias(token)
    repetition    l = l / r if l > 0 else l * r      for tokens of prompt and answer
    frequency     l -= f * count                     count of the token in the answer
    presence      l -= p                             for tokens of the answer
    min_tokens    l = -inf                           for stop tokens, while the answer is shorter
    grammar       l = -inf                           for tokens that the answer's grammar does not allow here
    temperature   l /= t
    top_k         l >= the k-th largest l stay       with all equals of the k-th
    top_p         the smallest set of largest l stays whose probability reaches top_p
    min_p         tokens stay with a probability >= min_p * that of the most likely token

A greedy choice takes the largest logit after the first six steps. A draw is keyed by (seed, position) and nothing
else. So a sequence gets the same tokens on a ring of any size, in any batch, and again after its turn moved to another
ring. Rows without special demands are sampled together: one argmax for the greedy ones, one cumulative sum for the
drawn ones. Log-probabilities are those of the raw logits, as in vLLM. R rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ringserve.workers.sampling.grammar import Grammars
from ringserve.workers.sampling.on_device import ChosenRows, choose, words_of
from ringserve.workers.sampling.parameters import (
    NO_HISTORY,
    NO_TOKEN,
    OUTSIDE_GRAMMAR,
    Sampled,
    SamplingParameters,
    TokenHistory,
    TokenLogprobs,
)

Logits = npt.NDArray[np.float64]

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

    A token depends on its own row, sampling parameters, history and position only. A row has no token if one of its
    logits is NaN or the largest is infinite: its prompt or KV is broken, and other rows are not.
    """
    if not rows:
        return []
    if logits.device.type != "cpu":
        return sample_rows_on_device(rows, logits)
    # max treats NaN as the largest value, so the winner shows any NaN; of equal values it takes the first.
    largest, winners = logits.max(dim=-1)
    finite = [number for number, value in enumerate(largest.tolist()) if math.isfinite(value)]
    if len(finite) < len(rows):
        sampled = [NO_TOKEN] * len(rows)
        for number, drawn in zip(finite, sample_rows([rows[each] for each in finite], logits[finite]), strict=True):
            sampled[number] = drawn
        return sampled
    tokens: list[int | None] = winners.tolist()
    _draw_plain_rows(rows, logits, tokens)
    for number, row in enumerate(rows):
        if row.sampler.is_special:
            tokens[number] = _choose(row, logits[number])
    return [
        OUTSIDE_GRAMMAR if token is None else Sampled(token, _wanted(row, each, token))
        for row, token, each in zip(rows, tokens, logits, strict=True)
    ]


def prepare_masks(rows: Sequence[SampledRow]) -> None:
    """Begin to make the masks of rows that are sampled after this step, beside the thread that computes it."""
    for row in rows:
        if row.sampler.grammar is not None:
            row.sampler.grammar.prepare()


def sample_rows_on_device(rows: Sequence[SampledRow], logits: Tensor) -> list[Sampled]:
    """Sample as `sample_rows` does, where the logits are: one read brings the tokens of all rows that this serves.

    Rows whose logits are changed, or whose log-probabilities are wanted, are sampled on the host from a copy of theirs.
    """
    others = [number for number, row in enumerate(rows) if not are_chosen_on_device([row])]
    sampled = ChosenRows(choose_rows(rows, logits)).read()
    if others:
        on_host = sample_rows([rows[number] for number in others], logits[others].cpu())
        for number, drawn in zip(others, on_host, strict=True):
            sampled[number] = drawn
    return sampled


def are_chosen_on_device(rows: Sequence[SampledRow]) -> bool:
    """Return whether a device samples all of these rows: none has its logits changed, or log-probabilities."""
    samplings = [row.sampler.sampling for row in rows]
    return not any(each.changes_logits or each.logprobs is not None for each in samplings)


def choose_rows(rows: Sequence[SampledRow], logits: Tensor) -> Tensor:
    """Choose the words int64[R] of rows from logits[R, V], where these are, as if all `are_chosen_on_device`."""
    samplings = [row.sampler.sampling for row in rows]
    uniforms = [_uniform(each.seed, row.next_position) for each, row in zip(samplings, rows, strict=True)]
    return choose(logits, samplings, uniforms)


def are_greedy(rows: Sequence[SampledRow]) -> bool:
    """Return whether the largest logit of each row and its token suffice to sample them."""
    return all(
        not row.sampler.is_drawn and not row.sampler.is_special and row.sampler.sampling.logprobs is None
        for row in rows
    )


def sample_greedy_rows(largest: Tensor, tokens: Tensor) -> list[Sampled]:
    """Sample rows that `are_greedy` from the largest logit [R] of each and its token [R], as `sample_rows` does."""
    return ChosenRows(words_of(largest, tokens)).read()


def _draw_plain_rows(rows: Sequence[SampledRow], logits: Tensor, tokens: list[int | None]) -> None:
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


def _choose(row: SampledRow, logits: Tensor) -> int | None:
    """Choose the token of one row from logits[V]; None where its grammar allows none."""
    sampling = row.sampler.sampling
    if row.sampler.is_drawn and not sampling.changes_logits and 0 < sampling.top_k < len(logits):
        return _draw_among_top(logits.double(), sampling, row.next_position)
    processed = row.sampler.process(logits.double().cpu().numpy())
    if sampling.grammar and not math.isfinite(processed.max()):
        return None
    if not row.sampler.is_drawn:
        return int(processed.argmax())
    return draw(processed, row.sampler.sampling, row.next_position)


def _draw_among_top(logits: Tensor, sampling: SamplingParameters, position: int) -> int:
    """Draw as `draw` does from the whole [V], but filter the few tokens that top_k can let stay, in token order."""
    top = logits.topk(sampling.top_k).values
    largest, smallest = top[0].item(), top[-1].item()
    # Temperature may round a slightly smaller logit to the k-th: then it stays too.
    slack = 2.0**-50 * (abs(largest) + abs(smallest))
    ids = (logits >= smallest - slack).nonzero().view(-1)
    return int(ids[draw(logits[ids].cpu().numpy(), sampling, position)])


def _wanted(row: SampledRow, logits: Tensor, token_id: int) -> TokenLogprobs | None:
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
    # side="right" never lands on a token of probability zero.
    return int(np.searchsorted(cumulative, _uniform(seed, position) * cumulative[-1], side="right"))


def _uniform(seed: int, position: int) -> float:
    """Return the random number in [0, 1) of a draw."""
    # Philox is counter-based: seed and position are its key, so no state is carried from token to token.
    key = ((position & SIXTY_FOUR_BITS) << 64) | (seed & SIXTY_FOUR_BITS)
    return float(np.random.Generator(np.random.Philox(key=key)).random())


class RowSampler:
    """Sampler of one sequence: its parameters, and the history that they look back at.

    Every rank of a decode ring has a sampler for each row and pushes every token to it, since any rank may draw. A row
    with a grammar draws only where the rank has `grammars`.
    """

    def __init__(
        self, sampling: SamplingParameters, history: TokenHistory = NO_HISTORY, grammars: Grammars | None = None
    ) -> None:
        self.sampling = sampling
        self.grammar = grammars.begin(sampling.grammar, history.answer_ids) if grammars and sampling.grammar else None
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
        if self.grammar is not None:
            self.grammar.push(token_id)

    def process(self, logits: Logits) -> Logits:
        """Return logits with bias, penalties and masks: a new [V], or `logits` itself where nothing changes.

        All are -inf where the grammar has become too complex.
        """
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
        if sampling.grammar:
            assert self.grammar is not None, "a rank that samples has grammars"
            allowed = self.grammar.mask()
            logits[slice(None) if allowed is None else ~allowed] = -np.inf
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
        smallest = _kth_largest(logits, sampling.top_k)
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
    # real distribution they are few. The largest is always sorted, also where one token of share 1 is all there is.
    highest = shares.max()
    smallest_sorted = min((1.0 - top_p) / len(logits), np.nextafter(highest, 0.0))
    candidates = np.sort(logits[shares > smallest_sorted])
    probabilities = np.exp(candidates - candidates[-1])
    probabilities *= highest
    cumulative = shares[shares <= smallest_sorted].sum() + np.cumsum(probabilities)
    num_removed = min(int(np.searchsorted(cumulative, 1.0 - top_p, side="right")), len(candidates) - 1)
    boundary = candidates[num_removed]
    stays = logits > boundary
    num_equals = len(candidates) - num_removed - np.count_nonzero(stays)
    stays[np.flatnonzero(logits == boundary)[:num_equals]] = True
    return np.where(stays, logits, -np.inf)


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


def _kth_largest(logits: Logits, k: int) -> float:
    """Return the k-th largest logit, which torch finds several times faster than numpy's partition."""
    return torch.from_numpy(logits).topk(k).values[-1].item()


def _largest(logits: Logits, count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.intp]]:
    """Return the ids of the `count` largest logits, descending; equal logits by ascending id."""
    if not count:
        return np.empty(0, np.intp)
    smallest = _kth_largest(logits, count)
    above = np.flatnonzero(logits > smallest)
    found = np.concatenate([above, np.flatnonzero(logits == smallest)[: count - len(above)]])
    return found[np.lexsort((found, -logits[found]))]
