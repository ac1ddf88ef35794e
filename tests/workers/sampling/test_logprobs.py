"""Log-probabilities of the raw logits, independent of later processing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringserve.workers.decode.messages import num_words, read_words, write_words
from ringserve.workers.sampling.parameters import NO_TOKEN, Sampled, TokenLogprobs
from ringserve.workers.sampling.sampler import logprobs_of


@given(st.lists(st.integers(-3, 3) | st.floats(-30, 30), min_size=1, max_size=40), st.integers(0, 20), st.data())
def test_they_are_the_log_softmax_and_equals_come_by_id(values: list[float], num_top: int, data: st.DataObject) -> None:
    logits = torch.tensor([values], dtype=torch.float64)
    token = data.draw(st.integers(0, len(values) - 1))
    wanted = torch.log_softmax(logits[0], 0)
    found = logprobs_of(logits, [token], num_top)[0]
    order = sorted(range(len(values)), key=lambda each: (-values[each], each))
    assert list(found.top_ids) == order[:num_top]
    np.testing.assert_allclose(found.top_logprobs, wanted[order[:num_top]], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(found.logprob, wanted[token], rtol=1e-9, atol=1e-9)
    assert found.token_id == token
    assert found.rank == 1 + sum(value > values[token] for value in values)


@st.composite
def drawn(draw: st.DrawFn) -> Sampled:
    token = draw(st.integers(0, 2**31))
    num_top = draw(st.none() | st.integers(0, 4))
    if num_top is None:
        return Sampled(token)
    top = st.lists(st.integers(0, 2**31), min_size=num_top, max_size=num_top).map(tuple)
    numbers = st.floats(max_value=0.0, allow_nan=False)
    logprobs = st.lists(numbers, min_size=num_top, max_size=num_top).map(tuple)
    rank = draw(st.integers(1, 2**31))
    return Sampled(
        token,
        TokenLogprobs(token_id=token, logprob=draw(numbers), rank=rank, top_ids=draw(top), top_logprobs=draw(logprobs)),
    )


@pytest.mark.parametrize("num_top", [None, 0, 3])
def test_a_row_without_a_token_arrives_as_one_among_others(num_top: int | None) -> None:
    sampled = [Sampled(7), NO_TOKEN, Sampled(8)]
    words = write_words(sampled, [None, num_top, None])
    assert len(words) == 2 + num_words(num_top)
    assert read_words(words, [None, num_top, None]) == sampled


@given(st.lists(drawn(), max_size=5))
def test_drawn_tokens_arrive_as_they_were_sent(sampled: list[Sampled]) -> None:
    num_tops = [None if each.logprobs is None else len(each.logprobs.top_ids) for each in sampled]
    words = write_words(sampled, num_tops)
    assert len(words) == sum(map(num_words, num_tops))
    assert read_words(words, num_tops) == sampled
