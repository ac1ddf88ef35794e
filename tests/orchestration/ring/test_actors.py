"""Ranks as actors: their places in a Ray cluster that several deployments share, their starts, and their ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray

from ringserve.orchestration.ring import actors
from ringserve.orchestration.ring.actors import RayRank, RayRanks
from tests.waiting import WAIT_SECONDS


def test_places_of_a_dead_leader_are_freed_and_those_of_another_deployment_are_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = {
        "1": {"name": "decode-0.of-another-namespace", "state": "CREATED"},
        "2": {"name": "decode-0.own", "state": "CREATED"},
        "3": {"name": "decode-0.removed", "state": "REMOVED"},
        "4": {"name": "decode-01.other-ring", "state": "CREATED"},
    }
    own = {"decode-0.own", "decode-0.removed", "decode-01.other-ring"}
    removed: list[str] = []

    def find(name: str) -> str:
        if name not in own:
            raise ValueError(f"Failed to look up placement group with name: {name}")
        return name

    monkeypatch.setattr(actors, "placement_group_table", lambda: table)
    monkeypatch.setattr(actors, "get_placement_group", find)
    monkeypatch.setattr(actors, "remove_placement_group", removed.append)
    RayRanks("decode-0", {"CPU": 1})._remove_leftovers()
    assert removed == ["decode-0.own"]


@pytest.mark.parametrize(("tp", "places"), [(1, 4), (2, 2), (4, 1)])
async def test_the_processes_that_share_heads_are_on_one_host(
    tp: int, places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, float]] = []
    taken: list[int] = []

    def make(bundles: list[dict[str, float]], strategy: str, name: str) -> Any:
        asked.extend(bundles)
        ready: Future[None] = Future()
        ready.set_result(None)
        return SimpleNamespace(ready=lambda: SimpleNamespace(future=lambda: ready))

    def place(placement_group: object, placement_group_bundle_index: int) -> None:
        taken.append(placement_group_bundle_index)

    actor = SimpleNamespace(remote=lambda: None)
    monkeypatch.setattr(actors, "placement_group_table", dict)
    monkeypatch.setattr(actors, "placement_group", make)
    monkeypatch.setattr(actors, "PlacementGroupSchedulingStrategy", place)
    monkeypatch.setattr(actors, "_remote", lambda *_, **__: SimpleNamespace(options=lambda **_: actor))
    await RayRanks("decode-0", {"CPU": 1.0, "GPU": 0.5}, tp).create(4, 5.0)
    assert asked == [{"CPU": 1.0 * tp, "GPU": 0.5 * tp}] * places
    assert taken == [rank // tp for rank in range(4)]


class _Actor:
    """Actor of a rank whose process has this id on a node."""

    def __init__(self, node: str, pid: int) -> None:
        self.start = SimpleNamespace(remote=lambda spec: _done(SimpleNamespace(rank=0)))
        self.home = SimpleNamespace(remote=lambda: _done((node, pid)))


def _done(value: object) -> Any:
    future: Future[object] = Future()
    future.set_result(value)
    return SimpleNamespace(future=lambda: future)


@pytest.mark.parametrize(("node", "is_ended"), [("here", True), ("elsewhere", False)])
async def test_a_rank_that_stands_still_is_ended_at_once_on_this_node_and_by_ray_on_others(
    node: str, is_ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []
    context = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ray, "kill", lambda actor, no_restart: told.append(actor))
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        os.kill(process.pid, signal.SIGSTOP)
        actor = _Actor(node, process.pid)
        rank = RayRank("rank 0", cast(Any, actor))
        await rank.start(cast(Any, None), 5.0)
        await rank.kill()
        if not is_ended:
            assert process.poll() is None
            process.kill()
        assert process.wait(WAIT_SECONDS) == -signal.SIGKILL
        await rank.kill()  # there is nobody of that id, or somebody else
    assert told == [actor, actor], "Ray frees the place"


GIVES_WAY = """
import os, sys, threading
from ringserve.orchestration.ring import actors

end = threading.Event()
waiting = threading.Thread(target=end.wait)
waiting.start()
actors.give_way()
later = threading.Thread(target=lambda: print(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
later.start()
later.join()
print(*(os.getpriority(os.PRIO_PROCESS, int(each)) for each in os.listdir("/proc/self/task")))
end.set()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a priority for each thread")
def test_all_threads_of_a_rank_leave_processors_to_router_and_leaders() -> None:
    found = subprocess.run([sys.executable, "-c", GIVES_WAY], capture_output=True, text=True, check=True).stdout.split()
    least = max(actors.RANK_NICENESS, os.getpriority(os.PRIO_PROCESS, 0))
    assert len(found) >= 3
    assert {int(each) for each in found} == {least}


def test_what_is_done_beside_others_leaves_the_caller_its_priority_and_raises_its_errors() -> None:
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = priority()
    assert actors.beside_others(priority) == min(before + actors.START_NICENESS, 19)
    assert priority() == before
    with pytest.raises(ZeroDivisionError):
        actors.beside_others(lambda: 1 // 0)
