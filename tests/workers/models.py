"""Tiny random models of every family that is served, and stock transformers as their oracle."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from ringserve.workers.model.builtin import END_TOKEN_ID, EOS_TOKEN_ID, write_tokenizer

KINDS = ("llama_gqa", "llama_mha", "qwen2", "qwen3", "mistral")
WINDOWED = "gpt_oss"
"""Kind whose first layer has a window of six tokens and whose layers have attention sinks: no ring shares its heads."""
ALL_WINDOWED = "mistral_window"
"""Kind all of whose layers have a window of eleven tokens."""
VOCAB_SIZE = 300

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 8192,
    # Weights ten times the usual make attention sharp enough that a wrong or missing key shows in the logits.
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
}


def save_model(kind: str, directory: Path) -> Path:
    """Write a random model of `kind`, always the same one."""
    torch.manual_seed(7)
    model: PreTrainedModel
    match kind:
        case "llama_gqa":
            model = LlamaForCausalLM(LlamaConfig(**SHAPE))
        case "llama_mha":
            model = LlamaForCausalLM(LlamaConfig(**SHAPE | {"num_key_value_heads": 4}))
        case "qwen2":
            model = Qwen2ForCausalLM(Qwen2Config(**{key: value for key, value in SHAPE.items() if key != "head_dim"}))
        case "qwen3":
            model = Qwen3ForCausalLM(Qwen3Config(**SHAPE | {"head_dim": 32}))
        case "mistral":
            model = MistralForCausalLM(MistralConfig(**SHAPE | {"sliding_window": None}))
        case "gpt_oss":
            return save_family(kind, FAMILY_SWITCHES[kind][0], directory)
        case "mistral_window":
            return save_family("mistral", FAMILY_SWITCHES["mistral"][0], directory)
        case _:
            raise AssertionError(f"no such kind of model: {kind}")
    model.save_pretrained(directory)
    return directory


ONE_SLIDES = {"layer_types": ["sliding_attention", "full_attention"]}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILY_SWITCHES: dict[str, tuple[dict[str, Any], ...]] = {
    "apertus": ({"attention_bias": True}, {"tie_word_embeddings": True}),
    "arcee": ({"attention_bias": True, "mlp_bias": True},),
    "cohere": ({"logit_scale": 0.25, "use_qk_norm": True}, {"attention_bias": True}),
    "cohere2": (ONE_SLIDES | {"sliding_window": 7, "logit_scale": 0.25}, {"sliding_window": 20}),
    "cwm": (ONE_SLIDES | {"sliding_window": 9, "bos_token_id": 1, "pad_token_id": 0, "eos_token_id": 2},),
    "ernie4_5": ({"use_bias": True}, {"tie_word_embeddings": False}),
    "exaone4": ({"sliding_window": 7, "sliding_window_pattern": 2}, {"layer_types": ["full_attention"] * 2}),
    "gemma": ({"head_dim": 32}, {"num_key_value_heads": 1, "attention_bias": True}),
    "gemma3_text": (
        {"sliding_window": 9, "sliding_window_pattern": 2, "head_dim": 32, "query_pre_attn_scalar": 32},
        {"sliding_window": 33, "num_key_value_heads": 1, "attention_bias": True},
    ),
    "glm": ({"attention_bias": True},),
    "glm4": ({"attention_bias": True},),
    "granite": (
        {"attention_multiplier": 0.4, "logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    ),
    "gpt_oss": (
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
        {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 64, "num_key_value_heads": 1},
    ),
    "granite_swa": (
        ONE_SLIDES
        | {"sliding_window": 9, "attention_multiplier": 0.4, "logits_scaling": 3.0, "embedding_multiplier": 2.0},
    ),
    "helium": ({"attention_bias": True},),
    "hunyuan_v1_dense": (
        {"attention_bias": True},
        {"rope_parameters": {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 10000.0}},
    ),
    "hyperclovax": (
        {"attention_multiplier": 0.4, "logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
        {"attention_bias": True, "mlp_bias": True, "use_post_norm": False},
    ),
    "internlm3": ({"attention_bias": True, "mlp_bias": True},),
    "iquestcoder": ({"attention_bias": True, "mlp_bias": True},),
    "jais2": ({"attention_bias": False, "mlp_bias": False}, {"tie_word_embeddings": True}),
    "ministral": ({"sliding_window": 5},),
    "ministral3": (
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 512.0,
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.3,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
            "sliding_window": 30,
        },
    ),
    "mistral": ({"sliding_window": 11}, {"head_dim": 24}, {"head_dim": 40, "sliding_window": 7}),
    "olmo": ({"clip_qkv": 0.7},),
    "olmo2": ({"attention_bias": True},),
    "olmo3": (ONE_SLIDES | {"sliding_window": 8}, {"sliding_window": 3, "attention_bias": True}),
    "phi": (
        {"qk_layernorm": True, "num_key_value_heads": 4},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    ),
    "phi3": (
        {"num_key_value_heads": 4},
        {"sliding_window": 10},
        {
            "original_max_position_embeddings": 80,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0 + 0.1 * step for step in range(8)],
                "long_factor": [1.0 + 3.0 * step for step in range(8)],
                "original_max_position_embeddings": 80,
            },
        },
    ),
    "qwen2": ({"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},),
    "qwen3": ({"use_sliding_window": True, "sliding_window": 2, "max_window_layers": 1},),
    "seed_oss": ({"attention_bias": True, "attention_out_bias": True, "mlp_bias": True},),
    "smollm3": (
        {"no_rope_layers": [1, 0]},
        {"attention_bias": True, "mlp_bias": True},
        {"no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 15},
    ),
    "starcoder2": ({"use_bias": True, "tie_word_embeddings": False}, {"sliding_window": 40}),
    "dots1": (
        EXPERTS
        | {"n_routed_experts": 6, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
        EXPERTS | {"n_routed_experts": 6, "n_shared_experts": 1, "sliding_window": 9, "max_window_layers": 1},
    ),
    "ernie4_5_moe": (
        EXPERTS | {"moe_num_experts": 5, "moe_k": 2, "moe_num_shared_experts": 2, "moe_layer_start_index": 1},
    ),
    "exaone_moe": (
        EXPERTS
        | {"num_experts": 5, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
        | {"sliding_window": 9, "sliding_window_pattern": 2},
    ),
    "flex_olmo": ({"num_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": True, "attention_bias": True},),
    "glm4_moe": (
        EXPERTS
        | {"n_routed_experts": 6, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "use_qk_norm": True},
    ),
    "granitemoe": (
        {"num_local_experts": 5, "num_experts_per_tok": 2, "attention_multiplier": 0.4, "logits_scaling": 3.0},
    ),
    "granitemoeshared": (
        {"num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 32}
        | {"attention_multiplier": 0.4, "logits_scaling": 3.0, "residual_multiplier": 0.5},
    ),
    "mellum": (ONE_SLIDES | EXPERTS | {"num_experts": 5, "sliding_window": 9, "attention_bias": True},),
    "minimax_m2": ({"num_local_experts": 5, "num_experts_per_tok": 2, "rotary_dim": 8},),
    "mixtral": (
        {"num_local_experts": 5, "num_experts_per_tok": 2},
        {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 13},
    ),
    "olmoe": ({"num_experts": 5, "num_experts_per_tok": 2, "clip_qkv": 0.7},),
    "phimoe": ({"num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True, "lm_head_bias": True},),
    "qwen2_moe": (EXPERTS | {"num_experts": 5, "shared_expert_intermediate_size": 48, "mlp_only_layers": [0]},),
    "qwen3_moe": (
        EXPERTS | {"num_experts": 5, "norm_topk_prob": True, "attention_bias": True},
        EXPERTS | {"num_experts": 8, "mlp_only_layers": [1]},
        EXPERTS | {"num_experts": 5, "use_sliding_window": True, "sliding_window": 25},
    ),
    "solar_open": (
        EXPERTS | {"n_routed_experts": 6, "n_group": 2, "topk_group": 1, "attention_bias": True},
        EXPERTS | {"n_routed_experts": 6, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.0},
    ),
}
"""Families that KINDS lacks, each with draws that use the switches of its config."""


def save_family(family: str, switches: dict[str, Any], directory: Path) -> Path:
    """Write a random model of a family with these values in its config; no weight has its neutral value."""
    torch.manual_seed(11)
    config = AutoConfig.for_model(family, **SHAPE | {"pad_token_id": None, "sliding_window": None} | switches)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weight in (*model.parameters(), *(part for _, part in model.named_buffers() if _.endswith("bias"))):
            if weight.ndim < 2:  # norms and biases
                weight.add_(torch.randn_like(weight), alpha=0.1)
    model.save_pretrained(directory)
    return directory


def add_text(directory: Path) -> Path:
    """Give a model the byte-level tokenizer, and the tokens that end its answers."""
    write_tokenizer(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS_TOKEN_ID, END_TOKEN_ID]}))
    return directory


def float32_attention(
    module: Module, query: Tensor, key: Tensor, value: Tensor, mask: None, *, scaling: float, **_: object
) -> tuple[Tensor, None]:
    """Attend rotated query[1,H,T,D] to key and value[1,K,S,D], widened to fp32; narrow the output [1,T,H,D]."""
    group = query.shape[1] // key.shape[1]
    k, v = (part.float().repeat_interleave(group, dim=1) for part in (key, value))
    scores = query.float() @ k.transpose(2, 3) * scaling
    num_tokens, num_stored = scores.shape[2:]
    hidden = torch.ones(num_tokens, num_stored, dtype=torch.bool).triu(num_stored - num_tokens + 1)
    out = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1) @ v
    return out.to(query.dtype).transpose(1, 2), None


class Oracle:
    """Oracle: a model as transformers runs it, on one process."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32) -> None:
        """Load the model in `dtype`; attention is computed in fp32 whatever it is, as ringserve does on a CPU."""
        AttentionInterface.register("float32", float32_attention)
        how = "eager" if dtype == torch.float32 else "float32"
        self._model: Any = AutoModelForCausalLM.from_pretrained(path, attn_implementation=how, dtype=dtype).eval()
        self._answers: dict[tuple[int, ...], list[int]] = {}

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """Return logits [T, vocab_size] of all positions."""
        with torch.inference_mode():
            logits: Tensor = self._model(torch.tensor([list(token_ids)])).logits[0]
        return logits

    def greedy(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """Return the greedy tokens that follow, with transformers' own KV cache. Many tests ask for the same ones."""
        known = self._answers.get(tuple(token_ids), [])
        if len(known) < num_tokens:
            known = self._answers[tuple(token_ids)] = self._greedy(token_ids, num_tokens)
        return known[:num_tokens]

    def _greedy(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        tokens: list[int] = []
        new, cache = list(token_ids), None
        with torch.inference_mode():
            for _ in range(num_tokens):
                output = self._model(torch.tensor([new]), past_key_values=cache, use_cache=True, logits_to_keep=1)
                new, cache = [int(output.logits[0, -1].argmax())], output.past_key_values
                tokens += new
        return tokens

    def generate(self, token_ids: Sequence[int], num_tokens: int, processors: Sequence[LogitsProcessor]) -> list[int]:
        """Return the tokens that follow by transformers' own greedy generation with these processors."""
        with torch.inference_mode():
            ids = self._model.generate(
                torch.tensor([list(token_ids)]),
                max_new_tokens=num_tokens,
                do_sample=False,
                logits_processor=LogitsProcessorList(processors),
            )
        tokens: list[int] = ids[0, len(token_ids) :].tolist()
        return tokens


def random_tokens(num_tokens: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(VOCAB_SIZE, (num_tokens,), generator=generator).tolist()
    return tokens


def main(directory: Path) -> None:
    """Write a model of every family that KINDS lacks, with four layers, and with text."""
    SHAPE["num_hidden_layers"] = 4
    for family, (switches, *_) in FAMILY_SWITCHES.items():
        of_layers = {key: 2 * switches[key] for key in ("layer_types", "no_rope_layers") if key in switches}
        add_text(save_family(family, switches | of_layers, directory / family))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
