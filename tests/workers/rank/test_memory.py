"""Freed memory goes back to the system, now and then."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from ringserve.workers.model.weights import find_trim
from ringserve.workers.rank.worker import TRIM_SECONDS, FreedMemory
from ringserve.workers.sampling.parameters import SamplingParameters
from tests.waiting import WAIT_SECONDS
from tests.workers.models import random_tokens
from tests.workers.rings import LocalRing, Turn


def test_memory_is_given_back_at_most_once_in_a_while() -> None:
    trims = list[int]()

    def trim(keep: int) -> int:
        trims.append(keep)
        return 1

    asked = (1.0, TRIM_SECONDS, TRIM_SECONDS + 1.0, 2 * TRIM_SECONDS)
    now = 0.0
    memory = FreedMemory(trim, lambda: now)
    for num_steps, seconds in enumerate(asked, 1):
        now = seconds
        memory.give_back(num_steps)
    assert trims == [0, 0]
    for seconds in (3 * TRIM_SECONDS, 100 * TRIM_SECONDS):
        now = seconds
        memory.give_back(len(asked))
    assert trims == [0, 0], "a process that rests does so whole"


def test_a_decode_rank_without_sequences_gives_memory_back(
    model_paths: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    given, both = set[FreedMemory](), threading.Event()

    def give_back(freed: FreedMemory, num_steps: int) -> None:
        if num_steps:
            given.add(freed)
        if len(given) == 2:
            both.set()

    monkeypatch.setattr(FreedMemory, "give_back", give_back)
    sampling = SamplingParameters(max_tokens=4)
    with LocalRing(model_paths["llama_gqa"], 2) as ring:
        conversation = ring.open("a", 64)
        first = ring.prefill([Turn(conversation, random_tokens(9), sampling)])["a"]
        ring.start_decode()
        ring.decode(conversation, first, sampling)
        assert both.wait(WAIT_SECONDS), "both ranks"


@pytest.mark.skipif(find_trim() is None, reason="only glibc has malloc_trim; musl and macOS go without")
def test_pages_between_what_is_in_use_are_given_back() -> None:
    small = [bytearray(60_000) for _ in range(2000)]  # below the size for which the system is asked each time
    kept = small[::20]
    before = psutil.Process().memory_info().rss
    del small
    now = 0.0
    memory = FreedMemory(clock=lambda: now)
    now = TRIM_SECONDS
    memory.give_back(1)
    assert psutil.Process().memory_info().rss < before - 50_000_000
    assert len(kept) == 100
