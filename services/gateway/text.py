"""Text and tokens: tokenizer, chat template, text that grows by whole characters, and stop strings.

Both gateway servers use it: `TextCodec` encodes prompts and keeps no state of a call, `AnswerText` decodes one answer.
"""

from __future__ import annotations

import inspect
import re
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ringserve.cp_core.errors import InvalidRequest, ModelRefused
from ringserve.workers.model.tokenizer import load_tokenizer, plain_backend, tokenizer_json
from ringserve.workers.protocol.steps import TokenIds

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CONTEXT_TOKENS = 6
"""Earlier tokens decoded before new ones: some tokenizers spell a token differently at the beginning of a text."""
WINDOW_TOKENS = 24
"""Tokens in `IncrementalText`'s window before it is shortened: each shortening decodes it once more."""
STAND_IN = "an answer that the conversation has"
"""Stand-in text for an answer whose text is unknown, when a chat template writes the messages after it."""
MAX_PENDING = 64
"""Trailing replacement characters held back because later tokens may complete them.

An incomplete character shows as 1 to 3 of them; a byte-fallback tokenizer's run of bytes shows as more.
"""


def _bytes_of_signs() -> dict[str, int]:
    """Return the alphabet of byte-level tokenizers: printable Latin-1 bytes stay, the others follow from 256."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTES_OF_SIGNS = _bytes_of_signs()


class TextCodec:
    """Tokenizer of one model directory. It loads nothing from the network."""

    def __init__(self, model_path: Path) -> None:
        """Load the tokenizer. Raises ModelRefused."""
        try:
            self._tokenizer: Any = load_tokenizer(model_path)
        except (OSError, ValueError, KeyError) as error:
            raise ModelRefused(f"the tokenizer of {model_path} cannot be loaded: {error}") from error
        self._backend = plain_backend(self._tokenizer)
        # A token's name is never shorter than its text: byte-level names have one character per byte, other names are
        # the text.
        self.max_characters = max((len(token) for token in self._tokenizer.get_vocab()), default=1)
        plain, whole = (self.encode("a", adds_special=adds).tolist() for adds in (False, True))
        self.num_special = next((n for n in range(len(whole)) if whole[n : n + len(plain)] == plain), 0)
        """Special tokens that `encode` puts before a text: 1 if the tokenizer adds BOS."""
        end = self._tokenizer.eos_token_id
        self.chat_ends: tuple[int, ...] = () if end is None else (end,)
        """Tokens that end a chat answer, besides the model's own.

        Chat fine-tunes often change the tokenizer's EOS (to `<|im_end|>`) and leave config.json unchanged.
        """

    def encode(self, text: str, *, adds_special: bool = True) -> TokenIds:
        """Return a text's token ids, by default with the special tokens that the tokenizer adds (such as BOS)."""
        return np.asarray(self._tokenizer(text, add_special_tokens=adds_special)["input_ids"], dtype=np.int64)

    def encode_chat(
        self,
        messages: Sequence[tuple[str, str]],
        *,
        opens_answer: bool = True,
        values: Mapping[str, Any] | None = None,
    ) -> TokenIds:
        """Return the token ids of (role, content) messages, as the model's chat template writes them.

        `opens_answer` adds the tokens that begin the assistant's answer. `values` are the client's values for template
        variables. Raises InvalidRequest.
        """
        conversation = [{"role": role, "content": content} for role, content in messages]
        return self.encode_template(conversation, (), opens_answer=opens_answer, values=values)

    def encode_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        opens_answer: bool = True,
        continues_last: bool = False,
        values: Mapping[str, Any] | None = None,
    ) -> TokenIds:
        """Return the token ids of messages in transformers' form, with calls and tools. Raises InvalidRequest.

        `continues_last` leaves the last message open, and the answer continues it.
        """
        ids = self._apply_template(
            messages,
            tools,
            values or {},
            add_generation_prompt=opens_answer,
            continue_final_message=continues_last,
            tokenize=True,
        )
        return np.asarray(ids, dtype=np.int64)

    def encode_following(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        last_token: int,
        ends: Collection[int],
        values: Mapping[str, Any] | None = None,
    ) -> TokenIds:
        """Return the token ids of messages that follow an answer whose text is unknown.

        The template writes a stand-in for the answer and then the messages; the text after the stand-in is encoded. If
        the template closes the answer by one of the tokens `ends`, and the answer's `last_token` is one of them too,
        the closing token is left out. Raises InvalidRequest.
        """
        call = next((each["tool_call_id"] for each in messages[:1] if "tool_call_id" in each), None)
        answer: dict[str, Any] = {"role": "assistant", "content": STAND_IN}
        if call is not None:  # templates expect a call before its output
            made = {"id": call, "type": "function", "function": {"name": STAND_IN, "arguments": {}}}
            answer = {"role": "assistant", "content": "", "tool_calls": [made]}
        before = [{"role": "user", "content": "x"}, answer]
        whole = str(
            self._apply_template([*before, *messages], tools, values or {}, add_generation_prompt=True, tokenize=False)
        )
        rest = whole.rpartition(STAND_IN)[2]
        found = [(rest.find(sign), sign) for sign in (self.decode_all([end]) for end in ends) if sign in rest]
        if not found and call is not None:  # nothing marks the end of the stand-in call
            raise InvalidRequest(
                "previous_response_id: the model's chat template ends no tool call with an end-of-sequence token; send "
                "the history in input"
            )
        place, sign = min(found, default=(0, ""))
        return self.encode(rest[place + (len(sign) if last_token in ends else 0) :], adds_special=False)

    def _apply_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        values: Mapping[str, Any],
        **settings: bool,
    ) -> Any:
        """Apply the chat template, with settings of transformers. Raises InvalidRequest."""
        # transformers takes its own settings as keywords too: a client could pass a template, which is a program.
        reserved = {"messages", *inspect.signature(self._tokenizer.apply_chat_template).parameters}
        for name in values.keys() & reserved:
            raise InvalidRequest(
                f"chat_template_kwargs: {name!r} is not allowed; give variables of the model's template"
            )
        if not self._tokenizer.chat_template:
            raise InvalidRequest("input.chat: this model has no chat template; send text or token ids")
        given = {**values, **({"tools": list(tools)} if tools else {})}
        try:
            return self._tokenizer.apply_chat_template(list(messages), return_dict=False, **settings, **given)
        except Exception as error:  # a template is a program and may raise any error
            raise InvalidRequest(f"input.chat: the model's chat template refuses these messages: {error}") from error

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def chat_template(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """Return the chat template's source for these tools; empty if the model has no template."""
        if not self._tokenizer.chat_template:
            return ""
        return str(self._tokenizer.get_chat_template(tools=list(tools)))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids. Spaces are not cleaned up, since that would change text already sent."""
        return self._text(token_ids, shows_special=False)

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        return self._text(token_ids, shows_special=True)

    def _text(self, token_ids: Sequence[int], *, shows_special: bool) -> str:
        if self._backend is not None:
            return str(self._backend.decode(list(token_ids), skip_special_tokens=not shows_special))
        return str(
            self._tokenizer.decode(
                list(token_ids), skip_special_tokens=not shows_special, clean_up_tokenization_spaces=False
            )
        )

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for, also if they are a part of a character.

        Example: three tokens of a byte-level tokenizer are the bytes E4, BD and A0, together "你".
        """
        text = self.decode_all([token_id])
        if REPLACEMENT not in text:
            return text.encode()
        (name,) = self.names([token_id])
        if (byte := re.fullmatch(r"<0x([0-9A-F]{2})>", name)) is not None:
            return bytes([int(byte[1], 16)])
        if all(sign in BYTES_OF_SIGNS for sign in name):
            return bytes(BYTES_OF_SIGNS[sign] for sign in name)
        return text.encode()

    def to_json(self) -> str:
        """Return the tokenizer as JSON. Raises InvalidRequest if it has no fast form."""
        return tokenizer_json(self._tokenizer)

    def describe(self) -> dict[str, Any]:
        """Return the class, the special tokens and the chat template, by transformers' names for them."""
        named = {name: str(token) for name, token in self._tokenizer.special_tokens_map.items() if token}
        return {
            "tokenizer_class": type(self._tokenizer).__name__,
            "chat_template": self._tokenizer.chat_template or None,
            **named,
        }

    def names(self, token_ids: Sequence[int]) -> list[str]:
        """Return the tokenizer's own token names; "" for a token without one."""
        return [name or "" for name in self._tokenizer.convert_ids_to_tokens(list(token_ids))]


class IncrementalText:
    """Text of a growing answer. `push` returns new whole characters; an incomplete character is held back.

    Tokens are decoded in a window that begins between two characters: a byte-fallback tokenizer shows a whole run of
    bytes as replacement characters if the window begins or ends inside a character.
    """

    def __init__(
        self,
        codec: TextCodec,
        *,
        hides_special: bool = True,
        hidden: Collection[int] = (),
        prompt: Sequence[int] = (),
    ) -> None:
        """Hide the text of `hidden` tokens. The answer follows `prompt`; its last CONTEXT_TOKENS tokens are enough.

        Example: SentencePiece's "▁paris" is " paris" after a prompt, and "paris" at the beginning of a text.
        """
        self._decode = codec.decode if hides_special else codec.decode_all
        self._hidden = hidden
        before = self._decode(prompt[-CONTEXT_TOKENS:]) if prompt else ""
        # A prompt of token ids may end inside a character; it then gives no context.
        self._ids = [] if before.endswith(REPLACEMENT) else list(prompt[-CONTEXT_TOKENS:])
        self._context = 0  # start of the window; ids before it are not decoded again
        self._boundaries: deque[int] = deque()  # indices between two characters, where the window may begin
        self._emitted = before if self._ids else ""  # part of the text of ids[context:] already returned
        self._sent: list[str] = []

    @property
    def text(self) -> str:
        """Text that is certain so far."""
        return "".join(self._sent)

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens, and return the whole characters that they complete."""
        self._ids.extend(token_id for token_id in token_ids if token_id not in self._hidden)
        shown = self._decode(self._ids[self._context :])
        certain = shown.rstrip(REPLACEMENT)
        if certain == shown:
            new = self._emit(shown)
            self._move_window()
        elif len(shown) - len(certain) > MAX_PENDING:
            new = self._emit(shown.removesuffix(REPLACEMENT))
            self._drop_bytes()
        else:
            new = self._emit(certain)
        return new

    def finish(self) -> str:
        """Return the rest of the text. An incomplete character becomes replacement characters."""
        return self._emit(self._decode(self._ids[self._context :]))

    def _emit(self, certain: str) -> str:
        new = certain[len(self._emitted) :] if certain.startswith(self._emitted) else ""
        self._emitted += new
        self._sent.append(new)
        return new

    def _move_window(self) -> None:
        """Shorten a long window: move its start to the last character boundary that leaves enough context."""
        self._boundaries.append(len(self._ids))
        if len(self._ids) - self._context < WINDOW_TOKENS:
            return
        before = self._context
        while self._boundaries[0] <= len(self._ids) - CONTEXT_TOKENS:
            self._context = self._boundaries.popleft()
        if self._context != before:
            self._emitted = self._decode(self._ids[self._context :])

    def _drop_bytes(self) -> None:
        """Move the window past bytes that are not text, so that they are not decoded again with later tokens."""
        self._boundaries.clear()
        self._context = len(self._ids) - CONTEXT_TOKENS
        self._emitted = self._decode(self._ids[self._context :]).removesuffix(REPLACEMENT)


@dataclass(frozen=True, kw_only=True, slots=True)
class StopRule:
    """Stop strings: the first complete one ends an answer, but not within its first `min_tokens` tokens.

    If several end at the same character, the longest counts. The outcome does not depend on how tokens cut the text. If
    `is_shown`, the stop string stays in the text; if `shows_special`, special tokens do.
    """

    strings: tuple[str, ...] = ()
    is_shown: bool = False
    min_tokens: int = 0
    shows_special: bool = False

    def make_text(self, codec: TextCodec, stop_token_ids: Sequence[int], prompt: Sequence[int]) -> IncrementalText:
        """Return an empty answer text. Stop tokens are hidden even if special tokens are shown."""
        hidden = frozenset(stop_token_ids) if self.shows_special else ()
        return IncrementalText(codec, hides_special=not self.shows_special, hidden=hidden, prompt=prompt)


class AnswerText:
    """Text of an answer up to its first stop string, which `matched` names.

    `push` adds a token and returns text that is certain; text that may begin a stop string is held back.
    """

    def __init__(self, text: IncrementalText, rule: StopRule | None = None) -> None:
        self._text = text
        self._rule = rule or StopRule()
        self._num_tokens = 0
        self._held = ""
        self._sent: list[str] = []
        self.matched: str | None = None

    @property
    def text(self) -> str:
        """Text that is certain so far."""
        return "".join(self._sent)

    def push_all(self, token_ids: Sequence[int], num_known: int = 0) -> tuple[int, str]:
        """Add tokens up to the token that completes a stop string.

        Return the number of added tokens, and the certain text after the first `num_known` of them.
        """
        if not self._rule.strings:  # decode tokens together: decoding is most of their cost
            if num_known:
                self._send(self._text.push(token_ids[:num_known]))
            self._num_tokens += len(token_ids)
            return len(token_ids), self._send(self._text.push(token_ids[num_known:]))
        texts: list[str] = []
        for token_id in token_ids:
            texts.append(self.push(token_id))
            if self.matched is not None:
                break
        return len(texts), "".join(texts[num_known:])

    def push(self, token_id: int) -> str:
        """Add a token to an answer that has not ended, and return the text that is certain."""
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
        num_held = self._length_to_hold(pending)
        self._held = pending[len(pending) - num_held :]
        return self._send(pending[: len(pending) - num_held])

    def finish(self) -> str:
        """Return the held text and any incomplete character, unless a stop string ended the answer."""
        if self.matched is not None:
            return ""
        rest, self._held = self._held + self._text.finish(), ""
        return self._send(rest)

    def _send(self, text: str) -> str:
        self._sent.append(text)  # joined once at the end: adding strings would be quadratic
        return text

    def _first_match(self, pending: str) -> tuple[int, int] | None:
        """Return (begin, end) in `pending` of the stop string that the new text completes first, or None."""
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
        """Return the length of the longest suffix of `pending` that is a prefix of a stop string."""
        longest = max(len(stop) for stop in self._rule.strings) - 1
        for length in range(min(longest, len(pending)), 0, -1):
            if pending.endswith(tuple(stop[:length] for stop in self._rule.strings if len(stop) > length)):
                return length
        return 0
