"""Keeper of the gateway: another takes the place of one that dies or stands still, at its addresses."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

import psutil
import pytest

from ringserve.cp_core.errors import ConfigError
from ringserve.orchestration.tasks import IDLE_NICENESS
from ringserve.services.cluster import capacity, gateway
from ringserve.services.cluster.capacity import SpareSchedule
from ringserve.services.cluster.gateway import GatewayKeeper
from ringserve.services.gateway import __main__ as entry
from ringserve.services.gateway import process
from ringserve.services.gateway.settings import GatewaySettings
from ringserve.workers.model.builtin import PREFIX, TINY
from tests.services.e2e.cluster import wait_until
from tests.waiting import START_SECONDS, WAIT_SECONDS

T = TypeVar("T")

SCRIPT = """
import json, sys, time
listen = sys.argv[1].replace(":0", ":7")
if listen == "broken":
    sys.exit(1)
if sys.argv[2] == "spare":
    time.sleep(float(sys.argv[3]))
    print(flush=True)
    if not sys.stdin.readline():
        sys.exit(0)
print(json.dumps({"gateway": listen, "http": "", "metrics": ""}), flush=True)
while True:
    print(flush=True)
    time.sleep(0.01)
"""
LOAD_SECONDS = "0"
SETTINGS = GatewaySettings(
    listen="host:0", http="", metrics="", router="", model="", model_name="", dtype="", device="cpu", max_seconds=60.0
)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def command(settings: GatewaySettings) -> Sequence[str]:
    return (sys.executable, "-S", "-c", SCRIPT, settings.listen, "spare" if settings.is_spare else "", LOAD_SECONDS)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make_keeper(clock: Clock, *, has_spare: bool = True) -> GatewayKeeper:
    """Return the keeper of a gateway that is a script, on a machine with an idle core."""
    return GatewayKeeper(
        SETTINGS,
        start_seconds=60.0,
        silent_seconds=4.0,
        spares=SpareSchedule(has_spare=has_spare, idle_seconds=clock),
        command=command,
        clock=clock,
    )


@pytest.fixture(params=[True, False], ids=["spare", "alone"])
def keeper(clock: Clock, request: pytest.FixtureRequest) -> Iterator[GatewayKeeper]:
    keeper = make_keeper(clock, has_spare=request.param)
    keeper.start()
    try:
        keeper.await_serving()
        yield keeper
    finally:
        keeper.end()


def look(keeper: GatewayKeeper, clock: Clock, seconds: float = 1.0) -> int:
    clock.now += seconds
    keeper.look(threading.Event())
    return keeper.pid


def has_line(keeper: GatewayKeeper) -> bool:
    assert keeper._process is not None
    return not keeper._process.lines.empty()


def test_a_gateway_that_gives_signs_of_life_is_left_alone(keeper: GatewayKeeper, clock: Clock) -> None:
    first = keeper.pid
    for _ in range(8):
        wait_until(lambda: has_line(keeper), "a heartbeat")
        assert look(keeper, clock) == first
    wait_until(lambda: has_line(keeper), "a heartbeat")
    assert look(keeper, clock, 100.0) == first, "it is this process that stood still"


def test_ctrl_c_does_not_reach_a_gateway_and_its_nice_value_counts_beside_ranks(keeper: GatewayKeeper) -> None:
    assert os.getpgid(keeper.pid) == keeper.pid != os.getpgid(0)
    assert os.getsid(keeper.pid) == os.getsid(0), "Linux shares processors out among sessions before nice values count"


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_another_takes_the_place_of_a_gateway_that_stands_still_or_died(
    keeper: GatewayKeeper, clock: Clock, number: signal.Signals
) -> None:
    first = keeper.pid
    os.kill(first, number)
    wait_until(lambda: look(keeper, clock) != first, "another gateway")
    assert keeper.settings.listen == "host:7"
    second = keeper.pid
    wait_until(lambda: has_line(keeper), "a heartbeat")
    assert look(keeper, clock) == second


def test_a_gateway_that_cannot_start_ends_the_cluster(
    keeper: GatewayKeeper, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "RESTART_WAITS", (0.0,))
    keeper.settings = replace(keeper.settings, listen="broken")
    keeper.look(threading.Event())  # a spare cannot start either
    os.kill(keeper.pid, signal.SIGKILL)
    with pytest.raises(ConfigError, match="the gateway did not start"):
        wait_until(lambda: look(keeper, clock) < 0, "an error")


@pytest.fixture
def spared(clock: Clock) -> Iterator[GatewayKeeper]:
    """Return a keeper of a gateway that serves, with a spare."""
    keeper = make_keeper(clock)
    keeper.start()
    try:
        keeper.await_serving()
        look(keeper, clock, capacity.SPARE_WAIT - 1)
        assert not spare_pid(keeper), "first turns come first"
        look(keeper, clock, 1)
        wait_until(lambda: keeper._spare is not None and not keeper._spare.lines.empty(), "a loaded spare")
        yield keeper
    finally:
        keeper.end()


def spare_pid(keeper: GatewayKeeper) -> int:
    return keeper._spare.pid if keeper._spare is not None else 0


def die(keeper: GatewayKeeper, clock: Clock) -> int:
    first = keeper.pid
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: look(keeper, clock, 0.0) != first, "another gateway")
    return keeper.pid


def test_the_spare_is_the_next_gateway_and_another_is_loaded_later(spared: GatewayKeeper, clock: Clock) -> None:
    spare = spare_pid(spared)
    assert die(spared, clock) == spare
    assert (spared.settings.listen, spared.settings.is_spare) == ("host:7", False)
    look(spared, clock, capacity.SPARE_WAIT - 1)
    assert not spare_pid(spared)
    look(spared, clock, 1)
    assert spare_pid(spared)


def test_a_spare_that_dies_is_replaced_but_not_at_once(
    spared: GatewayKeeper, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    first = spare_pid(spared)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: bool(look(spared, clock, 0.0)) and not spare_pid(spared), "the end of the spare")
    look(spared, clock, capacity.FAILED_SPARE_WAIT - 1)
    assert not spare_pid(spared)
    look(spared, clock, 1)
    assert spare_pid(spared) not in (0, first)
    assert "the spare gateway died (exit -9)" in caplog.text


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_without_a_spare_that_serves_another_gateway_is_started(
    spared: GatewayKeeper, clock: Clock, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr(gateway, "SPARE_SECONDS", 0.1)
    spare = spare_pid(spared)
    os.kill(spare, number)
    assert die(spared, clock) != spare
    with pytest.raises(ProcessLookupError):
        os.kill(spare, 0)


def test_nobody_waits_for_a_spare_that_still_loads_with_what_others_leave_of_the_cores(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "LOAD_SECONDS", "600")
    keeper = make_keeper(clock)
    keeper.start()
    try:
        keeper.await_serving()
        look(keeper, clock, capacity.SPARE_WAIT)
        spare = spare_pid(keeper)
        assert die(keeper, clock) != spare
        with pytest.raises(ProcessLookupError):
            os.kill(spare, 0)
    finally:
        keeper.end()


def test_the_end_of_a_gateway_is_that_of_its_spare(spared: GatewayKeeper) -> None:
    spare = spare_pid(spared)
    spared.end()
    with pytest.raises(ProcessLookupError):
        os.kill(spare, 0)


def test_a_spare_loads_with_what_others_leave_of_the_cores(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    started, of_script = list[tuple[bool, int]](), command

    def noted(settings: GatewaySettings) -> Sequence[str]:
        started.append((settings.is_spare, settings.niceness))
        return of_script(settings)

    monkeypatch.setitem(globals(), "command", noted)
    keeper = make_keeper(clock)
    keeper.start()
    try:
        keeper.await_serving()
        look(keeper, clock, capacity.SPARE_WAIT)
        assert started == [(False, 0), (True, IDLE_NICENESS)]
    finally:
        keeper.end()


def loaded_spare(keeper: GatewayKeeper) -> psutil.Process:
    """Return a spare that has loaded at a lower priority, of which nothing is left."""
    keeper._keep_spare(float("inf"))
    assert keeper._spare is not None
    spare = psutil.Process(keeper._spare.pid)
    wait_until(lambda: keeper._spare is not None and not keeper._spare.lines.empty(), "a loaded spare")

    def policies() -> set[tuple[int, int]]:
        found = set()
        for thread in spare.threads():
            with suppress(ProcessLookupError):  # it has ended
                found.add((os.getpriority(os.PRIO_PROCESS, thread.id), os.sched_getscheduler(thread.id)))
        return found

    # Python's join returns before the system has ended the thread, which takes long at a low priority.
    own = (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0))
    wait_until(lambda: policies() == {own}, "the end of the thread that loaded")
    return spare


def test_what_takes_time_before_a_gateway_serves_is_done_at_its_niceness(monkeypatch: pytest.MonkeyPatch) -> None:
    done = list[tuple[object, int]]()

    def note(work: Callable[[], T], niceness: int) -> T:
        done.append((result := work(), niceness))
        return result

    async def serve(settings: GatewaySettings, files: process.ModelFiles) -> None:
        assert settings == given
        assert files is done[1][0]

    for name in ("OPENBLAS_NUM_THREADS", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "")  # so that what `main` sets ends with this test
    for module in (entry, process):
        monkeypatch.setattr(module, "beside_others", note)
    monkeypatch.setattr(process, "serve", serve)
    # This process keeps its own logs and limits.
    monkeypatch.setattr(process, "set_up_logs", lambda *_: None)
    monkeypatch.setattr("resource.setrlimit", lambda *_: None)
    given = replace(SETTINGS, model=PREFIX + TINY, dtype="float32", niceness=7)
    assert entry.main(["--settings", given.to_json()]) == 0
    assert done[0][0] is process
    assert [niceness for _, niceness in done] == [7, 7]


def test_a_spare_ends_with_its_parent_and_listens_nowhere_before_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "IDLE_NICENESS", 5)  # on a busy machine others leave it next to nothing for minutes
    settings = replace(
        SETTINGS, listen="127.0.0.1:0", router="127.0.0.1:1", model=PREFIX + TINY, dtype="float32", follow_stdin=True
    )
    keeper = GatewayKeeper(settings, start_seconds=START_SECONDS, silent_seconds=WAIT_SECONDS)
    keeper.start()
    try:
        keeper.await_serving()
        address, stopped = keeper.settings.listen, threading.Event()
        spare = loaded_spare(keeper)
        first = keeper.pid
        os.kill(first, signal.SIGKILL)

        def is_replaced() -> bool:
            keeper.look(stopped)
            return keeper.pid != first

        wait_until(is_replaced, "the spare")
        assert (keeper.pid, keeper.settings.listen) == (spare.pid, address)
        host, _, port = address.rpartition(":")
        socket.create_connection((host, int(port)), WAIT_SECONDS).close()
        second = loaded_spare(keeper)
        assert not second.net_connections("tcp")
        assert keeper._spare is not None
        assert keeper._spare._popen.stdin is not None
        keeper._spare._popen.stdin.close()
        assert keeper._spare._popen.wait(WAIT_SECONDS) == 0
    finally:
        keeper.end()
