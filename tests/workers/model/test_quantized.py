"""Weights published in few bits: equal to what their own libraries compute, and served as a model of plain weights.

`quantized.safetensors` has a layer in each form, made by the form's own code (bitsandbytes 0.50.2, compressed-tensors
0.20.0, AutoAWQ 0.2.9, GPTQModel 7.7.0; fp8 by transformers 5), and the weight that this code makes of it (`expected`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ringserve.cp_core.errors import ModelRefused
from ringserve.workers.model.loading import load_model
from ringserve.workers.model.quantized import read_plain
from ringserve.workers.model.support import check_supported, quantization_of
from ringserve.workers.protocol.steps import Algorithm
from ringserve.workers.sampling.parameters import SamplingParameters
from tests.workers.models import FAMILY_SWITCHES, Oracle, random_tokens, save_family, save_model
from tests.workers.rings import LocalRing, Turn

LAYERS = Path(__file__).with_name("quantized.safetensors")
CONFIGS: dict[str, dict[str, Any]] = {
    "awq-gemm": {"quant_method": "awq", "bits": 4, "version": "gemm"},
    "bitsandbytes-fp4": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "bitsandbytes-int8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "bitsandbytes-nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "compressed-fp8-channel": {"quant_method": "compressed-tensors", "format": "float-quantized"},
    "compressed-int4-asym": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "compressed-int4-group": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "compressed-int8-channel": {"quant_method": "compressed-tensors", "format": "int-quantized"},
    "compressed-int8-packed": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "fp8-block": {"quant_method": "fp8", "weight_block_size": [16, 16]},
    "gptq-2bit": {"quant_method": "gptq", "bits": 2},
    "gptq-4bit": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq"},
    "gptq-8bit": {"quant_method": "gptq", "bits": 8},
    "gptq_v2-4bit": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
}
PLAIN = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def stored_layer(name: str) -> dict[str, Tensor]:
    with safe_open(LAYERS, framework="pt") as file:
        return {key.partition("/")[2]: file.get_tensor(key) for key in file.keys() if key.startswith(f"{name}/")}  # noqa: SIM118


class Stored(dict[str, Tensor]):
    """File of weights in memory."""

    def get_tensor(self, name: str) -> Tensor:
        return self[name]


def plain_weight(layer: Mapping[str, Tensor], config: Mapping[str, Any], dtype: torch.dtype) -> Tensor:
    """Return the weight of "layer", which must be all that is left of its tensors."""
    file = Stored(layer)
    (name, found), *others = read_plain(dict.fromkeys(file, file), config, dtype).items()
    assert name == "layer.weight"
    assert not others
    return found.get_tensor(name)


def test_every_form_has_a_layer() -> None:
    with safe_open(LAYERS, framework="pt") as file:
        assert {key.partition("/")[0] for key in file.keys()} == set(CONFIGS)  # noqa: SIM118


@pytest.mark.parametrize("name", CONFIGS)
def test_a_weight_is_what_the_library_of_its_form_makes_of_it(name: str) -> None:
    check_supported(PLAIN | {"quantization_config": CONFIGS[name]})
    layer = stored_layer(name)
    expected = layer.pop("expected")
    torch.testing.assert_close(plain_weight(layer, CONFIGS[name], expected.dtype), expected, rtol=0, atol=0)


def write_in_mxfp4(path: Path, plain: Path) -> None:
    """Write random experts of a gpt-oss model to `path` in mxfp4, and to `plain` as transformers unpacks them."""
    weights = load_file(path / "model.safetensors")
    unpacked, generator = dict(weights), torch.Generator().manual_seed(4)
    for name in [each for each in weights if each.endswith(("gate_up_proj", "down_proj"))]:
        experts, features, outputs = weights.pop(name).shape
        shape = (experts, outputs, features // 32)
        blocks = torch.randint(256, (*shape, 16), generator=generator).to(torch.uint8)
        scales = torch.randint(122, 126, shape, generator=generator).to(torch.uint8)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        unpacked[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    shutil.copytree(path, plain)
    save_file(unpacked, plain / "model.safetensors", {"format": "pt"})
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (path / "config.json").write_text(json.dumps(config))


def test_experts_of_gpt_oss_in_mxfp4_are_served_as_transformers_unpacks_them(tmp_path: Path) -> None:
    path, plain = save_family("gpt_oss", FAMILY_SWITCHES["gpt_oss"][0], tmp_path / "mxfp4"), tmp_path / "plain"
    write_in_mxfp4(path, plain)
    loaded, right = load_model(path, "float32", "cpu").model, load_model(plain, "float32", "cpu").model
    for (name, weight), other in zip(loaded.named_parameters(), right.parameters(), strict=True):
        assert torch.equal(weight, other), name
    assert quantization_of(json.loads((path / "config.json").read_text())) == "mxfp4"
    prompt, sampling = random_tokens(20), SamplingParameters(max_tokens=9)
    with LocalRing(path, 2) as ring:
        conversation = ring.open("a", 64)
        first = ring.prefill([Turn(conversation, prompt, sampling)])["a"]
        ring.start_decode()
        assert [first, *ring.decode(conversation, first, sampling)] == Oracle(plain).greedy(prompt, 9)


def test_the_last_blocks_of_a_weight_may_be_smaller() -> None:
    torch.manual_seed(1)
    stored, scale = torch.randn(10, 7).to(torch.float8_e4m3fn), torch.rand(3, 2)
    layer = {"layer.weight": stored, "layer.weight_scale_inv": scale}
    weight = plain_weight(layer, {"quant_method": "fp8", "weight_block_size": [4, 4]}, torch.float32)
    for row in range(10):
        for column in range(7):
            assert weight[row, column] == stored[row, column].float() * scale[row // 4, column // 4]


def test_one_factor_of_a_whole_weight_counts_for_all_of_it() -> None:
    """So does a file of AutoFP8, whose scale of activations is not used."""
    stored, scale = torch.arange(12.0).view(3, 4).to(torch.float8_e4m3fn), torch.tensor(0.5)
    layer = {"layer.weight": stored, "layer.weight_scale": scale, "layer.input_scale": torch.tensor(3.0)}
    assert torch.equal(plain_weight(layer, {"quant_method": "fp8"}, torch.float32), stored.float() / 2)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("gptq-4bit", lambda layer: layer.pop("layer.qzeros")),
        ("gptq-4bit", lambda layer: layer.update({"layer.g_idx": layer["layer.g_idx"] + 1})),
        ("awq-gemm", lambda layer: layer.update({"layer.scales": layer["layer.scales"][:, :8]})),
        ("compressed-int4-group", lambda layer: layer.pop("layer.weight_shape")),
        ("fp8-block", lambda layer: layer.update({"layer.weight_scale_inv": torch.rand(5, 3)})),
        ("fp8-block", lambda layer: layer.update({"layer.weight_scale_inv": torch.rand(64, 4)})),
        ("compressed-int4-group", lambda layer: layer.update({"layer.weight_scale": torch.rand(32, 80)})),
        ("bitsandbytes-nf4", lambda layer: layer.pop("layer.weight.absmax")),
    ],
)
def test_tensors_that_do_not_fit_together_are_refused_by_the_name_of_their_layer(
    name: str, damage: Callable[[dict[str, Tensor]], object]
) -> None:
    layer = stored_layer(name)
    del layer["expected"]
    damage(layer)
    with pytest.raises(ModelRefused, match=r"the (quantized )?weights of layer"):
        plain_weight(layer, CONFIGS[name], torch.float32)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            {"quant_method": "aqlm"},
            r"quantized by quant_method aqlm \(only awq, .*, mxfp4 can be read\) cannot be served",
        ),
        ({"bits": 4}, "quantized by quant_method None"),
        (
            {"quant_method": "awq", "bits": 4, "version": "gemv"},
            r"awq with version='gemv' \(only 'gemm', 'GEMM' can be read\)",
        ),
        ({"quant_method": "gptq", "bits": 3}, r"gptq with bits=3 \(only 2, 4, 8 can be read\)"),
        ({"quant_method": "gptq"}, r"gptq with bits=None \(only 2, 4, 8 can be read\)"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "format='nvfp4-pack-quantized'"),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
            "compressed-tensors with sparsity_config",
        ),
    ],
)
def test_a_form_that_is_not_read_is_refused_by_its_key(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelRefused, match=sentence):
        check_supported(PLAIN | {"quantization_config": config})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("awq-gemm", "awq, 4 bits"),
        ("bitsandbytes-int8", "bitsandbytes, 8 bits"),
        ("compressed-int4-asym", "compressed-tensors, pack-quantized"),
        ("fp8-block", "fp8"),
    ],
)
def test_a_form_has_a_name(name: str, words: str) -> None:
    assert quantization_of({"quantization_config": CONFIGS[name]}) == words
    assert quantization_of({}) == ""


def quantize(path: Path, config: dict[str, Any], quantized: Callable[[Tensor], dict[str, Tensor]]) -> Path:
    """Store the linear layers of a model's blocks in another form: `quantized` gives the tensors of a weight."""
    stored: dict[str, Tensor] = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        base, _, part = name.rpartition(".")
        is_layer = part == "weight" and tensor.ndim == 2 and base.endswith("proj")
        found = quantized(tensor) if is_layer else {part: tensor}
        stored |= {f"{base}.{key}": value.contiguous() for key, value in found.items()}
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(content | {"quantization_config": config}))
    return path


def in_fp8(weight: Tensor) -> dict[str, Tensor]:
    """Quantize a weight in blocks of 16 x 16, as DeepSeek and Qwen publish it in larger ones."""
    rows, columns = weight.shape
    blocks = weight.view(rows // 16, 16, columns // 16, 16)
    scale = blocks.abs().amax((1, 3)) / 448
    stored = (blocks / scale[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale_inv": scale}


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_model_in_fp8_answers_as_transformers_does(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts, too, which are published one by one and merged here."""
    # transformers asks for accelerate, which it needs on GPUs alone.
    monkeypatch.setattr("transformers.quantizers.quantizer_finegrained_fp8.is_accelerate_available", lambda: True)
    if family == "llama":
        path = save_model("llama_gqa", tmp_path)
    else:
        path = save_family(family, FAMILY_SWITCHES[family][0], tmp_path)
    quantize(path, FP8, in_fp8)
    oracle, prompt = Oracle(path), random_tokens(21)
    with LocalRing(path, 3, packs_weights=True, decode_variant="gather") as ring:
        conversation = ring.open("a", 128)
        (logits,) = ring.prefill_logits([Turn(conversation, prompt)], Algorithm.PASS_KV)
        torch.testing.assert_close(logits, oracle.logits(prompt), rtol=1e-3, atol=1e-3)
        ring.start_decode()
        first = int(logits[-1].argmax())
        following = ring.decode(conversation, first, SamplingParameters(max_tokens=12))
    assert [first, *following] == oracle.greedy(prompt, 12)


def in_gptq(weight: Tensor) -> dict[str, Tensor]:
    """Quantize a weight [out, in] to 4 bits, in groups of 16 inputs, with zero points of 8."""
    groups = weight.T.reshape(-1, 16, len(weight))
    scale = (groups.abs().amax(1) / 7).half()
    numbers = (groups / scale[:, None].float()).round().clamp(-8, 7).to(torch.int64).view(-1, len(weight)) + 8
    places = (torch.arange(8) * 4)[None, :, None]
    words = (numbers.view(-1, 8, len(weight)) << places).sum(1)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    zeros = torch.full((len(scale), len(weight) // 8), 0x77777777, dtype=torch.int32)
    return {"qweight": words, "qzeros": zeros, "scales": scale}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_model_in_gptq_has_the_weights_of_a_plain_one(tp: int, dtype: str, tmp_path: Path) -> None:
    """Biases stay as they are, and a rank of two takes its share of every weight."""
    path, plain = save_model("qwen2", tmp_path / "few"), save_model("qwen2", tmp_path / "plain")
    quantize(path, {"quant_method": "gptq", "bits": 4, "group_size": 16}, in_gptq)

    def rounded(weight: Tensor) -> dict[str, Tensor]:
        numbers = (weight.view(len(weight), -1, 16) / (scale := _scale(weight))).round().clamp(-8, 7)
        return {"weight": (numbers * scale).view_as(weight)}

    quantize(plain, {}, rounded)
    for rank in range(tp):
        ours, theirs = (load_model(each, dtype, "cpu", tp_rank=rank, tp=tp).model for each in (path, plain))
        for (name, weight), (_, expected) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
            assert torch.equal(weight, expected), name


def _scale(weight: Tensor) -> Tensor:
    return (weight.view(len(weight), -1, 16).abs().amax(-1, keepdim=True) / 7).half().float()


def test_few_bits_without_a_word_in_config_json_are_refused(tmp_path: Path) -> None:
    """They would be taken for weights without their factors."""
    path = quantize(save_model("llama_gqa", tmp_path), {}, in_fp8)
    with pytest.raises(
        ModelRefused, match=r"_proj\.weight as float8_e4m3fn, but config\.json has no quantization_conf"
    ):
        load_model(path, "float32", "cpu")
