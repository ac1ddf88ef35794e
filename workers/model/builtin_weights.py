"""The weights and configuration of `builtin:tiny`, the same bits on every machine. numpy only: no torch is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from workers.model.builtin_tokenizer import BOS_TOKEN_ID, END_TOKEN_ID, EOS_TOKEN_ID, VOCAB_SIZE

Weights = npt.NDArray[np.float32]

HIDDEN: Final = 512
INTERMEDIATE: Final = 1408
NUM_LAYERS: Final = 4
NUM_HEADS: Final = 8
NUM_KV_HEADS: Final = 2
HEAD_DIM: Final = 64
MAX_POSITIONS: Final = 131072
SEED: Final = 10

# Hidden dimension 0 is the same positive constant for every token, and no layer adds to it: it serves as a bias.
BIAS_CONSTANT: Final = 3.0
SUPPRESSED: Final = -40.0
# Standard deviation of each kind of matrix, in units of 1/sqrt(columns).
ATTENTION_OUTPUT_GAIN: Final = 2.0
MLP_OUTPUT_GAIN: Final = 0.7
# See `_look_back`.
LOOK_BACK_GAIN: Final = 2.5
LOOK_BACK_FREQUENCIES: Final = 12
ROPE_THETA: Final = 500000.0
PRINTABLE: Final = range(0x20, 0x7F)
COMMON: Final = " etaoinshrdlucmfwygpbvk"


def write_llama(directory: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors (46 MB, float32)."""
    save_file(_draw_weights(), directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "tie_word_embeddings": False,
        "bos_token_id": BOS_TOKEN_ID,
        "eos_token_id": EOS_TOKEN_ID,
    }
    generation = {"bos_token_id": BOS_TOKEN_ID, "eos_token_id": [EOS_TOKEN_ID, END_TOKEN_ID]}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    # Last: its presence says that the directory is whole.
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _draw_weights() -> dict[str, Weights]:
    generator = np.random.Generator(np.random.Philox(SEED))

    def draw(rows: int, columns: int, gain: float) -> Weights:
        # Uniform, because its bits are the same with every numpy and processor; a normal's are not promised to be.
        spread = gain * np.sqrt(3.0 / columns)
        drawn: Weights = ((2.0 * generator.random((rows, columns)) - 1.0) * spread).astype(np.float32)
        return drawn

    embedding = draw(VOCAB_SIZE, HIDDEN, np.sqrt(HIDDEN))
    embedding[:, 0] = BIAS_CONSTANT
    weights = {"model.embed_tokens.weight": embedding, "model.norm.weight": np.ones(HIDDEN, np.float32)}
    for layer in range(NUM_LAYERS):
        name = f"model.layers.{layer}"
        attention_output = draw(HIDDEN, NUM_HEADS * HEAD_DIM, ATTENTION_OUTPUT_GAIN)
        mlp_output = draw(HIDDEN, INTERMEDIATE, MLP_OUTPUT_GAIN)
        attention_output[0] = mlp_output[0] = 0.0
        query, key = draw(NUM_HEADS * HEAD_DIM, HIDDEN, 1.0), draw(NUM_KV_HEADS * HEAD_DIM, HIDDEN, 1.0)
        _look_back(query, key)
        weights |= {
            f"{name}.input_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{name}.self_attn.q_proj.weight": query,
            f"{name}.self_attn.k_proj.weight": key,
            f"{name}.self_attn.v_proj.weight": draw(NUM_KV_HEADS * HEAD_DIM, HIDDEN, 1.0),
            f"{name}.self_attn.o_proj.weight": attention_output,
            f"{name}.post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{name}.mlp.gate_proj.weight": draw(INTERMEDIATE, HIDDEN, 1.0),
            f"{name}.mlp.up_proj.weight": draw(INTERMEDIATE, HIDDEN, 1.0),
            f"{name}.mlp.down_proj.weight": mlp_output,
        }
    return weights | {"lm_head.weight": _logit_weights(draw(VOCAB_SIZE, HIDDEN, 1.0))}


def _look_back(query: Weights, key: Weights) -> None:
    """Make query head h of the first KV head attend to the token h + 1 places back, whatever the tokens are.

    Rotary scores depend on the distance alone where query and key are constants; turned against each other by an
    angle of h + 1 places they peak there. So what comes next hangs on the last five tokens, and on the far ones that
    the other heads pick; a flat average over thousands of tokens would make the output repeat itself at once.
    """
    frequencies = ROPE_THETA ** (-np.arange(LOOK_BACK_FREQUENCIES) / (HEAD_DIM // 2))
    cosine, sine = (slice(start, start + LOOK_BACK_FREQUENCIES) for start in (0, HEAD_DIM // 2))
    key[:HEAD_DIM] = 0.0
    key[cosine, 0] = LOOK_BACK_GAIN
    for head in range(NUM_HEADS // NUM_KV_HEADS):
        rows = query[head * HEAD_DIM : (head + 1) * HEAD_DIM]
        rows[:] = 0.0
        rows[cosine, 0] = LOOK_BACK_GAIN * np.cos((head + 1) * frequencies)
        rows[sine, 0] = -LOOK_BACK_GAIN * np.sin((head + 1) * frequencies)


def _logit_weights(drawn: Weights) -> Weights:
    """Rows of unprintable bytes and special tokens see the bias alone; common letters are favoured over rare signs."""
    allowed = np.zeros(len(drawn), bool)
    allowed[PRINTABLE.start : PRINTABLE.stop] = True
    drawn[~allowed] = 0.0
    drawn[:, 0] = np.where(allowed, 0.0, SUPPRESSED)
    for rank, letter in enumerate(COMMON):
        drawn[ord(letter), 0] = 0.8 - 0.03 * rank
    return drawn
