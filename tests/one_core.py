"""Ranks as threads of one process: they share the interpreter lock, are fastest on one core, and share a model.

On two cores most of their time goes into waking each other: a storm of requests took twice the processor time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch

from workers.model.loading import LoadedModel, load_model
from workers.rank import worker


@contextmanager
def on_one_core() -> Iterator[None]:
    """Restrict this thread and its later threads to one core; each computes alone, like a rank of a service."""
    threads, cores = torch.get_num_threads(), _cores()
    torch.set_num_threads(1)
    if cores:
        number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
        os.sched_setaffinity(0, {cores[number % len(cores)]})
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if cores:
            os.sched_setaffinity(0, cores)


_load_whole = cache(load_model)


def load_shared(path: Path, dtype: str, device: str, name: str | None = None, **place: int) -> LoadedModel:
    """Load a whole model once for all ranks of this process: no rank changes it, and loading took most of a start."""
    if place["tp"] > 1 or place["helix"] > 1:
        return load_model(path, dtype, device, name, **place)
    return _load_whole(path, dtype, device, name)


@contextmanager
def sharing_models() -> Iterator[None]:
    """Let ranks that start in this process share the models that they load."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(worker, "load_model", load_shared)
        yield


@pytest.fixture(autouse=True, scope="module")
def ranks_are_threads() -> Iterator[None]:
    """For a conftest to import: so it is with all tests beside and below it."""
    with on_one_core(), sharing_models():
        yield


def _cores() -> list[int]:
    """Those this thread may use; empty where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
