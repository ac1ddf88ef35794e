"""Restarts of leaders and their times, decided without Ray."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from ringserve.orchestration.protocol.rings import RingEvent
from ringserve.services.cluster.hosts import LeaderHost
from ringserve.services.cluster.leaders import NODE_SECONDS, RESTART_SECONDS, START_STAGES, RingKeeper
from ringserve.services.config import config_from


@dataclass
class FakeLeader:
    host: LeaderHost
    name: str
    started_at: float
    left: bool = False
    reason: str = ""
    starting: bool = False
    ends: list[str] = field(default_factory=list)

    def has_left(self) -> bool:
        return self.left

    def is_starting(self) -> bool:
        return self.starting

    def failure(self) -> str:
        return self.reason

    def end(self) -> None:
        self.ends.append("end")

    def kill(self) -> None:
        self.ends.append("kill")


class Machine:
    """A clock, the nodes that live, and every leader that was ever started."""

    def __init__(self) -> None:
        self.now = 0.0
        self.nodes: set[str] = set()
        self.made: list[FakeLeader] = []
        self.keeper = RingKeeper(self._start, self.nodes.__contains__, lambda: self.now)
        config = config_from({})
        (pool,) = config.pools_of("decode")
        host = LeaderHost(config=config, model_path="", fingerprint="", pool=pool, number=0, router_endpoint="")
        self.keeper.make(replace(host, measures_at_start=False))

    def _start(self, host: LeaderHost, name: str) -> FakeLeader:
        self.made.append(FakeLeader(host, name, self.now))
        return self.made[-1]

    def look(self, *, after: float = 2 * RESTART_SECONDS) -> int:
        """Let the keeper look, and return how many leaders have been started."""
        self.now += after
        self.keeper.look()
        return len(self.made)


@pytest.fixture
def machine() -> Machine:
    return Machine()


WANTED = RingEvent(ring="decode-0")


def test_a_leader_that_failed_is_started_again_by_another_name(machine: Machine) -> None:
    machine.made[0].reason = "died"
    assert machine.look() == 2
    assert [leader.name for leader in machine.made] == ["decode-0-1", "decode-0-2"]
    assert machine.made[1].host.measures_at_start, "nobody asks it to measure itself later"
    assert machine.made[0].ends == ["kill"]
    assert machine.look() == 2


def test_one_that_fails_at_once_does_not_keep_the_machine_busy(machine: Machine) -> None:
    machine.made[0].reason = "could not start"
    assert machine.look(after=RESTART_SECONDS / 2) == 1
    assert machine.look(after=RESTART_SECONDS) == 2


def test_a_ring_that_has_drained_stays_away_until_it_is_wanted(machine: Machine) -> None:
    machine.made[0].left = True
    assert machine.look() == 1
    assert machine.made[0].ends == ["end"]
    assert machine.keeper.leaders == []
    machine.keeper.want(WANTED)
    assert machine.look() == 2
    assert machine.look() == 2


def test_a_ring_that_is_wanted_before_it_was_seen_to_leave_is_not_forgotten(machine: Machine) -> None:
    machine.keeper.want(WANTED)
    assert machine.look() == 1, "it serves still"
    machine.made[0].left = True
    assert machine.look() == 2


def test_a_ring_that_died_instead_of_leaving_is_not_started_twice(machine: Machine) -> None:
    machine.keeper.want(WANTED)
    machine.made[0].reason = "died"
    assert machine.look() == 2
    machine.made[1].left = True
    assert machine.look() == 2, "it drains for another reason, and stays away"


def test_a_ring_that_nobody_knows_is_not_started(machine: Machine) -> None:
    machine.keeper.want(RingEvent(ring="decode-7"))
    assert machine.look() == 1


def test_a_ring_does_not_return_to_the_node_it_left_for(machine: Machine) -> None:
    machine.nodes.update({"10.0.0.1", "10.0.0.2"})
    machine.keeper.want(RingEvent(ring="decode-0", leaving_nodes=("10.0.0.1", "10.0.0.2")))
    machine.made[0].left = True
    assert machine.look() == 1
    machine.nodes.remove("10.0.0.1")
    assert machine.look() == 1
    machine.nodes.remove("10.0.0.2")
    assert machine.look() == 2


def test_a_node_that_stays_is_not_waited_for_for_ever(machine: Machine) -> None:
    machine.nodes.add("10.0.0.1")
    machine.keeper.want(RingEvent(ring="decode-0", leaving_nodes=("10.0.0.1",)))
    machine.made[0].left = True
    assert machine.look() == 1
    assert machine.look(after=NODE_SECONDS - 1) == 1
    assert machine.look(after=1) == 2


def test_a_silent_leader_is_killed_before_its_successor_starts(machine: Machine) -> None:
    machine.now = 10.0
    machine.keeper.want(RingEvent(ring="decode-0", silent_seconds=4.0))
    assert [leader.name for leader in machine.made] == ["decode-0-1", "decode-0-2"]
    assert machine.made[0].ends == ["kill"]


def test_a_leader_that_started_after_its_predecessor_fell_silent_is_left_alone(machine: Machine) -> None:
    machine.made[0].reason = "died"
    assert machine.look() == 2
    machine.now += 3.0
    machine.keeper.want(RingEvent(ring="decode-0", silent_seconds=4.0))
    machine.keeper.want(RingEvent(ring="other", silent_seconds=4.0))
    assert machine.look() == 2
    assert machine.made[1].ends == []


def test_a_leader_that_starts_is_not_taken_for_its_predecessor_that_fell_silent(machine: Machine) -> None:
    machine.made[0].reason = "died"
    assert machine.look() == 2
    machine.made[1].starting = True
    machine.now += 5.0
    machine.keeper.want(RingEvent(ring="decode-0", silent_seconds=4.0))
    assert machine.look() == 2, "the lost one was last heard before this one began"
    machine.made[1].starting = False
    machine.keeper.want(RingEvent(ring="decode-0", silent_seconds=4.0))
    assert machine.look() == 3


def test_a_leader_that_hangs_while_it_starts_is_replaced_at_last(machine: Machine) -> None:
    machine.made[0].starting = True
    limit = START_STAGES * machine.made[0].host.config.timeouts.start
    assert machine.look(after=limit) == 1
    assert machine.look(after=1.0) == 2
    assert machine.made[0].ends == ["kill"]


def test_rings_that_a_router_has_parked_return_when_another_takes_its_place(machine: Machine) -> None:
    machine.keeper.want(RingEvent(ring="decode-0", parked=True))
    machine.made[0].left = True
    assert machine.look() == 1, "it stays away"
    machine.keeper.want_parked()
    assert machine.look() == 2
    machine.made[1].left = True
    machine.keeper.want_parked()
    assert machine.look() == 2, "the second time somebody else has drained it"


def test_a_parked_ring_that_is_back_is_not_started_again(machine: Machine) -> None:
    machine.keeper.want(RingEvent(ring="decode-0", parked=True))
    machine.keeper.want(RingEvent(ring="decode-0", parked=False))
    machine.keeper.want_parked()
    machine.made[0].left = True
    assert machine.look() == 1
