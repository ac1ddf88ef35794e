"""A router that dies, stands still, or does not start again."""

from __future__ import annotations

import pytest

from ringserve.cp_core.errors import DiskFull, Unavailable
from ringserve.orchestration.protocol.rings import RingEvent
from ringserve.services.cluster.capacity import FAILED_SPARE_WAIT, SPARE_WAIT, SpareSchedule
from ringserve.services.cluster.hosts import RouterHost
from ringserve.services.cluster.router import (
    DISK_WAIT_SECONDS,
    PROBE_SECONDS,
    RESTART_WAITS,
    RouterKeeper,
)
from ringserve.services.config import config_from
from ringserve.workers.model.builtin import resolve_model_path
from ringserve.workers.model.info import read_model_info

SILENT = 5.0
START = 60.0


class Process:
    """Router that does what the test says."""

    def __init__(self, host: RouterHost) -> None:
        self.host = host
        self.served: str | None = None
        self.failure = ""
        self.is_silent = False
        self.is_disk_full = False
        self.kills = 0
        self.events: list[RingEvent] = []
        self.has_begun = False

    def begin(self) -> None:
        self.has_begun = True

    def endpoint(self) -> str | None:
        self._check()
        return self.served

    def event(self) -> RingEvent | None:
        self._check()
        return self.events.pop() if self.events else None

    def answers(self) -> bool:
        return not self.is_silent

    def kill(self) -> None:
        self.kills += 1

    def _check(self) -> None:
        if self.is_disk_full:
            raise DiskFull("the disk is full")
        if self.failure:
            raise Unavailable(self.failure)


class Keeping:
    """Keeper of such routers, with a clock of its own."""

    def __init__(self, *, has_spare: bool = False) -> None:
        self.now = 0.0
        self.made: list[Process] = []
        config = config_from({"router": {"listen": "127.0.0.1:0"}})
        host = RouterHost(config=config, model=read_model_info(resolve_model_path("builtin:tiny")), journal="/journal")
        self.keeper = RouterKeeper(
            host,
            self._make,
            start_seconds=START,
            silent_seconds=SILENT,
            spares=SpareSchedule(has_spare=has_spare, idle_seconds=lambda: self.now),
            clock=lambda: self.now,
        )
        self.keeper.serves_at("10.0.0.7:4711")

    def _make(self, host: RouterHost, name: str) -> Process:
        self.made.append(Process(host))
        return self.made[-1]

    def look(self, seconds: float = 0.0) -> RingEvent | None:
        self.now += seconds
        return self.keeper.look()


def test_a_router_that_dies_is_started_again_at_its_port() -> None:
    keeping = Keeping()
    keeping.made[0].failure = "the router died"
    keeping.look()
    keeping.look()
    assert [process.host.config.router.listen for process in keeping.made] == ["127.0.0.1:0", "127.0.0.1:4711"]
    again = keeping.made[1]
    again.events.append(RingEvent(ring="decode-0"))
    assert keeping.look() is None, "it does not serve yet"
    again.served = "10.0.0.7:4711"
    keeping.look()
    assert keeping.look() == RingEvent(ring="decode-0")


def test_a_router_that_stands_still_is_killed_and_started_again() -> None:
    keeping = Keeping()
    keeping.made[0].is_silent = True
    for _ in range(int(SILENT / PROBE_SECONDS) - 1):  # its latest answer may be older than the first look
        keeping.look(PROBE_SECONDS)
    still = keeping.made[0]
    assert still.kills == 0
    keeping.look(PROBE_SECONDS)
    assert still.kills == 1
    keeping.look()
    assert len(keeping.made) == 2


def test_a_router_is_not_blamed_for_a_while_in_which_its_keeper_stood_still() -> None:
    keeping = Keeping()
    keeping.made[0].is_silent = True
    keeping.look(100.0)
    keeping.look(PROBE_SECONDS)
    assert keeping.made[0].kills == 0


def test_a_router_that_never_starts_again_ends_the_cluster_with_its_reason() -> None:
    keeping = Keeping()
    for wait in RESTART_WAITS:
        keeping.made[-1].failure = "the router could not start: its port is taken"
        keeping.look()
        num_made = len(keeping.made)
        if wait:
            keeping.look(wait / 2)
            assert len(keeping.made) == num_made, "too early"
        keeping.look(wait)
        assert len(keeping.made) == num_made + 1
    keeping.made[-1].failure = "the router could not start: its port is taken"
    with pytest.raises(Unavailable, match="its port is taken; it could not be started again"):
        keeping.look()


def test_failures_long_ago_do_not_count() -> None:
    keeping = Keeping()
    for _ in range(3 * len(RESTART_WAITS)):
        keeping.made[-1].failure = "the router died"
        keeping.look()
        keeping.look(RESTART_WAITS[-1])
        keeping.made[-1].served = "10.0.0.7:4711"
        keeping.look()
        keeping.look(PROBE_SECONDS)


def test_a_full_disk_is_waited_for_without_end_and_told_once() -> None:
    keeping = Keeping()
    keeping.made[0].failure = "the router died"
    keeping.look()
    for _ in range(3 * len(RESTART_WAITS)):
        num_made = len(keeping.made)
        keeping.look(DISK_WAIT_SECONDS)
        assert len(keeping.made) == num_made + 1
        keeping.made[-1].is_disk_full = True
        keeping.look()
        assert keeping.made[-1].kills == 1
        assert keeping.keeper.trouble == "the disk is full; the router starts again once there is space"
    keeping.look(DISK_WAIT_SECONDS)
    keeping.made[-1].served = "10.0.0.7:4711"
    keeping.look()
    assert keeping.keeper.trouble == ""


def test_a_router_that_does_not_start_in_time_is_killed_and_another_started() -> None:
    keeping = Keeping()
    keeping.made[0].failure = "the router died"
    keeping.look()
    keeping.look()
    late = keeping.made[1]
    keeping.look(START)
    assert late.kills == 0
    keeping.look(0.1)
    assert late.kills == 1
    keeping.look(RESTART_WAITS[1])
    assert len(keeping.made) == 3


def spared() -> Keeping:
    """Return the keeper of a router that serves, and of its spare."""
    keeping = Keeping(has_spare=True)
    keeping.look(SPARE_WAIT - 1)
    assert len(keeping.made) == 1
    keeping.look(1)
    assert [process.has_begun for process in keeping.made] == [True, False]
    return keeping


def test_the_spare_takes_the_place_of_a_router_and_has_its_port() -> None:
    keeping = spared()
    keeping.made[0].failure = "the router died"
    keeping.look()
    keeping.look()
    spare = keeping.made[1]
    assert spare.has_begun
    assert spare.host.config.router.listen == "127.0.0.1:4711"
    spare.served = "10.0.0.7:4711"
    keeping.look()
    keeping.look(SPARE_WAIT)
    assert [process.has_begun for process in keeping.made] == [True, True, False], "and has a spare itself"


def test_a_spare_that_is_lost_is_replaced_but_not_at_once() -> None:
    keeping = spared()
    keeping.made[1].failure = "the router died"
    keeping.look()
    assert keeping.made[1].kills == 1
    keeping.look(FAILED_SPARE_WAIT - 1)
    assert len(keeping.made) == 2
    keeping.look(1)
    assert len(keeping.made) == 3
    assert keeping.made[0].kills == 0


def test_a_spare_that_died_with_the_router_costs_one_more_start() -> None:
    keeping = spared()
    for process in keeping.made:
        process.failure = "the router died"
    keeping.look()
    keeping.look()
    keeping.look(RESTART_WAITS[1])
    keeping.look()
    assert [process.has_begun for process in keeping.made][-1]
    assert len(keeping.made) == 3


def test_the_end_of_the_cluster_is_that_of_the_spare() -> None:
    keeping = spared()
    keeping.keeper.end_spare()
    keeping.keeper.end_spare()
    assert [process.kills for process in keeping.made] == [0, 1]
