"""Translation of a turn's responses to OpenAI's JSON.

Values that OpenAI has no name for are in one extra field, `ringserve`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ringserve.cp_core.errors import Unavailable
from ringserve.mapping import name_of
from ringserve.services.gateway.openai.calls import CallForm, CallReader, CallStart, ReadCall, Said
from ringserve.services.gateway.openai.requests import HttpTurn
from ringserve.services.gateway.text import REPLACEMENT
from ringserve.services.rpc.answer import message_dict
from ringserve.services.rpc.wire.contract import to_message
from ringserve.v1 import inference_pb2
from ringserve.views import ConversationInfo

Json = dict[str, Any]
Decode = Callable[[Sequence[int]], str]
"""Function that returns the text of token ids. Half a character is shown as a replacement character."""


Logprobs = Sequence[inference_pb2.TokenLogprobs]


class ChatShape:
    """Shape of chat completions. Every event of a stream carries the same id."""

    stream_object = "chat.completion.chunk"
    whole_object = "chat.completion"
    id_prefix = "chatcmpl"

    def opening(self, index: int) -> Json:
        return self._choice(index, {"role": "assistant", "content": ""}, None, None)

    def piece(self, index: int, text: str, logprobs: Json | None) -> Json:
        return self._choice(index, {"content": text}, logprobs, None)

    def said(self, index: int, said: Said, logprobs: Json | None) -> Json:
        """Return the choice of an event for a part of an answer that may call tools."""
        if isinstance(said, str):
            return self.piece(index, said, logprobs)
        call: Json = {"index": said.place}
        if isinstance(said, CallStart):
            call |= {"id": said.call_id, "type": "function", "function": {"name": said.name, "arguments": ""}}
        else:
            call["function"] = {"arguments": said.text}
        return self._choice(index, {"tool_calls": [call]}, logprobs, None)

    def closing(self, index: int, finish_reason: str) -> Json:
        return self._choice(index, {}, None, finish_reason)

    def whole(self, index: int, text: str, logprobs: Json | None, finish_reason: str) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}

    def with_calls(self, index: int, text: str, calls: Sequence[ReadCall], logprobs: Json | None, reason: str) -> Json:
        """Return the whole choice of an answer that may call tools."""
        choice = self.whole(index, text, logprobs, reason)
        if calls:
            made = [
                {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
            choice["message"] |= {"content": text or None, "tool_calls": made}
        return choice

    def logprobs(self, found: Logprobs, decode: Decode, offset: int) -> Json:
        return chat_logprobs(found, decode)

    @staticmethod
    def _choice(index: int, delta: Json, logprobs: Json | None, finish_reason: str | None) -> Json:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


class CompletionShape:
    """Shape of text completions, with the same methods."""

    stream_object = whole_object = "text_completion"
    id_prefix = "cmpl"

    def opening(self, index: int) -> Json:
        return self.whole(index, "", None, None)

    def piece(self, index: int, text: str, logprobs: Json | None) -> Json:
        return self.whole(index, text, logprobs, None)

    def closing(self, index: int, finish_reason: str) -> Json:
        return self.whole(index, "", None, finish_reason)

    def whole(self, index: int, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def logprobs(self, found: Logprobs, decode: Decode, offset: int) -> Json:
        return completion_logprobs(found, decode, offset)


Shape = ChatShape | CompletionShape


@dataclass(frozen=True, kw_only=True)
class Echo:
    """Prompt that comes back before its answer. `first` is its first token, which has no log-probability."""

    text: str
    first: int


class TurnAnswer:
    """Answers of a request, whole or as events of a stream: `start` once, then `chunk`s and a `complete` of each.

    `decode` returns the text of token ids, for log-probabilities.
    """

    def __init__(
        self,
        shape: Shape,
        model_name: str,
        decode: Decode,
        turn: HttpTurn,
        echo: Echo | None = None,
        form: CallForm | None = None,
    ) -> None:
        """Read calls of tools from the text where they have a `form`."""
        self._shape = shape
        self._form = form
        self._readers: dict[int, CallReader] = {}
        self._echo = echo
        self._decode = decode
        self._include_usage = turn.include_usage
        self._counts_each = turn.counts_each
        self._has_token_ids = turn.has_token_ids
        self._num_answers = max(turn.request.sampling_params.n, 1)
        self._has_logprobs = turn.request.sampling_params.HasField("logprobs")
        self._head: Json = {"created": int(time.time()), "model": model_name}
        self._start = inference_pb2.GenerateStart()
        self._sent_characters: Counter[int] = Counter()
        self._completes: list[inference_pb2.GenerateComplete] = []
        self._held: list[Json] = []

    def events(self, response: inference_pb2.GenerateResponse) -> list[Json]:
        """Return the events that a stream sends for one response.

        Those of the start are sent with the first token, as by vLLM: clients take the first event for it.
        """
        if response.HasField("start"):
            self._held = self._openings(response.start)
            return []
        held, self._held = self._held, []
        return held + self._events(response)

    def _openings(self, start: inference_pb2.GenerateStart) -> list[Json]:
        """Return one event for each answer, the first with the plan, and the prompt if it comes back."""
        self._start = start
        extra: Json = {"ringserve": self._opening_extra()}
        openings = [
            self._event(self._shape.opening(index)) | (extra if index == 0 else {})
            for index in range(self._num_answers)
        ]
        if self._echo is not None:
            openings += [
                self._event(self._shape.piece(index, self._echo.text, None)) for index in range(self._num_answers)
            ]
        return openings

    def _events(self, response: inference_pb2.GenerateResponse) -> list[Json]:
        if response.HasField("chunk"):
            return self._pieces(response.chunk)
        complete = response.complete
        self._completes.append(complete)
        rest = complete.text[self._sent_characters[complete.index] :]
        events = [self._event(self._shape.piece(complete.index, rest, None))] if rest else []
        reason = _reason(complete)
        if reader := self._reader(complete.index):
            events = self._said(complete.index, [*reader.push(rest), *reader.finish()], None)
            reason = _reason(complete, reader)
        closing = self._event(self._shape.closing(complete.index, reason))
        return [*events, closing | {"ringserve": self._extra(complete)}]

    def _pieces(self, chunk: inference_pb2.GenerateStreamChunk) -> list[Json]:
        offset = self._sent_characters[chunk.index]
        self._sent_characters[chunk.index] += len(chunk.text)
        logprobs = self._shape.logprobs(chunk.logprobs, self._decode, offset) if self._has_logprobs else None
        if reader := self._reader(chunk.index):
            said = reader.push(chunk.text)
            events = self._said(chunk.index, said or ([""] if logprobs else []), logprobs)
        else:
            has_news = bool(chunk.text) or bool(chunk.logprobs) or self._has_token_ids
            events = [self._event(self._shape.piece(chunk.index, chunk.text, logprobs))] if has_news else []
        if events and self._has_token_ids:
            events[0]["choices"][0]["token_ids"] = list(chunk.token_ids)
        if self._counts_each:
            usage = _usage(chunk.prompt_tokens, chunk.completion_tokens, chunk.cached_tokens)
            events = [event | {"usage": usage} for event in events]
        return events

    def _reader(self, index: int) -> CallReader | None:
        """Return the reader of an answer that may call tools."""
        return self._readers.setdefault(index, CallReader(self._form)) if self._form else None

    def _said(self, index: int, said: Sequence[Said], logprobs: Json | None) -> list[Json]:
        """Return the events of parts of an answer; the first has the log-probabilities."""
        assert isinstance(self._shape, ChatShape), "only chats have tools"
        return [
            self._event(self._shape.said(index, each, None if place else logprobs)) for place, each in enumerate(said)
        ]

    def last_events(self) -> list[Json]:
        """Return the events that a stream sends after the last answer. Raises Unavailable for an incomplete answer."""
        self._check_complete()
        if not self._include_usage:
            return []
        return [self._named(self._shape.stream_object) | {"choices": [], "usage": self._usage()}]

    def whole(self) -> Json:
        """Return the one object of answers that are not streamed, after all responses. Raises Unavailable."""
        self._check_complete()
        self._completes.sort(key=lambda complete: complete.index)
        extras = [self._extra(complete) for complete in self._completes]
        extra = extras[0] if len(extras) == 1 else extras[0] | {"answers": extras}
        return self._named(self._shape.whole_object) | {
            "choices": [self._choice(complete) for complete in self._completes],
            "usage": self._usage(),
            "ringserve": extra,
        }

    def _choice(self, complete: inference_pb2.GenerateComplete) -> Json:
        found, text = complete.output_logprobs, complete.text
        logprobs = self._shape.logprobs(found, self._decode, 0) if self._has_logprobs else None
        if self._echo is not None:
            text = self._echo.text + text
            scored = self._completes[0].prompt_logprobs  # sorted: those of answer 0, the others have none
            logprobs = echoed_logprobs(self._echo, scored, found, self._decode) if self._has_logprobs else None
        if self._form and isinstance(self._shape, ChatShape):
            reader = CallReader(self._form)
            said = [*reader.push(text), *reader.finish()]
            plain = "".join(each for each in said if isinstance(each, str))
            choice = self._shape.with_calls(complete.index, plain, reader.calls, logprobs, _reason(complete, reader))
        else:
            choice = self._shape.whole(complete.index, text, logprobs, _reason(complete))
        return choice | ({"token_ids": list(complete.output_ids)} if self._has_token_ids else {})

    def _check_complete(self) -> None:
        if len(self._completes) < self._num_answers:
            raise Unavailable("the stream ended without a completion")

    def _usage(self) -> Json:
        """Return the usage, in which the prompt counts once."""
        usage = next(complete.usage for complete in self._completes if complete.index == 0)
        completion = sum(complete.usage.completion_tokens for complete in self._completes)
        return _usage(usage.prompt_tokens, completion, usage.cached_tokens)

    def _named(self, kind: str) -> Json:
        return {"id": f"{self._shape.id_prefix}-{self._start.request_id}", "object": kind, **self._head}

    def _event(self, choice: Json) -> Json:
        usage = {"usage": None} if self._include_usage else {}
        return self._named(self._shape.stream_object) | {"choices": [choice]} | usage

    def _opening_extra(self) -> Json:
        start = self._start
        return {
            "request_id": start.request_id,
            "conversation_id": start.conversation_id,
            "prompt_tokens": start.prompt_tokens,
            "cached_tokens": start.cached_tokens,
            "plan": message_dict(start.plan),
        }

    def _extra(self, complete: inference_pb2.GenerateComplete) -> Json:
        return {
            "request_id": self._start.request_id,
            "conversation_id": self._start.conversation_id,
            "token_ids": list(complete.output_ids),
            "plan": message_dict(complete.plan),
            "ttft_seconds": complete.ttft_seconds,
            "ttit_seconds": complete.ttit_seconds,
            "seed": complete.seed,
        }


def _usage(prompt: int, completion: int, cached: int) -> Json:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _reason(complete: inference_pb2.GenerateComplete, reader: CallReader | None = None) -> str:
    """Return OpenAI's finish reason of an answer, which may call tools where it has a reader."""
    reason = name_of(inference_pb2.FinishReason, complete.finish_reason)
    return "tool_calls" if reader and reader.calls and reason == "stop" else reason


def conversation_json(view: ConversationInfo) -> Json:
    """Return a conversation in OpenAI's shape, with its own fields in `ringserve`."""
    known = message_dict(to_message(inference_pb2.GetConversationResponse, view))
    return {"id": view.conversation_id, "object": "conversation", "metadata": {}, "ringserve": known}


def model_json(name: str, created: int, max_positions: int) -> Json:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "ringserve",
        "max_model_len": max_positions,
    }


def chat_logprobs(found: Iterable[inference_pb2.TokenLogprobs], decode: Decode) -> Json:
    """Return `logprobs` of a chat's choice."""
    content = [
        _token(each.token_id, each.logprob, decode)
        | {"top_logprobs": [_token(token_id, logprob, decode) for token_id, logprob in _top(each)]}
        for each in found
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(found: Sequence[inference_pb2.TokenLogprobs], decode: Decode, offset: int) -> Json:
    """Return `logprobs` of a completion's choice, whose first token begins `offset` characters into the answer."""
    tokens, offsets = [], []
    for each in found:
        tokens.append(decode([each.token_id]))
        offsets.append(offset)
        offset += len(tokens[-1])
    return {
        "tokens": tokens,
        "token_logprobs": [each.logprob for each in found],
        "top_logprobs": [{decode([token_id]): logprob for token_id, logprob in reversed(_top(each))} for each in found],
        "text_offset": offsets,
    }


def echoed_logprobs(echo: Echo, prompt: Logprobs, found: Logprobs, decode: Decode) -> Json:
    """Return `logprobs` of a completion's choice that begins with its prompt."""
    first = decode([echo.first])
    rest = completion_logprobs([*prompt, *found], decode, len(first))
    return {
        "tokens": [first, *rest["tokens"]],
        "token_logprobs": [None, *rest["token_logprobs"]],
        "top_logprobs": [None, *rest["top_logprobs"]],
        "text_offset": [0, *rest["text_offset"]],
    }


def _top(logprobs: inference_pb2.TokenLogprobs) -> list[tuple[int, float]]:
    return list(zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True))


def _token(token_id: int, logprob: float, decode: Decode) -> Json:
    text = decode([token_id])
    return {"token": text, "logprob": logprob, "bytes": None if REPLACEMENT in text else list(text.encode())}
