"""Sampling of a batch's next tokens from the model's logits: processing, filters, draws, log-probabilities.

Logits are processed in fp64, in the order of transformers' generate (its `SequenceBias`, `RepetitionPenalty`,
`MinNewTokensLength`, `NoBadWords`, `Temperature`, `TopK`, `TopP` and `MinP` processors), with OpenAI's two penalties
after the repetition penalty, as in vLLM:

    bias          l += bias(token)
    repetition    l = l / r if l > 0 else l * r      for tokens of prompt and answer
    frequency     l -= f * count                     count of the token in the answer
    presence      l -= p                             for tokens of the answer
    min_tokens    l = -inf                           for stop tokens, while the answer is shorter
    allowed       l = -inf                           for tokens that are not among allowed_ids, if any are given
    banned        l = -inf                           for the token that would complete a banned sequence in the answer
    grammar       l = -inf                           for tokens that the answer's grammar does not allow here
    temperature   l /= t
    top_k         the k largest l stay               and all that equal the k-th largest
    top_p         the smallest set of largest l stays whose probability reaches top_p
    min_p         tokens stay with a probability >= min_p * the most likely token's

A greedy choice takes the largest logit after the first eight steps. A draw depends only on (seed, position), so a
sequence gets the same tokens on a ring of any size, in any batch, and after its turn has moved to another ring. On CPUs
one kernel call chooses the tokens of all rows whose logits need no processing (no bias, penalty, mask or grammar), and
a second call those of the other rows. Log-probabilities use the raw logits, as in vLLM. Prefill and decode steps call
this module; a row's state lies in its `RowSampler`.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ringserve.cp_core.attention import native
from ringserve.workers.sampling.grammar import Grammars
from ringserve.workers.sampling.on_device import BROKEN, ChosenRows, choose, words_of
from ringserve.workers.sampling.parameters import (
    NO_HISTORY,
    NO_TOKEN,
    NOT_REACHED,
    OUTSIDE_GRAMMAR,
    Sampled,
    SamplingParameters,
    TokenHistory,
    TokenLogprobs,
)

Logits = npt.NDArray[np.float64]

SIXTY_FOUR_BITS = 0xFFFF_FFFF_FFFF_FFFF
GREEDY = SamplingParameters()


class SampledRow(Protocol):
    """Sequence row. Its token at `next_position` is sampled."""

    @property
    def sampler(self) -> RowSampler: ...
    @property
    def next_position(self) -> int: ...


class CheckedToken(SampledRow, Protocol):
    """Token of a step with drafts: a row's newest token (`number` 0), or a draft after it (`number` 1 and up)."""

    @property
    def token_id(self) -> int: ...
    @property
    def number(self) -> int: ...


def sample_rows(rows: Sequence[SampledRow], logits: Tensor) -> list[Sampled]:
    """Sample the next token of each row of logits[R, V], in any float dtype.

    A token depends only on its row's logits, sampling parameters, history and position. A row gets no token if a logit
    is NaN or the largest is infinite: its prompt or KV is broken. Other rows are not affected.
    """
    if not rows:
        return []
    if logits.device.type != "cpu":
        return sample_rows_on_device(rows, logits)
    samplings = [row.sampler.sampling for row in rows]
    # Of rows whose logits change below, this call only finds out whether they are BROKEN.
    tokens = _choose(rows, [GREEDY if each.changes_logits else each for each in samplings], logits)
    sampled = [NO_TOKEN if token == BROKEN else Sampled(token) for token in tokens]
    changed = [number for number, each in enumerate(samplings) if each.changes_logits and tokens[number] != BROKEN]
    if changed:
        processed = logits[changed].double()
        for number, each in zip(changed, processed.numpy(), strict=True):
            rows[number].sampler.process(each)
        found = _choose([rows[each] for each in changed], [samplings[each] for each in changed], processed)
        for number, token in zip(changed, found, strict=True):
            sampled[number] = OUTSIDE_GRAMMAR if token == BROKEN else Sampled(token)
    for number, (sampling, each) in enumerate(zip(samplings, sampled, strict=True)):
        if sampling.logprobs is not None and each.token_id is not None:
            (logprobs,) = logprobs_of(logits[number][None], [each.token_id], sampling.logprobs)
            sampled[number] = replace(each, logprobs=logprobs)
    return sampled


def sample_checked(tokens: Sequence[CheckedToken], logits: Tensor) -> list[Sampled]:
    """Sample the successor of each token of a step from logits[B, V]. A row's newest token comes before its drafts.

    A draft counts if it equals the token that was sampled in its place; a wrong one and all after it give NOT_REACHED.
    So the tokens are the same as without drafts. If a row's parameters change the logits, each right draft is pushed to
    its sampler before the next token is sampled.
    """
    if not any(token.number for token in tokens):
        return sample_rows(tokens, logits)
    looking = {id(token.sampler) for token in tokens if token.number and token.sampler.sampling.changes_logits}
    at_once = [place for place, token in enumerate(tokens) if id(token.sampler) not in looking]
    sampled = [NOT_REACHED] * len(tokens)
    drawn = sample_rows([tokens[place] for place in at_once], logits[at_once] if looking else logits)
    for place, each in zip(at_once, drawn, strict=True):
        sampled[place] = each
    for place, token in enumerate(tokens):
        if id(token.sampler) in looking and (not token.number or _is_right(token, sampled[place - 1])):
            if token.number:
                token.sampler.push_ahead(token.token_id)
                prepare_masks([token])
            (sampled[place],) = sample_rows([token], logits[place : place + 1])
    return reached(tokens, sampled)


def reached(tokens: Sequence[CheckedToken], sampled: list[Sampled]) -> list[Sampled]:
    """Return `sampled` with NOT_REACHED from the first wrong draft of each row on."""
    for place, token in enumerate(tokens):
        if token.number and not _is_right(token, sampled[place - 1]):
            sampled[place] = NOT_REACHED
    return sampled


def _is_right(draft: CheckedToken, before: Sampled) -> bool:
    """Return True if the draft equals the token that was sampled in its place, and does not end the answer."""
    return before.token_id == draft.token_id and draft.token_id not in draft.sampler.sampling.stop_token_ids


def prepare_masks(rows: Sequence[SampledRow]) -> None:
    """Start computing the grammar masks of rows before they are sampled, for example while the model runs."""
    for row in rows:
        if row.sampler.grammar is not None:
            row.sampler.grammar.prepare()


def sample_rows_on_device(rows: Sequence[SampledRow], logits: Tensor) -> list[Sampled]:
    """Sample like `sample_rows`, on the logits' device, with one read for all its rows.

    Rows with changed logits or requested log-probabilities are copied and sampled on the host.
    """
    others = [number for number, row in enumerate(rows) if not can_choose_on_device([row])]
    sampled = ChosenRows(choose_rows(rows, logits)).read()
    if others:
        on_host = sample_rows([rows[number] for number in others], logits[others].cpu())
        for number, drawn in zip(others, on_host, strict=True):
            sampled[number] = drawn
    return sampled


def can_choose_on_device(rows: Sequence[SampledRow]) -> bool:
    """Return whether a device can sample all these rows: none has changed logits or log-probabilities."""
    samplings = [row.sampler.sampling for row in rows]
    return not any(each.changes_logits or each.logprobs is not None for each in samplings)


def choose_rows(rows: Sequence[SampledRow], logits: Tensor) -> Tensor:
    """Choose each row's token, or BROKEN, from logits[R, V] on their device: int64[R].

    `can_choose_on_device` must hold for all rows.
    """
    samplings = [row.sampler.sampling for row in rows]
    return choose(logits, samplings, _uniforms(rows, samplings))


def are_greedy(rows: Sequence[SampledRow]) -> bool:
    """Return whether each row's largest logit and its token suffice to sample the rows."""
    samplings = [row.sampler.sampling for row in rows]
    return not any(each.temperature > 0.0 or each.changes_logits or each.logprobs is not None for each in samplings)


def sample_greedy_rows(largest: Tensor, tokens: Tensor) -> list[Sampled]:
    """Sample greedy rows from each row's largest logit [R] and its token [R]. See `sample_rows`."""
    return ChosenRows(words_of(largest, tokens)).read()


def _choose(rows: Sequence[SampledRow], samplings: Sequence[SamplingParameters], logits: Tensor) -> list[int]:
    """Choose each row's token from logits[R, V] as they are, BROKEN if the row's largest is not finite."""
    uniforms = _uniforms(rows, samplings)
    if native.chooses(logits):
        given = ((each.temperature, each.top_k, each.top_p, each.min_p) for each in samplings)
        return native.choose_tokens(logits, [(*each, uniform) for each, uniform in zip(given, uniforms, strict=True)])
    chosen: list[int] = choose(logits, samplings, uniforms).tolist()
    return chosen


def _uniforms(rows: Sequence[SampledRow], samplings: Sequence[SamplingParameters]) -> list[float]:
    """Return the random numbers in [0, 1) of rows that are drawn, 0 for others."""
    # Philox is counter-based. Seed and position are its key, so there is no state between tokens.
    return [
        float(np.random.Generator(np.random.Philox(key=_key(each.seed, row.next_position))).random())
        if each.temperature > 0.0
        else 0.0
        for row, each in zip(rows, samplings, strict=True)
    ]


def _key(seed: int, position: int) -> int:
    return ((position & SIXTY_FOUR_BITS) << 64) | (seed & SIXTY_FOUR_BITS)


class RowSampler:
    """Sampler of one sequence: the sequence's sampling parameters, and the history that they look at.

    Every rank of a decode ring has a sampler for each row and pushes every token to it, since any rank may draw. Only
    ranks with `grammars` draw rows with a grammar.
    """

    def __init__(
        self, sampling: SamplingParameters, history: TokenHistory = NO_HISTORY, grammars: Grammars | None = None
    ) -> None:
        self.sampling = sampling
        self.grammar = grammars.begin(sampling.grammar, history.answer_ids) if grammars and sampling.grammar else None
        self.num_generated = history.num_generated
        self._seen = dict.fromkeys(history.prompt_ids)  # distinct tokens of the prompt, and of the answer
        self._counts = dict[int, int]()  # of each token in the answer
        self._uncounted = list(history.answer_ids)
        self._num_ahead = 0
        self._tail = list(history.answer_ids)  # the answer's last tokens, as many as `banned` looks at

    def push(self, token_id: int) -> None:
        """Append a token to the answer, unless `push_ahead` has."""
        if self._num_ahead:
            self._num_ahead -= 1
            return
        self.num_generated += 1
        if self.sampling.looks_at_answer:
            self._uncounted.append(token_id)
            self._tail.append(token_id)
        if self.grammar is not None:
            self.grammar.push(token_id)

    def push_ahead(self, token_id: int) -> None:
        """Append a token that `push` will bring again."""
        num_ahead, self._num_ahead = self._num_ahead, 0
        self.push(token_id)
        self._num_ahead = num_ahead + 1

    def process(self, logits: Logits) -> None:
        """Apply bias, penalties and masks to logits[V]. All become -inf if the grammar has become too complex."""
        sampling = self.sampling
        for item in sampling.logit_bias:
            logits[item.token_id] += item.bias
        if sampling.looks_at_answer:
            self._penalize(logits)
        if self.num_generated < sampling.min_tokens:
            logits[list(sampling.stop_token_ids)] = -np.inf
        if sampling.allowed_ids:
            allowed_ids = list(sampling.allowed_ids)
            kept = logits[allowed_ids]
            logits[:] = -np.inf
            logits[allowed_ids] = kept
        if sampling.banned:
            self._ban(logits)
        if sampling.grammar:
            assert self.grammar is not None, "a rank that samples has grammars"
            allowed = self.grammar.mask()
            logits[slice(None) if allowed is None else ~allowed] = -np.inf

    def _ban(self, logits: Logits) -> None:
        longest = max(len(each.token_ids) for each in self.sampling.banned) - 1
        del self._tail[: max(len(self._tail) - longest, 0)]
        for each in self.sampling.banned:
            *before, last = each.token_ids
            if not before or self._tail[-len(before) :] == before:
                logits[last] = -np.inf

    def _penalize(self, logits: Logits) -> None:
        sampling, counts = self.sampling, self._counts
        for token_id in self._uncounted:
            counts[token_id] = counts.get(token_id, 0) + 1
            self._seen[token_id] = None
        self._uncounted.clear()
        if sampling.repetition_penalty != 1.0:
            seen, penalty = np.fromiter(self._seen, np.int64, len(self._seen)), sampling.repetition_penalty
            repeated = logits[seen]
            logits[seen] = np.where(repeated < 0, repeated * penalty, repeated / penalty)
        if sampling.frequency_penalty or sampling.presence_penalty:
            said = np.fromiter(counts, np.int64, len(counts))
            times = np.fromiter(counts.values(), np.float64, len(counts))
            logits[said] -= sampling.frequency_penalty * times
            logits[said] -= sampling.presence_penalty


def logprobs_of(logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Return log-probabilities of one token per row of logits[R, V], and of the row's `num_top` most likely tokens."""
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
    """Return the k-th largest logit. torch is several times faster than numpy's partition."""
    return torch.from_numpy(logits).topk(k).values[-1].item()


def _largest(logits: Logits, count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.intp]]:
    """Return the ids of the `count` largest logits, descending. Equal logits ascend by id."""
    if not count:
        return np.empty(0, np.intp)
    smallest = _kth_largest(logits, count)
    above = np.flatnonzero(logits > smallest)
    found = np.concatenate([above, np.flatnonzero(logits == smallest)[: count - len(above)]])
    return found[np.lexsort((found, -logits[found]))]
