"""A service with one ring of each role: while one of them restarts, turns wait for it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.client.retries import NO_RETRIES
from services.reference import StockModel
from tests.services.e2e.cluster import Cluster, Inference, Ringserve, ids, pid_at, running_cluster, wait_until
from tests.services.e2e.talking import under_load
from tests.workers.models import random_tokens

RESTART_SECONDS = 120.0
STOP_SECONDS = 90.0
NUM_TOKENS = 1500


@pytest.fixture(scope="module")
def single(ringserve: Ringserve, model_path: Path) -> Iterator[Cluster]:
    """One ring of one rank of each role; told to end, it lets turns end first."""
    values = ("prefill.cp=1", "decode.cp=1")
    options = [word for value in values for word in ("--set", value)]
    with running_cluster(ringserve, "single", model_path, *options, "--drain-seconds", "60") as cluster:
        yield cluster


def test_both_rings_restart_and_turns_wait_instead_of_failing(
    ringserve: Ringserve, single: Cluster, stock: StockModel, tmp_path: Path
) -> None:
    inference = Inference(single.gateway)
    before = {group.name: group for group in inference.info().groups}
    most_waiting, is_shown_away = 0, False

    def restart_both() -> None:
        command = ("restart", "prefill-0", "decode-0", "--name", "single", "--json")
        restarting = ringserve.start(*command, output=tmp_path / "restart.log")

        def is_over() -> bool:
            nonlocal most_waiting, is_shown_away
            info = inference.info()
            most_waiting = max(most_waiting, info.turns_waiting_for_rings)
            is_shown_away |= any(group.state == "away" and group.restarting for group in info.groups)
            return restarting.poll() is not None

        wait_until(is_over, "both rings have restarted", RESTART_SECONDS)
        assert restarting.returncode == 0, (tmp_path / "restart.log").read_text()
        told = (tmp_path / "restart.log").read_text().splitlines()[-1]
        assert json.loads(told) == {"rings": ["prefill-0", "decode-0"], "serves": True}

    under_load(single.gateway, 2, restart_both, stock, retry=NO_RETRIES)
    assert most_waiting > 0, "turns were there while a ring was away"
    assert is_shown_away
    after = {group.name: group for group in inference.info().groups}
    assert set(after) == {"prefill-0", "decode-0"}
    for name, group in after.items():
        assert group.incarnation != before[name].incarnation
        assert not group.restarting


def test_the_clusters_own_gateway_comes_back_at_its_place_when_its_turns_have_ended(single: Cluster) -> None:
    inference = Inference(single.gateway)
    before = pid_at(single.gateway)
    with inference.running(ids(random_tokens(9), max_tokens=NUM_TOKENS)) as call:
        os.kill(before, signal.SIGTERM)
        *_, last = call
        assert last.complete.usage.completion_tokens == NUM_TOKENS
    again = Inference(single.gateway)
    request = ids(random_tokens(9), max_tokens=4)
    (*_, complete) = again.stub.Generate(request, timeout=RESTART_SECONDS, wait_for_ready=True)
    assert len(complete.complete.output_ids) == 4
    assert pid_at(single.gateway) != before


def test_a_cluster_that_is_told_to_end_lets_its_turns_end_first(
    ringserve: Ringserve, single: Cluster, tmp_path: Path
) -> None:
    """Last: it ends the cluster."""
    inference = Inference(single.gateway)
    with inference.running(ids(random_tokens(9), max_tokens=NUM_TOKENS)) as call:
        down = ringserve.start("down", "--name", "single", output=tmp_path / "down.log")
        *_, last = call
        assert last.complete.usage.completion_tokens == NUM_TOKENS
    assert down.wait(STOP_SECONDS) == 0, (tmp_path / "down.log").read_text()
