"""Faults of `python -m bench chaos`, on processes that only bear the names of ours."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest

from bench.chaos.experiment import in_phase
from bench.chaos.faults import Cell, How, Kind, Phase, Processes, choose, matrix
from bench.chaos.load import Stream
from ringserve.client import RingInfo, ServerInfo
from tests.bench.chaos.streams import PLAN, expected
from tests.services.e2e.cluster import is_alive, wait_until

WAITS = """
import socket, sys
if "LISTEN" in sys.argv:
    server = socket.create_server(("127.0.0.1", int(sys.argv[-1])))
print('runs', flush=True)
sys.stdin.read()
"""
PARENT = f"""
import subprocess, sys
for line in sys.stdin:
    title, *words = line.split("\t")
    command = [title.strip(), "-c", {WAITS!r}, *map(str.strip, words)]
    child = subprocess.Popen(command, executable=sys.executable, stdin=-1, stdout=-1)
    child.stdout.readline()
    print(child.pid, flush=True)
"""


class Parent:
    """A process of its own above those with our titles: whoever runs the tests has other children."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.pid = process.pid
        self.children = list[psutil.Process]()

    def start(self, title: str, *words: str) -> psutil.Process:
        """Start a child with this title, and these words after it in `ps`; it ends with the test."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(title, *words, sep="\t", file=self._process.stdin, flush=True)
        self.children.append(psutil.Process(int(self._process.stdout.readline())))
        return self.children[-1]


@contextlib.contextmanager
def running_parent() -> Iterator[Parent]:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        parent = Parent(process)
        yield parent
        for child in parent.children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()  # also one that is stopped


@pytest.fixture
def parent() -> Iterator[Parent]:
    with running_parent() as parent:
        yield parent


def below(*parents: Parent) -> Processes:
    """Return the processes below parents."""
    processes = Processes()
    for parent in parents:
        processes.add(parent.pid)
    return processes


def test_every_cell_is_named_once_and_chosen_by_its_name() -> None:
    cells = matrix()
    signals = (len(Kind) - 1) * len(Phase) * 2
    assert len(set(cells)) == len(cells) == signals + len(Phase)
    assert {cell.kind for cell in cells if cell.how is How.CUT} == {Kind.NODE}
    assert {cell.kind for cell in cells if cell.needs_worker} == {Kind.RAYLET, Kind.NODE}
    assert choose(["router/decoding/stop"]) == [Cell(Kind.ROUTER, Phase.DECODING, How.STOP)]
    assert {cell.kind for cell in choose(["decode-*/idle"])} == {Kind.DECODE_LEADER, Kind.DECODE_RANK}
    assert choose(["nothing"]) == []
    assert choose([]) == cells


def test_processes_are_known_by_their_titles_and_others_are_not(parent: Parent) -> None:
    rank, router = parent.start("ray::decode-0 rank 1"), parent.start("ray::router.wait_event")
    parent.start("ray::IDLE")
    processes = below(parent)
    assert processes.look() == {"decode-0 rank 1": rank.pid, "router": router.pid}
    assert processes.name_of(Kind.DECODE_RANK, "decode-0") == "decode-0 rank 1"
    assert processes.name_of(Kind.DECODE_RANK, "decode-1") == ""
    assert processes.name_of(Kind.ROUTER, "") == "router"


def test_of_a_name_with_a_port_only_the_process_that_listens_there_is_hit(parent: Parent) -> None:
    processes = below(parent)
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        processes.ports["router"] = port = elsewhere.getsockname()[1]
    parent.start("ray::router")
    other = parent.start("ray::prefill-0 leader")
    assert processes.look() == {"prefill-0 leader": other.pid}
    listening = parent.start("ray::router", "LISTEN", str(port))
    parent.start("ray::router")
    assert processes.look() == {"router": listening.pid, "prefill-0 leader": other.pid}


def test_raylets_are_known_by_the_addresses_of_their_nodes(parent: Parent) -> None:
    head = parent.start("/ray/core/raylet", "--node_ip_address=10.77.1.1")
    worker = parent.start("/ray/core/raylet", "--store=s", "--node_ip_address=10.77.1.2", "--port=0")
    parent.start("/ray/core/raylet")
    processes = below(parent)
    assert processes.look() == {"raylet 10.77.1.1": head.pid, "raylet 10.77.1.2": worker.pid}
    assert processes.name_of(Kind.RAYLET, "10.77.1.2") == processes.name_of(Kind.NODE, "10.77.1.2")
    assert processes.pid_of(processes.name_of(Kind.NODE, "10.77.1.2")) == worker.pid
    assert processes.name_of(Kind.NODE, "10.77.1.3") == ""


def test_all_processes_of_one_root_end_and_those_of_others_go_on(parent: Parent) -> None:
    with running_parent() as other:
        processes = below(parent, other)
        lost, stopped, stays = (
            parent.start("ray::prefill-0 rank 0"),
            parent.start("ray::IDLE"),
            other.start("ray::IDLE"),
        )
        processes.look()
        processes.hit("prefill-0 rank 0", How.STOP)
        processes.kill_all(parent.pid)
        wait_until(lambda: not (is_alive(lost) or is_alive(stopped)), "those of the parent have ended")
        assert is_alive(stays)


def test_a_stopped_process_goes_on_and_a_killed_one_is_gone(parent: Parent) -> None:
    leader, rank = parent.start("ray::prefill-0 leader.start"), parent.start("ray::prefill-0 rank 0")
    processes = below(parent)
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
    processes = below(parent)
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


@pytest.mark.parametrize(
    ("phase", "tokens", "rings"),
    [
        (Phase.QUEUED, 0, {PLAN.prefill_ring}),
        (Phase.PREFILL, 0, {PLAN.prefill_ring}),
        (Phase.MIGRATING, 1, {PLAN.prefill_ring, PLAN.decode_ring}),
        (Phase.DECODING, 6, {PLAN.decode_ring}),
    ],
)
def test_a_stream_counts_where_the_rings_at_work_for_it_are_among_those_asked_for(
    phase: Phase, tokens: int, rings: set[str]
) -> None:
    stream = Stream(expected=expected(), number=1, began=1.0, plan=PLAN, token_ids=[5] * tokens)
    ring = RingInfo(role="prefill", name=PLAN.prefill_ring, num_requests_running=1, num_requests_waiting=1)
    info = ServerInfo(rings=(ring,))
    for name in (PLAN.prefill_ring, PLAN.decode_ring):
        assert (in_phase(phase, [stream], info, {name}) is stream) == (name in rings)
    assert in_phase(phase, [stream], info, ()) is None


def test_a_stream_that_went_to_other_rings_has_to_do_with_the_first_ones_too() -> None:
    stream = Stream(expected=expected(), number=1, began=1.0)
    assert stream.uses({"prefill-9"}), "its client knows no plan"
    stream.note_plan(PLAN)
    stream.note_plan(replace(PLAN, prefill_ring="prefill-1"))
    assert stream.uses({"prefill-0"})
    assert stream.uses({"prefill-1"})
    assert not stream.uses({"prefill-9"})
