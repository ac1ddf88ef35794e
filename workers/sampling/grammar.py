"""Grammars of answers: the tokens that may come next, by llguidance, from a thread beside the one that computes.

A grammar is a text in llguidance's own form, which the gateway makes of a schema, a pattern or a list. The state of an
answer follows from the grammar and the answer's tokens alone: any rank can take it up at any token. This file needs no
torch, as gateways check grammars with it.
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
"""Seconds for a grammar's compilation and its first mask, which the gateway measures before the rings do both.

Schemas of a thousand words take a hundredth of it, also on a machine that is busy.
"""
MASK_SECONDS = 60.0
"""Seconds for a mask: far more than any grammar takes that the gateway has let through, on a machine that is busy."""
COMPILED = 32
"""Compiled grammars that a process retains: tools and schemas come again and again."""


def _limits() -> LLParserLimits:
    """Return what bounds a compilation, and each mask; a grammar beyond it is refused, or its answer fails."""
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
    """Matcher at the beginning of an answer, or the error that llguidance met, and the seconds that it took."""

    matcher: LLMatcher
    seconds: float


class Grammars:
    """Grammars of the answers of one model in one process.

    The tokenizer is read when the first grammar needs it: about a second for 128,000 tokens.
    """

    def __init__(self, read_tokenizer: Callable[[], str], vocab_size: int, end_token_ids: Sequence[int]) -> None:
        """`read_tokenizer` returns the tokenizer's JSON. A complete answer ends with one of `end_token_ids`."""
        self._read_tokenizer = read_tokenizer
        self.vocab_size = vocab_size
        self._end_token_ids = list(end_token_ids)
        self._reading = threading.Lock()
        self._compiled = lru_cache(COMPILED)(self._compile)

    def check(self, grammar: str) -> None:
        """Check that answers can be held to a grammar. Raises InvalidRequest, whose sentence begins with the fault."""
        if not self._end_token_ids:
            raise InvalidRequest("the model has no end-of-sequence token, by which a structured answer ends")
        if len(grammar) > MAX_GRAMMAR_CHARACTERS:
            raise InvalidRequest(
                f"{len(grammar)} characters are too many for a grammar; at most {MAX_GRAMMAR_CHARACTERS} are allowed"
            )
        compiled = self._compiled(grammar)
        if compiled.matcher.is_error():
            raise InvalidRequest(f"it is no valid grammar: {_summary(compiled.matcher.get_error())}")
        if compiled.seconds > MAX_COMPILE_SECONDS:
            raise InvalidRequest(
                f"it takes {compiled.seconds:.1f} s to compile; at most {MAX_COMPILE_SECONDS:g} are allowed"
            )

    def special_token(self, text: str) -> int | None:
        """Return the id of a text that is one special token, which no string of a grammar matches; None for another."""
        with self._reading:
            tokenizer = self._tokenizer
        ids = tokenizer.tokenize_str(text, parse_special=True)
        return ids[0] if len(ids) == 1 and tokenizer.is_special_token(ids[0]) else None

    def prepare(self, grammar: str) -> None:
        """Compile a grammar in the thread of the caller, and read the tokenizer where none was compiled before."""
        self._compiled(grammar)

    def begin(self, grammar: str, answer: Sequence[int] = ()) -> AnswerGrammar:
        """Return the grammar of an answer that has these tokens already. Nothing is computed yet."""
        return AnswerGrammar(self, grammar, answer)

    def matcher(self, grammar: str) -> LLMatcher:
        """Return a matcher at the beginning of an answer."""
        return self._compiled(grammar).matcher.deep_copy()

    @cached_property
    def thread(self) -> ThreadPoolExecutor:
        """Thread in which masks are made: llguidance computes without Python's lock."""
        return ThreadPoolExecutor(1, thread_name_prefix="grammar")

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        try:
            return LLTokenizer(self._read_tokenizer(), n_vocab=self.vocab_size, eos_token=self._end_token_ids)
        except ValueError as error:
            raise InvalidRequest(f"the tokenizer of this model does not suit llguidance: {error}") from error

    def _compile(self, grammar: str) -> Compiled:
        with self._reading:
            tokenizer = self._tokenizer
        began = time.perf_counter()
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_limits())
        if not matcher.is_error():
            matcher.compute_bitmask()
        return Compiled(matcher, time.perf_counter() - began)


class AnswerGrammar:
    """Grammar of one answer that grows: `push` each token, `prepare` the next mask, take it with `mask`."""

    def __init__(self, grammars: Grammars, grammar: str, answer: Sequence[int]) -> None:
        self._grammars = grammars
        self._grammar = grammar
        self._unread = list(answer)
        self._matcher: LLMatcher | None = None
        self._mask: Future[Mask | None] | None = None

    def push(self, token_id: int) -> None:
        """Append a token to the answer. Costs nothing until a mask is asked for: most ranks of a ring need none."""
        self._unread.append(token_id)
        self._mask = None

    def prepare(self) -> None:
        """Begin to make the next mask in the thread beside."""
        if self._mask is None:
            unread, self._unread = self._unread, []
            self._mask = self._grammars.thread.submit(self._next_mask, unread)

    def mask(self) -> Mask | None:
        """Return which tokens may come next, bool[V]; None where llguidance finds the grammar too complex from here."""
        self.prepare()
        assert self._mask is not None, "prepared"
        try:
            return self._mask.result(MASK_SECONDS)
        except (TimeoutError, OSError, ValueError, RingserveError) as error:  # the gateway had no such trouble
            log.error("no mask can be made: %s", error)
            return None

    def _next_mask(self, unread: list[int]) -> Mask | None:
        """Read tokens and return the mask after them; in the thread beside, one call of an answer after another."""
        if self._matcher is None:
            self._matcher = self._grammars.matcher(self._grammar)
        matcher = self._matcher
        matcher.consume_tokens(unread)
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            log.warning("an answer leaves its grammar: %s", _summary(matcher.get_error()))
            return None
        return np.unpackbits(bits, count=self._grammars.vocab_size, bitorder="little").view(np.bool_)


def _summary(error: str) -> str:
    """Return the first line of llguidance's error, and what a parser of patterns says below the pattern."""
    first, *others = [line.strip() for line in error.splitlines()] or [""]
    reason = next((line for line in others if line.startswith("error: ")), "")
    return f"{first} {reason}".strip()[:300]
