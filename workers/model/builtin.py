"""Models that ringserve brings along, written once to the user's cache as ordinary Hugging Face directories.

`builtin:tiny` is a small Llama with a byte-level tokenizer. Its weights are drawn, not trained, so it says nothing
sensible; they are shaped so that what it says is printable, varied and never ends by itself.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from cp_core.errors import ModelRefused
from workers.model.builtin_tokenizer import write_tokenizer
from workers.model.builtin_weights import write_llama

PREFIX = "builtin:"
TINY = "tiny"
# Part of the directory's name: raise it with every change of weights, tokenizer or configuration.
TINY_VERSION = 1


def resolve_model_path(model: str, environment: Mapping[str, str] = os.environ) -> Path:
    """The directory of `builtin:tiny`, written first if the cache lacks it, or of any other directory as given.

    Raises ModelRefused for an unknown builtin name and for a path that is no directory.
    """
    if not model.startswith(PREFIX):
        path = Path(model).expanduser()
        if not path.is_dir():
            raise ModelRefused(f"model path {model!r} is not a directory; give one, or {PREFIX}{TINY}")
        return path
    name = model.removeprefix(PREFIX)
    if name != TINY:
        raise ModelRefused(f"there is no builtin model {name!r}; the only one is {TINY!r}")
    target = cache_directory(environment) / "models" / f"{TINY}-{TINY_VERSION}"
    if not (target / "config.json").is_file():
        _write_once(target)
    return target


def cache_directory(environment: Mapping[str, str]) -> Path:
    """$RINGSERVE_CACHE, or ringserve/ in $XDG_CACHE_HOME, or in ~/.cache."""
    if chosen := environment.get("RINGSERVE_CACHE"):
        return Path(chosen)
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ringserve"


def _write_once(target: Path) -> None:
    """Write beside the target, then rename: several processes may do this at once, and one of them wins."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as directory:
            # Renamed is a directory inside the temporary one: that one is private to the user, and removed in any case.
            draft = Path(directory) / target.name
            draft.mkdir()
            write_tokenizer(draft)
            write_llama(draft)
            draft.rename(target)
    except OSError as error:
        # Losing the race leaves a non-empty target, which rename refuses; that one is as good as ours.
        if not (target / "config.json").is_file():
            raise ModelRefused(f"cannot write {PREFIX}{TINY} to {target}: {error}") from error
