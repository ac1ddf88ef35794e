"""Answer grammars: llguidance computes the tokens that may come next, in a thread beside the model.

A grammar is text in llguidance's format, which the gateway makes from a schema, a pattern or a list. An answer's state
depends only on the grammar and the answer's tokens, so any rank can continue at any token. This file needs no torch,
because gateways check grammars with it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from ringserve.cp_core.errors import InvalidRequest, RingserveError

log = logging.getLogger(__name__)

Mask = npt.NDArray[np.bool_]

MAX_GRAMMAR_CHARACTERS = 1 << 16
MAX_COMPILE_SECONDS = 1.0
"""Limit on compiling a grammar and computing its first mask, in seconds. The gateway measures it.

A schema of a thousand words takes a hundredth of it, even on a busy machine.
"""
MASK_SECONDS = 60.0
"""Timeout for a mask, in seconds: far more than any accepted grammar takes, even on a busy machine."""
COMPILED = 32
"""Compiled grammars cached per process, because clients repeat their tools and schemas."""


def _limits() -> LLParserLimits:
    """Return llguidance's limits on a compilation and a mask. A grammar beyond them is refused, or its answer fails."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        max_items_in_row=2_000,
        max_lexer_states=50_000,
        max_grammar_size=20_000,
        verbose_errors=False,  # errors would quote the answer
    )


@dataclass(frozen=True, slots=True)
class Compiled:
    """Compiled grammar: a matcher at the start of an answer, or llguidance's error, and the compile time in seconds."""

    matcher: LLMatcher
    seconds: float


class Grammars:
    """Grammars for one model's answers in one process.

    The first grammar loads the tokenizer, which takes about a second for 128,000 tokens.
    """

    def __init__(self, read_tokenizer: Callable[[], str], vocab_size: int, end_token_ids: Sequence[int]) -> None:
        """`read_tokenizer` returns the tokenizer's JSON. A complete answer ends with an id of `end_token_ids`."""
        self._read_tokenizer = read_tokenizer
        self.vocab_size = vocab_size
        self._end_token_ids = list(end_token_ids)
        self._reading = threading.Lock()
        self._compiled = lru_cache(COMPILED)(self._compile)

    def check(self, grammar: str) -> None:
        """Check that answers can follow a grammar. Raises InvalidRequest with a sentence that begins with the fault."""
        if not self._end_token_ids:
            raise InvalidRequest("the model has no end-of-sequence token, by which a structured answer ends")
        if len(grammar) > MAX_GRAMMAR_CHARACTERS:
            raise InvalidRequest(
                f"{len(grammar)} characters are too many for a grammar; at most {MAX_GRAMMAR_CHARACTERS} are allowed"
            )
        compiled = self._compiled(grammar)
        if compiled.matcher.is_error():
            raise InvalidRequest(f"it is not a valid grammar: {_summary(compiled.matcher.get_error())}")
        if compiled.seconds > MAX_COMPILE_SECONDS:
            raise InvalidRequest(
                f"it takes {compiled.seconds:.1f} s to compile; at most {MAX_COMPILE_SECONDS:g} are allowed"
            )

    def special_token(self, text: str) -> int | None:
        """Return the id of `text` if it is a special token, which no grammar string matches; else None."""
        with self._reading:
            tokenizer = self._tokenizer
        ids = tokenizer.tokenize_str(text, parse_special=True)
        return ids[0] if len(ids) == 1 and tokenizer.is_special_token(ids[0]) else None

    def prepare(self, grammar: str) -> None:
        """Compile a grammar in the caller's thread, and load the tokenizer if this is the first grammar."""
        self._compiled(grammar)

    def begin(self, grammar: str, answer: Sequence[int] = ()) -> AnswerGrammar:
        """Return the grammar of an answer that already has tokens `answer`. Nothing is computed yet."""
        return AnswerGrammar(self, grammar, answer)

    def matcher(self, grammar: str) -> LLMatcher:
        """Return a matcher at the start of an answer."""
        return self._compiled(grammar).matcher.deep_copy()

    @cached_property
    def thread(self) -> ThreadPoolExecutor:
        """Thread that computes masks. llguidance runs without the GIL."""
        return ThreadPoolExecutor(1, thread_name_prefix="grammar")

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        try:
            return LLTokenizer(self._read_tokenizer(), n_vocab=self.vocab_size, eos_token=self._end_token_ids)
        except ValueError as error:
            raise InvalidRequest(f"llguidance does not support this model's tokenizer: {error}") from error

    def _compile(self, grammar: str) -> Compiled:
        with self._reading:
            tokenizer = self._tokenizer
        began = time.perf_counter()
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_limits())
        if not matcher.is_error():
            matcher.compute_bitmask()
        return Compiled(matcher, time.perf_counter() - began)


class AnswerGrammar:
    """Grammar of one growing answer: `push` each token, `prepare` the next mask, get it with `mask`."""

    def __init__(self, grammars: Grammars, grammar: str, answer: Sequence[int]) -> None:
        self._grammars = grammars
        self._grammar = grammar
        self._unread = list(answer)
        self._matcher: LLMatcher | None = None
        self._mask: Future[Mask | None] | None = None

    def push(self, token_id: int) -> None:
        """Append a token to the answer. It costs nothing until `mask` is called, which most ranks never do."""
        self._unread.append(token_id)
        self._mask = None

    def prepare(self) -> None:
        """Start computing the next mask in the mask thread."""
        if self._mask is None:
            unread, self._unread = self._unread, []
            self._mask = self._grammars.thread.submit(self._next_mask, unread)

    def mask(self) -> Mask | None:
        """Return the tokens that may come next as bool[V], or None if the grammar is too complex from here."""
        self.prepare()
        assert self._mask is not None, "prepared"
        try:
            return self._mask.result(MASK_SECONDS)
        except (TimeoutError, OSError, ValueError, RingserveError) as error:  # the gateway accepted the grammar
            log.error("cannot compute a grammar mask: %s", error)
            return None

    def _next_mask(self, unread: list[int]) -> Mask | None:
        """Read tokens and return the next mask. Runs in the mask thread, one call per answer at a time."""
        if self._matcher is None:
            self._matcher = self._grammars.matcher(self._grammar)
        matcher = self._matcher
        matcher.consume_tokens(unread)
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            log.warning("an answer left its grammar: %s", _summary(matcher.get_error()))
            return None
        return np.unpackbits(bits, count=self._grammars.vocab_size, bitorder="little").view(np.bool_)


def _summary(error: str) -> str:
    """Return the first line of llguidance's error, and a regex parser's message below the pattern."""
    first, *others = [line.strip() for line in error.splitlines()] or [""]
    reason = next((line for line in others if line.startswith("error: ")), "")
    return f"{first} {reason}".strip()[:300]
