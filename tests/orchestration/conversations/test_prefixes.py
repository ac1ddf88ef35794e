"""Index of histories by their tokens, against a search through all of them."""

from __future__ import annotations

import gc
import weakref

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ringserve.orchestration.conversations.prefixes import PrefixIndex
from ringserve.orchestration.conversations.store import common_prefix


def tokens(text: str) -> np.ndarray:
    return np.asarray([ord(letter) for letter in text], dtype=np.int64)


def found(index: PrefixIndex, text: str, limit: int = 10) -> list[tuple[object, int]]:
    return list(index.matches(tokens(text), limit))


def test_a_prompt_finds_the_history_that_shares_most_of_it_first() -> None:
    index = PrefixIndex()
    for key in ("abcdef", "abcxyz", "abq", "zzz"):
        index.put(key, tokens(key))
    assert found(index, "abcdeg") == [("abcdef", 5), ("abcxyz", 3), ("abq", 2)]
    assert found(index, "abcdefgh")[0] == ("abcdef", 6)
    assert found(index, "ab", 1) == [("abq", 2)], "the latest of three that share as much"
    assert found(index, "y") == []
    assert found(index, "") == []


def test_the_latest_used_of_equal_matches_comes_first() -> None:
    index = PrefixIndex()
    for key in ("abc1", "abc2", "abc3"):
        index.put(key, tokens(key))
    assert [key for key, _ in found(index, "abc")] == ["abc3", "abc2", "abc1"]
    index.touch("abc1")
    assert [key for key, _ in found(index, "abc")] == ["abc1", "abc3", "abc2"]


def test_two_histories_of_the_same_tokens_are_both_found() -> None:
    index = PrefixIndex()
    index.put("first", tokens("abc"))
    index.put("second", tokens("abc"))
    assert found(index, "abcd") == [("second", 3), ("first", 3)]
    index.remove("second")
    assert found(index, "abcd") == [("first", 3)]


def test_a_removed_history_is_not_kept_alive_by_those_that_share_its_tokens() -> None:
    index, long = PrefixIndex(), tokens("abcdef")
    index.put("long", long)
    index.put("short", tokens("abc"))
    index.put("other", tokens("abx"))
    alive = weakref.ref(long)
    del long
    index.remove("long")
    gc.collect()
    assert alive() is None
    assert found(index, "abcdef") == [("short", 3), ("other", 2)]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "remove", "touch"]), st.integers(0, 5), st.text("ab", max_size=8)),
        max_size=30,
    ),
    st.text("ab", max_size=9),
)
def test_any_order_of_changes_finds_what_a_search_through_all_histories_finds(
    changes: list[tuple[str, int, str]], prompt: str
) -> None:
    index, known = PrefixIndex(), dict[str, str]()
    for what, number, text in changes:
        key = str(number)
        if what == "put":
            index.put(key, tokens(text))
            known[key] = text
        elif what == "remove":
            index.remove(key)
            known.pop(key, None)
        else:
            index.touch(key)
        assert len(index) == len(known)
    matches = found(index, prompt, 100)
    expected = {key: common_prefix(tokens(text), tokens(prompt)) for key, text in known.items()}
    assert dict(matches) == {key: shared for key, shared in expected.items() if shared}
    assert [shared for _, shared in matches] == sorted((shared for _, shared in matches), reverse=True)
