"""Reader of a GGUF file: the content of the config.json to write, and the tensors under their names in transformers.

The converters of models and tokenizers use it. It writes nothing. Everything is checked before the first tensor is
converted. Metadata or tensors without a counterpart are refused by name: a model that lost a part of itself would
answer, wrongly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize

from ringserve.cp_core.errors import ModelRefused

Array = npt.NDArray[np.float32]
Shape = tuple[int, ...]

ARCHITECTURES: Final[Mapping[str, str]] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Class in transformers of each architecture."""

KNOWN_KEYS: Final = frozenset(
    {
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.layer_norm_rms_epsilon",
        "attention.value_length",
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.factor",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "rope.scaling.type",
        "tensor_data_layout",
        "vocab_size",
    }
)
ROPE_FACTORS: Final = "rope_freqs.weight"
"""Tensor of the divisors that Llama 3's scaling applies to the rotary frequencies. The parameters of that scaling are
not in the metadata; `_llama3_rope` finds them from the divisors."""
LLAMA3_FACTORS: Final = (8.0, 16.0, 32.0)
LLAMA3_ORIGINAL_POSITIONS: Final = 8192


@dataclass(frozen=True, slots=True)
class Target:
    """Name and shape of a tensor in transformers.

    If `num_rotary_heads` is not 0, the file has the rows of each of so many heads in llama.cpp's rotary order.
    """

    name: str
    shape: Shape
    num_rotary_heads: int = 0


class GgufFile:
    """Model in one GGUF file. `config` is for config.json, `targets` has the transformers names of its tensors."""

    def __init__(self, path: Path) -> None:
        """Read and check everything but the tensors' values. Raises ModelRefused."""
        self.path = path
        if not path.is_file():
            raise ModelRefused(f"{path} is not a file; give a GGUF file")
        try:
            reader = GGUFReader(path)
            self.metadata: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
        except (ValueError, KeyError, IndexError, TypeError, OverflowError, MemoryError, OSError) as error:
            raise ModelRefused(f"{path} is not a whole GGUF file: {error}") from error
        self._tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in reader.tensors}
        self.architecture = str(self.metadata.get("general.architecture"))
        self._check_metadata()
        self.config = self._config()
        self.targets = self._targets()
        self._check_tensors()

    def tensors(self) -> Iterator[tuple[Target, Array]]:
        """Yield every tensor's target and values, dequantized to float32: those that llama.cpp computes with."""
        for name, target in self.targets.items():
            tensor = self._tensors[name]
            values = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
            if target.num_rotary_heads:
                values = _interleaved_to_halves(values, target.num_rotary_heads)
            yield target, values

    def refuse(self, feature: str) -> ModelRefused:
        return ModelRefused(f"{self.path} cannot be converted: {feature}")

    # --- metadata ----------------------------------------------------------------------------------------------------

    def _check_metadata(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise self.refuse(
                f"architecture {self.architecture!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
            )
        prefix = f"{self.architecture}."
        for key, value in self.metadata.items():
            # Writers state absent features as 0, such as the number of experts.
            if key.startswith(prefix) and key.removeprefix(prefix) not in KNOWN_KEYS and value:
                raise self.refuse(f"feature {key}={value!r} is not supported")
        if int(self.metadata.get("split.count", 1)) > 1:
            raise self.refuse("the file is one part of several; merge them with llama.cpp's gguf-split")

    def _value(self, key: str, default: object = None) -> Any:
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise self.refuse(f"metadata {self.architecture}.{key} is missing")
        if not isinstance(value, int | float | str):
            raise self.refuse(f"metadata {self.architecture}.{key} differs between layers")
        return value

    def _config(self) -> dict[str, Any]:
        hidden, heads = int(self._value("embedding_length")), int(self._value("attention.head_count"))
        head_dim = int(self._value("attention.key_length", hidden // heads))
        for key in ("attention.value_length", "rope.dimension_count"):
            if int(self._value(key, head_dim)) != head_dim:
                raise self.refuse(f"{self.architecture}.{key} is not the head dimension {head_dim}")
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None:
            raise self.refuse("tensor token_embd.weight is missing")
        config = {
            "architectures": [ARCHITECTURES[self.architecture]],
            "model_type": self.architecture,
            "dtype": "float32",
            "vocab_size": _shape(embedding)[0],
            "hidden_size": hidden,
            "intermediate_size": int(self._value("feed_forward_length")),
            "num_hidden_layers": int(self._value("block_count")),
            "num_attention_heads": heads,
            "num_key_value_heads": int(self._value("attention.head_count_kv", heads)),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": float(self._value("attention.layer_norm_rms_epsilon")),
            "max_position_embeddings": int(self._value("context_length")),
            "rope_parameters": self._rope(head_dim),
            "tie_word_embeddings": "output.weight" not in self._tensors,
        }
        for name, key in (("bos", "bos_token_id"), ("eos", "eos_token_id")):
            if (token := self.metadata.get(f"tokenizer.ggml.{name}_token_id")) is not None:
                config[key] = int(token)
        return config

    def _rope(self, head_dim: int) -> dict[str, Any]:
        theta = float(self._value("rope.freq_base", 10000.0))
        kind = self._value("rope.scaling.type", "none")
        if ROPE_FACTORS in self._tensors:
            return self._llama3_rope(theta, head_dim)
        if kind == "linear":
            return {"rope_type": "linear", "rope_theta": theta, "factor": float(self._value("rope.scaling.factor"))}
        if kind != "none":
            raise self.refuse(f"rotary scaling of type {kind!r} is not supported")
        return {"rope_type": "default", "rope_theta": theta}

    def _llama3_rope(self, theta: float, head_dim: int) -> dict[str, Any]:
        """Find the parameters of Llama 3 that give the file's divisors."""
        stored = dequantize(self._tensors[ROPE_FACTORS].data, self._tensors[ROPE_FACTORS].tensor_type)
        for factor in LLAMA3_FACTORS:
            divisors = _llama3_divisors(theta, head_dim, factor)
            if stored.shape == divisors.shape and np.allclose(stored, divisors, rtol=1e-4):
                return {
                    "rope_type": "llama3",
                    "rope_theta": theta,
                    "factor": factor,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": LLAMA3_ORIGINAL_POSITIONS,
                }
        factors = ", ".join(f"{factor:g}" for factor in LLAMA3_FACTORS)
        raise self.refuse(f"the values of {ROPE_FACTORS} are no Llama 3 scaling; supported are the factors {factors}")

    # --- tensors -----------------------------------------------------------------------------------------------------

    def _targets(self) -> dict[str, Target]:
        """Return the tensors that a file of this architecture and shape has."""
        config = self.config
        hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
        heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        # For Llama, llama.cpp rotates pairs of neighbouring rows of q and k, and transformers pairs of rows half a head
        # apart. Qwen's rows lie as in transformers.
        q_rotary, k_rotary = (heads, kv_heads) if self.architecture == "llama" else (0, 0)
        targets = {
            "token_embd.weight": Target("model.embed_tokens.weight", (vocab, hidden)),
            "output_norm.weight": Target("model.norm.weight", (hidden,)),
        }
        if not config["tie_word_embeddings"]:
            targets["output.weight"] = Target("lm_head.weight", (vocab, hidden))
        for layer in range(config["num_hidden_layers"]):
            old, new = f"blk.{layer}", f"model.layers.{layer}"
            attention = f"{new}.self_attn"
            targets |= {
                f"{old}.attn_norm.weight": Target(f"{new}.input_layernorm.weight", (hidden,)),
                f"{old}.attn_q.weight": Target(f"{attention}.q_proj.weight", (heads * dim, hidden), q_rotary),
                f"{old}.attn_k.weight": Target(f"{attention}.k_proj.weight", (kv_heads * dim, hidden), k_rotary),
                f"{old}.attn_v.weight": Target(f"{attention}.v_proj.weight", (kv_heads * dim, hidden)),
                f"{old}.attn_output.weight": Target(f"{attention}.o_proj.weight", (hidden, heads * dim)),
                f"{old}.ffn_norm.weight": Target(f"{new}.post_attention_layernorm.weight", (hidden,)),
                f"{old}.ffn_gate.weight": Target(f"{new}.mlp.gate_proj.weight", (inner, hidden)),
                f"{old}.ffn_up.weight": Target(f"{new}.mlp.up_proj.weight", (inner, hidden)),
                f"{old}.ffn_down.weight": Target(f"{new}.mlp.down_proj.weight", (hidden, inner)),
            }
            if self.architecture == "qwen2":
                for letter, rows in (("q", heads * dim), ("k", kv_heads * dim), ("v", kv_heads * dim)):
                    targets[f"{old}.attn_{letter}.bias"] = Target(f"{attention}.{letter}_proj.bias", (rows,))
            if self.architecture == "qwen3":
                for letter in "qk":
                    targets[f"{old}.attn_{letter}_norm.weight"] = Target(f"{attention}.{letter}_norm.weight", (dim,))
        return targets

    def _check_tensors(self) -> None:
        if missing := sorted(self.targets.keys() - self._tensors.keys()):
            raise self.refuse(f"tensor {missing[0]} is missing")
        if unknown := sorted(self._tensors.keys() - self.targets.keys() - {ROPE_FACTORS}):
            raise self.refuse(f"tensor {unknown[0]} is not part of a {self.architecture} model")
        for name, target in self.targets.items():
            tensor = self._tensors[name]
            if _shape(tensor) != target.shape:
                raise self.refuse(f"tensor {name} has shape {_shape(tensor)} where {target.shape} is needed")
            try:
                dequantize(tensor.data[..., :0], tensor.tensor_type)
            except NotImplementedError:
                raise self.refuse(f"tensor {name} has type {tensor.tensor_type.name}, which is not supported") from None
            except ValueError:
                continue  # the type is supported: the error is only about the empty slice


def _shape(tensor: ReaderTensor) -> Shape:
    """Return the shape with the longest stride first: GGUF writes it the other way round."""
    return tuple(int(size) for size in reversed(tensor.shape))


def _interleaved_to_halves(values: Array, num_heads: int) -> Array:
    """Reorder rows of each head from (pair, member) to (member, pair), as transformers rotates them."""
    num_pairs = values.shape[0] // num_heads // 2
    return np.ascontiguousarray(
        values.reshape(num_heads, num_pairs, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    )


def _llama3_divisors(theta: float, head_dim: int, factor: float) -> npt.NDArray[np.float64]:
    """Return by how much Llama 3 divides each rotary frequency: 1 for short waves, `factor` for long ones."""
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    # For wavelengths from 1/4 of LLAMA3_ORIGINAL_POSITIONS to all of them, the divisor grows smoothly from 1 to
    # `factor`.
    smooth = np.clip((LLAMA3_ORIGINAL_POSITIONS / wavelengths - 1.0) / 3.0, 0.0, 1.0)
    divisors: npt.NDArray[np.float64] = 1.0 / ((1.0 - smooth) / factor + smooth)
    return divisors
