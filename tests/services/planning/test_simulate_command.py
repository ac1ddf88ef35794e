"""`ringserve simulate`, as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.cli.main import main

CLUSTER = ("simulate", "--model", "llama3-8b", "--prefill", "4x2x2", "--decode", "2x1x2")


def test_placements_are_set_beside_each_other_on_the_same_trace(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    made = (*CLUSTER, "--conversations", "40", "--time", "2min", "--seed", "3", "--json")
    assert main([*made, "--write-trace", str(path)]) == 0
    first = json.loads(capsys.readouterr().out)
    assert [result["placement"] for result in first["results"]] == ["router", "round_robin", "kv_aware"]
    assert len({result["num_turns"] for result in first["results"]}) == 1
    assert len(path.read_text().splitlines()) == 40
    assert main([*CLUSTER, "--trace", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == first


def test_results_for_people_say_how_many_turns_were_taken(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CLUSTER, "--conversations", "5", "--time", "1min", "--placement", "kv_aware"]) == 0
    shown = capsys.readouterr().out
    assert "kv_aware" in shown
    assert "round_robin" not in shown
    assert "turns of 5 conversations" in shown


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--prefill", "4x2"), "--prefill: '4x2' is no pool; allowed are those like 20x2x8, rings x cp x tp"),
        (("--decode", "0x1x1"), "--decode: '0x1x1' is no pool"),
        (("--decode", "1x1x3"), "--tp: 3 does not divide the 8 KV heads of llama3-8b"),
        (("--placement", "best"), "placement is 'best'; allowed are router, round_robin, kv_aware"),
        (("--conversations", "0"), "--conversations: 0 is none"),
        (("--max-batch", "0"), "--max-batch: 0 is none"),
        (("--turns", "0.5"), "--turns: 0.5 is no mean of turns"),
        (("--turns", "nan"), "--turns: nan is no mean of turns"),
        (("--first", "4k,many"), "--first: 'many' is no number of tokens"),
        (("--time", "soon"), "--time: 'soon' is no duration"),
        (("--trace", "none.jsonl"), "--trace: none.jsonl cannot be read"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], sentence: str
) -> None:
    assert main([*CLUSTER, *arguments]) == 1
    error = capsys.readouterr().err.strip()
    assert error.startswith(f"ringserve: {sentence}")
    assert len(error.splitlines()) == 1
