"""Chaos run: clusters, the answers without a fault, and one cell of the matrix after the other.

`python -m bench chaos` makes a `Run`, which owns the cluster that runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.chaos.cluster import OwnCluster
from bench.chaos.experiment import Experiment
from bench.chaos.faults import Cell, Kind
from bench.chaos.load import Expected, answers_without_fault, write_scripts
from bench.chaos.nodes import Nodes
from bench.chaos.verdict import UNKNOWN, Outcome, Result, nothing_hit
from ringserve.client.async_client import AsyncClient
from ringserve.cp_core.errors import RingserveError, Unavailable
from ringserve.services.gateway.text import TextCodec
from ringserve.services.offline.demo import document
from ringserve.workers.model.builtin import resolve_model_path

Progress = Callable[[str], None]
MAX_LOOKS = 3
"""Times that a cell is run at most until a stream is seen in its phase: the router chooses the rings of a turn."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Cells to run, `rounds` times, in clusters of `ringserve up` with these options, whose files go to `directory`.

    No cell begins after `seconds`. Every turn has `stream_seconds`. Cells that need a worker node run in a cluster of
    two nodes, each for `num_threads` threads of ranks, whose options are `worker_settings`. With `has_link` this
    process is in a hub, and the link between the nodes can be cut. `forbidden` has reasons against cells of a kind.
    """

    cells: Sequence[Cell]
    rounds: int
    model: str
    settings: Sequence[str]
    directory: Path
    seconds: float
    stream_seconds: float
    worker_settings: Sequence[str] = ()
    num_threads: int = 1
    has_link: bool = False
    forbidden: Mapping[Kind, str] = field(default_factory=dict)


class Run:
    """Run of a plan. `stop` ends its cluster, whatever has happened."""

    def __init__(self, plan: Plan, progress: Progress) -> None:
        self._plan = plan
        self._progress = progress
        self._cluster: OwnCluster | None = None
        self._num_clusters = 0
        self._expected: list[Expected] = []
        self.smallest_lead = 0.0
        self.usual = UNKNOWN
        self.num_left = 0

    async def results(self) -> AsyncIterator[Result]:
        """Yield every cell's result. Raises Unavailable if a cluster does not start or is wrong without a fault."""
        deadline = time.monotonic() + self._plan.seconds
        todo = [(number, cell) for number in range(1, self._plan.rounds + 1) for cell in self._plan.cells]
        todo.sort(key=lambda each: each[1].needs_worker)  # for few starts: each takes half a minute
        for place, (number, cell) in enumerate(todo):
            if time.monotonic() > deadline:
                self.num_left = len(todo) - place
                return
            self._progress(f"{cell} ({place + 1} of {len(todo)})")
            for look in range(MAX_LOOKS):
                result = await self._cell(cell, f"chaos-{place}-{look}-")
                if result.outcome is not Outcome.UNSEEN:
                    break
            yield replace(result, round=number)

    async def _cell(self, cell: Cell, prefix: str) -> Result:
        if reason := self._plan.forbidden.get(cell.kind):
            return nothing_hit(cell, Outcome.FORBIDDEN, reason)
        cluster = await self._running(needs_worker=cell.needs_worker)
        experiment = self._experiment(cluster)
        try:
            result = await experiment.run(cell, prefix)
        except RingserveError as error:
            result = nothing_hit(cell, Outcome.BROKEN, f"the cluster failed: {error}")
        if cluster.has_ended:
            reason = f"the whole cluster ended: {cluster.last_line()}"
            result = replace(result, outcome=Outcome.BROKEN, reasons=(*result.reasons, reason))
        if result.outcome is Outcome.BROKEN and (result.recover_seconds is None or result.lost_conversations):
            self.stop()
        return result

    async def _running(self, *, needs_worker: bool) -> OwnCluster:
        """Return the cluster, started if none of this kind runs. The first one gives the answers without a fault."""
        running = self._cluster
        if running is None or running.has_ended or (running.worker is not None) != needs_worker:
            self.stop()
            self._cluster = self._new_cluster(needs_worker=needs_worker)
            self._num_clusters += 1
            await self._cluster.start(self._progress)
        assert self._cluster is not None, "just started"
        if not self._expected:
            path = resolve_model_path(self._plan.model)
            codec = TextCodec(path)
            scripts = write_scripts(codec.encode(document(codec)).tolist())
            self._progress("asking for the answers without a fault")
            async with AsyncClient(self._cluster.gateway) as client:
                self._expected = await answers_without_fault(client, scripts, self._plan.stream_seconds)
            self._progress("checking greedy answers against transformers")
            self.smallest_lead = await asyncio.to_thread(check_greedy, path, self._expected)
            self._progress("measuring the usual time between tokens")
            self.usual = await self._experiment(self._cluster).usual("usual-")
        return self._cluster

    def _new_cluster(self, *, needs_worker: bool) -> OwnCluster:
        plan, number = self._plan, self._num_clusters
        if not needs_worker:
            return OwnCluster(plan.settings, plan.directory, number)
        nodes = Nodes(plan.directory, number, plan.num_threads, has_link=plan.has_link)
        return OwnCluster(plan.worker_settings, plan.directory, number, nodes)

    def _experiment(self, cluster: OwnCluster) -> Experiment:
        seconds, worker = self._plan.stream_seconds, cluster.worker
        return Experiment(cluster.gateway, cluster.processes, self._expected, seconds, self.usual, worker)

    def stop(self) -> None:
        """End the cluster. Idempotent."""
        if self._cluster is not None:
            self._cluster.stop()
            self._cluster = None


def check_greedy(model_path: Path, expected: Sequence[Expected]) -> float:
    """Compare greedy answers with stock transformers' choices. Return the smallest lead of a chosen token, in logits.

    Raises Unavailable if an answer differs: without a fault, no service may differ from transformers.
    """
    from ringserve.services.offline.reference import StockModel  # here: torch and transformers take seconds to import

    stock, lead = StockModel(model_path), float("inf")
    for each in expected:
        if not each.script.is_greedy:
            continue
        for number, answer in enumerate(each.answers):
            reference = stock.follow((*each.history(number), *each.script.turns[number].prompt), answer)
            if tuple(reference.token_ids) != answer:
                raise Unavailable(f"turn {number + 1} of {each.script.name} differs from transformers without a fault")
            lead = min(lead, reference.smallest_lead)
    return lead
