"""Tokenizer loading for gateways and ranks, without the network and mostly without torch."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ringserve.cp_core.errors import ConfigError, InvalidRequest
from ringserve.workers.model.info import read_json

logger = logging.getLogger(__name__)

PROBES = (
    "Hello world",
    " two  spaces,\n\ta line",
    "na\u00efve \u6771\u4eac \U0001f642 12345",
    "if x != 1: return f(x)",
)
"""Texts by which a tokenizer is compared with its file."""
GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")


def load_tokenizer(model_path: Path) -> Any:
    """Return the tokenizer of a model directory, as transformers' AutoTokenizer chooses it.

    AutoTokenizer builds some tokenizers from the family's class, which splits texts unlike `tokenizer.json`. Then the
    file is used, since the model was trained with it. Example: a Qwen2 directory with a SentencePiece tokenizer.

    AutoTokenizer imports torch, which costs a gateway 250 MB and two seconds. If a Llama directory names a generic
    `tokenizer_class`, AutoTokenizer would choose PreTrainedTokenizerFast, so that is loaded directly.
    """
    files = [model_path / name for name in ("config.json", "tokenizer_config.json", "tokenizer.json")]
    if all(file.is_file() for file in files) and _is_generic(read_json(files[0]), read_json(files[1])):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(str(model_path), local_files_only=True)
    from transformers import AutoTokenizer

    chosen = AutoTokenizer.from_pretrained(str(model_path), local_files_only=True)
    if not files[2].is_file() or _reads_like(chosen, files[2]):
        return chosen
    from transformers import PreTrainedTokenizerFast

    logger.warning("%s: %s differs from tokenizer.json; tokenizer.json is used", model_path, type(chosen).__name__)
    return PreTrainedTokenizerFast.from_pretrained(str(model_path), local_files_only=True)


def check_same_tokens(model_path: Path, other_path: Path, key: str) -> None:
    """Check that two models have the same tokens. Raises ConfigError, which names `key` and the other model."""
    own, others = (load_tokenizer(path).get_vocab() for path in (model_path, other_path))
    if own != others:
        raise ConfigError(
            f"{key}: the tokenizer of {other_path} differs from that of {model_path} in "
            f"{len(own.items() ^ others.items())} entries; use a model with the same tokenizer, such as a smaller "
            "one of the family"
        )


def _reads_like(tokenizer: Any, file: Path) -> bool:
    """Return True if a tokenizer encodes PROBES as its file does, or has no fast form."""
    from tokenizers import Tokenizer

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return True
    stored = Tokenizer.from_file(str(file))
    stored.no_padding()
    stored.no_truncation()
    backends = (backend, stored)
    first, second = ([each.encode(text, add_special_tokens=False).ids for text in PROBES] for each in backends)
    return bool(first == second)


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
