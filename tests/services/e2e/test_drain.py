"""`ringserve drain` and `undrain` on a running cluster: a ring of each role is restarted under load, no turn fails."""

from __future__ import annotations

import json
import threading
from pathlib import Path

from tests.services.e2e.cluster import Inference, Ringserve, ids, running_cluster
from tests.workers.models import random_tokens

RINGS = ("prefill-0", "decode-0", "prefill-1", "decode-1")
RESTARTED = ("prefill-0", "decode-0")
PAUSE_SECONDS = 0.1
"""Between two turns of a client: the machine has rings to start meanwhile."""
RESTART_SECONDS = 100.0


class Load:
    """A client that asks for one turn after the other, some of a conversation, until told to stop."""

    def __init__(self, target: str, name: str) -> None:
        self.answers: list[list[int]] = []
        self.errors: list[Exception] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(Inference(target), name))
        self._thread.start()

    def _run(self, inference: Inference, name: str) -> None:
        while not self._stopped.wait(PAUSE_SECONDS):
            try:
                self.answers.append(list(inference.answer(ids(random_tokens(40), max_tokens=12)).output_ids))
                inference.answer(ids(random_tokens(9), conversation=name))
            except Exception as error:
                self.errors.append(error)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()


def test_a_ring_of_each_role_is_restarted_under_load_and_no_turn_fails(ringserve: Ringserve, model_path: Path) -> None:
    options = ("--set", "prefill.groups=2", "--set", "decode.groups=2", "--set", "prefill.cp=1", "--set", "decode.cp=1")
    with running_cluster(ringserve, "rolling", model_path, *options) as cluster:
        inference = Inference(cluster.gateway)
        before = {group.name: group for group in inference.info().groups}
        loads = [Load(cluster.gateway, f"c{number}") for number in range(2)]
        try:
            for ring in RESTARTED:
                named = (ring, "--name", "rolling", "--json")
                drained = ringserve.run("drain", *named, seconds=RESTART_SECONDS)
                assert drained.returncode == 0, drained.stderr
                assert json.loads(drained.stdout) == {"ring": ring, "drained": True}
                assert ring not in {group.name for group in inference.info().groups}
                undrained = ringserve.run("undrain", *named, seconds=RESTART_SECONDS)
                assert undrained.returncode == 0, undrained.stderr
        finally:
            for load in loads:
                load.stop()
        after = {group.name: group for group in inference.info().groups}
        assert [error for load in loads for error in load.errors] == []
        answers = [answer for load in loads for answer in load.answers]
        assert len(answers) > len(RINGS)
        assert all(answer == answers[0] for answer in answers)
        assert set(after) == set(RINGS)
        for ring in RESTARTED:
            assert before[ring].incarnation != after[ring].incarnation
            assert set(before[ring].rank_pids).isdisjoint(after[ring].rank_pids)
        last = ringserve.run("drain", "decode-7", "--name", "rolling")
        assert last.returncode == 1
        assert "decode-7" in last.stderr
        assert "Traceback" not in last.stderr
