"""Allow-list of models, decided from config.json alone, without torch: leaders and ranks refuse the same models.

A family is on the list once its outputs were compared with transformers. Every feature beyond causal softmax attention
over all earlier tokens is refused by its name, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ringserve.cp_core.errors import ModelRefused

Config = Mapping[str, object]

FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3")

# Rotary embeddings whose angles depend on the position alone. "dynamic" and "longrope" also depend on the length of the
# whole sequence, so cached keys would become wrong as it grows.
ROPE_TYPES: Final = ("default", "linear", "llama3", "yarn")

# Keys of config.json that only models with the feature set.
FEATURE_KEYS: Final[Mapping[str, str]] = {
    "quantization_config": "quantized weights",
    "vision_config": "vision input",
    "audio_config": "audio input",
    "kv_lora_rank": "multi-head latent attention (MLA)",
    "attn_logit_softcapping": "a soft cap on attention logits",
    "final_logit_softcapping": "a soft cap on output logits",
    "num_local_experts": "mixture of experts",
    "num_experts": "mixture of experts",
    "n_routed_experts": "mixture of experts",
    "alibi": "ALiBi position biases",
    "attention_chunk_size": "chunked attention",
    "linear_num_value_heads": "linear attention",
    "ssm_cfg": "state-space layers",
}
FEATURE_FAMILIES: Final[Mapping[str, str]] = {
    "gpt_oss": "attention sinks",
    "gemma2": "a soft cap on attention logits",
    "t5": "an encoder beside the decoder",
    "mixtral": "mixture of experts",
}


def check_supported(config: Config) -> None:
    """Raise ModelRefused with the name of the first feature in `config` (config.json) that cannot be served."""
    model_type = config.get("model_type")
    feature = _unsupported_feature(config)
    if feature is not None:
        raise ModelRefused(f"a {model_type!r} model with {feature} cannot be served")
    if model_type not in FAMILIES:
        raise ModelRefused(f"model type {model_type!r} cannot be served; supported are {', '.join(FAMILIES)}")
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
    if (family := str(config.get("model_type"))) in FEATURE_FAMILIES:
        return FEATURE_FAMILIES[family]
    if window := _sliding_window(config):
        return f"a sliding window of {window} tokens"
    return _unsupported_rope(config)


def _sliding_window(config: Config) -> object:
    """Return the sliding window of any layer, or None."""
    layer_types = config.get("layer_types") or []
    if isinstance(layer_types, list) and any(kind != "full_attention" for kind in layer_types):
        return config.get("sliding_window") or "unknown"
    match config.get("model_type"):
        case "mistral":
            # Mistral's default is a window of 4096; only an explicit null disables it.
            return config.get("sliding_window", 4096)
        case "qwen2" | "qwen3":
            return config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
        case "llama":
            return None
    return config.get("sliding_window")


def _unsupported_rope(config: Config) -> str | None:
    """Return the unsupported rotary embedding: in `rope_parameters`, or in `rope_scaling` of older configs."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        return f"rotary parameters {rope!r}"
    kind = rope.get("rope_type") or rope.get("type") or "default"
    return None if kind in ROPE_TYPES else f"rotary position embedding of type {kind!r}"
