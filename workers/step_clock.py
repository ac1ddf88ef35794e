"""How long a rank's steps took, and how long it waited for its peers in them.

Written by the compute thread, read by any.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from cp_core.transport import RingTransport


class StepClock:
    """Runs during steps only: a loop that waits for work, also for its leader's next header, is not in a step."""

    def __init__(self) -> None:
        self.step_seconds = 0.0
        self.wait_seconds = 0.0

    @contextmanager
    def step(self, *transports: RingTransport) -> Iterator[None]:
        """Count what happens inside as one step; waits are those of `transports`."""
        began, waited = time.perf_counter(), _waited(transports)
        yield
        self.step_seconds += time.perf_counter() - began
        self.wait_seconds += _waited(transports) - waited


def _waited(transports: tuple[RingTransport, ...]) -> float:
    return sum(transport.stats.seconds_waited for transport in transports)
