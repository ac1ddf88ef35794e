"""`python -m bench router`: a small load, parts of the router's work, and wrong options."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.router import parts
from bench.router.load import RouterLoad
from bench.router.restart import RestartLoad
from ringserve.services.auth.tls import SECRET_VARIABLE


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LOOKED_UP": 4096, "BRANCHES": 4, "POOL_BLOCKS": 128}.items():
        monkeypatch.setattr(parts, name, value)


@pytest.mark.slow
def test_it_counts_every_decision_and_the_memory_of_a_conversation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--conversations", "30", "--rings", "8", "--turns", "3", "--tokens", "200", "--rounds", "2"]
    assert main(["router", *sizes, "--journal", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["decisions"] == 90
    assert 0.0 < report["placement"]["p50"] <= report["decision"]["p50"] <= report["decision"]["p99"]
    assert report["decisions_per_second"] == pytest.approx(1e3 / report["decision"]["mean"], rel=1e-6)
    assert 0.0 < report["processor"]["p50"] <= report["processor"]["p99"] <= report["processor"]["most"]
    assert 0.0 < report["uncollected"]["mean"] <= report["processor"]["mean"]
    assert report["turn"]["p50"] > report["decision"]["p50"], "the end of a turn takes time too"
    journal = report["journal"]
    assert journal["turn"]["mean"] > journal["decision"]["mean"], "and its answer is written"
    assert journal["added"]["least"] <= journal["added"]["p50"] <= journal["added"]["most"]
    assert 0.0 <= report["pauses_share"] < 1.0
    assert (report["num_pauses"] > 0) == (report["longest_pause"] > 0.0)
    assert report["kept_share"] == 1.0, "no ring has a queue, so no conversation leaves its KV"
    assert 0.0 <= report["direct_share"] <= 1.0
    assert report["bytes_per_conversation"] > report["token_bytes_per_conversation"] > 0.0
    assert not list(tmp_path.iterdir()), "the journals of a run do not outlive it"


@pytest.mark.slow
def test_it_measures_parts_and_tells_which_targets_are_met(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--conversations", "20", "--rings", "4", "--tokens", "160", "--rounds", "2"]
    assert main(["router", *sizes, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    spreads = ("lookup", "branched_lookup", "pool_growth", "placed_at", "begun", "committed")
    for name in spreads:
        assert 0.0 < report["parts"][name]["p50"] <= report["parts"][name]["most"], name
    measured = report["parts"]["index_bytes_per_history"]
    assert report["parts"]["index_bytes_per_block"] == pytest.approx(measured / 10), "10 blocks of 16 tokens"
    assert report["parts"]["layout_bytes_per_token"] > 0.0
    met = {sentence.partition(":")[0]: is_met for sentence, is_met in report["targets"].items()}
    assert met["p99 of a decision (ms)"] == (report["following"]["p99"] <= 1.0), "further turns compare more"
    assert met["index, bytes for 16 tokens"] == (report["parts"]["index_bytes_per_block"] <= 40.0)


@pytest.mark.slow
def test_without_a_journal_the_table_has_no_rows_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["router", "--conversations", "5", "--rings", "4", "--rounds", "1", "--journal", "none"]) == 0
    printed = capsys.readouterr().out
    assert "p99 of a decision (ms): " in printed
    assert "journal" not in printed


@pytest.mark.slow
def test_a_router_that_starts_again_decides_by_what_its_journal_and_its_rings_tell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.router.command.RestartLoad", partial(RestartLoad, decisions=5))
    monkeypatch.setenv(SECRET_VARIABLE, "of the cluster")  # as where `up` was run in this process
    sizes = ["--conversations", "40", "--rings", "10", "--tokens", "64", "--journal", str(tmp_path)]
    assert main(["router", "--restart", *sizes, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["first_decision_seconds"] > 0.0
    assert 0.0 < report["serving_seconds"] <= report["told_seconds"]
    assert report["processor_seconds"] > 0.0
    assert report["cached_share"] == 1.0, "every turn finds the KV of its conversation on a ring"
    assert report["decisions"]["p50"] > 0.0
    ((target, is_met),) = report["targets"].items()
    assert target.startswith("first decision after a restart (s)")
    assert is_met == (report["first_decision_seconds"] <= 5.0)
    assert not list(tmp_path.iterdir()), "the journal of a run does not outlive it"


def test_a_restart_needs_a_journal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["router", "--restart", "--journal", "none"]) == 1
    assert "--journal: 'none' is not allowed with --restart" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("--rings", "1", "--rings: 1 is out of range"),
        ("--turns", "0", "--turns: 0"),
        ("--journal", "no/such", "--journal: 'no/such' is no directory"),
    ],
)
def test_sizes_out_of_range_are_refused(
    option: str, value: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["router", option, value]) == 1
    assert sentence in capsys.readouterr().err


def test_of_many_conversations_some_have_further_turns_and_few_are_in_the_journal() -> None:
    for count, followed, journaled in ((30, 30, 15), (10_000, 10_000, 5000), (100_000, 20_000, 5000)):
        load = RouterLoad(conversations=count, turns=3)
        assert load.num_turns == count + 2 * followed
        assert sum(load.is_journaled(f"conversation-{number}") for number in range(count)) == journaled
