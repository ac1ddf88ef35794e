"""Freed memory goes back to the system, now and then."""

from __future__ import annotations

import psutil
import pytest

from ringserve.workers.rank.worker import TRIM_SECONDS, FreedMemory, find_trim


def test_memory_is_given_back_at_most_once_in_a_while() -> None:
    trims = list[int]()

    def trim(keep: int) -> int:
        trims.append(keep)
        return 1

    asked = (1.0, TRIM_SECONDS, TRIM_SECONDS + 1.0, 2 * TRIM_SECONDS)
    now = 0.0
    memory = FreedMemory(trim, lambda: now)
    for seconds in asked:
        now = seconds
        memory.give_back()
    assert trims == [0, 0]


@pytest.mark.skipif(find_trim() is None, reason="only glibc has malloc_trim; musl and macOS go without")
def test_pages_between_what_is_in_use_are_given_back() -> None:
    small = [bytearray(60_000) for _ in range(2000)]  # below the size for which the system is asked each time
    kept = small[::20]
    before = psutil.Process().memory_info().rss
    del small
    now = 0.0
    memory = FreedMemory(clock=lambda: now)
    now = TRIM_SECONDS
    memory.give_back()
    assert psutil.Process().memory_info().rss < before - 50_000_000
    assert len(kept) == 100
