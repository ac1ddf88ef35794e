"""Arrivals drawn by chance, and those of a file."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringserve.cp_core.errors import ConfigError
from ringserve.services.offline.load.replay import KINDS, Arrival, draw_trace, read_trace, write_trace

BY_NAME = {kind.name: kind for kind in KINDS}


def drawn(
    rate: float = 20.0, duration: float = 100.0, seed: int = 0, every: dict[str, float] | None = None
) -> list[Arrival]:
    return draw_trace(
        kinds=BY_NAME, rate=rate, duration=duration, mix={"short": 0.8, "long": 0.2}, every=every or {}, seed=seed
    )


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 1000), rate=st.floats(0.1, 50.0), duration=st.floats(0.5, 50.0))
def test_arrivals_are_in_order_within_the_duration_and_as_large_as_their_kind(
    seed: int, rate: float, duration: float
) -> None:
    trace = drawn(rate, duration, seed, {"long": 3.0})
    assert [arrival.at for arrival in trace] == sorted(arrival.at for arrival in trace)
    for arrival in trace:
        kind = BY_NAME[arrival.kind]
        assert 0 <= arrival.at < duration
        assert kind.least_prompt <= arrival.prompt_tokens <= kind.most_prompt
        assert arrival.max_tokens == kind.max_tokens


def test_about_as_many_come_as_the_rate_says_in_about_the_mix() -> None:
    """2,000 are expected: five standard deviations are 224 of all and 90 of the long ones."""
    trace = drawn()
    assert abs(len(trace) - 2000) < 224
    assert abs(sum(arrival.kind == "long" for arrival in trace) - 0.2 * len(trace)) < 90


def test_those_at_fixed_intervals_come_beside_the_same_others() -> None:
    plain, more = drawn(duration=35.0), drawn(duration=35.0, every={"long": 10.0})
    extra = [arrival for arrival in more if arrival not in plain]
    assert [arrival.at for arrival in extra] == [5.0, 15.0, 25.0]
    assert [arrival for arrival in more if arrival not in extra] == plain


def test_a_written_trace_is_read_back(tmp_path: Path) -> None:
    trace = drawn(duration=5.0)
    write_trace(tmp_path / "trace.jsonl", trace)
    assert read_trace(tmp_path / "trace.jsonl") == trace
    with pytest.raises(ConfigError, match=r"--save-trace: .* cannot be written"):
        write_trace(tmp_path, trace)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "holds no arrivals"),
        ("{", "line 1 of .* is no JSON object of at, kind, prompt_tokens, max_tokens"),
        ('{"at": 0}', "line 1 of .* is no JSON object of at, kind, prompt_tokens, max_tokens"),
        ("[]", "line 1 of .* is no JSON object"),
        ('\n{"at": -1, "kind": "a", "prompt_tokens": 1, "max_tokens": 1}', "line 2 of .*: at must be 0 or more"),
        ('{"at": "x", "kind": "a", "prompt_tokens": 1, "max_tokens": 1}', "line 1 of .* is no JSON object"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_with_its_line(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        read_trace(path)
