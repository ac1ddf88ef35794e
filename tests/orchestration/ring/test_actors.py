"""Ranks as actors: their places in a Ray cluster that several deployments share, their starts, and their ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray

from ringserve.cp_core.errors import StaleIncarnation, Unavailable
from ringserve.orchestration.ring import actors
from ringserve.orchestration.ring.actors import RayRank, RayRanks
from ringserve.workers.protocol.ranks import WAIT_POLICY, RankSettings, RankSpec
from tests.waiting import WAIT_SECONDS, eventually


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
    actors.free_places("decode-0")
    assert removed == ["decode-0.own"]


class _Ray:
    """Ray that gives every place at once. `leased` counts each actor's renewals of its lease."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bundles: list[dict[str, float]] = []
        self.places: list[int] = []
        self.leased = Counter[int]()
        monkeypatch.setattr(actors, "placement_group_table", dict)
        monkeypatch.setattr(actors, "placement_group", self._make)
        monkeypatch.setattr(actors, "remove_placement_group", lambda group: None)
        monkeypatch.setattr(actors, "PlacementGroupSchedulingStrategy", self._place)
        monkeypatch.setattr(actors, "_remote", lambda *_, **__: SimpleNamespace(options=lambda **_: self))

    def _make(self, bundles: list[dict[str, float]], strategy: str, name: str, lifetime: str) -> Any:
        assert lifetime == "detached"
        self.bundles += bundles
        return SimpleNamespace(ready=lambda: _done(None))

    def _place(self, placement_group: object, placement_group_bundle_index: int) -> None:
        self.places.append(placement_group_bundle_index)

    def remote(self) -> Any:
        number = len(self.places)

        def ask() -> None:
            self.leased[number] += 1

        return SimpleNamespace(home=SimpleNamespace(remote=ask))


@pytest.mark.parametrize(("tp", "places"), [(1, 4), (2, 2), (4, 1)])
async def test_the_processes_that_share_heads_are_on_one_host(
    tp: int, places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = _Ray(monkeypatch)
    ranks = RayRanks("decode-0", {"CPU": 1.0, "GPU": 0.5}, tp)
    await ranks.create(4, 5.0)
    await ranks.close()
    assert made.bundles == [{"CPU": 1.0 * tp, "GPU": 0.5 * tp}] * places
    assert made.places == [rank // tp for rank in range(4)]


async def test_ranks_are_asked_for_as_long_as_they_have_a_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has started may wait for minutes while another one loads, and nobody has work for it meanwhile."""
    monkeypatch.setattr(actors, "LEASE_SECONDS", 0.04)
    monkeypatch.setattr(actors, "LEASE_LOOK_SECONDS", 0.01)
    made = _Ray(monkeypatch)
    ranks = RayRanks("decode-0", {"CPU": 1.0})
    await ranks.create(3, 5.0)
    await eventually(lambda: all(made.leased[rank] >= 3 for rank in (1, 2, 3)))
    await ranks.close()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}, "nobody asks any more"


class _Actor:
    """Actor of a rank whose process has this id on a node. Nothing can connect to it."""

    def __init__(self, node: str, pid: int) -> None:
        self.start = self.renew = SimpleNamespace(remote=lambda spec: _done(SimpleNamespace(rank=0)))
        self.home = SimpleNamespace(remote=lambda: _done((node, pid)))
        self.listen_for_calls = SimpleNamespace(remote=lambda *_: _done("127.0.0.1:1"))


def _done(value: object) -> Any:
    future: Future[object] = Future()
    future.set_result(value)
    return SimpleNamespace(future=lambda: future)


@pytest.mark.parametrize("method", ["start", "renew"])
@pytest.mark.parametrize(("node", "is_ended"), [("here", True), ("elsewhere", False)])
async def test_a_rank_that_stands_still_is_ended_at_once_on_this_node_and_by_ray_on_others(
    node: str, is_ended: bool, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []
    context = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ray, "kill", lambda actor, no_restart: told.append(actor))
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        actor = _Actor(node, process.pid)
        rank = RayRank("rank 0", cast(Any, actor))
        await getattr(rank, method)(_spec("first"), 5.0)
        os.kill(process.pid, signal.SIGSTOP)
        await rank.kill()
        if not is_ended:
            assert process.poll() is None
            process.kill()
        assert process.wait(WAIT_SECONDS) == -signal.SIGKILL
        await rank.kill()  # there is nobody of that id, or somebody else
    assert told == [actor, actor], "Ray frees the place"


def _spec(incarnation: str, **settings: Any) -> RankSpec:
    asked = RankSettings(model_path="model", num_blocks=4, listen_host="127.0.0.1", **settings)
    return RankSpec(ring="ring", rank=0, num_ranks=1, incarnation=incarnation, settings=asked)


class _Worker:
    """Worker of a rank that notes what is asked of it."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    @property
    def parts(self) -> Any:
        return SimpleNamespace(spec=self.asked[0])

    def start(self, spec: RankSpec) -> None:
        self.asked.append(spec)

    def renew(self, spec: RankSpec) -> None:
        self.asked.append(spec)

    def submit(self, commands: str) -> None:
        self.asked.append(commands)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> _Worker:
    worker = _Worker()
    monkeypatch.setattr(actors, "give_way", lambda: None)
    monkeypatch.setattr(actors, "LEASE_SECONDS", 1e6)
    monkeypatch.setattr(actors, "_make_worker", lambda: worker)
    return worker


def _actor() -> Any:
    return actors.RankActor()


@pytest.mark.parametrize("lane", ["compute", "transfer", "control"])
def test_what_a_dead_leader_asked_reaches_no_rank_that_another_has_taken_over(worker: _Worker, lane: str) -> None:
    actor = _actor()
    actor.start(_spec("first"))
    getattr(actor, lane)("first", "submit", "of the first")
    actor.renew(_spec("second"))
    with pytest.raises(StaleIncarnation, match="submit was asked of first, and this rank is one of second"):
        getattr(actor, lane)("first", "submit", "late")
    getattr(actor, lane)("second", "submit", "of the second")
    assert [each for each in worker.asked if isinstance(each, str)] == ["of the first", "of the second"]


def test_a_rank_is_taken_over_only_with_the_settings_that_it_was_started_with(worker: _Worker) -> None:
    actor = _actor()
    with pytest.raises(Unavailable, match="other settings"):
        actor.renew(_spec("early"))
    actor.start(_spec("first", decode_variant="auto"))
    for other in (_spec("other", decode_variant="auto", num_threads=7), _spec("other", fingerprint="another model")):
        with pytest.raises(Unavailable, match="rank 0 of ring ring was started with other settings"):
            actor.renew(other)
    actor.renew(_spec("second", decode_variant="auto"))
    assert len(worker.asked) == 2


def test_a_rank_that_was_made_for_a_ring_of_helix_is_taken_over_as_the_others_are(worker: _Worker) -> None:
    actor = _actor()
    actor.start(_spec("first", decode_variant="auto").with_helix())
    actor.renew(_spec("second", decode_variant="auto"))
    assert len(worker.asked) == 2


ENDS_UNASKED = """
import sys, threading
from types import SimpleNamespace
from ringserve.orchestration.ring import actors

now, asked, is_made = 0.0, 0.0, threading.Event()
renewals = int(sys.argv[1])

def sleep(seconds):
    global now, asked, renewals
    is_made.wait()
    now += seconds / 2
    if renewals:
        renewals -= 1
        asked = now
        rank.home()
    now += seconds / 2

actors.time = SimpleNamespace(monotonic=lambda: now, sleep=sleep)
actors._make_worker = object
actors.get_current_placement_group = lambda: "places"
actors.remove_placement_group = lambda places: print("free", places, now - asked, flush=True)
actors.ray.get_runtime_context = lambda: SimpleNamespace(get_node_id=lambda: "node")
rank = actors.RankActor()
is_made.set()
threading.Event().wait()
"""


@pytest.mark.parametrize("renewals", [0, 1, 5])
def test_a_rank_that_no_leader_asks_for_anything_ends_and_frees_its_places(renewals: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ENDS_UNASKED, str(renewals)],
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_SECONDS,
    )
    assert (ended.returncode, ended.stdout) == (1, f"free places {actors.LEASE_SECONDS}\n"), ended.stderr


GIVES_WAY = """
import os, sys, threading
from ringserve.orchestration.ring import actors

end = threading.Event()
waiting = threading.Thread(target=end.wait)
waiting.start()
actors.give_way()
later = threading.Thread(target=end.wait)
later.start()
print(*(os.getpriority(os.PRIO_PROCESS, int(each)) for each in os.listdir("/proc/self/task")))
end.set()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a priority for each thread")
def test_all_threads_of_a_rank_leave_processors_to_router_and_leaders() -> None:
    command = [sys.executable, "-c", GIVES_WAY]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=WAIT_SECONDS)
    found = ended.stdout.split()
    least = max(actors.RANK_NICENESS, os.getpriority(os.PRIO_PROCESS, 0))
    assert len(found) >= 3
    assert {int(each) for each in found} == {least}


@pytest.mark.skipif(sys.platform != "linux", reason="torch for other systems has another OpenMP")
@pytest.mark.parametrize(
    ("asked", "policy", "spins"),
    [({}, "PASSIVE", 2000), ({"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "7"}, "ACTIVE", 7)],
)
def test_threads_of_a_rank_spin_for_each_other_briefly_unless_the_environment_says_so(
    asked: dict[str, str], policy: str, spins: int
) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in WAIT_POLICY}
    made = subprocess.run(
        [sys.executable, "-c", "from ringserve.orchestration.ring import actors; actors._make_worker()"],
        env=environment | asked | {"OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        check=True,
        timeout=WAIT_SECONDS,
    )
    assert f"OMP_WAIT_POLICY = '{policy}'" in made.stderr
    assert f"GOMP_SPINCOUNT = '{spins}'" in made.stderr
