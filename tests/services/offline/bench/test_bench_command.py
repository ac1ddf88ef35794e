"""`ringserve bench`, each kind at a size that takes seconds."""

import json
from typing import Any

import pytest

from services.cli.main import main


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["bench", *arguments, "--rounds", "1", "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert all(
        0 < row["seconds"]["least"] <= row["seconds"]["median"] <= row["seconds"]["most"] for row in report["rows"]
    )
    return report


def test_attention_sets_both_rings_beside_those_of_torch_and_one_plain_call(capsys: pytest.CaptureFixture[str]) -> None:
    report = bench(capsys, "attention", "--ranks", "2", "--tokens", "512")
    names = ["GEMM", "pass-KV", "pass-Q", "torch all-gather", "torch all-to-all", "SDPA"]
    assert [row["name"] for row in report["rows"]] == names
    assert [target["limit"] for target in report["targets"]] == [1.0]


def test_prefill_sets_rings_beside_transformers_with_as_many_threads(capsys: pytest.CaptureFixture[str]) -> None:
    report = bench(capsys, "prefill", "--rings-only", "--ranks", "1", "--tokens", "64")
    assert [(row["name"], row["ranks"]) for row in report["rows"]] == [("GEMM", 1), ("ring", 1), ("transformers", 1)]
    ring = report["rows"][1]
    assert ring["share_of_gemm_rate"] > 0
    assert ring["peak_memory_bytes"] > 46_000_000, "the weights alone take as much"


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
        (("prefill", "--tokens", "1048576"), "1048576 tokens do not fit in the model's positions"),
        (("prefill", "--model", "builtin:none"), "there is no builtin model 'none'"),
    ],
)
def test_wrong_option_is_refused_in_one_sentence_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], sentence: str
) -> None:
    assert main(["bench", *arguments]) == 1
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith(f"ringserve: {sentence}")
