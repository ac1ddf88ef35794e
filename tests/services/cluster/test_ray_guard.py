"""Error messages for a Ray that does not start. The guard of a running Ray: tests/services/e2e/own/test_secure.py."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Never

import pytest

from cp_core.errors import Unavailable
from services.cluster import ray_guard

WAIT_FOR_INPUT = [sys.executable, "-c", "input()"]


def test_a_ray_that_does_not_start_is_told_in_one_sentence_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    of_others, left = subprocess.Popen(WAIT_FOR_INPUT, stdin=subprocess.PIPE), []

    def init(**options: object) -> Never:
        left.append(subprocess.Popen(WAIT_FOR_INPUT, stdin=subprocess.PIPE))
        raise Exception("The node timed out.\n  in some file, line 3")  # as bare as Ray's own

    monkeypatch.setattr("ray.init", init)
    for name in ("_make_token", "forward_every_line"):  # both are for the rest of a process's life
        monkeypatch.setattr(ray_guard, name, lambda: None)
    monkeypatch.setattr(ray_guard, "END_SECONDS", 0.1)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    with pytest.raises(Unavailable) as caught:
        ray_guard.start_own_ray(1, "test", tmp_path)
    assert str(caught.value) == "Ray did not start: The node timed out."
    (process,) = left
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL
    assert of_others.poll() is None
    of_others.communicate(b"\n", timeout=30)
