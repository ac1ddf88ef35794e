from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from ringserve.orchestration.ring import life
from tests.one_core import ranks_are_threads
from tests.workers.models import ALL_WINDOWED, WINDOWED, Oracle, save_model

__all__ = ["KINDS", "ranks_are_threads"]

KINDS = ("llama_gqa", "llama_mha", "qwen3", "mistral")
STEP_SECONDS = 120.0


@pytest.fixture(autouse=True)
def steps_have_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow steps more time than a service does: on a busy machine they take it, and are not hung."""
    monkeypatch.setattr(life, "LEAST_PATIENCE_CPU", STEP_SECONDS)


@pytest.fixture(scope="session")
def model_paths(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Make a model directory of every kind."""
    return {kind: save_model(kind, tmp_path_factory.mktemp(kind)) for kind in (*KINDS, WINDOWED, ALL_WINDOWED)}


@pytest.fixture(scope="session")
def oracles(model_paths: Mapping[str, Path]) -> Mapping[str, Oracle]:
    """Run each of the models with transformers."""
    return {kind: Oracle(path) for kind, path in model_paths.items()}
