"""An answer ends where a stop string is complete, however its text was cut into tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.text import REPLACEMENT, AnswerText, IncrementalText, StopRule, TextCodec

# Few letters, of one to four bytes, so that stop strings are found, begun and broken off.
letters = st.text("ab€😀", max_size=24)
stop_strings = st.lists(st.text("ab€😀", min_size=1, max_size=4), min_size=1, max_size=3)


def first_stop(text: str, stops: list[str]) -> tuple[int, int, str] | None:
    """(end, begin, which) of the first to be complete, the longest of those that end together: letter by letter."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            longest = max(ended, key=len)
            return end, end - len(longest), longest
    return None


def read(codec: TextCodec, raw: bytes, rule: StopRule) -> tuple[list[str], AnswerText, int]:
    """(what each token's push returned, the text, tokens that were read)."""
    answer = AnswerText(IncrementalText(codec), rule)
    pushed = []
    for number, byte in enumerate(raw):
        pushed.append(answer.push(byte))
        if answer.matched is not None:
            return pushed, answer, number + 1
    return pushed, answer, len(raw)


@given(letters, stop_strings, st.booleans())
def test_the_text_ends_before_the_first_stop_string(
    byte_codec: TextCodec, text: str, stops: list[str], is_shown: bool
) -> None:
    """Tokens are single bytes: stop strings go across tokens, and characters too."""
    pushed, answer, num_tokens = read(byte_codec, text.encode(), StopRule(strings=tuple(stops), is_shown=is_shown))
    found = first_stop(text, stops)
    if found is None:
        assert answer.matched is None
        assert "".join(pushed) + answer.finish() == answer.text == text
        return
    end, begin, which = found
    assert answer.matched == which
    assert "".join(pushed) == answer.text == text[: end if is_shown else begin]
    assert num_tokens == len(text[:end].encode()), "no token after the one that completes it is asked for"
    assert answer.finish() == "", "nothing follows"


@given(letters, stop_strings)
def test_nothing_sent_is_ever_part_of_a_stop_string_or_half_a_character(
    byte_codec: TextCodec, text: str, stops: list[str]
) -> None:
    pushed, _, _ = read(byte_codec, text.encode(), StopRule(strings=tuple(stops)))
    sent = ""
    for number, new in enumerate(pushed):
        sent += new
        assert REPLACEMENT not in new
        whole = text.encode()[: number + 1].decode(errors="ignore")
        assert whole.startswith(sent)
        waits = whole[len(sent) :]
        could_stop = any(stop.startswith(waits) for stop in stops)
        assert not waits or could_stop or first_stop(whole, stops), "text waits only where it may become a stop string"


@given(letters, stop_strings, st.integers(0, 24))
def test_stop_strings_within_the_first_tokens_do_not_count(
    byte_codec: TextCodec, text: str, stops: list[str], min_tokens: int
) -> None:
    raw = text.encode()
    rule = StopRule(strings=tuple(stops), min_tokens=min_tokens)
    pushed, answer, num_tokens = read(byte_codec, raw, rule)
    ends = [
        len(text[:end].encode())
        for end in range(1, len(text) + 1)
        if any(text[:end].endswith(stop) for stop in stops) and len(text[:end].encode()) > min_tokens
    ]
    assert (answer.matched is not None) == bool(ends)
    assert num_tokens == (ends[0] if ends else len(raw))
    shown = raw[:num_tokens].decode().removesuffix(answer.matched or "")
    assert "".join(pushed) + answer.finish() == shown


@given(st.text("abcé 😀€\n", max_size=24), st.lists(st.text("abcé 😀€", min_size=1, max_size=4), max_size=3))
def test_a_tokenizer_that_falls_back_to_bytes_stops_at_whole_characters_too(
    fallback_codec: TextCodec, text: str, stops: list[str]
) -> None:
    ids = fallback_codec.encode(text).tolist()
    whole = fallback_codec.decode(ids)
    answer = AnswerText(IncrementalText(fallback_codec), StopRule(strings=tuple(stops)))
    sent = ""
    for token in ids:
        sent += answer.push(token)
        assert REPLACEMENT not in sent
        assert whole.startswith(sent)
        if answer.matched is not None:
            break
    found = first_stop(whole, stops)
    assert answer.matched == (found and found[2])
    assert sent + answer.finish() == answer.text == (whole if found is None else whole[: found[1]])


def test_a_token_of_many_characters_may_hold_a_stop_string_and_more(byte_codec: TextCodec) -> None:
    class Words(TextCodec):
        def __init__(self) -> None:
            pass

        def decode(self, token_ids: list[int]) -> str:  # type: ignore[override]
            return "".join(["Hello. World", " and more", "\nUser: hi", "x"][token] for token in token_ids)

    answer = AnswerText(IncrementalText(Words()), StopRule(strings=("User:", "more\nUs")))
    assert [answer.push(0), answer.push(1), answer.push(2)] == ["Hello. World", " and ", ""]
    assert answer.matched == "more\nUs", "it is complete before the other one is"
    assert answer.text == "Hello. World and "


@pytest.mark.parametrize("stops", [(), ("zzz",)])
def test_bytes_that_are_no_text_are_shown_at_the_end(byte_codec: TextCodec, stops: tuple[str, ...]) -> None:
    pushed, answer, _ = read(byte_codec, b"az\xe2\x82", StopRule(strings=stops))
    assert "".join(pushed) == ("az" if not stops else "a")
    answer.finish()
    assert answer.text == "az" + REPLACEMENT
    assert answer.finish() == ""
