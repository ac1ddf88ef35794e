"""Nodes of a chaos run, without Ray: how rings are placed, and a worker that ends, is cut off and comes back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bench.chaos import nodes
from bench.chaos.faults import Processes
from bench.chaos.nodes import Nodes, WorkerNode, settings_of
from bench.namespaces import Command, cut_commands
from ringserve.services.config import load_config
from tests.services.e2e.cluster import is_alive, wait_until

WAITS = "import sys, time; print('runs', flush=True); time.sleep(600)"
NODE = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {WAITS!r}]).wait()"


@pytest.fixture
def processes() -> Iterator[Processes]:
    processes = Processes()
    yield processes
    processes.kill_all()


@pytest.fixture
def worker(tmp_path: Path) -> WorkerNode:
    """Return a worker that is one process above another, without a link of its own."""
    return WorkerNode("127.0.0.3", (sys.executable, "-c", NODE), {}, tmp_path / "worker.log", has_link=False)


def started(worker: WorkerNode, processes: Processes, log: Path, times: int) -> set[psutil.Process]:
    """Start or keep the worker until it has run a number of times; return its processes."""
    if times == 1:
        worker.start(processes)
    wait_until(lambda: log.read_text().count("runs") == times, f"it runs for the {times}. time")
    processes.look()
    return set(psutil.Process(processes.roots[-1]).children(recursive=True))


def test_each_node_gets_a_ring_of_each_role_of_the_size_that_was_configured() -> None:
    sized = load_config(None, {"prefill.cp": "3", "decode.cp": "1", "decode.threads_per_rank": "2"})
    overrides = dict(item.split("=") for item in settings_of(sized))
    config = load_config(None, {"prefill.cp": "3", "decode.cp": "1", "decode.threads_per_rank": "2"} | overrides)
    rings = [(pool.ring_name(0), pool.rings, pool.cp, pool.threads_per_rank, pool.resource) for pool in config.pools]
    assert rings == [
        ("prefill-0", 1, 3, 1, "near"),
        ("prefill-far-0", 1, 3, 1, "far"),
        ("decode-0", 1, 1, 2, "near"),
        ("decode-far-0", 1, 1, 2, "far"),
    ]
    assert load_config(None, overrides | {"ray.address": "10.77.1.1:6379"}).internal_tls.insecure


def test_a_worker_that_has_ended_comes_back_and_nothing_of_before_is_left(
    worker: WorkerNode, processes: Processes, tmp_path: Path
) -> None:
    (rank,) = started(worker, processes, tmp_path / "worker.log", 1)
    worker.keep()
    assert is_alive(rank), "a worker that runs is left alone"
    root = psutil.Process(processes.roots[-1])
    root.kill()
    wait_until(lambda: not is_alive(root), "its first process is lost")
    assert is_alive(rank)
    worker.keep()
    (again,) = started(worker, processes, tmp_path / "worker.log", 2)
    wait_until(lambda: not is_alive(rank), "what was left has ended")
    assert is_alive(again)
    worker.stop()
    processes.kill_all()
    wait_until(lambda: not is_alive(again), "all has ended")


def test_a_link_is_cut_and_joined_again_once(
    worker: WorkerNode, processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[Command] = []
    monkeypatch.setattr(nodes, "run_all", commands.extend)
    started(worker, processes, tmp_path / "worker.log", 1)
    pid = processes.roots[-1]
    worker.heal()
    assert commands == [], "nothing is cut"
    worker.cut()
    worker.heal()
    worker.heal()
    assert commands == [*cut_commands(pid, is_cut=True), *cut_commands(pid, is_cut=False)]
    worker.stop()


def test_with_a_link_the_nodes_have_addresses_of_one_network_and_without_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "_free_port", lambda host: 6379)
    for has_link, head, worker in ((True, "10.77.1.1", "10.77.1.2"), (False, "127.0.0.2", "127.0.0.3")):
        made = Nodes(tmp_path, 0, 4, has_link=has_link)
        assert made.ray_address == f"{head}:6379"
        assert made.worker.address == worker
        assert made.environment["RAY_AUTH_MODE"] == "token"
        made.stop()
