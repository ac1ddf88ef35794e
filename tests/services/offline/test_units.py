"""Numbers on the command line."""

from __future__ import annotations

import pytest

from ringserve.cp_core.errors import ConfigError
from ringserve.services.offline.units import (
    ContextShare,
    format_seconds,
    format_tokens,
    parse_contexts,
    parse_rate,
    parse_seconds,
    parse_tokens,
)


def test_tokens_in_thousands_and_millions() -> None:
    assert [parse_tokens("--context", text) for text in ("4096", "128k", "1m", "1.5M", " 8K ")] == [
        4096,
        128_000,
        1_000_000,
        1_500_000,
        8_000,
    ]


def test_contexts_are_weighed_and_sorted() -> None:
    assert parse_contexts("--context", "1m:1,128k:3") == (
        ContextShare(tokens=128_000, share=0.75),
        ContextShare(tokens=1_000_000, share=0.25),
    )
    assert [each.share for each in parse_contexts("--context", "8k,16k")] == [0.5, 0.5]


def test_durations_and_rates() -> None:
    assert [parse_seconds("--ttft", text) for text in ("500ms", "60s", "2min", "1h")] == [0.5, 60.0, 120.0, 3600.0]
    assert [parse_rate("--rate", text) for text in ("0.1/s", "6/min", "360/h")] == pytest.approx([0.1] * 3)


@pytest.mark.parametrize(
    ("parse", "text", "sentence"),
    [
        (parse_tokens, "many", "--x: 'many' is not a number of tokens; give one like 4096, 128k or 1m"),
        (parse_tokens, "0", "--x: '0' is not a number of tokens"),
        (parse_tokens, "0.0001k", "is not a number of tokens"),
        (parse_tokens, "-5", "is not a number of tokens"),
        (parse_contexts, "8k,8000", "--x: '8000' is given twice"),
        (parse_contexts, "8k:0", "--x: '0' is not a number above 0; give a weight like 128k:9"),
        (parse_contexts, "8k:nan", "--x: 'nan' is not a number above 0"),
        (parse_contexts, "", "--x: '' is not a number of tokens"),
        (parse_seconds, "60", "--x: '60' is not a duration; give one like 500ms, 60s or 2min"),
        (parse_seconds, "0s", "--x: '0' is not a number above 0"),
        (parse_seconds, "1.2.3s", "--x: '1.2.3' is not a number above 0"),
        (parse_rate, "5", "--x: '5' is not a rate; give one like 0.1/s, 6/min or 360/h"),
        (parse_rate, "0/s", "--x: '0' is not a number above 0"),
    ],
)
def test_what_is_none_of_these_is_refused_with_what_is_allowed(parse: object, text: str, sentence: str) -> None:
    assert callable(parse)
    with pytest.raises(ConfigError) as refused:
        parse("--x", text)
    assert sentence in str(refused.value)


def test_numbers_are_written_short() -> None:
    assert [format_tokens(count) for count in (128_000, 1_000_000, 4096, 1_500_000)] == ["128k", "1m", "4096", "1500k"]
    assert [format_seconds(seconds) for seconds in (0.0123, 1.234, 77.0, 1202.3)] == [
        "12.3 ms",
        "1.23 s",
        "77 s",
        "1202 s",
    ]
