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
    "cohere2",
    "cwm",
    "ernie4_5",
    "exaone4",
    "gemma",
    "gemma3_text",
    "glm",
    "glm4",
    "granite",
    "granite_swa",
    "helium",
    "hunyuan_v1_dense",
    "hyperclovax",
    "internlm3",
    "iquestcoder",
    "jais2",
    "llama",
    "ministral",
    "ministral3",
    "mistral",
    "olmo",
    "olmo2",
    "olmo3",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "seed_oss",
    "smollm3",
    "starcoder2",
)
EXPERT_FAMILIES: Final = (
    "dots1",
    "ernie4_5_moe",
    "exaone_moe",
    "flex_olmo",
    "glm4_moe",
    "gpt_oss",
    "granitemoe",
    "granitemoeshared",
    "mellum",
    "minimax_m2",
    "mixtral",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_moe",
    "solar_open",
)
"""Families with a mixture of experts, whose experts are on every rank whole."""

# Rotary embeddings whose angles depend on the position alone.
ROPE_TYPES: Final = ("default", "linear", "llama3", "yarn")
# Those whose angles change when the sequence becomes longer than a limit: cached keys would become wrong then.
LIMITED_ROPE_TYPES: Final = ("dynamic", "longrope")

# Keys of config.json that are set only by models with the named feature.
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
    if config.get("is_causal") is False or config.get("use_bidirectional_attention"):
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
    return _unsupported_window(config) or _unsupported_rope(config)


def quantization_of(config: Config) -> str:
    """Return the form of a model's published weights, empty if they are plain. Example: "awq, 4 bits"."""
    found = config.get("quantization_config")
    if not isinstance(found, Mapping):
        return ""
    method, bits = str(found.get("quant_method")), found.get("bits")
    if method in ("fp8", "mxfp4"):
        return method
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
        return f"quant_method {method} (only {', '.join(READ_QUANTIZATIONS)} can be read)"
    for key, allowed in READ_QUANTIZATIONS[method].items():
        if ((value := found.get(key)) is not None or key == "bits") and value not in allowed:
            return f"{method} with {key}={value!r} (only {', '.join(map(repr, allowed))} can be read)"
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
    "mxfp4": {},
}
"""Quantization methods that can be read, each with the values that some keys may have; other keys do not matter.

Only `bits` may not be missing."""


WINDOWS: Final[Mapping[str, int | None]] = {
    "cohere2": 4096,
    "cwm": 8192,
    "dots1": 4096,
    "exaone4": 4096,
    "exaone_moe": 4096,
    "gemma3_text": 4096,
    "gpt_oss": 128,
    "granite_swa": 128,
    "mellum": 1024,
    "ministral": 4096,
    "ministral3": None,
    "mistral": 4096,
    "mixtral": None,
    "olmo3": 4096,
    "phi3": None,
    "qwen2": 4096,
    "qwen3": 4096,
    "qwen3_moe": 4096,
    "smollm3": None,
    "starcoder2": None,
}
"""Families with layers that attend over a sliding window, each with the window that a config without one means."""
SWITCHED_WINDOWS: Final = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3")
"""Families whose window counts only with `use_sliding_window`."""
UNIFORM_WINDOWS: Final = ("ministral", "ministral3", "mistral", "mixtral", "phi3", "qwen3_moe", "starcoder2")
"""Families all of whose layers have the window; only ministral reads `layer_types`."""
FULL_EVERY: Final[Mapping[str, int]] = {
    "cohere2": 4,
    "exaone4": 4,
    "exaone_moe": 4,
    "gemma3_text": 6,
    "gpt_oss": 2,
    "olmo3": 4,
}
"""Families in which every n-th layer has full attention unless `layer_types` says otherwise, with n."""
FULL_UNTIL: Final[Mapping[str, int]] = {"dots1": 62, "qwen2": 28, "qwen3": 28}
"""Families with the window from layer `max_window_layers` on, unless `layer_types` says otherwise; its default."""
SINKS: Final = ("gpt_oss", "granite_swa")
"""Families whose layers have attention sinks."""
SLIDING, FULL = "sliding_attention", "full_attention"


def layer_windows(config: Config) -> tuple[int, ...]:
    """Return the sliding window of each layer in tokens, 0 for full attention, of a config that is served.

    A token sees the last `window` tokens up to itself. Example: a Gemma 3 with a window of 512 gives 512 five times,
    then 0, and so on.
    """
    window, layers = _window(config), config.get("num_hidden_layers")
    if not isinstance(window, int) or not isinstance(layers, int):
        return ()
    windows = tuple(window if _slides(config, layer) else 0 for layer in range(layers))
    return windows if any(windows) else ()


def _window(config: Config) -> object:
    """Return the window of the layers that have one, or None."""
    family = str(config.get("model_type"))
    if family == "llama" or (family in SWITCHED_WINDOWS and not config.get("use_sliding_window")):
        return None
    return config.get("sliding_window", WINDOWS.get(family))


def _slides(config: Config, layer: int) -> bool:
    """Return whether a layer has the window."""
    family, kinds = str(config.get("model_type")), config.get("layer_types")
    if isinstance(kinds, list) and (family not in UNIFORM_WINDOWS or family == "ministral"):
        return bool(kinds[layer] == SLIDING)
    if family in FULL_EVERY:
        period = config.get("sliding_window_pattern") if family != "gpt_oss" else None
        return bool((layer + 1) % (period if isinstance(period, int) and period > 0 else FULL_EVERY[family]))
    if family in UNIFORM_WINDOWS:
        return True
    first = config.get("max_window_layers", FULL_UNTIL.get(family))
    return isinstance(first, int) and layer >= first


def _unsupported_window(config: Config) -> str | None:
    """Return the kind of layers, or the window, that cannot be served."""
    family, kinds, window = str(config.get("model_type")), config.get("layer_types"), _window(config)
    if isinstance(kinds, list):
        if odd := [kind for kind in kinds if kind not in (SLIDING, FULL)]:
            return f"layers of type {odd[0]!r}"
        if len(kinds) != config.get("num_hidden_layers", len(kinds)):
            return f"layer_types of {len(kinds)} for {config.get('num_hidden_layers')} layers"
        if SLIDING in kinds and window is None and family != "llama":
            return "layers that slide and no sliding_window"
    if window is None:
        return None
    if family in WINDOWS and isinstance(window, int) and window > 0:
        is_told = isinstance(kinds, list) or family in (*UNIFORM_WINDOWS, *FULL_EVERY, *FULL_UNTIL)
        return None if is_told else f"a sliding window of {window} tokens and no layer_types"
    return f"a sliding window of {window} tokens"


def rope_limit(config: Config) -> int | None:
    """Return the positions up to which the rotary embedding's angles stay as they are; None if that is all of them.

    Example: Phi-3.5 has 131,072 positions, but beyond the 4,096th the angles of all of them change: the limit is 4,096.
    """
    limits = [_limit(config, each) for each in _ropes(config) if _rope_kind(each) in LIMITED_ROPE_TYPES]
    return min((limit for limit in limits if limit is not None), default=None)


def _limit(config: Config, rope: Config) -> int | None:
    keys = ("original_max_position_embeddings",) if _rope_kind(rope) == "longrope" else ()
    found = [where.get(key) for key in keys for where in (rope, config)] + [config.get("max_position_embeddings")]
    return next((value for value in found if isinstance(value, int)), None)


def _ropes(config: Config) -> list[Config]:
    """Return the rotary embeddings, one per kind of layer: `rope_parameters`, or `rope_scaling` in older configs."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        return []
    return [part for part in rope.values() if isinstance(part, Mapping)] or [rope]


def _rope_kind(rope: Config) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _unsupported_rope(config: Config) -> str | None:
    """Return the unsupported rotary embedding."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        return f"rotary parameters {rope!r}"
    for kind in map(_rope_kind, _ropes(config)):
        if kind not in (*ROPE_TYPES, *LIMITED_ROPE_TYPES):
            return f"rotary position embedding of type {kind!r}"
    return None
