"""`python -m bench chaos` where network namespaces are refused, and where they are permitted."""

from __future__ import annotations

import json
import os
import sys

import pytest

from bench.__main__ import main
from bench.chaos import command as chaos
from ringserve.cp_core.errors import Unavailable

REASON = "this machine lets only root make network namespaces"


class Replaced(Exception):
    """This process would be another program now."""


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the commands by which this process would replace itself; the first ends the run."""
    told: list[list[str]] = []

    def replace(program: str, command: list[str]) -> None:
        told.append(command)
        raise Replaced

    monkeypatch.setattr(os, "execvp", replace)
    return told


@pytest.fixture
def _refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> tuple[str, ...]:
        raise Unavailable(REASON)

    monkeypatch.setattr(chaos, "isolation", refuse)


@pytest.mark.usefixtures("_refused")
def test_cuts_that_the_machine_refuses_are_in_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "--only", "node", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["held"] is True
    assert [(cell["phase"], cell["how"], cell["outcome"], cell["reasons"]) for cell in report["cells"]] == [
        (phase, "cut", "not permitted here", [REASON])
        for phase in ("queued", "prefill", "migrating", "decoding", "idle")
    ]


@pytest.mark.usefixtures("_refused")
def test_cuts_that_the_machine_refuses_are_in_the_table_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "--only", "node"]) == 0
    said = capsys.readouterr().out
    assert said.count("not permitted here") == 5 + 2
    assert f"not permitted here: {REASON}" in said
    assert "5 not permitted here" in said


def test_a_run_with_cuts_begins_anew_in_a_namespace_of_its_own(
    monkeypatch: pytest.MonkeyPatch, commands: list[list[str]]
) -> None:
    monkeypatch.setattr(chaos, "isolation", lambda: ("unshare", "--net", "--"))
    monkeypatch.setattr(sys, "argv", ["bench", "chaos", "--only", "node"])
    with pytest.raises(Replaced):
        main(["chaos", "--only", "node"])
    ((*prefix, python, _, module, command, only, node, hub),) = commands
    assert prefix == ["unshare", "--net", "--"]
    assert [python, module, command, only, node, hub] == [
        sys.executable,
        "bench",
        "chaos",
        "--only",
        "node",
        "--in-hub",
    ]


def test_two_nodes_are_not_made_where_both_would_take_the_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "--only", "raylet/idle", "--set", "model.device=cuda", "--json"]) == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert {cell["outcome"] for cell in cells} == {"not permitted here"}
    assert "choose model.device=cpu" in cells[0]["reasons"][0]
