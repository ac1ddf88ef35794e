from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.gateway.text import TextCodec
from tests.services.doors import Doors
from tests.workers.models import Oracle, save_model
from workers.model.builtin_tokenizer import write_tokenizer


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with a byte-level tokenizer."""
    path = save_model("llama_gqa", tmp_path_factory.mktemp("model"))
    write_tokenizer(path)
    return path


@pytest.fixture(scope="session")
def codec(model_path: Path) -> TextCodec:
    return TextCodec(model_path)


@pytest.fixture(scope="session")
def oracle(model_path: Path) -> Oracle:
    return Oracle(model_path)


@pytest.fixture
async def doors(model_path: Path, codec: TextCodec) -> AsyncIterator[Doors]:
    """A gateway before a whole service. Every test leaves all its KV free or kept, and nothing running."""
    async with Doors(model_path, codec) as doors:
        yield doors
        await doors.wait_idle()
        doors.service.check_integrity()
