"""Keeper of the gateway: one that dies or stands still is started again at its addresses."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from ringserve.cp_core.errors import ConfigError
from ringserve.services.cluster import gateway
from ringserve.services.cluster.gateway import GatewayKeeper
from ringserve.services.gateway.settings import GatewaySettings
from tests.services.e2e.cluster import wait_until

SCRIPT = """
import json, sys, time
listen = sys.argv[1].replace(":0", ":7")
if listen == "broken":
    sys.exit(1)
print(json.dumps({"gateway": listen, "http": "", "metrics": ""}), flush=True)
while True:
    print(flush=True)
    time.sleep(0.01)
"""
SETTINGS = GatewaySettings(
    listen="host:0", http="", metrics="", router="", model="", model_name="", dtype="", device="cpu", max_seconds=60.0
)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def command(settings: GatewaySettings) -> Sequence[str]:
    return (sys.executable, "-S", "-c", SCRIPT, settings.listen)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def keeper(clock: Clock) -> Iterator[GatewayKeeper]:
    keeper = GatewayKeeper(SETTINGS, start_seconds=60.0, silent_seconds=4.0, command=command, clock=clock)
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


def test_a_gateway_that_gives_signs_of_life_is_left_alone(keeper: GatewayKeeper, clock: Clock) -> None:
    first = keeper.pid
    for _ in range(8):
        wait_until(lambda: not keeper._lines.empty(), "a heartbeat")
        assert look(keeper, clock) == first
    wait_until(lambda: not keeper._lines.empty(), "a heartbeat")
    assert look(keeper, clock, 100.0) == first, "it is this process that stood still"


def test_ctrl_c_does_not_reach_a_gateway_and_its_nice_value_counts_beside_ranks(keeper: GatewayKeeper) -> None:
    assert os.getpgid(keeper.pid) == keeper.pid != os.getpgid(0)
    assert os.getsid(keeper.pid) == os.getsid(0), "Linux shares processors out among sessions before nice values count"


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_gateway_that_stands_still_or_died_is_started_again_in_place(
    keeper: GatewayKeeper, clock: Clock, number: signal.Signals
) -> None:
    first = keeper.pid
    os.kill(first, number)
    wait_until(lambda: look(keeper, clock) != first, "another gateway")
    assert keeper.settings.listen == "host:7"
    second = keeper.pid
    wait_until(lambda: not keeper._lines.empty(), "a heartbeat")
    assert look(keeper, clock) == second


def test_a_gateway_that_cannot_start_ends_the_cluster(
    keeper: GatewayKeeper, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "RESTART_WAITS", (0.0,))
    keeper.settings = replace(keeper.settings, listen="broken")
    os.kill(keeper.pid, signal.SIGKILL)
    with pytest.raises(ConfigError, match="the gateway did not start"):
        wait_until(lambda: look(keeper, clock) < 0, "an error")
