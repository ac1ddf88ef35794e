"""Simulated time: what is due is done in order, and nothing takes time but what says so."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

ANNOUNCE_SECONDS = 2.0
"""How often simulated rings tell the router how they are, as real ones do."""


class Clock:
    """Events of one simulation. Of those due at the same instant the one that was entered first is first."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Do `event` when so many seconds, 0 or more, have passed."""
        assert seconds >= 0.0, f"time cannot go back by {seconds} s"
        heapq.heappush(self._due, (self.now + seconds, next(self._order), event))

    def run(self) -> None:
        """Until nothing is due any more."""
        while self._due:
            self.now, _, event = heapq.heappop(self._due)
            event()
