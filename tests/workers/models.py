"""Tiny random models of every family that is served, and stock transformers as their oracle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import (
    AttentionInterface,
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
        case _:
            raise AssertionError(f"no such kind of model: {kind}")
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
