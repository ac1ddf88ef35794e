"""Log of the latest events of rings and turns, which the router shows to operators; the newest is last."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from ringserve.orchestration.protocol.views import EventKind
from ringserve.views import ServerEvent

MAX_EVENTS = 100
COUNTED = (EventKind.FAILOVER, EventKind.REFUSAL, EventKind.EVICTION)
"""Kinds of which many events may come at once: repetitions are counted in one event."""
MAX_TEXT = 300
"""Most characters of an event's text."""


class EventLog:
    """Log of at most MAX_EVENTS events. `clock` tells seconds since the epoch.

    A failover or refusal that repeats the latest event of its kind is counted in that event, and all evictions of a
    ring are one event. So a flood of events leaves room for others.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._events: deque[ServerEvent] = deque(maxlen=MAX_EVENTS)

    def note(self, kind: EventKind, ring: str, text: str, count: int = 1) -> None:
        """Add an event that happened `count` times. `ring` may be empty."""
        event = ServerEvent(at=self._clock(), kind=kind, ring=ring, text=text[:MAX_TEXT], count=count)
        for place in range(len(self._events) - 1, -1, -1):
            other = self._events[place]
            if other.kind == kind and (kind is not EventKind.EVICTION or other.ring == ring):
                if kind in COUNTED and (other.ring, other.text) == (event.ring, event.text):
                    del self._events[place]
                    event = replace(event, count=other.count + count)
                break
        self._events.append(event)

    def latest(self) -> tuple[ServerEvent, ...]:
        """Return the events, the newest last."""
        return tuple(self._events)
