"""How long a rank's steps took, how long it waited for its peers in them, and how long messages were under way.

Written by the compute thread, read by any.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager

from cp_core.transport.interface import RingTransport
from workers.protocol.steps import STEP_BOUNDS


class StepClock:
    """Runs during steps only: a loop that waits for work, also for its leader's next header, is not in a step.

    `step_counts` are steps by length: element i those of at most STEP_BOUNDS[i] seconds, and of more than the bound
    before it; the last those that took longer than every bound.
    """

    def __init__(self) -> None:
        self.step_seconds = 0.0
        self.wait_seconds = 0.0
        self.communication_seconds: float | None = None
        self.step_counts = [0] * (len(STEP_BOUNDS) + 1)

    @contextmanager
    def step(self, *transports: RingTransport) -> Iterator[None]:
        """Count what happens inside as one step; waits and messages are those of `transports`."""
        began, waited, under_way = time.perf_counter(), _waited(transports), _under_way(transports)
        yield
        seconds = time.perf_counter() - began
        self.step_counts[bisect_left(STEP_BOUNDS, seconds)] += 1
        self.step_seconds += seconds
        self.wait_seconds += _waited(transports) - waited
        after = _under_way(transports)
        if under_way is not None and after is not None:
            self.communication_seconds = (self.communication_seconds or 0.0) + after - under_way


def _waited(transports: tuple[RingTransport, ...]) -> float:
    return sum(transport.stats.seconds_waited for transport in transports)


def _under_way(transports: tuple[RingTransport, ...]) -> float | None:
    """None where no transport sees when its messages are done."""
    told = [seconds for each in transports if (seconds := each.stats.seconds_under_way) is not None]
    return sum(told) if told else None
