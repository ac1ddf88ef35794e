"""Built-in models, which lie in the user's cache as ordinary Hugging Face directories.

`builtin:smollm2` is a real chat model. `ringserve import` fetches it, and so do `up`, `demo` and `bench`; this module
only looks it up. `builtin:tiny` is written here on first use: a small Llama with a byte-level tokenizer. Its token id i
< 256 is the byte i, and five special tokens follow. Its weights are random, not trained, and the same bits on every
machine. They make its answers printable, varied and endless, but meaningless. Writing them needs numpy only: no torch
is loaded. Commands, gateways and ranks find the directory of their model here.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from ringserve.cp_core.errors import ModelRefused

PREFIX = "builtin:"
TINY = "tiny"
SMOLLM2 = "smollm2"
# Part of a directory's name: increase it with every change of weights, tokenizer or configuration.
VERSIONS: Final[Mapping[str, int]] = {TINY: 1, SMOLLM2: 1}
HUB_NAME: Final = re.compile(r"[\w-]+/[\w.-]+", re.ASCII)
"""Name of a model on Hugging Face's hub."""
ALLOWED: Final = f"{PREFIX}{TINY} or {PREFIX}{SMOLLM2}"


def resolve_model_path(model: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the directory of a model; `builtin:tiny` is written first if the cache lacks it.

    Raises ModelRefused for a builtin name that is unknown or was not fetched, and for a path that is no directory.
    """
    if not model.startswith(PREFIX):
        path = Path(model).expanduser()
        if not path.is_dir():
            fetch = (
                f" ('hf download {model} --local-dir DIR' fetches the model of that name)"
                if HUB_NAME.fullmatch(model)
                else ""
            )
            raise ModelRefused(f"model path {model!r} is not a directory; give a directory{fetch}, or {ALLOWED}")
        return path
    name = model.removeprefix(PREFIX)
    if name not in VERSIONS:
        raise ModelRefused(f"there is no builtin model {name!r}; give {ALLOWED}")
    target = builtin_directory(name, environment)
    if (target / "config.json").is_file():
        return target
    if name != TINY:
        raise ModelRefused(f"{model} is not in the cache ({target}); run 'ringserve import {model}' here once")
    write_once(model, target, _write_tiny)
    return target


def builtin_directory(name: str, environment: Mapping[str, str]) -> Path:
    """Return where the cache holds a built-in model, whether it is there or not."""
    return cache_directory(environment) / "models" / f"{name}-{VERSIONS[name]}"


def has_random_weights(model: str) -> bool:
    """Return whether a model's answers mean nothing: only `builtin:tiny` is not trained."""
    return model == PREFIX + TINY


def cache_directory(environment: Mapping[str, str]) -> Path:
    """Return $RINGSERVE_CACHE, or ringserve/ in $XDG_CACHE_HOME or ~/.cache."""
    if chosen := environment.get("RINGSERVE_CACHE"):
        return Path(chosen)
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ringserve"


def write_once(name: str, target: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a draft beside the target, then rename it.

    If several processes do this at once, the first one's rename wins, and the others use its result. Raises
    ModelRefused if the directory cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as directory:
            # The draft is a directory inside the temporary one, which is private to the user and removed in any case.
            draft = Path(directory) / target.name
            draft.mkdir()
            write(draft)
            draft.rename(target)
    except OSError as error:
        # If another process was first, rename fails because the target is not empty. Its result is as good as ours. Any
        # other failure is an error.
        if not (target / "config.json").is_file():
            raise ModelRefused(f"cannot write {name} to {target}: {error}") from error


def _write_tiny(directory: Path) -> None:
    write_tokenizer(directory)
    write_llama(directory)


NUM_BYTES: Final = 256
SPECIAL_TOKENS: Final = ("<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|end|>")
BOS_TOKEN_ID: Final = NUM_BYTES
EOS_TOKEN_ID: Final = NUM_BYTES + 1
END_TOKEN_ID: Final = NUM_BYTES + 4
VOCAB_SIZE: Final = NUM_BYTES + len(SPECIAL_TOKENS)
MAX_POSITIONS: Final = 131072

# The rendering of a conversation extends the rendering of its beginning, so that a turn can reuse the last one's KV.
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{% else %}<|user|>{% endif %}"
    "{% if message['role'] == 'system' %}System: {% endif %}{{ message['content'] }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tokenizer(directory: Path, max_positions: int = MAX_POSITIONS) -> None:
    """Write tokenizer.json and tokenizer_config.json for `AutoTokenizer`. No token is ever added to a text."""
    vocab = {character: byte for byte, character in enumerate(_byte_alphabet())}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[1],
        "additional_special_tokens": list(SPECIAL_TOKENS[2:]),
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _byte_alphabet() -> list[str]:
    """Return the character of each byte in byte-level tokenizers: itself if printable, else one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(NUM_BYTES, 2 * NUM_BYTES))
    return [chr(byte if byte in printable else next(substitutes)) for byte in range(NUM_BYTES)]


Weights = npt.NDArray[np.float32]

HIDDEN: Final = 512
INTERMEDIATE: Final = 1408
NUM_LAYERS: Final = 4
NUM_HEADS: Final = 8
NUM_KV_HEADS: Final = 2
HEAD_DIM: Final = 64
SEED: Final = 10

# Hidden dimension 0 is the same positive constant for every token, and no layer adds to it: it is a bias.
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


def write_llama(
    directory: Path, weights: Mapping[str, Weights] | None = None, shape: Mapping[str, Any] | None = None
) -> None:
    """Write config.json, generation_config.json and model.safetensors: of `builtin:tiny` unless others are given."""
    own_shape = {
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
    }
    save_file(dict(weights) if weights else _draw_weights(), directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": VOCAB_SIZE,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": BOS_TOKEN_ID,
        "eos_token_id": EOS_TOKEN_ID,
        **(shape or own_shape),
    }
    generation = {"bos_token_id": BOS_TOKEN_ID, "eos_token_id": [EOS_TOKEN_ID, END_TOKEN_ID]}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    # Written last: its presence means that the directory is complete.
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _draw_weights() -> dict[str, Weights]:
    generator = np.random.Generator(np.random.Philox(SEED))

    def draw(rows: int, columns: int, gain: float) -> Weights:
        # Uniform: its bits are the same with every numpy and processor, unlike a normal distribution's.
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

    If queries and keys are constant, rotary scores depend on the distance alone. Head h's query is rotated by the angle
    of h + 1 places, so its scores peak at that distance. So the next token depends on the newest token, on the four
    before it (one for each head), and on distant ones that the other heads choose. Without this, attention by random
    weights would be a nearly flat average over thousands of tokens, and the output would repeat itself at once.
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
    """Suppress unprintable bytes and special tokens by the bias alone, and favour common letters over rare signs."""
    allowed = np.zeros(len(drawn), bool)
    allowed[PRINTABLE.start : PRINTABLE.stop] = True
    drawn[~allowed] = 0.0
    drawn[:, 0] = np.where(allowed, 0.0, SUPPRESSED)
    for rank, letter in enumerate(COMMON):
        drawn[ord(letter), 0] = 0.8 - 0.03 * rank
    return drawn
