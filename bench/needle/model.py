"""The needle model: two layers and one head that find a code among a million tokens; its weights are not trained.

A code is a run of different digits between `#` and `.`, as `#4821.`; one may lie anywhere in a text of other signs.
After a `#` at the end of the prompt the model writes the digits of the code and its `.`. Both layers attend over all
tokens: for each token the first one looks up the token before it, and the second one the token that once followed an
equal sign (an induction head). If attention only averaged, an answer would not show that tokens were left out.

The needle bench serves the model. This module writes only the model's directory, in the cache.

The residual of a token, in slots of one number each:

    0   1 .. 12     13 .. 24                  25 .. 36                   37 .. 63
    1   its sign    sign of the token before  sign that was looked up    random numbers of its own
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ringserve.workers.model.builtin import VOCAB_SIZE, cache_directory, write_llama, write_once, write_tokenizer

Weights = npt.NDArray[np.float32]

SIGNS: Final = "#0123456789."
"""Signs that codes consist of: the only ones that the layers tell apart."""
HIDDEN: Final = 64
HEAD_DIM: Final = 16
INTERMEDIATE: Final = 64
NUM_LAYERS: Final = 2
MAX_POSITIONS: Final = (1 << 20) + (1 << 16)
# The upper half of the rotary pairs turns by at most a third of a radian over all positions, so its scores compare what
# tokens are, at whatever distance. Scores of the lower half depend on the distance.
ROPE_THETA: Final = 1e13
PLACES: Final = range(4)
CONTENTS: Final = (*range(4, 8), *range(12, 16))
SEED: Final = 11

SIGN = slice(1, 1 + len(SIGNS))
BEFORE = slice(SIGN.stop, SIGN.stop + len(SIGNS))
FOUND = slice(BEFORE.stop, BEFORE.stop + len(SIGNS))
RANDOM = slice(FOUND.stop, HIDDEN)
# A token has a norm of sqrt(2), so the root of its mean square is this, and RMSNorm divides by it.
RMS: Final = float(np.sqrt(2.0 / HIDDEN))

# Gains of queries and keys. The right token's score must be hundreds above the others, since a million of them share
# the softmax.
PLACE_GAIN: Final = 11.0
SIGN_GAIN: Final = 5.0
LOGIT_GAIN: Final = 2.0
MLP_GAIN: Final = 0.05
SUPPRESSED: Final = -40.0
PRINTABLE: Final = range(0x20, 0x7F)


# Part of a directory's name: increase it with every change of weights, tokenizer or configuration.
VERSION: Final = 1


def needle_path(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the model's directory, which is written first if the cache lacks it. Raises ModelRefused."""
    target = cache_directory(environment) / "models" / f"needle-{VERSION}"
    if not (target / "config.json").is_file():
        write_once("the needle model", target, _write)
    return target


def _write(directory: Path) -> None:
    write_tokenizer(directory, MAX_POSITIONS)
    write_llama(directory, make_weights(VOCAB_SIZE), shape())


def shape() -> dict[str, Any]:
    """Return the entries of config.json that describe the model's shape."""
    return {
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
    }


def make_weights(vocab_size: int) -> dict[str, Weights]:
    """Return all matrices, the same bits on every machine. A token id below 256 is that byte."""
    generator = np.random.Generator(np.random.Philox(SEED))

    def draw(rows: int, columns: int) -> Weights:
        # Uniform numbers have the same bits with every numpy and processor; normally distributed ones do not.
        drawn: Weights = ((2.0 * generator.random((rows, columns)) - 1.0) * np.sqrt(3.0 / columns)).astype(np.float32)
        return drawn

    embedding = np.zeros((vocab_size, HIDDEN), np.float32)
    own = draw(vocab_size, RANDOM.stop - RANDOM.start)
    embedding[:, RANDOM] = own / np.linalg.norm(own, axis=1, keepdims=True)
    embedding[:, 0] = 1.0
    for place, sign in enumerate(SIGNS):
        embedding[ord(sign), 1:] = 0.0
        embedding[ord(sign), SIGN.start + place] = 1.0
    ones = np.ones(HIDDEN, np.float32)
    weights = {"model.embed_tokens.weight": embedding, "model.norm.weight": ones}
    for layer, (query, key, target) in enumerate(((*_before(), BEFORE), (*_same_sign(), FOUND))):
        name = f"model.layers.{layer}"
        value, output = _carry(target, draw(HEAD_DIM - len(SIGNS), RANDOM.stop - RANDOM.start))
        down = np.zeros((HIDDEN, INTERMEDIATE), np.float32)
        down[RANDOM] = MLP_GAIN * draw(RANDOM.stop - RANDOM.start, INTERMEDIATE)
        weights |= {
            f"{name}.input_layernorm.weight": ones,
            f"{name}.self_attn.q_proj.weight": query,
            f"{name}.self_attn.k_proj.weight": key,
            f"{name}.self_attn.v_proj.weight": value,
            f"{name}.self_attn.o_proj.weight": output,
            f"{name}.post_attention_layernorm.weight": ones,
            f"{name}.mlp.gate_proj.weight": draw(INTERMEDIATE, HIDDEN),
            f"{name}.mlp.up_proj.weight": draw(INTERMEDIATE, HIDDEN),
            f"{name}.mlp.down_proj.weight": down,
        }
    return weights | {"lm_head.weight": _logits(draw(vocab_size, HIDDEN))}


def _before() -> tuple[Weights, Weights]:
    """Return query and key weights whose score is greatest for the token one place before.

    Queries and keys are constants, so their rotary score depends only on the distance.
    """
    query, key = np.zeros((HEAD_DIM, HIDDEN), np.float32), np.zeros((HEAD_DIM, HIDDEN), np.float32)
    for pair in PLACES:
        angle = ROPE_THETA ** (-pair / (HEAD_DIM // 2))
        key[pair, 0] = PLACE_GAIN
        query[pair, 0] = PLACE_GAIN * np.cos(angle)
        query[pair + HEAD_DIM // 2, 0] = -PLACE_GAIN * np.sin(angle)
    return query, key


def _same_sign() -> tuple[Weights, Weights]:
    """Return queries of a token's sign and keys of the sign before a token; different signs have no positive score."""
    query, key = np.zeros((HEAD_DIM, HIDDEN), np.float32), np.zeros((HEAD_DIM, HIDDEN), np.float32)
    for place in range(len(SIGNS)):
        row, direction = CONTENTS[place % len(CONTENTS)], 1.0 if place < len(CONTENTS) else -1.0
        query[row, SIGN.start + place] = key[row, BEFORE.start + place] = SIGN_GAIN * direction
    return query, key


def _carry(target: slice, drawn: Weights) -> tuple[Weights, Weights]:
    """Return the matrices that carry an attended token's sign to `target`, and some of its random numbers."""
    value, output = np.zeros((HEAD_DIM, HIDDEN), np.float32), np.zeros((HIDDEN, HEAD_DIM), np.float32)
    for place in range(len(SIGNS)):
        value[place, SIGN.start + place] = RMS
        output[target.start + place, place] = 1.0
    value[len(SIGNS) :, RANDOM] = drawn * RMS
    output[RANDOM, len(SIGNS) :] = drawn.T
    return value, output


def _logits(drawn: Weights) -> Weights:
    """Return the head's weights: they favour the sign that was looked up, and suppress what cannot be printed."""
    weights = np.zeros_like(drawn)
    weights[:, RANDOM] = drawn[:, RANDOM]
    weights[:, 0] = SUPPRESSED
    weights[PRINTABLE.start : PRINTABLE.stop, 0] = 0.0
    for place, sign in enumerate(SIGNS):
        weights[ord(sign), FOUND.start + place] = LOGIT_GAIN
    return weights
