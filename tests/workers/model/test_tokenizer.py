"""A directory's `tokenizer.json` decides how its text becomes tokens, whatever class transformers chooses."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from ringserve.workers.model.tokenizer import load_tokenizer, tokenizer_json
from tests.workers.models import add_text

TEXT = "hello world"


def write_sentence_pieces(directory: Path, tokenizer_class: str) -> Tokenizer:
    """Write a tokenizer of letters with SentencePiece's spaces, in a directory of Qwen2."""
    letters = {letter: number for number, letter in enumerate(["<unk>", "\u2581", *string.ascii_lowercase])}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": tokenizer_class}))
    return tokenizer


@pytest.mark.parametrize("tokenizer_class", ["Qwen2Tokenizer", "PreTrainedTokenizerFast", "LlamaTokenizerFast"])
def test_a_tokenizer_that_transformers_replaces_by_its_familys_is_read_from_the_file(
    tokenizer_class: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored = write_sentence_pieces(tmp_path, tokenizer_class)
    replaced = AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
    expected = stored.encode(TEXT).ids
    assert replaced(TEXT, add_special_tokens=False)["input_ids"] != expected, "transformers is mended: drop the check"
    loaded = load_tokenizer(tmp_path)
    assert loaded(TEXT, add_special_tokens=False)["input_ids"] == expected
    assert loaded.decode(expected) == TEXT
    assert Tokenizer.from_str(tokenizer_json(loaded)).encode(TEXT).ids == expected
    assert "Qwen2Tokenizer differs from tokenizer.json; tokenizer.json is used" in caplog.text


def test_other_tokenizers_are_those_that_transformers_chooses(
    model_paths: Mapping[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for kind, path in model_paths.items():
        directory = tmp_path / kind
        directory.mkdir()
        (directory / "config.json").write_text((path / "config.json").read_text())
        add_text(directory)
        chosen = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        assert type(load_tokenizer(directory)) is type(chosen)
    assert not caplog.records
