"""Processors and filters give the distribution and the greedy token of transformers' own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ringserve.workers.sampling.parameters import (
    NO_TOKEN,
    Sampled,
    SamplingParameters,
    TokenBias,
    TokenHistory,
    TokenSequence,
)
from ringserve.workers.sampling.sampler import RowSampler, sample_greedy_rows, sample_rows
from tests.workers.sampling.one_row import WAYS, Choose, assert_shares, choose_token

VOCAB_SIZE = 40
tokens = st.integers(0, VOCAB_SIZE - 1)
seeds = st.integers(0, 2**32 - 1)


def random_logits(seed: int, spread: float = 4.0) -> Tensor:
    """Make logits [V] in fp64, all different."""
    return spread * torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def processed(row: RowSampler, logits: Tensor) -> npt.NDArray[np.float64]:
    """Return a copy of logits[V] with the row's bias, penalties and masks."""
    result: npt.NDArray[np.float64] = logits.numpy().copy()
    row.process(result)
    return result


@st.composite
def samplings(draw: st.DrawFn) -> SamplingParameters:
    """Draw sampling parameters with each feature on or off."""

    def maybe(default: Any, values: st.SearchStrategy[Any]) -> Any:
        return draw(st.just(default) | values)

    biased = draw(st.lists(tokens, unique=True, max_size=5))
    return SamplingParameters(
        temperature=draw(st.floats(0.05, 5.0)),
        top_k=maybe(0, st.integers(1, 2 * VOCAB_SIZE)),
        top_p=maybe(1.0, st.floats(0.01, 0.999)),
        min_p=maybe(0.0, st.floats(0.001, 1.0)),
        repetition_penalty=maybe(1.0, st.floats(0.2, 5.0)),
        logit_bias=tuple(TokenBias(token, draw(st.floats(-20, 20))) for token in biased),
        min_tokens=maybe(0, st.integers(1, 8)),
        stop_token_ids=tuple(draw(st.lists(tokens, unique=True, max_size=4))),
    )


words = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=5)
"""Sequences of few tokens, so that answers often contain them."""


def sequences(banned: list[list[int]]) -> tuple[TokenSequence, ...]:
    return tuple(TokenSequence(tuple(each)) for each in banned)


def processors(sampling: SamplingParameters, num_prompt: int) -> LogitsProcessorList:
    """Make transformers' processors in the order of its generate."""
    listed: list[Any] = []
    if sampling.logit_bias:
        listed.append(SequenceBiasLogitsProcessor([[[item.token_id], item.bias] for item in sampling.logit_bias]))
    if sampling.repetition_penalty != 1.0:
        listed.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.min_tokens and sampling.stop_token_ids:
        stops = list(sampling.stop_token_ids)
        listed.append(MinNewTokensLengthLogitsProcessor(num_prompt, sampling.min_tokens, stops))
    return LogitsProcessorList(listed)


def warpers(sampling: SamplingParameters) -> LogitsProcessorList:
    listed: list[Any] = [TemperatureLogitsWarper(sampling.temperature)]
    if sampling.top_k:
        listed.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        listed.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        listed.append(MinPLogitsWarper(sampling.min_p))
    return LogitsProcessorList(listed)


@pytest.mark.parametrize("choose", WAYS)
@given(samplings(), seeds, st.lists(tokens, min_size=1, max_size=12), st.lists(tokens, max_size=12))
def test_the_distribution_is_that_of_transformers(
    choose: Choose, sampling: SamplingParameters, seed: int, prompt: list[int], answer: list[int]
) -> None:
    logits = random_logits(seed)
    ids: Any = torch.tensor([prompt + answer])
    theirs = processors(sampling, len(prompt))(ids, _scores(logits))
    ours = processed(RowSampler(sampling, TokenHistory.of(sampling, prompt, answer)), logits)
    # transformers' bias is in fp32.
    np.testing.assert_allclose(ours, theirs[0].numpy(), rtol=1e-6, atol=1e-6)
    theirs = warpers(sampling)(ids, _scores(torch.from_numpy(ours)))[0]
    assert_shares(choose, torch.from_numpy(ours), sampling, torch.softmax(theirs, 0).numpy())


@given(samplings(), seeds, st.lists(tokens, min_size=1, max_size=12), st.lists(tokens, max_size=12))
def test_the_greedy_token_is_that_of_transformers(
    sampling: SamplingParameters, seed: int, prompt: list[int], answer: list[int]
) -> None:
    sampling, logits = replace(sampling, temperature=0.0), random_logits(seed)
    ids: Any = torch.tensor([prompt + answer])
    theirs = processors(sampling, len(prompt))(ids, _scores(logits))
    row = Row(RowSampler(sampling, TokenHistory.of(sampling, prompt, answer)), len(prompt) + len(answer))
    assert sample_rows([row], logits[None])[0].token_id == int(theirs.argmax())


def _scores(logits: Tensor) -> Any:
    """Make a copy [1, V] that processors may change."""
    return logits[None].clone()


class Row:
    def __init__(self, sampler: RowSampler, next_position: int = 7) -> None:
        self.sampler = sampler
        self.next_position = next_position


@given(seeds, st.sets(tokens, min_size=1), words, st.lists(st.integers(0, 3), max_size=6))
def test_masks_are_those_of_transformers(
    seed: int, allowed: set[int], banned: list[list[int]], answer: list[int]
) -> None:
    """The prompt is of a token that no sequence has: transformers looks for sequences in the prompt, too."""
    sampling = SamplingParameters(allowed_ids=tuple(sorted(allowed)), banned=sequences(banned))
    logits, prompt = random_logits(seed), [VOCAB_SIZE - 1] * 4
    ids: Any = torch.tensor([prompt + answer])
    forbidden = sorted(set(range(VOCAB_SIZE)) - allowed)
    theirs = SuppressTokensLogitsProcessor(forbidden)(ids, _scores(logits)) if forbidden else _scores(logits)
    theirs = NoBadWordsLogitsProcessor(banned)(ids, theirs)
    row = RowSampler(sampling, TokenHistory.of(sampling, prompt, answer[:2]))
    for token in answer[2:]:
        row.push(token)
    np.testing.assert_array_equal(processed(row, logits), theirs[0].numpy())


def test_a_row_whose_masks_allow_nothing_has_no_token() -> None:
    sampling = SamplingParameters(allowed_ids=(3, 5), banned=sequences([[3], [5]]))
    assert choose_token(random_logits(1), sampling, 7) is None


@given(samplings(), words, st.lists(tokens, max_size=20), st.integers(0, 20), seeds)
def test_a_row_told_token_by_token_equals_one_told_at_once(
    sampling: SamplingParameters, banned: list[list[int]], answer: list[int], told_before: int, seed: int
) -> None:
    """Resume a sequence with its tokens so far, before or after its first logits."""
    sampling = replace(sampling, presence_penalty=0.7, frequency_penalty=-0.3, banned=sequences(banned))
    prompt, logits = [3, 3, 5], random_logits(seed)
    row = RowSampler(sampling, TokenHistory.of(sampling, prompt, answer[:told_before]))
    for token in answer[told_before:]:
        processed(row, logits)
        row.push(token)
    whole = RowSampler(sampling, TokenHistory.of(sampling, prompt, answer))
    np.testing.assert_array_equal(processed(row, logits), processed(whole, logits))
    assert row.num_generated == whole.num_generated == len(answer)


@given(seeds, st.lists(tokens, max_size=20), st.floats(-2, 2), st.floats(-2, 2))
def test_presence_and_frequency_count_the_answer_and_not_the_prompt(
    seed: int, answer: list[int], presence: float, frequency: float
) -> None:
    """Check OpenAI's formula: mu[j] -> mu[j] - c[j] * frequency - (1 if c[j] > 0 else 0) * presence."""
    logits = random_logits(seed)
    sampling = SamplingParameters(presence_penalty=presence, frequency_penalty=frequency)
    ours = processed(RowSampler(sampling, TokenHistory.of(sampling, list(range(VOCAB_SIZE)), answer)), logits)
    wanted = [
        logit - answer.count(token) * frequency - (presence if token in answer else 0.0)
        for token, logit in enumerate(logits.tolist())
    ]
    np.testing.assert_allclose(ours, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("choose", WAYS)
@given(st.lists(st.integers(-3, 3), min_size=2, max_size=30), st.floats(0.01, 0.99))
def test_among_equals_at_the_boundary_of_top_p_the_smaller_ids_stay(
    choose: Choose, levels: list[int], top_p: float
) -> None:
    """Take the number of tokens that stay from transformers, which leaves open which of equal ones do."""
    logits = torch.tensor(levels, dtype=torch.float64)
    theirs = TopPLogitsWarper(top_p)(torch.zeros(1, 1), logits[None])
    num_kept = int(torch.isfinite(theirs).sum())
    kept = sorted(range(len(levels)), key=lambda token: (-levels[token], token))[:num_kept]
    shares = torch.zeros_like(logits)
    shares[kept] = torch.softmax(logits[kept], 0)
    assert_shares(choose, logits, SamplingParameters(temperature=1.0, top_p=top_p), shares.numpy())


@pytest.mark.parametrize("choose", WAYS)
def test_all_equals_of_the_kth_stay(choose: Choose) -> None:
    logits = torch.tensor([1.0, 2.0, 1.0, 3.0, 0.0])
    shares = torch.softmax(torch.tensor([1.0, 2.0, 1.0, 3.0, -torch.inf], dtype=torch.float64), 0)
    assert_shares(choose, logits, SamplingParameters(temperature=1.0, top_k=3), shares.numpy())


@given(st.lists(st.tuples(samplings(), st.booleans(), seeds, st.lists(tokens, max_size=6)), min_size=1, max_size=6))
def test_a_row_gets_its_token_whatever_else_is_in_the_batch(
    wanted: list[tuple[SamplingParameters, bool, int, list[int]]],
) -> None:
    rows, alone = [], []
    logits = torch.stack([random_logits(seed) for *_, seed, _ in wanted])
    for number, (sampling, is_plain, seed, answer) in enumerate(wanted):
        temperature = sampling.temperature if seed % 3 else 0.0
        if is_plain:
            sampling = SamplingParameters(temperature=temperature, seed=seed)
        sampling = replace(sampling, seed=seed, temperature=temperature, logprobs=seed % 4 or None)
        history = TokenHistory.of(sampling, [1, 2, 3], answer)
        rows.append(Row(RowSampler(sampling, history), 3 + len(answer)))
        alone += sample_rows([Row(RowSampler(sampling, history), 3 + len(answer))], logits[number : number + 1])
    assert sample_rows(rows, logits) == alone
    assert sample_rows(rows[::-1], logits.flip(0)) == alone[::-1]


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_broken_row_has_no_token_and_the_others_have_theirs(broken: float) -> None:
    logits = torch.stack([random_logits(seed) for seed in range(4)])
    kinds = [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 2}, {"temperature": 0.5, "logprobs": 2}]
    rows = [Row(RowSampler(SamplingParameters(**kind)), 9) for kind in kinds]  # type: ignore[arg-type]
    whole = sample_rows(rows, logits)
    for number in range(4):
        damaged = logits.clone()
        damaged[number, 3] = broken
        assert sample_rows(rows, damaged) == [*whole[:number], NO_TOKEN, *whole[number + 1 :]]
    greedy = sample_greedy_rows(torch.tensor([1.0, broken]), torch.tensor([4, 5]))
    assert greedy == [Sampled(4), NO_TOKEN]


def test_no_rows_have_no_tokens() -> None:
    assert sample_rows([], torch.zeros(0, 5)) == []


def test_nearly_no_temperature_is_greedy_and_overflows_nothing() -> None:
    logits = torch.tensor([1e30, -1e30, 3e30, 0.0])
    assert choose_token(logits, SamplingParameters(temperature=1e-300, top_p=0.5, min_p=0.1), 1) == 2
