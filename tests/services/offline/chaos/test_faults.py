"""Faults of `ringserve chaos`, on processes that only bear the names of ours."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from ringserve.client import RingInfo, ServerInfo
from services.offline.chaos.experiment import in_phase
from services.offline.chaos.faults import Cell, How, Kind, Phase, Processes, choose, matrix
from services.offline.chaos.load import Stream
from tests.services.e2e.cluster import is_alive, wait_until
from tests.services.offline.chaos.streams import PLAN, expected

WAITS = "import sys; print('runs', flush=True); sys.stdin.read()"
PARENT = f"""
import subprocess, sys
for title in sys.stdin:
    child = subprocess.Popen([title.strip(), "-c", {WAITS!r}], executable=sys.executable, stdin=-1, stdout=-1)
    child.stdout.readline()
    print(child.pid, flush=True)
"""


class Parent:
    """A process of its own above those with our titles: whoever runs the tests has other children."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.pid = process.pid
        self.children = list[psutil.Process]()

    def start(self, title: str) -> psutil.Process:
        """Start a child with this title; it ends with the test."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(title, file=self._process.stdin, flush=True)
        self.children.append(psutil.Process(int(self._process.stdout.readline())))
        return self.children[-1]


@pytest.fixture
def parent() -> Iterator[Parent]:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        parent = Parent(process)
        yield parent
        for child in parent.children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()  # also one that is stopped


def test_every_cell_is_named_once_and_chosen_by_its_name() -> None:
    cells = matrix()
    assert len(set(cells)) == len(cells) == len(Kind) * len(Phase) * len(How)
    assert choose(["router/decoding/stop"]) == [Cell(Kind.ROUTER, Phase.DECODING, How.STOP)]
    assert {cell.kind for cell in choose(["decode-*/idle"])} == {Kind.DECODE_LEADER, Kind.DECODE_RANK}
    assert choose(["nothing"]) == []
    assert choose([]) == cells


def test_processes_are_known_by_their_titles_and_others_are_not(parent: Parent) -> None:
    rank, router = parent.start("ray::decode-0 rank 1"), parent.start("ray::router.wait_event")
    parent.start("ray::IDLE")
    processes = Processes(parent.pid)
    assert processes.look() == {"decode-0 rank 1": rank.pid, "router": router.pid}
    assert processes.name_of(Kind.DECODE_RANK, "decode-0") == "decode-0 rank 1"
    assert processes.name_of(Kind.DECODE_RANK, "decode-1") == ""
    assert processes.name_of(Kind.ROUTER, "") == "router"


def test_a_stopped_process_goes_on_and_a_killed_one_is_gone(parent: Parent) -> None:
    leader, rank = parent.start("ray::prefill-0 leader.start"), parent.start("ray::prefill-0 rank 0")
    processes = Processes(parent.pid)
    processes.look()
    assert processes.hit("prefill-0 leader", How.STOP) == leader.pid
    wait_until(lambda: leader.status() == psutil.STATUS_STOPPED, "the leader is stopped")
    assert processes.hit("prefill-0 rank 0", How.KILL) == rank.pid
    wait_until(lambda: "prefill-0 rank 0" not in processes.look(), "the rank is gone")
    assert processes.resume() == [leader.pid]
    wait_until(lambda: leader.status() != psutil.STATUS_STOPPED, "the leader goes on")
    assert processes.resume() == []


def test_the_end_kills_stopped_processes_too(parent: Parent) -> None:
    leader = parent.start("ray::prefill-0 leader")
    processes = Processes(parent.pid)
    processes.look()
    processes.hit("prefill-0 leader", How.STOP)
    processes.kill_all()
    wait_until(lambda: not is_alive(leader), "the leader has ended")


@pytest.mark.parametrize(
    ("phase", "tokens", "running", "waiting"),
    [
        (Phase.QUEUED, 0, 0, 1),
        (Phase.PREFILL, 0, 1, 0),
        (Phase.MIGRATING, 1, 0, 0),
        (Phase.DECODING, 6, 0, 0),
    ],
)
def test_each_phase_is_seen_by_its_own_signs_alone(phase: Phase, tokens: int, running: int, waiting: int) -> None:
    stream = Stream(expected=expected(), number=1, began=1.0, plan=PLAN, token_ids=[5] * tokens)
    ring = RingInfo(role="prefill", name=PLAN.prefill_ring, num_requests_running=running, num_requests_waiting=waiting)
    info = ServerInfo(rings=(ring,))
    assert [each for each in Phase if in_phase(each, [stream], info)] == [phase]
    stream.ended = 2.0
    assert not any(in_phase(each, [stream], info) for each in Phase)
    assert not in_phase(phase, [Stream(expected=expected(), number=1, began=1.0)], info)
