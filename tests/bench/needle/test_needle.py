"""The demo of length: its text, its oracle, and the verdict on what a service answered."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.needle.command import _report
from bench.needle.model import needle_path
from bench.needle.task import ANSWER, Expected, FoundCode, expected, haystack, needle_config
from ringserve.cp_core.errors import ConfigError
from ringserve.services.gateway.text import TextCodec
from ringserve.services.offline.reference import StockModel


def test_attention_in_blocks_gives_the_tokens_of_attention_at_once(tmp_path: Path) -> None:
    """More queries than a block, so that blocks with and without earlier keys are merged."""
    needle = needle_path({"RINGSERVE_CACHE": str(tmp_path)})
    codec = TextCodec(needle)
    prompt, answer = codec.encode(haystack(5000, 0.4)).tolist(), codec.encode(ANSWER).tolist()
    right = expected(needle, prompt, answer)
    stock = StockModel(needle).follow(prompt, answer)
    assert right.token_ids == stock.token_ids == answer
    assert right.smallest_lead == pytest.approx(stock.smallest_lead, abs=1e-4)
    assert max(right.logprobs) < 0.0


@pytest.mark.parametrize("num_tokens", [63, (1 << 20) + (1 << 16)])
def test_a_length_that_the_model_does_not_read_is_refused(num_tokens: int) -> None:
    with pytest.raises(ConfigError, match=f"--tokens: {num_tokens} is not allowed; the needle model reads 64 to"):
        needle_config(num_tokens)


@pytest.mark.parametrize("num_tokens", [64, 1 << 20])
def test_rings_have_room_for_the_text_and_the_answer(num_tokens: int) -> None:
    config = needle_config(num_tokens)
    assert 2 * config.kv_cache.tokens_per_rank > num_tokens + len(ANSWER)
    assert len(haystack(num_tokens, 0.5)) == num_tokens


@pytest.mark.parametrize(
    ("text", "token_ids", "logprobs", "status"),
    [
        (ANSWER, [1, 2], [-0.1, -0.2], 0),
        (ANSWER, [1, 3], [-0.1, -0.2], 1),
        (ANSWER, [1, 2], [-0.1, -0.2001], 1),
        ("99999.", [1, 2], [-0.1, -0.2], 1),
    ],
)
def test_other_tokens_probabilities_or_codes_fail(
    text: str, token_ids: Sequence[int], logprobs: Sequence[float], status: int
) -> None:
    answer: dict[str, Any] = {"text": text, "token_ids": list(token_ids)}
    found = FoundCode(answer=answer, logprobs=list(logprobs), seconds=1.0, tokens_per_rank={}, peak_bytes={})
    right = Expected(token_ids=[1, 2], logprobs=[-0.1, -0.2], smallest_lead=1.0, seconds=1.0)
    told = io.StringIO()
    assert _report(Console(file=told, width=200), found, right, is_json=False) == status
    assert ("FAILED" in told.getvalue()) is bool(status)
