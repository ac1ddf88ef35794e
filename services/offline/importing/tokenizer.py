"""Tokenizer of a GGUF file, as the files that transformers reads: tokenizer.json and tokenizer_config.json.

The conversion calls it. Only tokenizers whose splitting of text is known are converted: with another one the model
would get other tokens than in its training, and answer worse.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split
from tokenizers.processors import TemplateProcessing

from ringserve.services.offline.importing.gguf_file import GgufFile

LLAMA3_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT: Final = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
LLAMA3: Final = frozenset({"llama-bpe", "llama3", "llama-v3"})
QWEN2: Final = frozenset({"qwen2", "deepseek-r1-qwen"})
SUPPORTED: Final = (*sorted(LLAMA3 | QWEN2), "gpt-2", "smollm")

CONTROL, USER_DEFINED = 3, 4
"""Types of tokens in GGUF that are matched whole in a text; a control token is left out of decoded text."""
END_OF_TURN: Final = ("<|im_end|>", "<|eot_id|>")
"""Tokens that end an answer in a chat, if a model has them beside its end-of-text token."""


def write_tokenizer(file: GgufFile, directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json. Raises ModelRefused."""
    metadata = file.metadata
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise file.refuse(f"tokenizer {kind!r} is not supported; supported is 'gpt2' (byte-level BPE)")
    tokens = _strings(file, "tokenizer.ggml.tokens")
    special = _special_tokens(metadata, tokens)
    tokenizer = _byte_level(file, tokens)
    types = metadata.get("tokenizer.ggml.token_type") or [0] * len(tokens)
    tokenizer.add_special_tokens(_added(tokens, types, CONTROL))
    tokenizer.add_tokens(_added(tokens, types, USER_DEFINED))
    is_llama3 = metadata.get("tokenizer.ggml.pre") in LLAMA3
    # As llama.cpp: a Llama 3 begins every text with its first token unless the file says otherwise.
    if metadata.get("tokenizer.ggml.add_bos_token", is_llama3) and "bos_token" in special:
        bos = special["bos_token"]
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.config["max_position_embeddings"],
        **special,
    }
    template = metadata.get("tokenizer.chat_template")
    if template:
        settings["chat_template"] = template
    _write_json(directory / "tokenizer_config.json", settings)
    generation = {key: file.config[key] for key in ("bos_token_id",) if key in file.config}
    _write_json(directory / "generation_config.json", generation | {"eos_token_id": _ends(metadata, tokens, types)})


def _byte_level(file: GgufFile, tokens: list[str]) -> Tokenizer:
    pre = file.metadata.get("tokenizer.ggml.pre")
    if pre not in SUPPORTED:
        raise file.refuse(f"tokenizer.ggml.pre is {pre!r}; supported are {', '.join(SUPPORTED)}")
    merges = [_pair(file, merge) for merge in _strings(file, "tokenizer.ggml.merges", may_be_empty=True)]
    vocab = {token: index for index, token in enumerate(tokens)}
    try:
        # In Llama 3 a word that is in the vocabulary becomes that token, without any merges.
        tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=pre in LLAMA3))
    except Exception as error:  # tokenizers raises plain exceptions
        raise file.refuse(f"its tokenizer is broken: {error}") from error
    if pre in QWEN2:
        tokenizer.normalizer = NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(str(pre))
    tokenizer.decoder = ByteLevelDecoder()
    return tokenizer


def _pre_tokenizer(pre: str) -> PreTokenizer:
    """Return the split of text into words that the merges of a known tokenizer were learnt on."""
    if pre in LLAMA3 or pre in QWEN2:
        split = Split(Regex(LLAMA3_SPLIT if pre in LLAMA3 else QWEN2_SPLIT), behavior="isolated")
        return Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    words = ByteLevel(add_prefix_space=False, use_regex=True)
    return Sequence([Digits(individual_digits=True), words]) if pre == "smollm" else words


def _strings(file: GgufFile, key: str, *, may_be_empty: bool = False) -> list[str]:
    value = file.metadata.get(key, [] if may_be_empty else None)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise file.refuse(f"metadata {key} is missing or is not a list of strings")
    if key.endswith("tokens") and len(value) != file.config["vocab_size"]:
        raise file.refuse(f"{key} has {len(value)} tokens, but the embedding has {file.config['vocab_size']}")
    return value


def _pair(file: GgufFile, merge: str) -> tuple[str, str]:
    first, space, second = merge.partition(" ")
    if not (first and space and second):
        raise file.refuse(f"merge {merge!r} of its tokenizer is not a pair")
    return first, second


def _special_tokens(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None and 0 <= int(index) < len(tokens):
            special[f"{name}_token"] = tokens[int(index)]
    return special


def _added(tokens: list[str], types: list[int], kind: int) -> list[AddedToken]:
    found = [token for token, each in zip(tokens, types, strict=False) if each == kind]
    return [AddedToken(token, normalized=False, special=kind == CONTROL) for token in found]


def _ends(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> list[int]:
    """Return the ids that end an answer: the file's own, and the end of a turn if its chat template writes one."""
    names = ("eos", "eot")
    ends = [metadata[key] for name in names if (key := f"tokenizer.ggml.{name}_token_id") in metadata]
    template = str(metadata.get("tokenizer.chat_template", ""))
    for token in END_OF_TURN:
        if token in template and token in tokens and types[tokens.index(token)] == CONTROL:
            ends.append(tokens.index(token))
    return sorted({int(end) for end in ends})


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
