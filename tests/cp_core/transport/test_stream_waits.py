"""Waits of a stream are counted by its events; waits of a host for one have a deadline and end with the ring."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch.distributed import ProcessGroup, Work

from ringserve.cp_core.errors import Unavailable
from ringserve.cp_core.transport.nccl import NcclRing, ProcessGroupLike, ProcessGroupRing, StreamWaits
from tests.waiting import WAIT_SECONDS


@dataclass
class Event:
    """Event of a stream whose clock stands at `at` milliseconds when it passes."""

    at: float
    has_passed: bool = False

    def query(self) -> bool:
        return self.has_passed

    def elapsed_time(self, end_event: Event, /) -> float:
        assert self.has_passed
        assert end_event.has_passed
        return end_event.at - self.at


def test_a_wait_counts_when_its_stream_has_waited_and_only_once() -> None:
    events = [Event(at) for at in (100.0, 350.0, 400.0, 1400.0)]
    recorded, waited = iter(events), list[str]()
    waits = StreamWaits(lambda: next(recorded), lambda: False)
    for name in "ab":
        waits.around(partial(waited.append, name))
    assert waited == ["a", "b"]
    assert waits.take() == 0.0
    for event in events[:3]:
        event.has_passed = True
    assert waits.take() == 0.25
    assert waits.take() == 0.0
    events[3].has_passed = True
    assert waits.take() == 1.0


def test_a_wait_that_is_recorded_is_not_counted() -> None:
    def record() -> Event:
        raise AssertionError("a recording has no events with times")

    waited = list[str]()
    waits = StreamWaits(record, lambda: True)
    waits.around(partial(waited.append, "a"))
    assert waited == ["a"]
    assert waits.take() == 0.0


class Group:
    """Process group without messages, whose abort waits."""

    def __init__(self, num_ranks: int = 2) -> None:
        self._num_ranks = num_ranks
        self.is_aborting, self.has_aborted, self.may_end = threading.Event(), threading.Event(), threading.Event()

    def abort(self) -> None:
        self.is_aborting.set()
        self.may_end.wait(WAIT_SECONDS)
        self.has_aborted.set()

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self._num_ranks


class BareRing(ProcessGroupRing):
    """Ring that notes whether its connections are broken."""

    is_broken = False

    def wait_for(self, work: Work, deadline: float) -> None:
        raise AssertionError("no message is sent")

    def _break_connections(self) -> None:
        self.is_broken = True


def bare_ring(timeout_seconds: float, num_ranks: int = 2) -> BareRing:
    return BareRing(cast("ProcessGroupLike", Group(num_ranks)), timeout_seconds, None)


def event_asked(query: Callable[[], bool]) -> torch.Event:
    event: Any = Event(0.0)
    event.query = query
    return cast("torch.Event", event)


def test_a_host_waits_until_its_device_has_passed_an_event() -> None:
    answers = iter([False, False, True])
    ring = bare_ring(60.0)
    ring.await_event(event_asked(lambda: next(answers)))
    assert list(answers) == []
    assert not ring.is_broken


def test_a_rank_that_is_alone_is_woken_by_its_device() -> None:
    def query() -> bool:
        raise AssertionError("there is no peer to look after")

    woken: list[str] = []
    event = event_asked(query)
    event.synchronize = lambda: woken.append("done")  # type: ignore[method-assign]
    bare_ring(60.0, num_ranks=1).await_event(event)
    assert woken == ["done"]


def test_a_step_that_does_not_end_breaks_the_ring_at_its_deadline() -> None:
    ring = bare_ring(0.01)
    with pytest.raises(Unavailable, match=r"rank 0 waited 0\.01 s for its device and its peers"):
        ring.await_event(event_asked(lambda: False))
    assert ring.is_broken


@pytest.mark.parametrize("has_passed", [False, True])
def test_a_ring_that_is_closed_ends_the_wait_and_what_its_device_has_is_void(has_passed: bool) -> None:
    """Messages of a ring that is given up end without data, so the event behind them may pass."""
    ring = bare_ring(60.0)

    def query() -> bool:
        ring.close()
        return has_passed

    with pytest.raises(Unavailable, match="rank 0 left the ring of 2"):
        ring.await_event(event_asked(query))
    assert ring.is_broken


def test_a_ring_of_nccl_is_closed_before_nccl_has_ended_it() -> None:
    """NCCL waits for recordings of its messages to be gone: those of the thread that closes the ring, too."""
    group = Group()
    ring = NcclRing(cast("ProcessGroup", group), torch.device("cpu"), 60.0, None)
    ring.close()
    assert group.is_aborting.wait(WAIT_SECONDS)
    assert not group.has_aborted.is_set()
    with pytest.raises(Unavailable, match="rank 0 left the ring of 2"):
        ring.await_event(event_asked(lambda: False))
    group.may_end.set()
    assert group.has_aborted.wait(WAIT_SECONDS)
