"""Reading of a prompt when its turn begins: the tokens it shares with the history, and whether it repeats that."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cp_core.errors import InvalidRequest, NotFound
from orchestration.protocol.turns import PromptMode
from orchestration.router.begin import common_prefix, repeats_history, resolve_prompt
from workers.protocol.prefill_steps import TokenIds

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
def test_a_prompt_that_begins_with_the_history_is_the_whole_history(history: list[int], new: list[int]) -> None:
    prompt = ids(history, new)
    whole, mode = resolve_prompt(ids(history), prompt, AUTO)
    assert mode is WHOLE
    assert whole.tolist() == prompt.tolist()


@given(few_tokens.filter(bool), few_tokens.filter(bool))
def test_a_resolved_prompt_is_what_was_sent_or_follows_the_history(history: list[int], prompt: list[int]) -> None:
    whole, mode = resolve_prompt(ids(history), ids(prompt), AUTO)
    assert mode in (APPEND, WHOLE)
    assert whole.tolist() == (history + prompt if mode is APPEND else prompt)
    assert mode is (WHOLE if repeats_history(ids(history), ids(prompt)) else APPEND)


@given(few_tokens.filter(bool), few_tokens.filter(bool), st.sampled_from([APPEND, WHOLE]))
def test_a_stated_mode_is_obeyed_whatever_the_tokens(history: list[int], prompt: list[int], mode: PromptMode) -> None:
    whole, taken = resolve_prompt(ids(history), ids(prompt), mode)
    assert taken is mode
    assert whole.tolist() == (history + prompt if mode is APPEND else prompt)


HISTORY = range(1000, 1400)


@pytest.mark.parametrize(
    ("prompt", "mode"),
    [
        (ids(range(20)), APPEND),
        (ids(range(5000, 6000)), APPEND),
        (ids([1000]), APPEND),  # one token in common by chance
        (ids(range(1000, 1040), range(50)), APPEND),  # the same opening words, a tenth of the history
        (ids(HISTORY, range(20)), WHOLE),
        (ids(HISTORY), WHOLE),
        (ids(range(1000, 1100), range(20)), WHOLE),  # cut back to a quarter and continued
        (ids(range(1000, 1099), range(20)), APPEND),  # just under a quarter
        (ids(range(1000, 1200), range(200)), WHOLE),  # half of the prompt agrees
        (ids(range(1000, 1200), range(201)), APPEND),  # just under half, and just under half of the passages
        (ids([7], range(1001, 1400), range(20)), WHOLE),  # first token edited
        (ids(range(1000, 1050), [7], range(1051, 1400), [8]), WHOLE),  # edited early, the rest as it was
        (ids(range(90), HISTORY), WHOLE),  # something was put before
        (ids(range(1200, 1400), range(300)), APPEND),  # a quotation of just under half
    ],
)
def test_a_prompt_of_unstated_mode_is_read_by_what_it_repeats(prompt: TokenIds, mode: PromptMode) -> None:
    assert resolve_prompt(ids(HISTORY), prompt, AUTO)[1] is mode


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
