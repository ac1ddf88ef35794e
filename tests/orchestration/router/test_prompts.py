"""Reading of a prompt when its turn begins: the tokens it shares with the history, and how it is read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringserve.cp_core.errors import InvalidRequest, NotFound
from ringserve.orchestration.conversations.store import common_prefix
from ringserve.orchestration.protocol.plans import PromptMode
from ringserve.orchestration.router.admission import resolve_prompt
from ringserve.workers.protocol.steps import TokenIds

AUTO, APPEND, WHOLE, NEW = PromptMode.AUTO, PromptMode.APPEND, PromptMode.WHOLE_HISTORY, PromptMode.NEW

few_tokens = st.lists(st.integers(0, 3), max_size=30)


def ids(*parts: range | list[int]) -> TokenIds:
    return np.concatenate([np.asarray(list(part), dtype=np.int64) for part in parts])


@given(few_tokens, few_tokens)
def test_the_common_prefix_ends_at_the_first_difference(left: list[int], right: list[int]) -> None:
    shared = common_prefix(ids(left), ids(right))
    assert left[:shared] == right[:shared]
    assert shared == min(len(left), len(right)) or left[shared] != right[shared]


@given(few_tokens.filter(bool), few_tokens)
def test_a_prompt_of_unstated_mode_follows_the_history_even_where_it_repeats_it(
    history: list[int], new: list[int]
) -> None:
    whole, mode = resolve_prompt(ids(history), ids(history, new), AUTO)
    assert mode is APPEND
    assert whole.tolist() == history + history + new


@given(few_tokens.filter(bool), few_tokens.filter(bool), st.sampled_from([APPEND, WHOLE]))
def test_a_stated_mode_is_obeyed_whatever_the_tokens(history: list[int], prompt: list[int], mode: PromptMode) -> None:
    whole, taken = resolve_prompt(ids(history), ids(prompt), mode)
    assert taken is mode
    assert whole.tolist() == (history + prompt if mode is APPEND else prompt)


@pytest.mark.parametrize("mode", [AUTO, WHOLE])
def test_the_first_prompt_of_a_conversation_is_new(mode: PromptMode) -> None:
    whole, taken = resolve_prompt(None, ids([1, 2]), mode)
    assert (whole.tolist(), taken) == ([1, 2], NEW)


def test_nothing_can_be_appended_to_a_conversation_that_does_not_exist() -> None:
    with pytest.raises(NotFound, match="nothing to append to"):
        resolve_prompt(None, ids([1]), APPEND)


@pytest.mark.parametrize("mode", [AUTO, APPEND, WHOLE])
@pytest.mark.parametrize("history", [None, ids([1, 2])])
def test_an_empty_prompt_is_refused(history: TokenIds | None, mode: PromptMode) -> None:
    with pytest.raises(InvalidRequest, match="0 tokens, at least 1"):
        resolve_prompt(history, ids([]), mode)


@pytest.mark.parametrize("mode", [AUTO, APPEND])
def test_a_begin_token_of_the_tokenizer_is_left_out_of_a_follow_up(mode: PromptMode) -> None:
    whole, _ = resolve_prompt(ids([1, 7, 8]), ids([1, 9]), mode, num_special=1)
    assert whole.tolist() == [1, 7, 8, 9]
    first, _ = resolve_prompt(ids([]), ids([1, 9]), AUTO, num_special=1)
    assert first.tolist() == [1, 9], "a conversation's first text keeps it"
    history, _ = resolve_prompt(ids([1, 7]), ids([1, 7, 9]), PromptMode.WHOLE_HISTORY, num_special=1)
    assert history.tolist() == [1, 7, 9]
