"""Progress of a rank and the times of its steps. The compute thread writes them, any thread reads them."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from ringserve.cp_core.transport.interface import RingTransport
from ringserve.workers.protocol.ranks import STEP_BOUNDS


class Progress:
    """Progress of a rank for watchdogs.

    `steps` counts forward passes. `running` is the number of sequences in the current prefill step, or in the decode
    batch. `decode_variant` served the latest decode step. Every heartbeat of an idle loop resets the time since the
    last step: a rank that waits for work is not stuck. `checked_drafts[i]` and `accepted_drafts[i]` count the draft
    tokens at place i behind a sequence's newest token. `waited_steps` counts, by reason, a GPU's decode steps whose
    tokens had to be read before the next step was issued.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.running = 0
        self.decode_variant = ""
        self.waited_steps: Counter[str] = Counter()
        self.checked_drafts: list[int] = []
        self.accepted_drafts: list[int] = []
        self._moved = time.monotonic()

    def checked(self, num_drafts: int, num_accepted: int) -> None:
        """Count a sequence's drafts in a step, by their places behind its newest token."""
        for counts, number in ((self.checked_drafts, num_drafts), (self.accepted_drafts, num_accepted)):
            counts += [0] * (number - len(counts))
            for place in range(number):
                counts[place] += 1

    def alive(self, running: int) -> None:
        """Note a heartbeat, with `running` sequences."""
        self.running = running
        self._moved = time.monotonic()

    def stepped(self, running: int) -> None:
        """Count a forward pass over `running` sequences."""
        self.steps += 1
        self.alive(running)

    def decoded(self, running: int, variant: str) -> None:
        """Count a decode step of this variant."""
        self.decode_variant = variant
        self.stepped(running)

    @property
    def seconds_since_step(self) -> float:
        return time.monotonic() - self._moved


class StepClock:
    """Times of a rank's steps: their lengths, the waits for peers in them, and the time with messages under way.

    The clock runs during steps only. No step runs while a loop waits for work, or for the next header of the decode
    loop that leads it. Element i of `step_counts` counts the steps of at most STEP_BOUNDS[i] seconds and more than the
    bound before it; the last element counts the steps above every bound. `communication_seconds` is None while no
    transport can tell when its messages are done.
    """

    def __init__(self, *transports: RingTransport) -> None:
        self.step_seconds = 0.0
        self.wait_seconds = 0.0
        self.communication_seconds: float | None = None
        self.step_counts = [0] * (len(STEP_BOUNDS) + 1)
        self.watch(*transports)

    def watch(self, *transports: RingTransport) -> None:
        """Count the waits and messages of these transports from the next step on."""
        self._transports = transports

    @contextmanager
    def step(self) -> Iterator[None]:
        """Count the block of the `with` statement as one step."""
        began, waited, under_way = time.perf_counter(), self.seconds_waited, self._seconds_under_way
        yield
        seconds = time.perf_counter() - began
        self.step_counts[bisect_left(STEP_BOUNDS, seconds)] += 1
        self.step_seconds += seconds
        self.wait_seconds += self.seconds_waited - waited
        after = self._seconds_under_way
        if under_way is not None and after is not None:
            self.communication_seconds = (self.communication_seconds or 0.0) + after - under_way

    @property
    def seconds_waited(self) -> float:
        """Seconds for which the transports waited for peers since they exist, in steps and between them."""
        return sum(transport.stats.seconds_waited for transport in self._transports)

    @property
    def _seconds_under_way(self) -> float | None:
        """Seconds for which messages were under way; None if no transport can tell when its messages are done."""
        told = [seconds for each in self._transports if (seconds := each.stats.seconds_under_way) is not None]
        return sum(told) if told else None
