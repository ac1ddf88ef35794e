"""Waits of a stream are counted by its events: when they have passed, once, and without waiting for others."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from cp_core.transport.nccl import StreamWaits


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
    waits = StreamWaits(lambda: next(recorded))
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
