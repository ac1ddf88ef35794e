"""Grammars over the byte-level tokenizer of the tests: token i < 256 is the byte i."""

from __future__ import annotations

from pathlib import Path

from ringserve.workers.model.builtin import END_TOKEN_ID, EOS_TOKEN_ID, write_tokenizer
from ringserve.workers.model.tokenizer import load_tokenizer, tokenizer_json
from ringserve.workers.sampling.grammar import Grammars

ENDS = (EOS_TOKEN_ID, END_TOKEN_ID)


def byte_grammars(directory: Path, vocab_size: int, ends: tuple[int, ...] = ENDS) -> Grammars:
    """Return grammars whose tokenizer is written to `directory`."""
    write_tokenizer(directory)
    return Grammars(lambda: tokenizer_json(load_tokenizer(directory)), vocab_size, ends)
