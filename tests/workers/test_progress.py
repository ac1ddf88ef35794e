"""Times of a rank's steps, with transports whose times are set by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ringserve.cp_core.transport.interface import TransportStats
from ringserve.workers import progress
from ringserve.workers.progress import StepClock
from ringserve.workers.protocol.ranks import STEP_BOUNDS


class Time:
    """Clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(progress, "time", time)
    return time


def transport(**stats: Any) -> Any:
    return SimpleNamespace(stats=TransportStats(**stats))


def test_every_step_is_in_the_bucket_of_its_length(time: Time) -> None:
    clock = StepClock()
    lengths = [0.0, *STEP_BOUNDS, *(1.5 * bound for bound in STEP_BOUNDS)]
    for seconds in lengths:
        time.now = 0.0  # so that no length is rounded
        with clock.step():
            time.now += seconds
    assert sum(clock.step_counts) == len(lengths)
    assert clock.step_seconds == pytest.approx(sum(lengths))
    for place, bound in enumerate(STEP_BOUNDS):
        assert sum(clock.step_counts[: place + 1]) == sum(seconds <= bound for seconds in lengths)


def test_waits_and_messages_count_within_steps_only(time: Time) -> None:
    ring, tensor = transport(seconds_under_way=3.0), transport(seconds_under_way=0.0)
    clock = StepClock(ring, tensor)
    ring.stats.seconds_waited = 2.0
    with clock.step():
        ring.stats.seconds_waited += 0.5
        ring.stats.seconds_under_way += 1.5
        tensor.stats.seconds_under_way += 0.25
    ring.stats.seconds_under_way += 100.0
    ring.stats.seconds_waited += 100.0
    with clock.step():
        ring.stats.seconds_under_way += 1.0
    assert (clock.wait_seconds, clock.communication_seconds) == (0.5, 2.75)


def test_a_transport_that_cannot_tell_is_not_taken_for_silent(time: Time) -> None:
    clock = StepClock(transport())
    with clock.step():
        time.now += 1.0
    assert clock.communication_seconds is None
    clock.watch()
    with clock.step():
        time.now += 1.0
    assert clock.communication_seconds is None
    clock.watch(transport(seconds_under_way=0.0))
    with clock.step():
        time.now += 1.0
    assert clock.communication_seconds == 0.0
