"""How far a rank has come, for watchdogs. Written by the compute thread, read by any."""

from __future__ import annotations

import time


class Progress:
    """`steps` counts forward passes; `running` is the number of sequences in the one now computed, or in the batch.
    `decode_variant` served the latest decode step.

    The clock also starts anew at every sign of life of an idle loop: a rank that waits for work is not stuck.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.running = 0
        self.decode_variant = ""
        self._moved = time.monotonic()

    def alive(self, running: int) -> None:
        self.running = running
        self._moved = time.monotonic()

    def stepped(self, running: int) -> None:
        self.steps += 1
        self.alive(running)

    def decoded(self, running: int, variant: str) -> None:
        self.decode_variant = variant
        self.stepped(running)

    @property
    def seconds_since_step(self) -> float:
        return time.monotonic() - self._moved
