"""Verdicts of `python -m bench chaos` on what its clients may have seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from bench.chaos.faults import Cell, How, Kind, Phase
from bench.chaos.load import Stream
from bench.chaos.verdict import Observation, Outcome, Usual, judge
from tests.bench.chaos.streams import answered, failed

CELL = Cell(Kind.DECODE_RANK, Phase.DECODING, How.KILL)
EXACT = answered(6, 7, 8)


def seen(streams: Sequence[Stream] = (EXACT,), **changes: Any) -> Observation:
    """Return a fault at 101.5 that nobody noticed, but for these changes."""
    fields: dict[str, Any] = {
        "victim": "decode-1 rank 1",
        "streams": streams,
        "affected": streams,
        "follow_ups": [],
        "hit_at": 101.5,
        "detect_seconds": 0.4,
        "sign": "the ring is rebuilding",
        "recover_seconds": 6.0,
        "free_before": 64,
        "free_after": 64,
        "lost": [],
        "is_alone": False,
    }
    return Observation(**fields | changes)


def test_streams_that_end_exactly_keep_the_promise() -> None:
    result = judge(CELL, seen())
    assert (result.outcome, result.reasons) == (Outcome.HELD, ())
    assert (result.streams, result.exact, result.errors) == (1, 1, ())
    assert result.next_token_seconds == pytest.approx(0.5)
    assert result.longest_gap_seconds == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"streams": [EXACT, failed("Unavailable: it died")]}, "1 of 2 streams: Unavailable: it died"),
        ({"streams": [answered(6, 9, 8)]}, "1 of 1 streams: its tokens differ from place 1 of 3"),
        ({"streams": [answered(6, 7)]}, "1 of 1 streams: its tokens differ from place 2 of 3"),
        ({"streams": [answered(6, 7, 8, text="fg")]}, "1 of 1 streams: its text differs"),
        (
            {"follow_ups": [answered(6, 7, 8, prompt_tokens=3)]},
            "1 of 1 follow-ups: its prompt had 3 tokens instead of 8: history is lost",
        ),
        ({"detect_seconds": None}, "the service did not notice the fault"),
        ({"detect_seconds": 7.04}, "the service did not notice the fault within 5 s, but after 7.0"),
        (
            {"affected": [answered(6, 7, 8, at=(101.0, 112.0, 113.0))]},
            "the next token of a stream came 10.5 s later than without a fault",
        ),
        ({"recover_seconds": None}, "the cluster did not become whole and idle again"),
        ({"free_after": 60}, "4 KV blocks are not free again"),
        ({"lost": ["talk-3"]}, "the history of talk-3 is lost"),
    ],
)
def test_each_broken_promise_is_told_in_a_sentence(changes: dict[str, Any], reason: str) -> None:
    result = judge(CELL, seen(**changes))
    assert (result.outcome, result.reasons) == (Outcome.BROKEN, (reason,))


def test_the_only_ring_of_a_role_may_take_its_time_to_come_back() -> None:
    late = [answered(6, 7, 8, at=(101.0, 125.0, 126.0))]
    assert judge(CELL, seen(affected=late, is_alone=True)).outcome is Outcome.HELD


@pytest.mark.parametrize(
    ("began", "at", "late"),
    [
        (101.0, 118.0, 10.1),  # its prompt was computed for 0.5 s of 6.9 when the fault came
        (101.6, 118.0, 9.5),  # it began after the fault
        (90.0, 112.0, 10.5),  # it should have had its first token long ago
    ],
)
def test_of_a_prompt_only_the_time_beyond_its_usual_one_is_late(began: float, at: float, late: float) -> None:
    stream = answered(6, 7, 8, at=(at, at + 1, at + 2))
    stream.began = began
    result = judge(CELL, seen([stream], usual=Usual(first_tokens={stream.expected.script.name: 6.9})))
    assert result.late_seconds == pytest.approx(late)
    assert result.next_token_seconds == pytest.approx(at - 101.5)
    assert result.outcome is (Outcome.BROKEN if late > 10.0 else Outcome.HELD)


def test_a_stream_that_has_a_token_has_waited_for_its_prompt() -> None:
    stream = answered(6, 7, 8, at=(101.2, 112.0, 113.0))
    result = judge(CELL, seen([stream], usual=Usual(first_tokens={stream.expected.script.name: 60.0})))
    assert result.late_seconds == pytest.approx(10.5)


def test_tokens_that_were_streamed_and_are_not_the_answers_break_the_promise() -> None:
    stream = answered(6, 7, 8)
    stream.token_ids = [6, 6, 7, 8]
    assert judge(CELL, seen([stream])).reasons == (
        "1 of 1 streams: tokens were streamed that are not those of the answer",
    )


def test_what_is_usual_are_gaps_and_first_tokens_of_all_streams() -> None:
    first, second = answered(6, 7, 8, at=(101.0, 101.5, 103.5)), answered(6, 7, 8, at=(104.0, 104.5, 105.0))
    second.expected = replace(second.expected, script=replace(second.expected.script, name="second"))
    usual = Usual.of([first, second])
    assert usual.longest_gap == pytest.approx(2.0)
    assert usual.last_first_token == pytest.approx(4.0)
    assert 0.5 < usual.gap_p99 <= 2.0
    assert Usual.of([failed("Unavailable: it died")]) == Usual()


def test_a_gap_that_ended_before_the_fault_is_none_of_its_doing() -> None:
    stream = answered(6, 7, 8, at=(90.0, 101.0, 102.0))
    result = judge(CELL, seen([stream]))
    assert result.longest_gap_seconds == pytest.approx(1.0)
    assert result.longest_gap_at_seconds == pytest.approx(-0.5)
    assert result.longest_gap_after_pieces == 2


def test_the_longest_gap_is_told_in_usual_gaps_where_these_are_known() -> None:
    gaps = [answered(6, 7, 8, at=(101.0, 101.5, 103.5)), answered(6, 7, 8)]
    assert judge(CELL, seen(gaps)).gap_ratio is None
    result = judge(CELL, seen(gaps, usual=Usual(gap_p99=0.5)))
    assert result.gap_ratio == pytest.approx(4.0)
    assert result.as_dict()["gap_ratio"] == pytest.approx(4.0)
