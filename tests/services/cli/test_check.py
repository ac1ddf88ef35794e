"""`ringserve check`: what a model directory is, and why it would be refused, without a cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from ringserve.services.cli.check import examine
from ringserve.services.cli.main import main
from ringserve.workers.model.builtin import resolve_model_path, write_tokenizer
from tests.workers.model.test_quantized import FP8, in_fp8, quantize
from tests.workers.models import WINDOWED, save_model


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = save_model("llama_gqa", tmp_path / "model")
    write_tokenizer(path)
    return path


def test_a_directory_is_told_in_figures(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(directory), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["family"], found["dtype"], found["files"]) == ("llama", "float32", 1)
    assert found["file_bytes"] == (directory / "model.safetensors").stat().st_size
    assert list(found["weight_bytes"]) == ["1", "2"], "two KV heads can be on one rank or on two"
    # Two layers, keys and values, two KV heads of 16 numbers of four bytes.
    assert found["kv_token_bytes"] == 2 * 2 * 2 * 16 * 4
    assert found["remarks"] == ["its chat template takes no tools: requests with tools are refused"]
    assert main(["check", str(directory), "--device", "cuda"]) == 0
    told = capsys.readouterr().out
    assert "llama, served" in told
    assert "bfloat16" in told


def test_the_form_of_weights_in_few_bits_is_told(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantize(directory, FP8, in_fp8)
    assert examine(directory, "float32", "cpu").quantization == "fp8"
    assert main(["check", str(directory)]) == 0
    assert "fp8; float32 once they are read" in " ".join(capsys.readouterr().out.split())


def test_windows_are_told_by_their_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Heads with attention sinks are not spread over ranks."""
    path = save_model(WINDOWED, tmp_path / "model")
    write_tokenizer(path)
    found = examine(path, "float32", "cpu")
    assert (found.windows, list(found.weight_bytes)) == ((6, 0), [1])
    assert main(["check", str(path)]) == 0
    assert "windows 6 tokens in 1 of 2 layers" in " ".join(capsys.readouterr().out.split())


def test_kv_of_a_gpu_has_the_type_of_the_model() -> None:
    path = resolve_model_path("builtin:tiny")
    on_cpu, on_gpu = examine(path, "bfloat16", "cpu"), examine(path, "bfloat16", "cuda")
    assert on_cpu.kv_token_bytes == 2 * on_gpu.kv_token_bytes


def test_a_chat_template_is_no_must(directory: Path) -> None:
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    config = directory / "tokenizer_config.json"
    config.write_text(json.dumps({k: v for k, v in json.loads(config.read_text()).items() if k != "chat_template"}))
    (remark,) = examine(directory, "float32", "cpu").remarks
    assert remark == "it has no chat template: chats are refused, texts and token ids are served"


def test_a_directory_that_would_be_refused_is_refused_with_the_rings_own_sentence(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused() -> str:
        assert main(["check", str(directory)]) == 1
        return capsys.readouterr().err

    weights = load_file(directory / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({key: each for key, each in weights.items() if key != name}, directory / "model.safetensors")
    assert f"lacks weights for 1 tensors, the first is {name}" in refused()
    save_file(weights | {name: weights[name][:-1].contiguous()}, directory / "model.safetensors")
    assert f"has {name} of shape" in refused()
    save_file(weights, directory / "model.safetensors")
    (directory / "tokenizer.json").write_text("{")
    assert "tokenizer" in refused()
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    assert "mamba" in refused()
