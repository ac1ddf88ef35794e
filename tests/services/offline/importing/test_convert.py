"""Conversion of GGUF files: the same model by the measure of transformers, or a refusal that names the reason."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from ringserve.cp_core.errors import ModelRefused
from ringserve.services.gateway.text import TextCodec
from ringserve.services.offline.importing import convert as converting
from ringserve.services.offline.importing.convert import convert, is_intact
from ringserve.services.offline.importing.gguf_file import _llama3_divisors
from ringserve.services.offline.importing.tokenizer import LLAMA3_SPLIT, QWEN2_SPLIT
from ringserve.workers.model.info import read_model_info
from tests.services.offline.importing.files import CONTROL_TOKENS, tokens, write_gguf
from tests.waiting import WAIT_SECONDS

PROMPT = [5, 77, 130, 3, 250, 9, 41, 41, 200, 17]


def silent(work: str, part: float | None) -> None:
    """Report nothing."""


def logits(path: Path) -> torch.Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([PROMPT])).logits
    return found


@pytest.mark.parametrize("kind", ["llama_gqa", "llama_mha", "qwen2", "qwen3"])
def test_a_converted_model_has_the_logits_of_its_source(kind: str, tmp_path: Path) -> None:
    file, source = write_gguf(kind, tmp_path)
    convert(file, tmp_path / "model", silent)
    assert torch.equal(logits(tmp_path / "model"), logits(source))
    assert read_model_info(tmp_path / "model").num_layers == 2


@pytest.mark.parametrize("quantization", [GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0])
def test_quantised_weights_become_exactly_what_their_blocks_say(
    quantization: GGMLQuantizationType, tmp_path: Path
) -> None:
    file, source = write_gguf("llama_gqa", tmp_path, quantization=quantization)
    convert(file, tmp_path / "model", silent)
    converted = load_file(tmp_path / "model" / "model.safetensors")
    for name, values in load_file(source / "model.safetensors").items():
        expected = dequantize(quantize(values, quantization), quantization) if values.ndim == 2 else values
        assert np.array_equal(converted[name], expected), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_of_half_the_size_are_the_nearest_values(dtype: str, tmp_path: Path) -> None:
    file, source = write_gguf("llama_gqa", tmp_path)
    convert(file, tmp_path / "model", silent, dtype)
    exact: Any = AutoModelForCausalLM.from_pretrained(source)
    rounded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert str(rounded.dtype) == f"torch.{dtype}"
    for name, values in exact.state_dict().items():
        assert torch.equal(rounded.state_dict()[name], values.to(rounded.dtype)), name


def test_large_models_are_written_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, source = write_gguf("llama_gqa", tmp_path)
    monkeypatch.setattr(converting, "MAX_FILE_BYTES", 50_000)
    convert(file, tmp_path / "model", silent)
    assert len(list((tmp_path / "model").glob("model-*.safetensors"))) > 2
    assert torch.equal(logits(tmp_path / "model"), logits(source))


def test_progress_ends_at_the_whole(tmp_path: Path) -> None:
    parts: list[float] = []
    file, _ = write_gguf("llama_gqa", tmp_path)
    convert(file, tmp_path / "model", lambda _, part: parts.append(part) if part is not None else None)
    assert parts == sorted(parts)
    assert parts[-1] == 1.0


def test_llama_3_s_rotary_parameters_are_found_from_its_divisors(tmp_path: Path) -> None:
    divisors = _llama3_divisors(10000.0, 16, 32.0).astype(np.float32)
    file, _ = write_gguf("llama_gqa", tmp_path, with_tensors={"rope_freqs.weight": divisors})
    convert(file, tmp_path / "model", silent)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    plain = 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    assert loaded.config.rope_parameters["rope_type"] == "llama3"
    torch.testing.assert_close(loaded.model.rotary_emb.inv_freq, plain / torch.from_numpy(divisors))


# --- tokenizer -------------------------------------------------------------------------------------------------------


def test_its_tokenizer_takes_control_tokens_whole_and_gives_text_back(tmp_path: Path) -> None:
    file, _ = write_gguf("llama_gqa", tmp_path)
    convert(file, tmp_path / "model", silent)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    text = "the naïve ☃ in the  year 1212\n"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    names = tokens()
    assert names.index("Ġthe") in ids
    assert names.index("12") not in ids, "smollm takes each digit alone, whatever the merges say"
    messages = [{"role": "user", "content": "the"}]
    chat: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert (chat[0], chat.count(CONTROL_TOKENS.index("<|im_end|>"))) == (1, 1)
    assert TextCodec(tmp_path / "model").encode_chat([("user", "the")]).tolist() == chat


def test_an_answer_ends_at_the_end_of_text_and_at_the_end_of_a_turn(tmp_path: Path) -> None:
    file, _ = write_gguf("llama_gqa", tmp_path)
    convert(file, tmp_path / "model", silent)
    assert read_model_info(tmp_path / "model").eos_token_ids == (0, 2)


def test_llama_3_s_tokenizer_begins_a_text_with_its_first_token(tmp_path: Path) -> None:
    file, _ = write_gguf("llama_gqa", tmp_path, pre="llama-bpe")
    convert(file, tmp_path / "model", silent)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer("the").input_ids == [1, tokens().index("the")]


def test_texts_are_split_as_transformers_splits_them() -> None:
    assert GGUF_PRE_TOKENIZER_SPLITS["llama-bpe"] == LLAMA3_SPLIT
    assert GGUF_PRE_TOKENIZER_SPLITS["qwen2"] == QWEN2_SPLIT


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architecture": "gemma2"}, "architecture 'gemma2' is not supported; supported are llama, qwen2, qwen3"),
        ({"metadata": {"llama.expert_count": 8}}, "feature llama.expert_count=8 is not supported"),
        ({"metadata": {"llama.attention.sliding_window": 4096}}, "feature llama.attention.sliding_window=4096"),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "rotary scaling of type 'yarn'"),
        ({"metadata": {"llama.rope.dimension_count": 8}}, "rope.dimension_count is not the head dimension 16"),
        ({"metadata": {"split.count": 3}}, "one part of several"),
        ({"without": "blk.1.ffn_up.weight"}, "tensor blk.1.ffn_up.weight is missing"),
        ({"with_tensors": {"blk.0.attn_q.bias": np.zeros(64, np.float32)}}, "tensor blk.0.attn_q.bias is not part of"),
        (
            {"with_tensors": {"rope_freqs.weight": np.full(8, 3.0, np.float32)}},
            "rope_freqs.weight are no Llama 3 scaling",
        ),
        ({"pre": "mystery"}, "tokenizer.ggml.pre is 'mystery'; supported are"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name_and_leaves_nothing(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    file, _ = write_gguf("llama_gqa", tmp_path, **changes)
    with pytest.raises(ModelRefused, match=reason):
        convert(file, tmp_path / "out" / "model", silent)
    assert not list(tmp_path.glob("out/*"))


@pytest.mark.parametrize("kept", [0, 3, 100, 5000, -1000])
def test_a_file_that_ends_too_early_is_refused(kept: int, tmp_path: Path) -> None:
    file, _ = write_gguf("llama_gqa", tmp_path)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ModelRefused, match="is not a whole GGUF file"):
        convert(file, tmp_path / "model", silent)


def test_a_file_of_another_kind_and_a_taken_directory_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "notes.gguf"
    file.write_text("These are notes, and no model at all. " * 20)
    with pytest.raises(ModelRefused, match="is not a whole GGUF file"):
        convert(file, tmp_path / "model", silent)
    with pytest.raises(ModelRefused, match="is not a file"):
        convert(tmp_path / "none.gguf", tmp_path / "model", silent)
    with pytest.raises(ModelRefused, match="exists; give a directory that is empty"):
        convert(file, tmp_path, silent)


def test_an_interrupted_conversion_leaves_no_directory(tmp_path: Path) -> None:
    file, _ = write_gguf("llama_gqa", tmp_path)

    def interrupt(work: str, part: float | None) -> None:
        if part is not None and part > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(file, tmp_path / "out" / "model", interrupt)
    assert not list((tmp_path / "out").iterdir())


# --- checksums -------------------------------------------------------------------------------------------------------


def test_every_file_has_a_checksum_that_other_tools_read(tmp_path: Path) -> None:
    file, _ = write_gguf("llama_gqa", tmp_path)
    model = tmp_path / "model"
    convert(file, model, silent)
    subprocess.run(
        ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=model, check=True, timeout=WAIT_SECONDS
    )
    digest = hashlib.sha256((model / "config.json").read_bytes()).hexdigest()
    assert f"{digest}  config.json" in (model / "SHA256SUMS").read_text()
    assert is_intact(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1.0}))
    assert not is_intact(model)
    assert not is_intact(tmp_path)


def test_only_files_that_were_written_after_the_checksums_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, _ = write_gguf("llama_gqa", tmp_path)
    model = tmp_path / "model"
    convert(file, model, silent)
    for path in model.iterdir():
        os.utime(path, (2000, 2000 + (path.name == "SHA256SUMS")))
    os.utime(model / "config.json", (2000, 2001))
    read: list[str] = []
    sha256_of = converting.sha256_of

    def noted(path: Path) -> str:
        read.append(path.name)
        return sha256_of(path)

    monkeypatch.setattr(converting, "sha256_of", noted)
    assert is_intact(model)
    assert read == ["config.json"], "it may be as new as they are"
    (model / "model.safetensors").unlink()
    assert not is_intact(model)
