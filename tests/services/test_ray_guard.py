"""Ray that does not come up is told in a sentence. What guards one that does: tests/services/e2e/own/test_secure.py."""

from __future__ import annotations

from pathlib import Path
from typing import Never

import pytest

from cp_core.errors import Unavailable
from services import ray_guard


def test_a_ray_that_does_not_start_is_told_in_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def init(**options: object) -> Never:
        raise Exception("The node timed out.\n  in some file, line 3")  # as bare as Ray's own

    monkeypatch.setattr("ray.init", init)
    for name in ("_make_token", "forward_every_line"):  # both are for the rest of a process's life
        monkeypatch.setattr(ray_guard, name, lambda: None)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    with pytest.raises(Unavailable) as caught:
        ray_guard.start_own_ray(1, "test", tmp_path)
    assert str(caught.value) == "Ray did not start: The node timed out."
