"""A gateway, and a model whose chat template takes tools."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.services.gateway.openai.test_tools import model_of
from tests.services.local_gateway import codec, gateway, model_path, oracle

__all__ = ["codec", "gateway", "model_path", "oracle"]


@pytest.fixture(scope="module")
def hermes_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_of("hermes", tmp_path_factory.mktemp("hermes"))
