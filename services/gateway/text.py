"""Between text and tokens: the model's own tokenizer and chat template, and text that grows by whole characters."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cp_core.errors import InvalidRequest, ModelRefused
from workers.model.info import read_json
from workers.protocol.prefill_steps import TokenIds

GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CONTEXT_TOKENS = 6
"""Tokens decoded again before new ones: some tokenizers spell a token differently at the beginning of a text."""
MAX_PENDING = 64
"""Replacement characters at the end that may still become something else; an unfinished character shows as 1 to 3."""


class TextCodec:
    """Tokenizer of one model directory. Loads nothing from the network."""

    def __init__(self, model_path: Path) -> None:
        """Raises ModelRefused."""
        try:
            self._tokenizer: Any = _load_tokenizer(model_path)
        except (OSError, ValueError, KeyError) as error:
            raise ModelRefused(f"the tokenizer of {model_path} cannot be loaded: {error}") from error

    def encode(self, text: str) -> TokenIds:
        """Token ids of a text, with the special tokens that the tokenizer adds by itself."""
        return np.asarray(self._tokenizer(text)["input_ids"], dtype=np.int64)

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> TokenIds:
        """Token ids of (role, content) messages by the model's chat template, ready for the assistant's answer."""
        if not self._tokenizer.chat_template:
            raise InvalidRequest("input.chat: this model has no chat template; send text or token ids")
        conversation = [{"role": role, "content": content} for role, content in messages]
        try:
            ids = self._tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
        except Exception as error:  # a template is a program of the model's maker and raises what it likes
            raise InvalidRequest(f"input.chat: the model's chat template refuses these messages: {error}") from error
        return np.asarray(ids, dtype=np.int64)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Without the clean-up of spaces that some tokenizers ask for: it changes text that was sent already."""
        return str(
            self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )


class IncrementalText:
    """Text of a growing answer. `push` returns what is new and certain; half a character waits.

    Tokens are decoded in a window that begins between two characters: a byte-fallback tokenizer shows a whole run of
    bytes as replacement characters if it begins or ends inside one.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._ids: list[int] = []
        self._context = 0  # ids before here are not decoded any more
        self._whole: deque[int] = deque()  # after so many ids the text was whole; places the window may begin at
        self._emitted = ""  # of the text of ids[context:]
        self.text = ""

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; returns the whole characters that they complete."""
        self._ids.extend(token_ids)
        shown = self._codec.decode(self._ids[self._context :])
        certain = shown.rstrip(REPLACEMENT)
        if certain == shown:
            new = self._emit(shown)
            self._move_on()
        elif len(shown) - len(certain) > MAX_PENDING:
            new = self._emit(shown.removesuffix(REPLACEMENT))
            self._give_up()
        else:
            new = self._emit(certain)
        return new

    def finish(self) -> str:
        """The rest: what never became a whole character is shown as replacement characters."""
        return self._emit(self._codec.decode(self._ids[self._context :]))

    def _emit(self, certain: str) -> str:
        new = certain[len(self._emitted) :] if certain.startswith(self._emitted) else ""
        self._emitted += new
        self.text += new
        return new

    def _move_on(self) -> None:
        """Let the window begin at the last whole place that leaves enough context."""
        self._whole.append(len(self._ids))
        before = self._context
        while self._whole[0] <= len(self._ids) - CONTEXT_TOKENS:
            self._context = self._whole.popleft()
        if self._context != before:
            self._emitted = self._codec.decode(self._ids[self._context :])

    def _give_up(self) -> None:
        """So many bytes that are no text: begin anywhere, or every token would decode all of them again."""
        self._whole.clear()
        self._context = len(self._ids) - CONTEXT_TOKENS
        self._emitted = self._codec.decode(self._ids[self._context :]).removesuffix(REPLACEMENT)


def _load_tokenizer(model_path: Path) -> Any:
    """Return the tokenizer that transformers' AutoTokenizer would take for a model directory.

    AutoTokenizer imports torch: 250 MB and two seconds of a gateway's start. For a Llama directory whose
    `tokenizer_class` is the generic one it ends at that class, which is taken here at once.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class StopRule:
    """Strings that end an answer where they are complete, but within its first `min_tokens` tokens.

    Of several the one that is complete first counts, of those that end together the longest: so it does not matter how
    the text came to be cut into tokens. With `is_shown` the string stays part of the text.
    """

    strings: tuple[str, ...] = ()
    is_shown: bool = False
    min_tokens: int = 0


class AnswerText:
    """Takes tokens one by one; `push` returns text that is certain to be sent. `matched` is what ended it."""

    def __init__(self, text: IncrementalText, rule: StopRule | None = None) -> None:
        self._text = text
        self._rule = rule or StopRule()
        self._num_tokens = 0
        self._held = ""
        self.text = ""
        self.matched: str | None = None

    def push(self, token_id: int) -> str:
        """Add a token to an answer that has not ended."""
        assert self.matched is None, "nothing follows a stop string"
        self._num_tokens += 1
        new = self._text.push([token_id])
        if not self._rule.strings:
            return self._send(new)
        pending = self._held + new
        if self._num_tokens > self._rule.min_tokens:
            ends = self._first_match(pending)
            if ends is not None:
                begin, end = ends
                self.matched, self._held = pending[begin:end], ""
                return self._send(pending[: end if self._rule.is_shown else begin])
        kept = self._length_to_hold(pending)
        self._held = pending[len(pending) - kept :]
        return self._send(pending[: len(pending) - kept])

    def finish(self) -> str:
        """The rest of an answer that no stop string ended: what was held, and what never became a whole character."""
        if self.matched is not None:
            return ""
        rest, self._held = self._held + self._text.finish(), ""
        return self._send(rest)

    def _send(self, text: str) -> str:
        self.text += text
        return text

    def _first_match(self, pending: str) -> tuple[int, int] | None:
        """(begin, end) in `pending` of the stop string that its new part, after what was held, completes first."""
        found = []
        for stop in self._rule.strings:
            begin = pending.find(stop, max(0, len(self._held) - len(stop) + 1))
            if begin >= 0:
                found.append((begin + len(stop), begin))
        if not found:
            return None
        end, begin = min(found)
        return begin, end

    def _length_to_hold(self, pending: str) -> int:
        """Of the longest end of `pending` that a stop string begins with."""
        longest = max(len(stop) for stop in self._rule.strings) - 1
        for length in range(min(longest, len(pending)), 0, -1):
            if pending.endswith(tuple(stop[:length] for stop in self._rule.strings if len(stop) > length)):
                return length
        return 0
