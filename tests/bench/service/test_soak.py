"""A soak reads the memory of processes that ran all the while, and says how much each grew."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bench.service.soak import Memory


def test_growth_is_between_the_means_after_the_warm_up_and_at_the_end() -> None:
    memory = Memory(os.getpid())
    memory.samples = {
        ("rank", 1): [(1000.0 + second, 100 + second) for second in range(101)],
        ("flat", 2): [(1000.0 + second, 50) for second in range(101)],
        ("late", 3): [(1090.0, 10)],
        ("early", 4): [(1035.0, 10)],
    }
    found = {each.process: each for each in memory.growths(1000.0, 100.0)}
    assert found.keys() == {"rank", "flat"}
    assert found["flat"].share == 0.0
    assert (found["rank"].early, found["rank"].late) == (134.5, 195.0)
    assert found["rank"].share == pytest.approx(195 / 134.5 - 1)


def test_processes_below_are_seen_by_their_names() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    memory = Memory(os.getpid())
    try:
        memory.look()
    finally:
        child.communicate(b"\n")
    assert {os.getpid(), child.pid} <= {pid for _, pid in memory.samples}
    assert all(size > 0 for samples in memory.samples.values() for _, size in samples)
