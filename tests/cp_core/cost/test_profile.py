"""Hardware profiles: the shipped ones, and the rules of a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ringserve.cp_core.cost.profile import format_profile, parse_profile, read_profile, shipped_profiles
from ringserve.cp_core.errors import ConfigError
from tests.cp_core.cost.hardware import ROUND


def content() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(format_profile(ROUND))
    return loaded


def test_the_papers_two_platforms_are_shipped() -> None:
    assert shipped_profiles() == ("gti", "gtt")
    rdma, tcp = read_profile("gtt"), read_profile("gti")
    assert tcp.prefill.link_bytes_per_second == 3e9 < rdma.prefill.link_bytes_per_second
    assert "2411.01783" in rdma.source
    assert "2411.01783" in tcp.source


def test_a_profile_written_is_the_same_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    path.write_text(format_profile(ROUND))
    assert read_profile(str(path)) == ROUND


def test_overheads_of_a_ring_grow_with_its_ranks_and_with_cached_tokens() -> None:
    assert ROUND.prefill.rates(1, is_cached=False).layer_overhead_seconds == pytest.approx(0.1)
    assert ROUND.prefill.rates(4, is_cached=False).layer_overhead_seconds == pytest.approx(0.13)
    assert ROUND.prefill.rates(4, is_cached=True).layer_overhead_seconds == pytest.approx(0.131)


@pytest.mark.parametrize(
    ("section", "key", "value", "sentence"),
    [
        ("prefill", "gemm_flops", 0.0, "prefill.gemm_flops is 0.0; allowed is any number above 0"),
        ("prefill", "gemm_flops", -1.0, "prefill.gemm_flops is -1.0; allowed is any number above 0"),
        ("decode", "hop_seconds", -1.0, "decode.hop_seconds is -1.0; allowed is any number from 0"),
        ("prefill", "gemm_flops", "fast", "prefill.gemm_flops is 'fast'; a number is needed"),
        ("prefill", "gemm_flops", True, "prefill.gemm_flops is True; a number is needed"),
        ("prefill", "gemm_flops", float("nan"), "prefill.gemm_flops is nan; a number is needed"),
        ("prefill", "overlap", 1.5, "prefill.overlap is 1.5; allowed are 0 to 1"),
        ("prefill", "lone_speed", 0.5, "prefill.lone_speed is 0.5; allowed is 1 or more"),
        ("prefill", "speed", 1.0, "prefill.speed is unknown; allowed are gemm_flops"),
        ("decode", "free_rows", 1.5, "decode.free_rows is 1.5; a whole number is needed"),
        ("decode", "hop_seconds", None, "decode.hop_seconds is None; a number is needed"),
        ("", "name", 3, "name is 3; a string is needed"),
        ("", "processes_per_host", 0, "processes_per_host is 0"),
    ],
)
def test_a_constant_that_cannot_be_is_refused_by_its_key(section: str, key: str, value: Any, sentence: str) -> None:
    loaded = content()
    (loaded[section] if section else loaded)[key] = value
    with pytest.raises(ConfigError, match=f"hardware profile x: {sentence}".replace("(", r"\(")):
        parse_profile(json.dumps(loaded), "x")


def test_latencies_and_overheads_may_be_nothing() -> None:
    loaded = content()
    loaded["prefill"]["link_latency_seconds"] = 0.0
    loaded["decode"]["free_rows"] = 0
    profile = parse_profile(json.dumps(loaded), "x")
    assert profile.prefill.link_latency_seconds == 0.0


def test_missing_constants_and_sections_are_refused() -> None:
    loaded = content()
    del loaded["decode"]["hop_seconds"]
    with pytest.raises(ConfigError, match=r"hardware profile x: decode\.hop_seconds is missing"):
        parse_profile(json.dumps(loaded), "x")
    del loaded["decode"]
    with pytest.raises(ConfigError, match="hardware profile x has no section 'decode'"):
        parse_profile(json.dumps(loaded), "x")


def test_what_is_no_profile_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hardware profile 'h200' is unknown; allowed are gti, gtt, or the path"):
        read_profile("h200")
    with pytest.raises(ConfigError, match="is not JSON"):
        parse_profile("{", "x")
    with pytest.raises(ConfigError, match="does not hold a JSON object"):
        parse_profile("[]", "x")
    path = tmp_path / "binary.json"
    path.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_profile(str(path))
