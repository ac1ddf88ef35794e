"""`ringserve simulate` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ringserve.services.cli.main import main
from ringserve.services.offline.simulator.placement import POLICIES
from ringserve.services.offline.simulator.results import MAX_BINS, bin_seconds, binned

CLUSTER = ("simulate", "--model", "llama3-8b", "--prefill", "4x2x2", "--decode", "2x1x2")


def test_placements_are_set_beside_each_other_on_the_same_trace(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    made = (*CLUSTER, "--conversations", "40", "--time", "2min", "--seed", "3", "--json")
    assert main([*made, "--write-trace", str(path)]) == 0
    first = json.loads(capsys.readouterr().out)
    assert [result["placement"] for result in first["results"]] == list(POLICIES)
    assert len({result["num_turns"] for result in first["results"]}) == 1
    assert len(path.read_text().splitlines()) == 40
    assert main([*CLUSTER, "--trace", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == first


def test_placements_in_processes_of_their_own_come_to_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    made = (*CLUSTER, "--busy", "0.5", "--time", "20s", "--first", "500-4k:50,8k-32k:45,100k:5", "--json")
    results = []
    for jobs in ("1", "2"):
        assert main([*made, "--placement", "router,least_loaded", "--jobs", jobs]) == 0
        results.append(json.loads(capsys.readouterr().out)["results"])
    assert results[0] == results[1]
    assert [result["placement"] for result in results[0]] == ["router", "least_loaded"]
    assert results[0][0]["num_turns"] > 10
    assert results[0][0]["ttft_of_size"]["short"]["count"] > 0


def test_a_picture_is_drawn_where_it_is_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "day.png"
    assert main([*CLUSTER, "--conversations", "20", "--time", "1min", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("seconds", "length"),
    [(0.0, 1), (24.0, 1), (25.0, 2), (1200.0, 60), (3600.0, 300), (86_400.0, 3600), (9e6, 432_000)],
)
def test_bins_of_a_picture_are_two_dozen_at_most_and_read_well_on_a_clock(seconds: float, length: float) -> None:
    assert bin_seconds(seconds) == length
    assert seconds <= MAX_BINS * length


def test_turns_are_binned_by_the_time_at_which_they_were_asked() -> None:
    bins = binned([3.0, 119.0, 1100.0, 1190.0], [1.0, 3.0, 5.0, 7.0])
    assert [(each.start, each.stop, each.values.count, each.values.most) for each in bins] == [
        (0.0, 60.0, 1, 1.0),
        (60.0, 120.0, 1, 3.0),
        (1080.0, 1140.0, 1, 5.0),
        (1140.0, 1200.0, 1, 7.0),
    ]
    assert binned([], []) == ()


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
        (
            ("--placement", "best"),
            "--placement: 'best' is unknown; allowed are router, least_loaded, round_robin, kv_a",
        ),
        (("--placement", "router,best"), "--placement: 'best' is unknown"),
        (("--busy", "0"), "--busy: 0.0 is no share; allowed are numbers above 0 and up to 1"),
        (("--busy", "nan"), "--busy: nan is no share"),
        (("--jobs", "0"), "--jobs: 0 is out of range; allowed are 1 to 64"),
        (("--first", "4k:much"), "--first: '4k:much' has no weight after the colon; allowed are those like 8k-128k:45"),
        (("--first", "4k:0"), "--first: '4k:0' has no weight"),
        (("--first", "8k-4k"), "--first: '8k-4k' ends before it begins; allowed are ranges like 8k-128k"),
        (("--answer", "0"), "--answer: '0' is not a number of tokens"),
        (("--write-trace", "none/trace.jsonl"), "--write-trace: cannot write none/trace.jsonl"),
        (("--conversations", "0"), "--conversations: 0 is out of range"),
        (("--max-batch", "0"), "--max-batch: 0 is out of range"),
        (("--turns", "0.5"), "--turns: 0.5 is out of range; allowed are 1 to 1000"),
        (("--turns", "nan"), "--turns: nan is out of range"),
        (("--first", "4k,many"), "--first: 'many' is not a number of tokens"),
        (("--time", "soon"), "--time: 'soon' is not a duration"),
        (("--trace", "none.jsonl"), "--trace: none.jsonl cannot be read"),
        (("--scale", "none,much"), "--scale: 'much' is unknown; allowed are none, load, busy"),
        (("--target", "0"), "--target: 0.0 is no share; allowed are numbers above 0 and up to 1"),
        (("--placement", "least_loaded", "--scale", "load"), "placement is 'least_loaded'; with scaling only 'router'"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], sentence: str
) -> None:
    assert main([*CLUSTER, *arguments]) == 1
    error = capsys.readouterr().err.strip()
    assert error.startswith(f"ringserve: {sentence}")
    assert len(error.splitlines()) == 1
