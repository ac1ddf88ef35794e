from __future__ import annotations

from pathlib import Path

import pytest

from ringserve.services.gateway.text import TextCodec
from ringserve.services.offline.reference import StockModel
from ringserve.workers.model.builtin import write_tokenizer
from tests.services.e2e.cluster import Ringserve
from tests.workers.models import save_model


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
