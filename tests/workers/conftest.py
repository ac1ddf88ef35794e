from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.one_core import ranks_are_threads
from tests.workers.models import ALL_WINDOWED, KINDS, WINDOWED, Oracle, save_model

__all__ = ["ranks_are_threads"]


@pytest.fixture(scope="session")
def model_paths(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Write a model directory of every kind."""
    return {kind: save_model(kind, tmp_path_factory.mktemp(kind)) for kind in (*KINDS, WINDOWED, ALL_WINDOWED)}


@pytest.fixture(scope="session")
def oracles(model_paths: Mapping[str, Path]) -> Mapping[str, Oracle]:
    """Load every model as transformers runs it."""
    return {kind: Oracle(path) for kind, path in model_paths.items()}


@pytest.fixture(scope="session")
def builtin_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a cache directory for builtin models."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def edited_config(tmp_path: Path, model_paths: Mapping[str, Path]) -> Callable[..., Path]:
    """Copy a model's directory with some keys of config.json changed."""

    def edit(kind: str, **changes: object) -> Path:
        target = tmp_path / "edited"
        shutil.copytree(model_paths[kind], target)
        config = json.loads((target / "config.json").read_text()) | changes
        (target / "config.json").write_text(json.dumps(config))
        return target

    return edit
