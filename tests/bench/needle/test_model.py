"""The built-in model of long texts finds its code by transformers' own attention, wherever the code lies."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from bench.needle.model import needle_path
from bench.needle.task import ANSWER, CODE, haystack
from ringserve.services.gateway.text import TextCodec
from ringserve.services.offline.reference import StockModel
from ringserve.workers.model.info import read_model_info


@pytest.fixture(scope="module")
def needle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return needle_path({"RINGSERVE_CACHE": str(tmp_path_factory.mktemp("cache"))})


def test_the_weights_are_those_of_version_1(needle: Path) -> None:
    """Check the weights: a change needs a new version of it, or old caches would serve another model by this name."""
    assert needle.name == "needle-1"
    assert hashlib.sha256((needle / "model.safetensors").read_bytes()).hexdigest().startswith("b5a18808267ed533")


def test_it_has_room_for_a_million_tokens_and_one_head(needle: Path) -> None:
    info = read_model_info(needle)
    assert (info.num_layers, info.num_heads, info.num_kv_heads) == (2, 1, 1)
    assert info.max_positions >= 1 << 20


@pytest.mark.parametrize("depth", [0.0, 0.31, 1.0])
def test_it_writes_the_code_that_lies_in_the_text(needle: Path, depth: float) -> None:
    codec = TextCodec(needle)
    text = haystack(700, depth)
    assert text.count(CODE[:-1]) == 1
    prompt = codec.encode(text).tolist()
    assert len(prompt) == 700
    found = StockModel(needle).greedy(prompt, len(ANSWER))
    assert codec.decode(found.token_ids) == ANSWER
    assert found.smallest_lead > 0.5


def test_without_a_code_it_writes_none(needle: Path) -> None:
    codec = TextCodec(needle)
    found = StockModel(needle).greedy(codec.encode("a text without any#").tolist(), 4)
    assert not set(codec.decode(found.token_ids)) & set(ANSWER)
