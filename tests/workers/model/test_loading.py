"""Model loading, and refusals of models by the name of the feature."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import Linear
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

from ringserve.cp_core.attention import native
from ringserve.cp_core.cost.memory import kv_bytes_per_token
from ringserve.cp_core.errors import ModelRefused
from ringserve.workers.model import layers
from ringserve.workers.model.info import multiplies_bfloat16, read_fingerprint, read_model_info
from ringserve.workers.model.layers import GatedMlp, PackedLinear, pack
from ringserve.workers.model.loading import load_model
from ringserve.workers.model.support import FAMILIES, check_supported, layer_windows
from ringserve.workers.model.weights import find_trim, release_pages
from ringserve.workers.protocol.ranks import RankSettings, RankSpec
from ringserve.workers.protocol.steps import Algorithm
from ringserve.workers.rank import parts as rank_parts
from ringserve.workers.sampling.parameters import SamplingParameters
from tests.programs import require
from tests.workers.models import KINDS, Oracle, random_tokens, save_family, save_model
from tests.workers.rings import LocalRing, Turn

PLAIN = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


@pytest.mark.parametrize("kind", KINDS)
def test_every_supported_family_loads_with_our_attention(kind: str, model_paths: Mapping[str, Path]) -> None:
    loaded = load_model(model_paths[kind], "float32", "cpu")
    assert loaded.model.config._attn_implementation == "ringserve"
    assert loaded.info.model_type in FAMILIES
    assert loaded.info.num_parameters == pytest.approx(loaded.model.num_parameters(), rel=0.01)
    assert not loaded.model.training


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_asked_dtype_is_what_is_loaded(dtype: str, model_paths: Mapping[str, Path]) -> None:
    loaded = load_model(model_paths["llama_gqa"], dtype, "cpu")
    assert {str(weights.dtype) for weights in loaded.model.parameters()} == {f"torch.{dtype}"}


@pytest.mark.parametrize(("dtype", "element_bytes"), [("bfloat16", 2), ("float16", 2), ("float32", 4)])
def test_kv_has_the_dtype_of_the_model_unless_cpus_lack_it(
    dtype: str, element_bytes: int, model_paths: Mapping[str, Path]
) -> None:
    elements = 2 * 2 * 2 * 16
    on_gpu, on_cpu = (read_model_info(model_paths["llama_gqa"], dtype, device=device) for device in ("cuda", "cpu"))
    assert (on_gpu.kv_dtype, on_gpu.kv_bytes_per_token) == (dtype, elements * element_bytes)
    of_cpus, bytes_of_cpus = ("float32", 4) if dtype == "float16" else (dtype, element_bytes)
    assert (on_cpu.kv_dtype, on_cpu.kv_bytes_per_token) == (of_cpus, elements * bytes_of_cpus)
    for info in (on_gpu, on_cpu):
        assert kv_bytes_per_token(info.shape) == info.kv_bytes_per_token
        assert info.element_bytes == element_bytes


def test_a_processor_is_known_by_its_flags(tmp_path: Path) -> None:
    flags = tmp_path / "cpuinfo"
    assert not multiplies_bfloat16(flags)
    for text, is_fast in [("flags : fpu avx512f\n", False), ("model name : avx512_bf16\nflags : avx512_bf16\n", True)]:
        flags.write_text(text)
        assert multiplies_bfloat16(flags) is is_fast


CAN_PACK_BFLOAT16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
"""True if this processor has kernels for packed bf16 weights; only there are such weights packed at all."""


@pytest.mark.parametrize("num_rows", [0, 1, 2, 17])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if CAN_PACK_BFLOAT16 else [torch.float32])
def test_a_packed_layer_answers_as_a_plain_one_and_keeps_its_hooks(
    dtype: torch.dtype, has_bias: bool, num_rows: int
) -> None:
    linear = Linear(96, 40, bias=has_bias, dtype=dtype).requires_grad_(False)
    linear.register_forward_hook(lambda _module, _inputs, output: output + 1)
    rows = torch.randn(1, num_rows, 96, dtype=dtype)
    plain = linear(rows)
    PackedLinear.pack(linear)
    if dtype is torch.bfloat16:
        assert torch.equal(linear(rows), plain)
    else:  # the kernels sum in another order
        torch.testing.assert_close(linear(rows), plain)
    assert [name for name, _ in linear.named_parameters()] == ["bias"] * has_bias


def test_packing_gives_up_the_pages_that_it_has_read_and_no_others(
    model_paths: Mapping[str, Path], tmp_path: Path
) -> None:
    """What stays plain, as embeddings do, is read from the file again; pages that were written to are the only copy."""
    shutil.copytree(model_paths["llama_gqa"], tmp_path / "model")
    path = tmp_path / "model"
    (path / "tokens.bin").write_bytes(bytes(1 << 20))
    written = torch.from_file(str(path / "tokens.bin"), shared=False, size=1 << 18, dtype=torch.float32)
    written.fill_(3.0)
    model = load_model(path, "float32", "cpu")
    embeddings = model.model.get_input_embeddings().weight.clone()
    assert mapped_kilobytes(path / "model.safetensors") > 0
    model.pack_weights(with_head=True)
    assert mapped_kilobytes(path / "model.safetensors") == 0
    assert torch.equal(model.model.get_input_embeddings().weight, embeddings)
    assert (written == 3.0).all()


def mapped_kilobytes(file: Path) -> int:
    """Return how much of a file's mappings is in memory of this process."""
    found = re.findall(rf" {re.escape(str(file))}\n(?:\w+:.*\n)*?Rss: +(\d+) kB", Path("/proc/self/smaps").read_text())
    return sum(map(int, found))


@pytest.mark.skipif(find_trim() is None, reason="only glibc has malloc_trim; musl and macOS go without")
def test_packing_gives_back_what_the_allocator_holds_of_freed_weights(tmp_path: Path) -> None:
    """It takes tensors from its own heap once a larger one was freed, and keeps them while a later one lives."""
    torch.ones(7 << 20)
    weights = [torch.ones(1 << 18) for _ in range(200)]
    later = torch.ones(1 << 18)
    weights.clear()
    before = psutil.Process().memory_info().rss
    release_pages(tmp_path)
    assert before - psutil.Process().memory_info().rss > 100 << 20
    assert later.sum() == 1 << 18


def test_files_that_replace_those_that_were_read_have_another_name(
    model_paths: Mapping[str, Path], tmp_path: Path
) -> None:
    """Else the next process would be shown the weights of the old ones under the name of the new."""
    shutil.copytree(model_paths["llama_gqa"], tmp_path / "model")
    old = load_model(tmp_path / "model", "float32", "cpu")
    shutil.copy(tmp_path / "model" / "model.safetensors", tmp_path / "new")
    (tmp_path / "new").rename(tmp_path / "model" / "model.safetensors")
    new = load_model(tmp_path / "model", "float32", "cpu")
    assert old._key != new._key
    assert old._key == replace(new, files=old.files)._key


def test_a_wide_mlp_is_computed_in_parts_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    if native.library() is None:
        require("c++", "g++", "clang++")
    mlp = LlamaMLP(LlamaConfig(hidden_size=24, intermediate_size=56, num_attention_heads=2)).requires_grad_(False)
    rows = torch.randn(1, 50, 24)
    plain = mlp(rows)
    pack(mlp)
    forward = GatedMlp.try_of(mlp)
    assert forward is not None
    whole = forward(rows)
    torch.testing.assert_close(whole, plain)
    monkeypatch.setattr(layers, "PRODUCT_NUMBERS", 7 * 56 + 1)
    monkeypatch.setattr(layers, "LEAST_PRODUCT_ROWS", 1)
    assert torch.equal(forward(rows), whole)


@pytest.mark.parametrize("is_fast", [False, True] if CAN_PACK_BFLOAT16 else [False])
@pytest.mark.parametrize(("num_ranks", "variant"), [(1, "gather"), (2, "pass_q"), (3, "gather"), (3, "pass_q")])
def test_a_bfloat16_model_answers_as_transformers_does_with_attention_in_float32(
    num_ranks: int, variant: str, is_fast: bool, model_paths: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three turns of uneven shards, one of a single token, which leaves ranks without any; caches are poisoned."""
    monkeypatch.setattr("ringserve.workers.model.layers.multiplies_bfloat16", lambda: is_fast)
    monkeypatch.setattr(rank_parts, "load_model", load_model)  # packing would change a model that other tests share
    path = model_paths["llama_gqa"]
    oracle = Oracle(path, torch.bfloat16)
    sampling = SamplingParameters(max_tokens=8)
    with LocalRing(path, num_ranks, dtype="bfloat16", packs_weights=True, decode_variant=variant) as ring:
        assert {worker.parts.cache.dtype for worker in ring.workers} == {torch.bfloat16}
        packed = [module for module in ring.workers[0].parts.model.model.modules() if isinstance(module, PackedLinear)]
        assert bool(packed) is is_fast
        conversation = ring.open("a", 96)
        for number, algorithm in enumerate((Algorithm.PASS_KV, Algorithm.PASS_Q, Algorithm.GATHER_KV)):
            new = random_tokens((37, 1, 6)[number], seed=number)
            first = ring.prefill([Turn(conversation, new, sampling)], algorithm)["a"]
            prompt = list(conversation.tokens)
            assert oracle.greedy(prompt, 1) == [first]
        ring.start_decode()
        answer = [first, *ring.decode(conversation, first, sampling)]
    assert answer == oracle.greedy(prompt, 8)


@pytest.mark.parametrize(
    ("changes", "feature"),
    [
        ({"model_type": "granite", "sliding_window": 4096}, "a sliding window of 4096 tokens"),
        (
            {"model_type": "qwen2_moe", "use_sliding_window": True, "sliding_window": 512},
            "a sliding window of 512 tokens",
        ),
        ({"model_type": "mistral", "sliding_window": -1}, "a sliding window of -1 tokens"),
        (
            {"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 8},
            "a sliding window of 8 tokens and no layer_types",
        ),
        (
            {"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]},
            "layers that slide and no sliding_window",
        ),
        (
            {"model_type": "olmo3", "layer_types": ["full_attention"] * 3, "num_hidden_layers": 2},
            "layer_types of 3 for 2 layers",
        ),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layers of type 'chunked_attention'"),
        ({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, "a soft cap on attention logits"),
        ({"final_logit_softcapping": 30.0}, "a soft cap on output logits"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, r"multi-head latent attention \(MLA\)"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "an encoder beside the decoder"),
        ({"model_type": "qwen2_vl", "vision_config": {"depth": 32}}, "vision input"),
        ({"model_type": "llama", "num_local_experts": 8}, "mixture of experts"),
        ({"quantization_config": {"quant_method": "hqq"}}, "weights quantized by quant_method hqq"),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, "rotary position embedding of type 'su'"),
        ({"rope_parameters": "yarn"}, "rotary parameters 'yarn'"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "su"}, "sliding_attention": {}}},
            "rotary position embedding of type 'su'",
        ),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "bidirectional attention"),
        ({"is_causal": False}, "bidirectional attention"),
    ],
)
def test_what_the_core_lacks_is_refused_by_its_name(changes: dict[str, object], feature: str) -> None:
    with pytest.raises(ModelRefused, match=feature):
        check_supported(PLAIN | changes)


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({"model_type": "mistral"}, (4096,) * 4),
        ({"model_type": "mistral", "sliding_window": None}, ()),
        ({"model_type": "gpt_oss"}, (128, 0, 128, 0)),
        ({"model_type": "gemma3_text", "sliding_window": 5}, (5,) * 4),
        ({"model_type": "gemma3_text", "sliding_window": 5, "sliding_window_pattern": 3}, (5, 5, 0, 5)),
        ({"model_type": "cohere2", "sliding_window": 5}, (5, 5, 5, 0)),
        ({"model_type": "olmo3", "layer_types": ["full_attention"] * 4}, ()),
        ({"model_type": "qwen2", "sliding_window": 5}, ()),
        (
            {"model_type": "qwen2", "sliding_window": 5, "use_sliding_window": True, "max_window_layers": 3},
            (0, 0, 0, 5),
        ),
        ({"model_type": "qwen3_moe", "sliding_window": 5, "use_sliding_window": True}, (5,) * 4),
        ({"model_type": "llama", "sliding_window": 5}, ()),
    ],
)
def test_the_window_of_each_layer_is_that_of_transformers(config: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert layer_windows(config | {"num_hidden_layers": 4}) == windows
    theirs = AutoConfig.for_model(**config, num_hidden_layers=4)
    window, kinds = getattr(theirs, "sliding_window", None) or 0, getattr(theirs, "layer_types", None)
    if config["model_type"] != "llama":
        slides = [kind == "sliding_attention" for kind in kinds] if kinds else [True] * 4
        assert tuple(window if each else 0 for each in slides) == (windows or (0,) * 4)


@pytest.mark.parametrize(
    ("changes", "positions"),
    [
        ({}, 8192),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 8192),
        ({"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 4096}, 4096),
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 2048}}, 2048),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}, "sliding_attention": {}}}, 8192),
    ],
)
def test_positions_end_where_a_rotary_embedding_would_change_for_all_of_them(
    changes: dict[str, object], positions: int, edited_config: Callable[..., Path]
) -> None:
    changes = {"rope_parameters": None} | changes
    assert read_model_info(edited_config("llama_gqa", **changes)).max_positions == positions


def test_a_config_whose_windows_transformers_reads_otherwise_is_refused(edited_config: Callable[..., Path]) -> None:
    """Its Mistral reads no `layer_types`, so all layers would have the window."""
    path = edited_config("mistral", sliding_window=8, layer_types=["full_attention", "sliding_attention"])
    with pytest.raises(ModelRefused, match=r"config\.json lacks layer_types, and transformers assumes"):
        load_model(path, "float32", "cpu")


def test_families_that_were_not_compared_are_refused_with_those_that_are() -> None:
    with pytest.raises(ModelRefused, match=r"'bloom' cannot be served; supported are apertus, arcee, .*, starcoder2$"):
        check_supported({"model_type": "bloom"})


def test_a_model_without_a_language_head_is_refused() -> None:
    with pytest.raises(ModelRefused, match="LlamaForSequenceClassification"):
        check_supported(PLAIN | {"architectures": ["LlamaForSequenceClassification"]})


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 4096},
        {"model_type": "qwen3", "layer_types": ["full_attention"] * 2},
        # QwQ-32B: a window that no layer has
        {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 64, "num_hidden_layers": 64},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_scaling": None},
    ],
)
def test_a_feature_that_is_switched_off_is_no_reason_to_refuse(changes: dict[str, object]) -> None:
    check_supported(PLAIN | changes)


def test_a_directory_that_is_not_whole_is_refused(tmp_path: Path, model_paths: Mapping[str, Path]) -> None:
    with pytest.raises(ModelRefused, match=r"has no config\.json"):
        read_model_info(tmp_path)
    config = (model_paths["llama_gqa"] / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelRefused, match=r"has no weights: neither \*\.safetensors nor pytorch_model\.bin"):
        load_model(tmp_path, "float32", "cpu")
    (tmp_path / "config.json").write_text(config[:40])
    with pytest.raises(ModelRefused, match=r"config\.json cannot be read"):
        read_model_info(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelRefused, match="does not hold a JSON object"):
        read_model_info(tmp_path)


def test_missing_weights_are_refused_and_not_drawn_at_random(edited_config: Callable[..., Path]) -> None:
    path = edited_config("llama_gqa")
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelRefused, match=r"lacks weights for 1 tensors, the first is model\.layers\.1\.mlp\.up_proj"):
        load_model(path, "float32", "cpu")


def test_damaged_weights_are_refused(edited_config: Callable[..., Path]) -> None:
    path = edited_config("llama_gqa")
    (path / "model.safetensors").write_bytes(b"not weights at all")
    with pytest.raises(ModelRefused, match="cannot be loaded"):
        load_model(path, "float32", "cpu")


def test_weights_of_another_shape_are_refused(edited_config: Callable[..., Path]) -> None:
    path = edited_config("llama_gqa", intermediate_size=100)
    with pytest.raises(
        ModelRefused, match=r"mlp\.down_proj\.weight of shape \(64, 96\), but config\.json needs \(64, 100\)"
    ):
        load_model(path, "float32", "cpu")


@pytest.mark.parametrize(("key", "value"), [("num_hidden_layers", 0), ("hidden_size", "64"), ("vocab_size", None)])
def test_a_shape_that_makes_no_sense_is_refused_by_its_key(
    edited_config: Callable[..., Path], key: str, value: object
) -> None:
    with pytest.raises(ModelRefused, match=f"{key}={value!r}; allowed is a positive integer"):
        read_model_info(edited_config("llama_gqa", **{key: value}))


def test_heads_that_do_not_divide_are_refused(edited_config: Callable[..., Path]) -> None:
    with pytest.raises(ModelRefused, match="4 query heads are not a multiple of 3 key/value heads"):
        read_model_info(edited_config("llama_gqa", num_key_value_heads=3))


def test_other_dtypes_are_refused_with_the_allowed_ones(model_paths: Mapping[str, Path]) -> None:
    with pytest.raises(ModelRefused, match="'int8' is not supported; use one of float32, bfloat16, float16"):
        load_model(model_paths["llama_gqa"], "int8", "cpu")


def test_end_of_sequence_ids_of_the_generation_config_win(edited_config: Callable[..., Path]) -> None:
    path = edited_config("llama_gqa", eos_token_id=2)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert read_model_info(path).eos_token_ids == (5, 6)
    (path / "generation_config.json").unlink()
    assert read_model_info(path).eos_token_ids == (2,)


def test_one_layer_asks_for_attention_once_and_gets_no_mask(model_paths: Mapping[str, Path]) -> None:
    """Check the hook's q[T,H,D], k and v[T,K,D], passed without a copy, at positions with gaps."""
    seen = []

    class Recorder:
        def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
            seen.append((layer, tuple(q.shape), tuple(k.shape), q.is_contiguous() and k.is_contiguous(), scale))
            return q

    loaded = load_model(model_paths["llama_gqa"], "float32", "cpu")
    with torch.inference_mode():
        states = loaded.hidden_states(torch.tensor([1, 2, 3]), torch.tensor([0, 7, 3]), Recorder())
    assert states.shape == (3, 64)
    assert seen == [(layer, (3, 4, 16), (3, 2, 16), True, 0.25) for layer in range(2)]


def test_ranks_that_load_at_the_same_time_leave_transformers_as_it_was(model_paths: Mapping[str, Path]) -> None:
    tie_weights = PreTrainedModel.tie_weights
    with ThreadPoolExecutor(8) as threads:
        loads = [threads.submit(load_model, path, "float32", "cpu") for path in model_paths.values() for _ in range(6)]
        for load in loads:
            load.result()
    assert PreTrainedModel.tie_weights is tie_weights


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [{"tp": 2, "tp_rank": 1}, {"helix": 3, "helix_rank": 2}, {}])
def test_a_rank_has_memory_for_its_share_of_the_weights_alone(
    kind: str, share: Mapping[str, Any], model_paths: Mapping[str, Path]
) -> None:
    """The files are float32: no parameter of another dtype is a view of more than itself."""
    model = load_model(model_paths[kind], "bfloat16", "cpu", **share).model
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert isinstance(embedding, torch.Tensor)
    assert isinstance(head, torch.Tensor)
    is_tied = head.untyped_storage().data_ptr() == embedding.untyped_storage().data_ptr()
    assert is_tied is model.config.tie_word_embeddings
    for name, weights in model.named_parameters():
        if not (is_tied and weights is head):
            assert weights.untyped_storage().nbytes() == 2 * weights.numel(), name
        assert weights.is_contiguous()


def test_weights_that_lie_in_the_files_as_they_are_needed_are_mapped(tmp_path: Path) -> None:
    """All ranks of a machine share their memory."""
    path = save_model("llama_gqa", tmp_path)
    loaded = load_model(path, "float32", "cpu")
    lines = Path("/proc/self/maps").read_text().splitlines()
    mappings = [line.split()[0].split("-") for line in lines if line.endswith(str(path / "model.safetensors"))]
    for name, weights in loaded.model.named_parameters():
        assert any(int(start, 16) <= weights.data_ptr() < int(stop, 16) for start, stop in mappings), name
    ranks = [load_model(path, "float32", "cpu", tp=2, tp_rank=rank).model.state_dict() for rank in range(2)]
    whole = load_file(path / "model.safetensors")
    for name, dim in [("model.layers.1.self_attn.q_proj.weight", 0), ("model.layers.1.mlp.down_proj.weight", 1)]:
        assert torch.equal(torch.cat([rank[name] for rank in ranks], dim), whole[name])


def test_a_file_without_the_head_names_its_tensors_without_a_prefix(tmp_path: Path) -> None:
    path = save_model("qwen3", tmp_path)
    config = json.loads((path / "config.json").read_text())
    weights = load_file(path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    del weights["lm_head.weight"]
    save_file(weights, path / "model.safetensors")
    before = load_model(path, "float32", "cpu").model.state_dict()
    save_file({name.removeprefix("model."): part for name, part in weights.items()}, path / "model.safetensors")
    after = load_model(path, "float32", "cpu").model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], part) for name, part in after.items())


def _change_weights(path: Path) -> dict[str, torch.Tensor]:
    """Return other weights of the same shapes."""
    return {name: part + 1.0 for name, part in load_file(path / "model.safetensors").items()}


def _cut_into_files(path: Path) -> None:
    """Save the model in `path` anew, as several files with their index."""
    model = AutoModelForCausalLM.from_pretrained(path)
    (path / "model.safetensors").unlink()
    model.save_pretrained(path, max_shard_size="60KB")
    assert len(list(path.glob("model-*-of-*.safetensors"))) > 2


def _leave_files_of_an_older_save(path: Path) -> None:
    older = _change_weights(path)
    _cut_into_files(path)
    save_file(older, path / "model-00001-of-00099.safetensors", metadata={"format": "pt"})


def _leave_averaged_weights(path: Path) -> None:
    save_file(_change_weights(path), path / "model_ema.safetensors", metadata={"format": "pt"})


def _leave_a_tensor_of_training(path: Path) -> None:
    norm = {"model.norm.weight": torch.zeros(64)}
    _cut_into_files(path)
    save_file(norm, path / "training_state.safetensors", metadata={"format": "pt"})


def _say_tied(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))


def _say_tied_and_store_only_the_head(path: Path) -> None:
    _say_tied(path)
    weights = load_file(path / "model.safetensors")
    del weights["model.embed_tokens.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def _save_by_torch(path: Path) -> None:
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()


def _save_by_torch_in_two_files(path: Path) -> None:
    names = list(load_file(path / "model.safetensors").items())
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[:5], names[5:])):
        torch.save(dict(part), path / f"pytorch_model-{number}.bin")
        weight_map |= {name: f"pytorch_model-{number}.bin" for name, _ in part}
    (path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (path / "model.safetensors").unlink()


@pytest.mark.parametrize(
    "edit",
    [
        _leave_files_of_an_older_save,
        _leave_averaged_weights,
        _leave_a_tensor_of_training,
        _say_tied,
        _say_tied_and_store_only_the_head,
        _save_by_torch,
        _save_by_torch_in_two_files,
    ],
)
@pytest.mark.parametrize("kind", ["llama_gqa", "qwen2"])
def test_the_weights_are_those_that_transformers_reads(kind: str, edit: Callable[[Path], None], tmp_path: Path) -> None:
    """Directories as people have them: leftovers of training, and a config that is wrong about a tied head."""
    path = save_model(kind, tmp_path)
    edit(path)
    stock = AutoModelForCausalLM.from_pretrained(path).state_dict()
    loaded = load_model(path, "float32", "cpu").model.state_dict()
    assert loaded.keys() == stock.keys()
    for name, part in stock.items():
        assert torch.equal(loaded[name], part), name


@pytest.mark.parametrize("share", [{"tp": 2, "tp_rank": 1}, {"helix": 2, "helix_rank": 1}])
def test_a_head_that_only_the_config_ties_is_cut_apart_from_the_embedding(
    share: Mapping[str, Any], tmp_path: Path
) -> None:
    path = save_model("llama_gqa", tmp_path)
    head = load_file(path / "model.safetensors")["lm_head.weight"]
    _say_tied(path)
    loaded = load_model(path, "float32", "cpu", **share)
    assert torch.equal(loaded.model.state_dict()["lm_head.weight"], head[150:])


def test_two_files_with_one_tensor_and_no_index_are_refused(tmp_path: Path) -> None:
    path = save_model("llama_gqa", tmp_path)
    (path / "model.safetensors").rename(path / "weights.safetensors")
    load_model(path, "float32", "cpu")
    save_file({"model.norm.weight": torch.zeros(64)}, path / "other.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelRefused, match=r"has model\.norm\.weight in .*safetensors and in another file, and no model"
    ):
        load_model(path, "float32", "cpu")


def test_an_index_that_names_what_is_not_there_is_refused(tmp_path: Path) -> None:
    path = save_model("llama_gqa", tmp_path)
    _cut_into_files(path)
    index = path / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"]
    for change, words in (
        ({"model.norm.weight": "gone.safetensors"}, r"has no gone\.safetensors, which its index names"),
        ({"model.extra.weight": names["model.norm.weight"]}, r"lacks model\.extra\.weight, which .* assigns to it"),
        ({"model.norm.weight": "../other/model.safetensors"}, "not all names of files beside it"),
    ):
        index.write_text(json.dumps({"weight_map": names | change}))
        with pytest.raises(ModelRefused, match=words):
            load_model(path, "float32", "cpu")


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"type": "yarn", "factor": 4.0}, 2048),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 512}, 512),
        (None, 512),
    ],
)
def test_yarn_multiplies_the_positions(
    rope: dict[str, object] | None, positions: int, edited_config: Callable[..., Path]
) -> None:
    """As Qwen's own recipe for 131,072 positions has it, whose config says 32,768."""
    path = edited_config("llama_gqa", max_position_embeddings=512, rope_scaling=rope, rope_parameters=None)
    assert read_model_info(path).max_positions == positions


def test_a_prompt_beyond_the_length_before_yarn_is_exact(edited_config: Callable[..., Path]) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
    path = edited_config("llama_gqa", max_position_embeddings=64, rope_parameters=rope)
    prompt = random_tokens(150)
    with LocalRing(path, 2) as ring:
        (logits,) = ring.prefill_logits([Turn(ring.open("a", 192), prompt)])
    torch.testing.assert_close(logits, Oracle(path).logits(prompt), rtol=1e-3, atol=1e-3)


def test_a_default_of_transformers_that_the_config_omits_is_asked_for(tmp_path: Path) -> None:
    """Read from config.json alone, the model would have another shape in the leader than in its ranks."""
    path = save_family("starcoder2", {"head_dim": None}, tmp_path)
    config = json.loads((path / "config.json").read_text())
    del config["num_key_value_heads"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelRefused, match=r"lacks num_key_value_heads, and transformers assumes 2; add it there"):
        load_model(path, "float32", "cpu")


# --- identity --------------------------------------------------------------------------------------------------------


def _change_one_tensor(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] += 1e-3
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def _swap_two_tensors(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    first, second = (f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1))
    tensors[first], tensors[second] = tensors[second].clone(), tensors[first].clone()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def _change_config(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))


def _add_tokenizer(path: Path) -> None:
    (path / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize("change", [_change_one_tensor, _swap_two_tensors, _change_config, _add_tokenizer])
def test_a_fingerprint_is_that_of_the_model_and_not_of_its_directory(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    model = save_model("llama_gqa", tmp_path / "model")
    before = read_fingerprint(model)
    copy = model.rename(tmp_path / "elsewhere")
    (copy / "model.safetensors").touch()
    (copy / "model_ema.safetensors").write_bytes(b"no part of the model")
    (copy / "README.md").write_text("no part of it either")
    assert read_fingerprint(copy) == before
    change(copy)
    assert read_fingerprint(copy) != before


@pytest.mark.parametrize("is_legacy", [True, False])
def test_weights_of_torch_save_have_a_fingerprint_too(is_legacy: bool, tmp_path: Path) -> None:
    def write(value: float, directory: Path) -> Path:
        weights = {"weight": torch.full((1000,), value)}
        directory.mkdir()
        torch.save(weights, directory / "pytorch_model.bin", _use_new_zipfile_serialization=not is_legacy)
        return directory

    one, other = write(1.0, tmp_path / "one"), write(2.0, tmp_path / "other")
    copy = shutil.copytree(one, tmp_path / "copy")
    assert read_fingerprint(one) == read_fingerprint(copy) != read_fingerprint(other)


def test_a_directory_without_readable_weights_has_no_fingerprint(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="has no weights"):
        read_fingerprint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ModelRefused, match=r"model.safetensors cannot be read as weights: its header is damaged"):
        read_fingerprint(tmp_path)


def test_a_rank_refuses_a_model_that_was_replaced_before_or_while_it_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_model("llama_gqa", tmp_path / "model")
    settings = RankSettings(model_path=str(model), fingerprint=read_fingerprint(model), num_blocks=4)
    spec = RankSpec(ring="ring", rank=0, num_ranks=1, incarnation="first", settings=settings)
    rank_parts.load_parts(spec, poisoned=False).close()
    original = (model / "model.safetensors").read_bytes()
    _change_one_tensor(model)
    refusal = (
        rf"{model} is not the model that the service began with: .* was {settings.fingerprint}; put its files back"
    )
    with pytest.raises(ModelRefused, match=refusal):
        rank_parts.load_parts(spec, poisoned=False)
    (model / "model.safetensors").write_bytes(original)

    def replace_after_loading(*arguments: Any, **options: Any) -> Any:
        loaded = load_model(*arguments, **options)
        _change_one_tensor(model)
        return loaded

    monkeypatch.setattr(rank_parts, "load_model", replace_after_loading)
    with pytest.raises(ModelRefused, match=refusal):
        rank_parts.load_parts(spec, poisoned=False)
