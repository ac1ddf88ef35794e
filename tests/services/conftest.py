from __future__ import annotations

import pytest

from services.text import TextCodec
from workers.builtin_tokenizer import write_tokenizer


@pytest.fixture(scope="session")
def byte_codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    """The tokenizer of `builtin:tiny`: token i < 256 is the byte i."""
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return TextCodec(directory)
