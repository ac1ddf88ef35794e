"""Ranks as threads of one process: they share the interpreter lock and are fastest on one core.

On two cores most of their time goes into waking each other: a storm of requests took twice the processor time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


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


@pytest.fixture(autouse=True, scope="module")
def ranks_are_threads() -> Iterator[None]:
    """For a conftest to import: so it is with all tests beside and below it."""
    with on_one_core():
        yield


def _cores() -> list[int]:
    """Those this thread may use; empty if the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
