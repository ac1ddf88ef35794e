"""Text and tokens: the model's tokenizer and chat template, text that grows by whole characters, and stop strings.

Used by both servers of the gateway: `TextCodec` encodes prompts, `AnswerText` decodes one answer.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ringserve.cp_core.errors import InvalidRequest, ModelRefused
from ringserve.workers.model.tokenizer import load_tokenizer, plain_backend, tokenizer_json
from ringserve.workers.protocol.prefill_steps import TokenIds

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CONTEXT_TOKENS = 6
"""Tokens decoded again before new ones: some tokenizers spell a token differently at the beginning of a text."""
WINDOW_TOKENS = 24
"""Tokens from which on the window moves: each move decodes once more."""
STAND_IN = "an answer that the conversation has"
"""Text of an answer of which only the tokens are known, when a chat template writes the messages behind it."""
MAX_PENDING = 64
"""Trailing replacement characters held back because later tokens may complete them.

An incomplete character shows as 1 to 3, a run of bytes of a byte-fallback tokenizer as more.
"""


class TextCodec:
    """Tokenizer of one model directory. Loads nothing from the network."""

    def __init__(self, model_path: Path) -> None:
        """Load the tokenizer. Raises ModelRefused."""
        try:
            self._tokenizer: Any = load_tokenizer(model_path)
        except (OSError, ValueError, KeyError) as error:
            raise ModelRefused(f"the tokenizer of {model_path} cannot be loaded: {error}") from error
        self._backend = plain_backend(self._tokenizer)
        # A byte-level token has a character a byte, others their own characters: no token stands for more.
        self.max_characters = max((len(token) for token in self._tokenizer.get_vocab()), default=1)
        plain, whole = (self.encode("a", adds_special=adds).tolist() for adds in (False, True))
        self.num_special = next((n for n in range(len(whole)) if whole[n : n + len(plain)] == plain), 0)
        """Special tokens that `encode` puts before a text: 1 if the tokenizer adds BOS."""
        end = self._tokenizer.eos_token_id
        self.chat_ends: tuple[int, ...] = () if end is None else (end,)
        """Tokens that end an answer in a chat, beside the model's own.

        A chat fine-tune often changes the tokenizer's EOS (`<|im_end|>`) and leaves config.json as it was.
        """

    def encode(self, text: str, *, adds_special: bool = True) -> TokenIds:
        """Return the token ids of a text, with the special tokens that the tokenizer adds."""
        return np.asarray(self._tokenizer(text, add_special_tokens=adds_special)["input_ids"], dtype=np.int64)

    def encode_chat(
        self,
        messages: Sequence[tuple[str, str]],
        *,
        opens_answer: bool = True,
        values: Mapping[str, Any] | None = None,
    ) -> TokenIds:
        """Return the token ids of (role, content) messages by the model's chat template.

        `opens_answer` adds the tokens that begin the assistant's answer. `values` are the client's own for variables of
        the template. Raises InvalidRequest.
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
        """Return the token ids of messages as transformers takes them, with calls and tools. Raises InvalidRequest.

        `continues_last` leaves the last message open, and the answer goes on in it.
        """
        ids = self._applied(
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
        """Return the token ids of messages that follow an answer, of which the conversation's tokens are known alone.

        The template writes the messages behind a stand-in for the answer, and what it writes after that is returned.
        Where the template closes the answer by one of the tokens `ends`, and one of them is the answer's `last_token`
        already, it is left out. Raises InvalidRequest.
        """
        call = next((each["tool_call_id"] for each in messages[:1] if "tool_call_id" in each), None)
        answer: dict[str, Any] = {"role": "assistant", "content": STAND_IN}
        if call is not None:  # templates want a call before its output
            made = {"id": call, "type": "function", "function": {"name": STAND_IN, "arguments": {}}}
            answer = {"role": "assistant", "content": "", "tool_calls": [made]}
        before = [{"role": "user", "content": "x"}, answer]
        whole = str(
            self._applied([*before, *messages], tools, values or {}, add_generation_prompt=True, tokenize=False)
        )
        rest = whole.rpartition(STAND_IN)[2]
        found = [(rest.find(sign), sign) for sign in (self.decode_all([end]) for end in ends) if sign in rest]
        if not found and call is not None:  # the rest of the call has no end
            raise InvalidRequest(
                "previous_response_id: the model's chat template closes no call by an end-of-sequence token; send the "
                "history in input"
            )
        place, sign = min(found, default=(0, ""))
        return self.encode(rest[place + (len(sign) if last_token in ends else 0) :], adds_special=False)

    def _applied(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        values: Mapping[str, Any],
        **settings: bool,
    ) -> Any:
        """Apply the chat template, with settings of transformers. Raises InvalidRequest."""
        # transformers' own settings have the same place: a client could bring a template, which is a program.
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

    def chat_template(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """Return the chat template for these tools; empty where the model has none."""
        if not self._tokenizer.chat_template:
            return ""
        return str(self._tokenizer.get_chat_template(tools=list(tools)))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, without the clean-up of spaces: it would change text that was sent before."""
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

    def to_json(self) -> str:
        """Return the tokenizer as JSON. Raises InvalidRequest for one that has no fast form."""
        return tokenizer_json(self._tokenizer)

    def names(self, token_ids: Sequence[int]) -> list[str]:
        """Return the tokenizer's own names of tokens; empty where it has none."""
        return [name or "" for name in self._tokenizer.convert_ids_to_tokens(list(token_ids))]


class IncrementalText:
    """Text of a growing answer. `push` returns new text that is certain; an incomplete character is held.

    Tokens are decoded in a window that begins between two characters: a byte-fallback tokenizer shows a whole run of
    bytes as replacement characters if the window begins or ends inside one.
    """

    def __init__(
        self,
        codec: TextCodec,
        *,
        hides_special: bool = True,
        hidden: Collection[int] = (),
        prompt: Sequence[int] = (),
    ) -> None:
        """`hidden` tokens have no text here. The answer follows `prompt`, of which the last tokens are enough.

        Example: SentencePiece's "▁paris" is " paris" after a prompt, and "paris" at the beginning of a text.
        """
        self._decode = codec.decode if hides_special else codec.decode_all
        self._hidden = hidden
        before = self._decode(prompt[-CONTEXT_TOKENS:]) if prompt else ""
        # A prompt of token ids may end inside a character: it then gives no context.
        self._ids = [] if before.endswith(REPLACEMENT) else list(prompt[-CONTEXT_TOKENS:])
        self._context = 0  # index where the window begins: ids before it are not decoded again
        self._whole: deque[int] = deque()  # ends of ids between two characters, where the window may begin
        self._emitted = before if self._ids else ""  # sent part of the text of ids[context:]
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
        """Return the rest: an incomplete character is shown as replacement characters."""
        return self._emit(self._decode(self._ids[self._context :]))

    def _emit(self, certain: str) -> str:
        new = certain[len(self._emitted) :] if certain.startswith(self._emitted) else ""
        self._emitted += new
        self._sent.append(new)
        return new

    def _move_window(self) -> None:
        """Move a window that has become long to the last place between characters that leaves enough context."""
        self._whole.append(len(self._ids))
        if len(self._ids) - self._context < WINDOW_TOKENS:
            return
        before = self._context
        while self._whole[0] <= len(self._ids) - CONTEXT_TOKENS:
            self._context = self._whole.popleft()
        if self._context != before:
            self._emitted = self._decode(self._ids[self._context :])

    def _drop_bytes(self) -> None:
        """Move the window past many bytes that are no text, so that later tokens do not decode all of them again."""
        self._whole.clear()
        self._context = len(self._ids) - CONTEXT_TOKENS
        self._emitted = self._decode(self._ids[self._context :]).removesuffix(REPLACEMENT)


@dataclass(frozen=True, kw_only=True, slots=True)
class StopRule:
    """Stop strings, which end an answer where one is complete, but not within its first `min_tokens` tokens.

    The string that is complete first counts; of strings that end together, the longest. The outcome does not depend on
    how tokens cut the text. With `is_shown` the string stays part of the text, and with `shows_special` the text has
    special tokens.
    """

    strings: tuple[str, ...] = ()
    is_shown: bool = False
    min_tokens: int = 0
    shows_special: bool = False

    def text_of(self, codec: TextCodec, stop_token_ids: Sequence[int], prompt: Sequence[int]) -> IncrementalText:
        """Return the text of an answer that one of these tokens may end; it is not shown among special tokens."""
        hidden = frozenset(stop_token_ids) if self.shows_special else ()
        return IncrementalText(codec, hides_special=not self.shows_special, hidden=hidden, prompt=prompt)


class AnswerText:
    """Text of an answer up to its first stop string, which `matched` names.

    `push` takes a token and returns text that is certain to be sent; text that may begin a stop string is held.
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
        """Add tokens up to the one that completes a stop string.

        Return their number, and the text that is certain since the first `num_known` of them.
        """
        if not self._rule.strings:  # tokens that came together are decoded together, which is the most of their cost
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
        """Return the rest of an answer that no stop string ended: the held text and an incomplete character."""
        if self.matched is not None:
            return ""
        rest, self._held = self._held + self._text.finish(), ""
        return self._send(rest)

    def _send(self, text: str) -> str:
        self._sent.append(text)  # joined once, since the text of a long answer is long
        return text

    def _first_match(self, pending: str) -> tuple[int, int] | None:
        """Return (begin, end) in `pending` of the stop string that the new part completes first, or None."""
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
        """Return the length of the longest end of `pending` that begins a stop string."""
        longest = max(len(stop) for stop in self._rule.strings) - 1
        for length in range(min(longest, len(pending)), 0, -1):
            if pending.endswith(tuple(stop[:length] for stop in self._rule.strings if len(stop) > length)):
                return length
        return 0
