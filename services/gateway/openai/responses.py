"""Translation of turn responses to OpenAI's JSON, for one prompt and for several in one request.

The HTTP application makes a `TurnAnswer` per prompt, which holds its state. Values that OpenAI has no name for go into
one extra field, `ringserve`.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from ringserve.cp_core.errors import RingserveError, Unavailable
from ringserve.mapping import enum_name
from ringserve.services.gateway.openai.errors import error_body
from ringserve.services.gateway.openai.requests import HttpTurn
from ringserve.services.gateway.openai.tools import AnswerForm, AnswerReader, CallStart, ReadCall, Said, Thought
from ringserve.services.gateway.text import REPLACEMENT, IncrementalText, TextCodec
from ringserve.services.rpc.answer import message_dict
from ringserve.services.rpc.wire.contract import to_message
from ringserve.v1 import inference_pb2
from ringserve.views import ConversationInfo

log = logging.getLogger(__name__)

Json = dict[str, Any]
Logprobs = Sequence[inference_pb2.TokenLogprobs]


class ChatShape:
    """Shape of chat completions. All events in a stream carry the same id."""

    stream_object = "chat.completion.chunk"
    whole_object = "chat.completion"
    id_prefix = "chatcmpl"

    def opening(self, index: int) -> Json:
        return self._choice(index, {"role": "assistant", "content": ""}, None, None)

    def piece(self, index: int, text: str, logprobs: Json | None) -> Json:
        return self._choice(index, {"content": text}, logprobs, None)

    def part(self, index: int, said: Said, logprobs: Json | None) -> Json:
        """Return an event's choice for one part of an answer that may call tools."""
        if isinstance(said, str):
            return self.piece(index, said, logprobs)
        if isinstance(said, Thought):
            return self._choice(index, {"reasoning_content": said.text}, logprobs, None)
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

    def whole_with_calls(
        self, index: int, said: Sequence[Said], calls: Sequence[ReadCall], logprobs: Json | None, reason: str
    ) -> Json:
        """Return the choice for a whole answer that may have thoughts and call tools."""
        text = "".join(each for each in said if isinstance(each, str))
        choice = self.whole(index, text, logprobs, reason)
        if thoughts := "".join(each.text for each in said if isinstance(each, Thought)):
            choice["message"]["reasoning_content"] = thoughts
        if calls:
            made = [
                {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
            choice["message"] |= {"content": text or None, "tool_calls": made}
        return choice

    def logprobs(self, found: Logprobs, codec: TextCodec, offsets: Offsets) -> Json:
        return chat_logprobs(found, codec)

    @staticmethod
    def _choice(index: int, delta: Json, logprobs: Json | None, finish_reason: str | None) -> Json:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


class CompletionShape:
    """Shape of text completions; the methods mirror `ChatShape`.

    Answers have no opening event, since clients would take it for the first token when they measure times.
    """

    stream_object = whole_object = "text_completion"
    id_prefix = "cmpl"

    def piece(self, index: int, text: str, logprobs: Json | None) -> Json:
        return self.whole(index, text, logprobs, None)

    def closing(self, index: int, finish_reason: str) -> Json:
        return self.whole(index, "", None, finish_reason)

    def whole(self, index: int, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def logprobs(self, found: Logprobs, codec: TextCodec, offsets: Offsets) -> Json:
        return completion_logprobs(found, codec, offsets)


Shape = ChatShape | CompletionShape


@dataclass(frozen=True, kw_only=True)
class Echo:
    """Prompt to repeat before its answer. `first` is its first token, which has no log-probability."""

    text: str
    first: int


class TurnAnswer:
    """The `n` answers to one prompt, as one object or as stream events.

    Responses arrive as one `start`, then each answer's `chunk`s and `complete`. `codec` names the tokens of
    log-probabilities.
    """

    def __init__(
        self,
        shape: Shape,
        model_name: str,
        codec: TextCodec,
        turn: HttpTurn,
        echo: Echo | None = None,
        form: AnswerForm | None = None,
    ) -> None:
        """Read thoughts and tool calls from the text as `form` says."""
        self._shape = shape
        self._form = form or AnswerForm()
        self._readers: dict[int, AnswerReader] = {}
        self._hides_thoughts = turn.hides_thoughts
        params = turn.request.sampling_params
        self._hides_special = params.skip_special_tokens or not params.HasField("skip_special_tokens")
        self._echo = echo
        self._codec = codec
        self._offsets: dict[int, Offsets] = {}
        self._include_usage = turn.include_usage
        self._counts_each = turn.counts_each
        self._has_token_ids = turn.has_token_ids
        self._num_answers = max(turn.request.sampling_params.n, 1)
        self._has_logprobs = turn.request.sampling_params.HasField("logprobs")
        self._head: Json = {"created": int(time.time()), "model": model_name}
        self._start = inference_pb2.GenerateStart()
        self._sent_characters: Counter[int] = Counter()
        self._completes: list[inference_pb2.GenerateComplete] = []
        self._is_begun = False

    def events(self, response: inference_pb2.GenerateResponse) -> list[Json]:
        """Return the stream events for one response.

        The opening events wait for the first token, as in vLLM: clients measure TTFT by the first event. The first
        event has the plan.
        """
        if response.HasField("start"):
            self._start = response.start
            return []
        events = self._events(response)
        if self._is_begun or not events:
            return events
        self._is_begun = True
        first, *others = self._openings() + events
        return [{"ringserve": self._opening_extra()} | first, *others]

    def _openings(self) -> list[Json]:
        """Return one opening event per answer of a chat, then the prompt if it is echoed."""
        shape, indices = self._shape, range(self._num_answers)
        openings = [self._event(shape.opening(index)) for index in indices] if isinstance(shape, ChatShape) else []
        echo = self._echo
        return openings + ([self._event(shape.piece(index, echo.text, None)) for index in indices] if echo else [])

    def _events(self, response: inference_pb2.GenerateResponse) -> list[Json]:
        if response.HasField("chunk"):
            return self._pieces(response.chunk)
        complete = response.complete
        self._completes.append(complete)
        rest = complete.text[self._sent_characters[complete.index] :]
        events = [self._event(self._shape.piece(complete.index, rest, None))] if rest else []
        reason = _reason(complete)
        if reader := self._reader(complete.index):
            said = [*reader.push(rest), *reader.finish(is_cut=_is_cut(complete))]
            events = self._make_events(complete.index, said, None)
            reason = _reason(complete, reader)
        closing = self._event(self._shape.closing(complete.index, reason))
        return [*events, closing | {"ringserve": self._extra(complete)}]

    def _pieces(self, chunk: inference_pb2.GenerateStreamChunk) -> list[Json]:
        self._sent_characters[chunk.index] += len(chunk.text)
        logprobs = None
        if self._has_logprobs:
            offsets = self._offsets.setdefault(chunk.index, self._new_offsets())
            logprobs = self._shape.logprobs(chunk.logprobs, self._codec, offsets)
        if reader := self._reader(chunk.index):
            events = self._make_events(chunk.index, reader.push(chunk.text), logprobs)
        else:
            has_news = bool(chunk.text) or bool(chunk.logprobs) or self._has_token_ids
            events = [self._event(self._shape.piece(chunk.index, chunk.text, logprobs))] if has_news else []
        if events and self._has_token_ids:
            events[0]["choices"][0]["token_ids"] = list(chunk.token_ids)
        if self._counts_each:
            usage = _usage(chunk.prompt_tokens, chunk.completion_tokens, chunk.cached_tokens)
            events = [event | {"usage": usage} for event in events]
        return events

    def _reader(self, index: int) -> AnswerReader | None:
        """Return the reader for an answer; None if the answer is all text."""
        if self._form.is_plain:
            return None
        if index not in self._readers:
            self._readers[index] = self._form.make_reader()
        return self._readers[index]

    def _make_events(self, index: int, said: Sequence[Said], logprobs: Json | None) -> list[Json]:
        """Return one event per part of an answer. The first event carries the log-probabilities."""
        assert isinstance(self._shape, ChatShape), "only chats have tools and thoughts"
        shown = self._shown(said) or ([""] if logprobs else [])
        return [
            self._event(self._shape.part(index, each, None if place else logprobs)) for place, each in enumerate(shown)
        ]

    def _shown(self, said: Sequence[Said]) -> Sequence[Said]:
        return [each for each in said if not isinstance(each, Thought)] if self._hides_thoughts else said

    def last_events(self) -> list[Json]:
        """Return the events that a stream sends after the last answer. Raises Unavailable for an incomplete answer."""
        self._check_complete()
        if not self._include_usage:
            return []
        return [self._make_head(self._shape.stream_object) | {"choices": [], "usage": self._usage()}]

    def whole(self) -> Json:
        """Return the one object of answers that are not streamed, after all responses. Raises Unavailable."""
        self._check_complete()
        self._completes.sort(key=lambda complete: complete.index)
        extras = [self._extra(complete) for complete in self._completes]
        extra = extras[0] if len(extras) == 1 else extras[0] | {"answers": extras}
        return self._make_head(self._shape.whole_object) | {
            "choices": [self._choice(complete) for complete in self._completes],
            "usage": self._usage(),
            "ringserve": extra,
        }

    def _choice(self, complete: inference_pb2.GenerateComplete) -> Json:
        found, text = complete.output_logprobs, complete.text
        logprobs = self._shape.logprobs(found, self._codec, self._new_offsets()) if self._has_logprobs else None
        if self._echo is not None:
            text = self._echo.text + text
            scored = self._completes[0].prompt_logprobs  # sorted: only answer 0 has them
            offsets = self._new_offsets()
            logprobs = echoed_logprobs(self._echo, scored, found, self._codec, offsets) if self._has_logprobs else None
        if isinstance(self._shape, ChatShape) and not self._form.is_plain:
            reader = self._form.make_reader()
            said = self._shown([*reader.push(text), *reader.finish(is_cut=_is_cut(complete))])
            choice = self._shape.whole_with_calls(
                complete.index, said, reader.calls, logprobs, _reason(complete, reader)
            )
        else:
            choice = self._shape.whole(complete.index, text, logprobs, _reason(complete))
        return choice | ({"token_ids": list(complete.output_ids)} if self._has_token_ids else {})

    def _new_offsets(self) -> Offsets:
        return Offsets(self._codec, hides_special=self._hides_special)

    def _check_complete(self) -> None:
        if len(self._completes) < self._num_answers:
            raise Unavailable("the stream ended without a completion")

    def _usage(self) -> Json:
        """Return the usage. The prompt counts once, whatever the number of answers."""
        usage = next(complete.usage for complete in self._completes if complete.index == 0)
        completion = sum(complete.usage.completion_tokens for complete in self._completes)
        accepted = sum(complete.usage.accepted_draft_tokens for complete in self._completes)
        return _usage(usage.prompt_tokens, completion, usage.cached_tokens, accepted)

    def _make_head(self, kind: str) -> Json:
        return {"id": f"{self._shape.id_prefix}-{self._start.request_id}", "object": kind, **self._head}

    def _event(self, choice: Json) -> Json:
        usage = {"usage": None} if self._include_usage else {}
        return self._make_head(self._shape.stream_object) | {"choices": [choice]} | usage

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
            "accepted_draft_tokens": complete.usage.accepted_draft_tokens,
            "seed": complete.seed,
        }


def _usage(prompt: int, completion: int, cached: int, accepted: int = 0) -> Json:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"accepted_prediction_tokens": accepted},
    }


def _is_cut(complete: inference_pb2.GenerateComplete) -> bool:
    return complete.finish_reason == inference_pb2.FINISH_REASON_LENGTH


def _reason(complete: inference_pb2.GenerateComplete, reader: AnswerReader | None = None) -> str:
    """Return OpenAI's finish reason: "tool_calls" if a stopped answer called tools."""
    reason = enum_name(inference_pb2.FinishReason, complete.finish_reason)
    return "tool_calls" if reader and reader.calls and reason == "stop" else reason


def conversation_json(view: ConversationInfo) -> Json:
    """Return a conversation in OpenAI's shape, with ringserve's fields under `ringserve`."""
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


class Offsets:
    """Places of tokens in a growing text, in characters. The tokens of one character have the same place."""

    def __init__(self, codec: TextCodec, *, hides_special: bool = True) -> None:
        self._text = IncrementalText(codec, hides_special=hides_special)
        self._length = 0

    def take(self, token_id: int) -> int:
        """Return where the next token's text begins."""
        begin = self._length
        self._length += len(self._text.push([token_id]))
        return begin


def chat_logprobs(found: Iterable[inference_pb2.TokenLogprobs], codec: TextCodec) -> Json:
    """Return a chat choice's `logprobs`."""
    content = [
        _token(each.token_id, each.logprob, codec)
        | {"top_logprobs": [_token(token_id, logprob, codec) for token_id, logprob in _top(each)]}
        for each in found
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(found: Iterable[inference_pb2.TokenLogprobs], codec: TextCodec, offsets: Offsets) -> Json:
    """Return a completion choice's `logprobs`."""
    known = list(found)
    return {
        "tokens": [_name(each.token_id, codec) for each in known],
        "token_logprobs": [each.logprob for each in known],
        "top_logprobs": [_by_name(each, codec) for each in known],
        "text_offset": [offsets.take(each.token_id) for each in known],
    }


def echoed_logprobs(echo: Echo, prompt: Logprobs, found: Logprobs, codec: TextCodec, offsets: Offsets) -> Json:
    """Return the `logprobs` of a completion choice that echoes its prompt."""
    first = offsets.take(echo.first)
    rest = completion_logprobs([*prompt, *found], codec, offsets)
    return {
        "tokens": [_name(echo.first, codec), *rest["tokens"]],
        "token_logprobs": [None, *rest["token_logprobs"]],
        "top_logprobs": [None, *rest["top_logprobs"]],
        "text_offset": [first, *rest["text_offset"]],
    }


def _top(logprobs: inference_pb2.TokenLogprobs) -> list[tuple[int, float]]:
    return list(zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True))


def _token(token_id: int, logprob: float, codec: TextCodec) -> Json:
    return {"token": codec.decode_all([token_id]), "logprob": logprob, "bytes": list(codec.token_bytes(token_id))}


def _name(token_id: int, codec: TextCodec) -> str:
    """Return a token's text; for part of a character, its bytes as OpenAI's completions write them."""
    text = codec.decode_all([token_id])
    if REPLACEMENT not in text:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in codec.token_bytes(token_id))


def _by_name(each: inference_pb2.TokenLogprobs, codec: TextCodec) -> dict[str, float]:
    """Return the log-probabilities of the most likely tokens and of the sampled one, by token name.

    If several tokens have the same name, only the first keeps it; the others are named by their ids.
    """
    named: dict[str, float] = {}
    for token_id, logprob in dict([*_top(each), (each.token_id, each.logprob)]).items():
        name = _name(token_id, codec)
        named[f"token_id:{token_id}" if name in named else name] = logprob
    return named


Response = inference_pb2.GenerateResponse
DONE = b"data: [DONE]\n\n"


class Answer(Protocol):
    """Answer to one request, in its endpoint's shape."""

    @property
    def ends_with(self) -> bytes:
        """Line to send after the last event of a stream that ended well."""

    def events(self, place: int, response: Response) -> list[Json]:
        """Return the stream events for a response to prompt number `place`."""

    def last_events(self) -> list[Json]:
        """Return the stream events after the last response. Raises Unavailable if an answer is incomplete."""

    def failure(self, error: Exception) -> list[Json]:
        """Return the events that end a stream with an error."""

    def whole(self) -> Json:
        """Return the one object of an answer that is not streamed, after all responses. Raises Unavailable."""


Placed = AsyncGenerator[tuple[int, inference_pb2.GenerateResponse], None]


async def drop_answers(responses: Placed) -> Placed:
    """Leave the answers out of responses, for a request that only scores its prompts."""
    async with aclosing(responses) as closing:
        async for place, response in closing:
            if response.HasField("chunk"):
                continue
            if response.HasField("complete"):
                complete = response.complete
                for name in ("output_ids", "text", "output_logprobs", "matched_stop", "matched_stop_str"):
                    complete.ClearField(name)
                complete.finish_reason = inference_pb2.FINISH_REASON_LENGTH
                complete.usage.completion_tokens = 0
            yield place, response


async def collect_answer(responses: Placed, answer: Answer) -> dict[str, Any]:
    async with aclosing(responses) as closing:
        async for place, response in closing:
            answer.events(place, response)
    return answer.whole()


async def stream_events(responses: Placed, answer: Answer) -> AsyncGenerator[bytes, None]:
    """Yield the stream's lines. An error before the first event is raised; a later one is sent as the last event."""
    is_begun = False
    try:
        async with aclosing(responses) as closing:
            async for place, response in closing:
                for event in answer.events(place, response):
                    yield _line(event)
                    is_begun = True
        for event in answer.last_events():
            yield _line(event)
    except Exception as error:
        if not is_begun:
            raise
        if not isinstance(error, RingserveError):
            log.exception("a stream of events failed with an internal error")
        for event in answer.failure(error):
            yield _line(event)
        return
    if answer.ends_with:
        yield answer.ends_with


def _line(event: dict[str, Any]) -> bytes:
    name = f"event: {event['type']}\n".encode() if "type" in event else b""
    # Escaped: some clients end a line at U+2028 or U+0085.
    return name + b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"


class PromptAnswers:
    """Answers to several prompts in one request. Choices are numbered across prompts.

    Example: with two choices per prompt, choices 0 and 1 answer the first prompt, 2 and 3 the second.
    """

    def __init__(self, answers: Sequence[TurnAnswer], num_choices: int, name: str) -> None:
        """Give each prompt `num_choices` choices. `name` is the id of the combined answer."""
        self._answers = answers
        self._num_choices = num_choices
        self._name = name

    @property
    def ends_with(self) -> bytes:
        """Line to send after the last event of a stream that ended well."""
        return DONE

    def failure(self, error: Exception) -> list[Json]:
        """Return the events that end a stream with an error."""
        return [error_body(error)]

    def events(self, place: int, response: Response) -> list[Json]:
        """Return the stream events for a response to prompt number `place`."""
        return [self._renumber(place, event) for event in self._answers[place].events(response)]

    def last_events(self) -> list[Json]:
        """Return the events that a stream sends after the last answer. Raises Unavailable for an incomplete one."""
        last = [answer.last_events() for answer in self._answers]
        if not last[0]:
            return []
        events = [event for events in last for event in events]
        return [self._renumber(0, events[0]) | {"usage": _sum_usages([event["usage"] for event in events])}]

    def whole(self) -> Json:
        """Return the one object of answers that are not streamed, after all responses. Raises Unavailable."""
        parts = [self._renumber(place, answer.whole()) for place, answer in enumerate(self._answers)]
        if len(parts) == 1:
            return parts[0]
        return parts[0] | {
            "choices": [choice for part in parts for choice in part["choices"]],
            "usage": _sum_usages([part["usage"] for part in parts]),
            "ringserve": {"prompts": [part["ringserve"] for part in parts]},
        }

    def _renumber(self, place: int, part: Json) -> Json:
        if len(self._answers) == 1:
            return part
        choices = [choice | {"index": choice["index"] + place * self._num_choices} for choice in part["choices"]]
        return part | {"id": self._name, "choices": choices}


def _sum_usages(usages: Sequence[Json]) -> Json:
    """Add up the usage of several prompts."""
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    accepted = sum(usage["completion_tokens_details"]["accepted_prediction_tokens"] for usage in usages)
    return {name: sum(usage[name] for usage in usages) for name in names} | {
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"accepted_prediction_tokens": accepted},
    }
