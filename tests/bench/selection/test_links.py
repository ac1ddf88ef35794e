"""Commands that give links their rate."""

from __future__ import annotations

import pytest

from bench.selection.links import (
    LEAST_BURST_BYTES,
    LEAST_QUEUE_BYTES,
    LinkRate,
    parse_rate,
    shape_commands,
)
from ringserve.cp_core.errors import ConfigError


@pytest.mark.parametrize(("text", "bits"), [("500kbit", 5e5), ("50mbit", 5e7), ("1gbit", 1e9), ("2.5gbit", 2.5e9)])
def test_a_rate_is_read_and_shown_as_tc_writes_it(text: str, bits: float) -> None:
    assert parse_rate(text) == LinkRate(bits)
    assert str(parse_rate(text)) == text
    assert parse_rate(text).bytes_per_second == bits / 8


@pytest.mark.parametrize("text", ["", "50", "0mbit", "-1mbit", "1Gbit", "fast", "1 gbit"])
def test_a_bad_rate_is_refused_with_allowed_ones(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--rates: {text!r} is no rate; allowed are those like 500kbit, 50mbit"):
        parse_rate(text)


def shaper_of(rate: str) -> dict[str, str]:
    """Return the parameters of tbf by name."""
    ((*command, kind, rate_key, rate_text, burst_key, burst, queue_key, queue),) = shape_commands(parse_rate(rate))
    assert command == ["tc", "qdisc", "replace", "dev", "eth0", "root"]
    assert kind == "tbf"
    return {rate_key: rate_text, burst_key: burst, queue_key: queue}


def test_egress_of_a_rank_is_shaped_with_a_burst_of_half_a_millisecond() -> None:
    assert shaper_of("1gbit") == {"rate": "1000000000bit", "burst": "62500", "limit": "125000000"}


def test_slow_links_let_two_frames_pass_and_never_drop() -> None:
    assert shaper_of("1mbit") == {
        "rate": "1000000bit",
        "burst": str(LEAST_BURST_BYTES),
        "limit": str(LEAST_QUEUE_BYTES),
    }
