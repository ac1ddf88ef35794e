"""Tokenizer loading for gateways and ranks, without the network and mostly without torch."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ringserve.cp_core.errors import InvalidRequest
from ringserve.workers.model.info import read_json

GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")


def load_tokenizer(model_path: Path) -> Any:
    """Return the tokenizer that transformers' AutoTokenizer would choose for a model directory.

    AutoTokenizer imports torch, which costs a gateway 250 MB and two seconds. If a Llama directory has the generic
    `tokenizer_class`, AutoTokenizer would choose it, so it is loaded directly.
    """
    files = [model_path / name for name in ("config.json", "tokenizer_config.json", "tokenizer.json")]
    if all(file.is_file() for file in files) and _is_generic(read_json(files[0]), read_json(files[1])):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(str(model_path), local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(model_path), local_files_only=True)


def _is_generic(model: Mapping[str, object], tokenizer: Mapping[str, object]) -> bool:
    is_plain = "auto_map" not in tokenizer and model.get("model_type") == "llama"
    return is_plain and tokenizer.get("tokenizer_class") in GENERIC_CLASSES


def plain_backend(tokenizer: Any) -> Any | None:
    """Return the fast tokenizer if `decode` only calls it; None for other tokenizers.

    A gateway decodes every token message, and transformers' own part takes longer than the fast tokenizer.
    """
    from transformers import PreTrainedTokenizerFast

    backend = getattr(tokenizer, "backend_tokenizer", None)
    verbs = ("decode", "_decode")
    is_plain = all(getattr(type(tokenizer), verb, None) is getattr(PreTrainedTokenizerFast, verb) for verb in verbs)
    return backend if is_plain else None


def tokenizer_json(tokenizer: Any) -> str:
    """Return a tokenizer as JSON, with its added tokens. Raises InvalidRequest if it has no fast form."""
    backend = copy.copy(getattr(tokenizer, "backend_tokenizer", None))
    if backend is None:
        raise InvalidRequest("the tokenizer of this model has no fast form, which structured answers need")
    backend.no_padding()
    backend.no_truncation()
    return str(backend.to_str())
