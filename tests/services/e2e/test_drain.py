"""`ringserve drain` and `undrain` on a running cluster: a ring of each role is restarted under load, no turn fails."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services.e2e.cluster import Cluster, Inference, Ringserve, ids, running_cluster, wait_until
from tests.workers.models import random_tokens

RINGS = ("prefill-0", "decode-0", "prefill-1", "decode-1")
RESTARTED = ("prefill-0", "decode-0")
WAIT_SECONDS = 30.0
NUM_TOKENS = 1500
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


@pytest.fixture(scope="module")
def rolling(ringserve: Ringserve, model_path: Path) -> Iterator[Cluster]:
    """Two rings of each role, and logs as JSON."""
    values = ("prefill.groups=2", "decode.groups=2", "prefill.cp=1", "decode.cp=1", "logs.format=json")
    options = [word for value in values for word in ("--set", value)]
    with running_cluster(ringserve, "rolling", model_path, *options) as cluster:
        yield cluster


def test_one_request_is_followed_through_every_process_by_its_id(ringserve: Ringserve, rolling: Cluster) -> None:
    Inference(rolling.gateway).answer(ids(random_tokens(40), request_id="followed"))
    log = ringserve.directory / "state" / "rolling.log"

    def lines() -> list[dict[str, str]]:
        # The first lines are of `up` for people; whatever comes after the rings have started is JSON.
        written = [line for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("{")]
        return [each for each in map(json.loads, written) if each.get("request_id") == "followed"]

    def processes() -> set[str]:
        return {line["process"].rstrip("-01") for line in lines()}

    wait_until(lambda: processes() == {"gateway", "router", "prefill", "decode"}, "a line of each process")
    assert len({line["turn_id"] for line in lines()}) == 1
    for line in lines():
        assert set(line) - {"ring"} == {"ts", "level", "process", "logger", "message", "request_id", "turn_id"}
        assert line.get("ring", "") == (line["process"] if "-" in line["process"] else "")


def test_a_gateway_that_is_told_to_end_finishes_its_turns_first(
    ringserve: Ringserve, rolling: Cluster, model_path: Path, tmp_path: Path
) -> None:
    output = tmp_path / "gateway.log"
    options = ("--router", rolling.router, "--model", str(model_path), "--drain-seconds", "60")
    process = ringserve.start("gateway", "--listen", "127.0.0.1:0", *options, output=output)

    def address() -> str:
        lines = [line for line in output.read_text().splitlines() if line.startswith("{")]
        return str(json.loads(lines[0])["gateway"]) if lines else ""

    try:
        wait_until(lambda: address() != "", "the gateway's address")
        inference = Inference(address())
        with inference.running(ids(random_tokens(9), max_tokens=NUM_TOKENS)) as call:
            process.terminate()
            *_, last = call
            assert last.complete.usage.completion_tokens == NUM_TOKENS
        assert process.wait(WAIT_SECONDS) == 0
    finally:
        process.kill()
        process.wait()


def test_a_ring_of_each_role_is_restarted_under_load_and_no_turn_fails(ringserve: Ringserve, rolling: Cluster) -> None:
    inference = Inference(rolling.gateway)
    before = {group.name: group for group in inference.info().groups}
    loads = [Load(rolling.gateway, f"c{number}") for number in range(2)]
    try:
        for ring in RESTARTED:
            named = (ring, "--name", "rolling", "--json")
            drained = ringserve.run("drain", *named, seconds=RESTART_SECONDS)
            assert drained.returncode == 0, drained.stderr
            outcome = json.loads(drained.stdout)
            assert (outcome["ring"], outcome["drained"], outcome["failed"]) == (ring, True, 0)
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
