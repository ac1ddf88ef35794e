"""The one cluster that most of these tests share. `test_up_and_down.py`, the last file, ends it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services.e2e.cluster import (
    Cluster,
    Inference,
    Ringserve,
    idle_after,
    options_of,
    wait_until,
)
from tests.services.e2e.terminal import Foreground, started
from tests.waiting import START_SECONDS


@pytest.fixture(scope="package")
def terminal(
    ringserve: Ringserve, model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Foreground, Cluster]]:
    """Start the one cluster that these tests share, in the foreground; the last of them ends it with Ctrl-C."""
    directory = tmp_path_factory.mktemp("shared")
    ready = directory / "ready.json"
    spares = ("--set", "gateway.spare=true", "--set", "router.spare=true")
    options = ("--name", "shared", "--ready-file", str(ready), *spares, *options_of(model_path))
    with started(ringserve, directory, "up", *options) as up:
        wait_until(lambda: ready.exists() or up.is_over, "the cluster serves", START_SECONDS)
        assert not up.is_over, up.output
        yield up, Cluster(ringserve, **json.loads(ready.read_text()))
        if not up.is_over:
            assert up.interrupt() == 0, up.output


@pytest.fixture(scope="package")
def cluster(terminal: tuple[Foreground, Cluster]) -> Cluster:
    """Return the one cluster that these tests share."""
    return terminal[1]


@pytest.fixture
def inference(cluster: Cluster) -> Iterator[Inference]:
    """Yield a client of the shared cluster's gateway. Every test leaves the cluster idle."""
    with idle_after(cluster.gateway) as inference:
        yield inference
