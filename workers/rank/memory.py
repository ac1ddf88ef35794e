"""Memory that a rank has freed, given back to the system."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

TRIM_SECONDS = 10.0
"""Least time between two trims, each of which takes 10 to 50 ms."""


def find_trim() -> Callable[[int], int] | None:
    """Return glibc's `malloc_trim`; None if the C library has none."""
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim


class FreedMemory:
    """Memory that the allocator keeps between what is in use: prompts of many lengths leave much of it."""

    def __init__(self, trim: Callable[[int], int] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._trim = trim or find_trim()
        self._clock = clock
        self._trimmed_at = clock()

    def give_back(self) -> None:
        """Give whole pages back, unless that was done a short while ago."""
        now = self._clock()
        if self._trim is not None and now - self._trimmed_at >= TRIM_SECONDS:
            self._trim(0)
            self._trimmed_at = self._clock()
