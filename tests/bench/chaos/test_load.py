"""Scripts of the load of `python -m bench chaos`."""

from __future__ import annotations

import pytest

from bench.chaos.load import (
    FIRST,
    HIT,
    LAST,
    NUM_CONVERSATIONS,
    Expected,
    stop_string,
    write_scripts,
)


@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("abcdefghij", "ghi"),
        ("abc\ufffdd\ufffde\ufffdfgh", "fgh"),
        ("abcdef\ufffd\ufffd\ufffd\ufffd", "def"),
        ("a\ufffd", "a"),
        ("\ufffd\ufffd", ""),
    ],
)
def test_a_stop_string_is_whole_characters_of_the_answers_later_text(text: str, stop: str) -> None:
    assert stop_string(text, int(len(text) * 0.6)) == stop


def test_conversations_differ_from_their_first_tokens_on_and_half_of_them_are_seeded() -> None:
    scripts = write_scripts(list(range(4000)))
    assert len({script.turns[FIRST].prompt[:8] for script in scripts}) == len(scripts) == NUM_CONVERSATIONS
    assert sum(script.is_greedy for script in scripts) == NUM_CONVERSATIONS // 2
    assert {script.repeats_history for script in scripts if script.is_greedy} == {True, False}
    for script in scripts:
        sampling = script.turns[HIT].sampling
        assert (sampling.temperature == 0.0) == script.is_greedy
        assert script.is_greedy or (sampling.seed is not None and sampling.presence_penalty)


def test_a_client_sends_the_whole_history_or_what_is_new() -> None:
    appending, repeating = write_scripts(list(range(4000)))[0], write_scripts(list(range(4000)))[2]
    for script in (appending, repeating):
        expected = Expected(script=script, answers=((1, 2), (3,)), texts=("", ""))
        history = (*script.turns[FIRST].prompt, 1, 2, *script.turns[HIT].prompt, 3)
        assert expected.history(LAST) == history
        assert expected.prompt(FIRST) == script.turns[FIRST].prompt
        assert expected.prompt(LAST) == ((*history,) if script.repeats_history else ()) + script.turns[LAST].prompt
