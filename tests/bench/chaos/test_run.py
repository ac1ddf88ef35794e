"""Runs of `python -m bench chaos` whose clusters are fakes: which cells run where, and which are not permitted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.chaos import run
from bench.chaos.faults import Cell, Kind, Processes, choose
from bench.chaos.run import Plan, Run
from bench.chaos.verdict import Outcome, Result, Usual


class FakeCluster:
    """Cluster that starts at once; `worker` is not None if it was given nodes."""

    started: list[tuple[list[str], bool]] = []  # noqa: RUF012 - each test has its own

    def __init__(self, settings: list[str], directory: Path, number: int, nodes: object = None) -> None:
        self._settings = settings
        self.worker = nodes
        self.processes = Processes()
        self.gateway = "gateway"
        self.has_ended = False

    async def start(self, progress: object) -> None:
        self.started.append((self._settings, self.worker is not None))

    def stop(self) -> None:
        self.has_ended = True


class FakeExperiment:
    """Experiment in which every cell holds."""

    def __init__(self, *arguments: object) -> None:
        self._worker = arguments[-1]

    async def usual(self, prefix: str) -> Usual:
        return Usual(gap_p99=0.1)

    async def run(self, cell: Cell, prefix: str) -> Result:
        assert cell.needs_worker == (self._worker is not None)
        return Result(process=cell.kind, phase=cell.phase, how=cell.how, outcome=Outcome.HELD, recover_seconds=1.0)


def plan(cells: list[Cell], **changes: Any) -> Plan:
    fields: dict[str, Any] = {
        "cells": cells,
        "rounds": 1,
        "model": "builtin:tiny",
        "settings": ["plain"],
        "directory": Path(),
        "seconds": 60.0,
        "stream_seconds": 60.0,
        "worker_settings": ["two nodes"],
    }
    return Plan(**fields | changes)


async def results(wanted: Plan) -> list[Result]:
    chaos = Run(wanted, lambda line: None)
    try:
        return [result async for result in chaos.results()]
    finally:
        chaos.stop()


@pytest.fixture
def clusters(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], bool]]:
    """Put fakes in the place of clusters; return the settings of those that start, and whether they have a worker."""
    started = FakeCluster.started = []
    monkeypatch.setattr(run, "OwnCluster", FakeCluster)
    monkeypatch.setattr(run, "Nodes", lambda *arguments, **options: object())
    monkeypatch.setattr(run, "Experiment", FakeExperiment)

    async def no_answers(*arguments: object) -> list[object]:
        return [object()]

    monkeypatch.setattr(run, "answers_without_fault", no_answers)
    monkeypatch.setattr(run, "check_greedy", lambda *arguments: 1.0)
    return started


async def test_cells_of_a_worker_run_together_in_a_cluster_of_two_nodes(
    clusters: list[tuple[list[str], bool]],
) -> None:
    cells = choose(["raylet/idle/kill", "router/idle/kill", "node/idle"])
    assert [cell.needs_worker for cell in cells] == [False, True, True]
    ran = await results(plan([*cells, *cells[:1]], rounds=2))
    assert [result.process for result in ran] == 4 * ["router"] + 2 * ["raylet", "node"]
    assert {result.outcome for result in ran} == {Outcome.HELD}
    assert clusters == [(["plain"], False), (["two nodes"], True)]


@pytest.mark.parametrize(("num_unseen", "outcome"), [(1, Outcome.HELD), (run.MAX_LOOKS, Outcome.UNSEEN)])
async def test_a_phase_that_no_stream_was_seen_in_is_looked_for_again_in_other_conversations(
    num_unseen: int, outcome: Outcome, clusters: list[tuple[list[str], bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefixes: list[str] = []

    class Unlucky(FakeExperiment):
        async def run(self, cell: Cell, prefix: str) -> Result:
            prefixes.append(prefix)
            found = await super().run(cell, prefix)
            return found if len(prefixes) > num_unseen else replace(found, outcome=Outcome.UNSEEN)

    monkeypatch.setattr(run, "Experiment", Unlucky)
    (result,) = await results(plan(choose(["router/queued/kill"])))
    assert result.outcome is outcome
    assert len(set(prefixes)) == len(prefixes) == min(num_unseen + 1, run.MAX_LOOKS)


async def test_cells_that_are_not_permitted_are_told_and_start_no_cluster(
    clusters: list[tuple[list[str], bool]],
) -> None:
    ran = await results(plan(choose(["node"]), forbidden={Kind.NODE: "only root may"}))
    assert {(result.process, result.how, result.outcome, result.reasons) for result in ran} == {
        ("node", "cut", Outcome.FORBIDDEN, ("only root may",))
    }
    assert len(ran) == 5
    assert clusters == []
