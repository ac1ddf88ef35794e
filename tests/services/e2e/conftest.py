from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.gateway.text import TextCodec
from services.offline.reference import StockModel
from tests.services.e2e.cluster import Cluster, Inference, Ringserve, idle_after, running_cluster
from tests.workers.models import save_model
from workers.model.builtin import write_tokenizer

IDLE_SECONDS = 30.0


@pytest.fixture(scope="session")
def ringserve(tmp_path_factory: pytest.TempPathFactory) -> Ringserve:
    return Ringserve(tmp_path_factory.mktemp("ringserve"))


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a tiny random model with a byte-level tokenizer."""
    path = save_model("llama_gqa", tmp_path_factory.mktemp("model"))
    write_tokenizer(path)
    return path


@pytest.fixture(scope="session")
def stock(model_path: Path) -> StockModel:
    """Return the model as transformers runs it in one process."""
    return StockModel(model_path)


@pytest.fixture(scope="session")
def codec(model_path: Path) -> TextCodec:
    return TextCodec(model_path)


@pytest.fixture(scope="package")
def cluster(ringserve: Ringserve, model_path: Path) -> Iterator[Cluster]:
    """Start the one cluster that these tests share."""
    with running_cluster(ringserve, "shared", model_path) as cluster:
        yield cluster


@pytest.fixture
def inference(cluster: Cluster) -> Iterator[Inference]:
    """Yield a client of the shared cluster's gateway. Every test leaves the cluster idle."""
    with idle_after(cluster.gateway, IDLE_SECONDS) as inference:
        yield inference
