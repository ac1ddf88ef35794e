"""Allow-list of models, decided from config.json alone, without torch: leaders and ranks refuse the same models.

A family is on the list once its outputs were compared with transformers. Every feature beyond causal softmax attention
over all earlier tokens is refused by its name, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ringserve.cp_core.errors import ModelRefused

Config = Mapping[str, object]

FAMILIES: Final = (
    "apertus",
    "arcee",
    "cohere",
    "ernie4_5",
    "gemma",
    "glm",
    "glm4",
    "granite",
    "helium",
    "llama",
    "mistral",
    "olmo",
    "olmo2",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "seed_oss",
    "smollm3",
    "starcoder2",
)
EXPERT_FAMILIES: Final = (
    "ernie4_5_moe",
    "glm4_moe",
    "granitemoe",
    "minimax_m2",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
)
"""Families with a mixture of experts, whose experts are on every rank whole."""

# Rotary embeddings whose angles depend on the position alone. "dynamic" and "longrope" also depend on the length of the
# whole sequence, so cached keys would become wrong as it grows.
ROPE_TYPES: Final = ("default", "linear", "llama3", "yarn")

# Keys of config.json that only models with the feature set.
FEATURE_KEYS: Final[Mapping[str, str]] = {
    "vision_config": "vision input",
    "audio_config": "audio input",
    "kv_lora_rank": "multi-head latent attention (MLA)",
    "attn_logit_softcapping": "a soft cap on attention logits",
    "final_logit_softcapping": "a soft cap on output logits",
    "alibi": "ALiBi position biases",
    "attention_chunk_size": "chunked attention",
    "linear_num_value_heads": "linear attention",
    "ssm_cfg": "state-space layers",
}
FEATURE_FAMILIES: Final[Mapping[str, str]] = {
    "gpt_oss": "attention sinks",
    "gemma2": "a soft cap on attention logits",
    "t5": "an encoder beside the decoder",
}
EXPERT_KEYS: Final = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def check_supported(config: Config) -> None:
    """Raise ModelRefused with the name of the first feature in `config` (config.json) that cannot be served."""
    model_type = config.get("model_type")
    feature = _unsupported_feature(config)
    if feature is not None:
        raise ModelRefused(f"a {model_type!r} model with {feature} cannot be served")
    families = (*FAMILIES, *EXPERT_FAMILIES)
    if model_type not in families:
        raise ModelRefused(f"model type {model_type!r} cannot be served; supported are {', '.join(sorted(families))}")
    architectures = config.get("architectures") or []
    if isinstance(architectures, list) and not all(str(name).endswith("ForCausalLM") for name in architectures):
        raise ModelRefused(f"architecture {architectures} cannot be served; a ...ForCausalLM is needed")


def _unsupported_feature(config: Config) -> str | None:
    if config.get("is_encoder_decoder"):
        return "an encoder beside the decoder"
    if config.get("is_causal") is False:
        return "bidirectional attention"
    for key, feature in FEATURE_KEYS.items():
        if config.get(key):
            return feature
    if quantization := _unread_quantization(config):
        return f"weights quantized by {quantization}"
    if (family := str(config.get("model_type"))) in FEATURE_FAMILIES:
        return FEATURE_FAMILIES[family]
    if family not in EXPERT_FAMILIES and any(config.get(key) for key in EXPERT_KEYS):
        return "mixture of experts"
    if window := _sliding_window(config):
        return f"a sliding window of {window} tokens"
    return _unsupported_rope(config)


def quantization_of(config: Config) -> str:
    """Return the form of a model's published weights, empty if they are plain. Example: "awq, 4 bits"."""
    found = config.get("quantization_config")
    if not isinstance(found, Mapping):
        return ""
    method, bits = str(found.get("quant_method")), found.get("bits")
    if method == "fp8":
        return "fp8"
    if method == "compressed-tensors":
        return f"{method}, {found.get('format')}"
    if method == "bitsandbytes":
        bits = 4 if found.get("load_in_4bit") else 8
    return f"{method}, {bits} bits"


def _unread_quantization(config: Config) -> str | None:
    """Return the method of quantized weights that cannot be read, with the key that says so; None for plain ones."""
    found = config.get("quantization_config")
    if not found:
        return None
    if not isinstance(found, Mapping):
        return f"{found!r}"
    method = str(found.get("quant_method"))
    if method not in READ_QUANTIZATIONS:
        return f"quant_method {method} (read are {', '.join(READ_QUANTIZATIONS)})"
    for key, allowed in READ_QUANTIZATIONS[method].items():
        if ((value := found.get(key)) is not None or key == "bits") and value not in allowed:
            return f"{method} with {key}={value!r} (read are {', '.join(map(repr, allowed))})"
    for key in ("sparsity_config", "transform_config"):
        value = found.get(key)
        if isinstance(value, Mapping) and value and value.get("format") != "dense":
            return f"{method} with {key}"
    return None


READ_QUANTIZATIONS: Final[Mapping[str, Mapping[str, tuple[object, ...]]]] = {
    "awq": {"bits": (4,), "version": ("gemm", "GEMM"), "zero_point": (True,)},
    "bitsandbytes": {},
    "compressed-tensors": {
        "format": ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized"),
        "quantization_status": ("compressed",),
    },
    "fp8": {},
    "gptq": {"bits": (2, 4, 8), "checkpoint_format": ("gptq", "gptq_v2")},
}
"""Methods of quantized weights that are read, each with the values of its keys that are; other keys do not matter.

Only `bits` has no default."""


def _sliding_window(config: Config) -> object:
    """Return the sliding window of any layer, or None."""
    family, layer_types = config.get("model_type"), config.get("layer_types")
    if isinstance(layer_types, list) and any(kind != "full_attention" for kind in layer_types):
        return config.get("sliding_window") or "unknown"
    if family == "llama":
        return None
    if family == "mistral":
        # Mistral's default is a window of 4096; only an explicit null disables it.
        return config.get("sliding_window", 4096)
    if family in SWITCHED_WINDOWS:
        if not config.get("use_sliding_window") or (family in LISTED_WINDOWS and _no_layer_slides(config)):
            return None
        return config.get("sliding_window", 4096)
    return config.get("sliding_window")


def _no_layer_slides(config: Config) -> bool:
    """Return True if all layers are full attention although a window is set, as in QwQ-32B."""
    first, layers = config.get("max_window_layers"), config.get("num_hidden_layers")
    return bool(config.get("layer_types")) or (isinstance(first, int) and isinstance(layers, int) and first >= layers)


SWITCHED_WINDOWS: Final = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3")
"""Families whose window counts only with `use_sliding_window`."""
LISTED_WINDOWS: Final = ("qwen2", "qwen3", "smollm3")
"""Families whose layers follow `layer_types`, or slide from layer `max_window_layers` on."""


def _unsupported_rope(config: Config) -> str | None:
    """Return the unsupported rotary embedding: in `rope_parameters`, or in `rope_scaling` of older configs."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        return f"rotary parameters {rope!r}"
    kind = rope.get("rope_type") or rope.get("type") or "default"
    return None if kind in ROPE_TYPES else f"rotary position embedding of type {kind!r}"
