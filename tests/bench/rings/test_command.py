"""`python -m bench`, each kind at a size that takes seconds."""

import json
from typing import Any

import pytest

from bench.__main__ import main
from bench.rings.decode import DecodeCase
from bench.rings.model_rank import BLOCK_TOKENS
from ringserve.workers.model.builtin import resolve_model_path
from ringserve.workers.model.info import read_model_info


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--rounds", "1", "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert all(0 < row["seconds"]["least"] <= row["seconds"]["p50"] <= row["seconds"]["most"] for row in report["rows"])
    return report


@pytest.mark.slow
def test_attention_sets_both_rings_beside_those_of_torch_and_one_plain_call(capsys: pytest.CaptureFixture[str]) -> None:
    report = bench(capsys, "attention", "--ranks", "2", "--tokens", "512")
    names = ["GEMM", "pass-KV", "pass-Q", "torch all-gather", "torch all-to-all", "SDPA"]
    assert [row["name"] for row in report["rows"]] == names
    assert [target["limit"] for target in report["targets"]] == [1.0]


@pytest.mark.slow
def test_prefill_sets_rings_beside_transformers_with_as_many_threads(capsys: pytest.CaptureFixture[str]) -> None:
    report = bench(capsys, "prefill", "--rings-only", "--ranks", "1", "--tokens", "64")
    assert [(row["name"], row["ranks"]) for row in report["rows"]] == [("GEMM", 1), ("ring", 1), ("transformers", 1)]
    ring = report["rows"][1]
    assert ring["share_of_gemm_rate"] > 0
    assert ring["peak_memory_bytes"] > 46_000_000, "the weights alone take as much"


@pytest.mark.slow
def test_prefill_sets_processes_that_share_the_weights_beside_rings(capsys: pytest.CaptureFixture[str]) -> None:
    """Sums of a token's states in every layer, and of its embedding, are more bytes than its keys and values."""
    report = bench(capsys, "prefill", "--rings-only", "--ranks", "2", "--tp", "2", "--tokens", "64")
    rows = {row["name"]: row for row in report["rows"]}
    assert list(rows) == ["GEMM", "ring", "transformers", "tensor parallel", "SP-TP"]
    info = read_model_info(resolve_model_path("builtin:tiny"), "float32")
    state, kv = info.hidden_size * info.element_bytes, info.kv_bytes_per_token
    # The sampled token's logits are joined too; a ring of two sends half of the keys and values.
    logits = -(-info.vocab_size // 2) * info.element_bytes
    assert rows["tensor parallel"]["bytes_sent"] == 64 * (1 + 2 * info.num_layers) * state + logits
    # Rows are gathered once more, for the head.
    assert rows["SP-TP"]["bytes_sent"] == 64 * (1 + 2 * info.num_layers) * state + logits
    assert rows["ring"]["bytes_sent"] == 64 / 2 * kv
    assert report["targets"][0]["text"] == "TTFT of tensor parallel over a ring, 2 ranks, 64 tokens"


@pytest.mark.slow
def test_decode_measures_every_variant_at_every_context_and_batch(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--context", "64,128", "--batch", "1,2", "--steps", "8", "--layers", "2")
    report = bench(capsys, "decode", "--rings-only", "--ranks", "2", *sizes)
    assert [(row["tokens"], row["batch"], row["name"]) for row in report["rows"]] == [
        (context, batch, name)
        for context in (64, 128)
        for batch in (1, 2)
        for name in ("auto", "gather", "pass_q", "helix")
    ]
    assert [target["text"].partition(", ")[2] for target in report["targets"]] == [
        f"2 ranks, {context} tokens, batch {batch}" for context in (64, 128) for batch in (1, 2)
    ]


@pytest.mark.slow
def test_decode_measures_short_sequences_spread_and_whole_beside_a_long_one(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--context", "200", "--short", "20", "--batch", "4", "--steps", "8", "--layers", "2")
    report = bench(capsys, "decode", "--rings-only", "--ranks", "2", *sizes)
    assert [row["name"] for row in report["rows"]] == [
        name + where for name in ("auto", "gather", "pass_q") for where in ("", ", whole")
    ]
    texts = [target["text"] for target in report["targets"] if "spread" in target["text"]]
    assert texts[0] == "auto, whole over spread, 2 ranks, 200 tokens and 3 times 20"
    assert len(texts) == 3


def test_a_short_sequence_that_lies_whole_has_blocks_on_its_rank_alone() -> None:
    case = DecodeCase(context=200, batch=4, steps=8, short=20)
    for is_whole in (False, True):
        tables = case.tables(2, is_whole=is_whole)
        for row, blocks in enumerate(tables):
            held = case.held(row, 2, is_whole=is_whole)
            assert sum(held) == case.tokens_of(row)
            for tokens, table in zip(held, blocks, strict=True):
                assert not tokens or len(table) * BLOCK_TOKENS >= tokens + 8
        for rank in (0, 1):
            used = [block for blocks in tables for block in blocks[rank]]
            assert len(set(used)) == len(used) <= case.num_blocks(2)
    assert [[len(table) for table in blocks] for blocks in case.tables(2, is_whole=True)][1:] == [
        [0, 2],
        [2, 0],
        [0, 2],
    ]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("attention", "--ranks", "2", "--tokens", "63"), "--tokens: 63 is no multiple of 4"),
        (("attention", "--heads", "3"), "--heads: 3 is no multiple of the 2 KV heads"),
        (("attention", "--cached", "-1"), "--cached: -1 is negative"),
        (("decode", "--steps", "1"), "--steps: 1 is too few"),
        (("decode", "--rings-only", "--layers", "-1"), "--layers: -1 is negative"),
        (("decode", "--layers", "2"), "--layers: needs --rings-only"),
        (("decode", "--context", "6000", "--rings-only", "--set", "prefill.cp=1"), "--set: not with --rings-only"),
        (("prefill", "--algorithm", "pass_q"), "--algorithm: needs --rings-only"),
        (("decode", "--short", "2"), "--short: needs --rings-only"),
        (("prefill", "--tp", "2"), "--tp: needs --rings-only"),
        (("prefill", "--rings-only", "--tp", "3"), "--tp: 3 does not divide the 2 KV heads"),
        (("prefill", "--tokens", "1048576"), "1048576 tokens do not fit in the model's positions"),
        (("prefill", "--model", "builtin:none"), "there is no builtin model 'none'"),
    ],
)
def test_wrong_option_is_refused_in_one_sentence_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], sentence: str
) -> None:
    assert main([*arguments]) == 1
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith(f"bench: {sentence}")
