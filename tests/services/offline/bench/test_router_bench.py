"""`ringserve bench router`: a small load, and wrong options."""

from __future__ import annotations

import json

import pytest

from services.cli.main import main


def test_it_counts_every_decision_and_the_memory_of_a_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--conversations", "30", "--rings", "8", "--turns", "3", "--tokens", "200"]
    assert main(["bench", "router", *sizes, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["decisions"] == 90
    assert 0.0 < report["placement"]["p50"] <= report["decision"]["p50"] <= report["decision"]["p99"]
    assert report["decisions_per_second"] == pytest.approx(1e3 / report["decision"]["mean"], rel=1e-6)
    assert 0.0 < report["processor"]["p50"] <= report["processor"]["p99"] <= report["processor"]["most"]
    assert 0.0 <= report["pauses_share"] < 1.0
    assert (report["num_pauses"] > 0) == (report["longest_pause"] > 0.0)
    assert report["kept_share"] == 1.0, "no ring has a queue, so no conversation leaves its KV"
    assert 0.0 <= report["direct_share"] <= 1.0
    assert report["bytes_per_conversation"] > report["token_bytes_per_conversation"] > 0.0
    assert report["is_met"] == (report["decision"]["p99"] < report["target_milliseconds"])


def test_the_table_tells_the_target(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "router", "--conversations", "5", "--rings", "4"]) == 0
    assert "target of p99 under 1 ms" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "value", "sentence"), [("--rings", "1", "--rings: 1 is out of range"), ("--turns", "0", "--turns: 0")]
)
def test_sizes_out_of_range_are_refused(
    option: str, value: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "router", option, value]) == 1
    assert sentence in capsys.readouterr().err
