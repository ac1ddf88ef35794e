"""From a turn's responses to OpenAI's JSON. What OpenAI has no name for is in one extra field, `ringserve`."""

from __future__ import annotations

import time
from typing import Any

from google.protobuf.json_format import MessageToDict

from orchestration.turn import ConversationView
from ringserve.v1 import inference_pb2
from services.answer import plan_dict
from services.wire import groups as wire_groups

Json = dict[str, Any]


class ChatShape:
    """Chat completions. One object a turn; every event of a stream carries the same id."""

    stream_object = "chat.completion.chunk"
    whole_object = "chat.completion"
    id_prefix = "chatcmpl"

    def opening(self) -> Json:
        return self.choice({"role": "assistant", "content": ""}, None)

    def piece(self, text: str) -> Json:
        return self.choice({"content": text}, None)

    def closing(self, finish_reason: str) -> Json:
        return self.choice({}, finish_reason)

    @staticmethod
    def choice(delta: Json, finish_reason: str | None) -> Json:
        return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}

    def whole(self, text: str, finish_reason: str) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}


class CompletionShape:
    """Completions of a text: the same verbs."""

    stream_object = whole_object = "text_completion"
    id_prefix = "cmpl"

    def opening(self) -> Json:
        return self.whole("", None)

    def piece(self, text: str) -> Json:
        return self.whole(text, None)

    def closing(self, finish_reason: str) -> Json:
        return self.whole("", finish_reason)

    def whole(self, text: str, finish_reason: str | None) -> Json:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}


Shape = ChatShape | CompletionShape


class TurnAnswer:
    """One turn's answer: `start` once, then `chunk`s, then `complete`, whole or as events of a stream."""

    def __init__(self, shape: Shape, model_name: str, include_usage: bool) -> None:
        self._shape = shape
        self._include_usage = include_usage
        self._head: Json = {"created": int(time.time()), "model": model_name}
        self._start = inference_pb2.GenerateStart()
        self._sent_characters = 0

    def events(self, response: inference_pb2.GenerateResponse) -> list[Json]:
        """What a stream sends for one response."""
        shape = self._shape
        if response.HasField("start"):
            self._start = response.start
            return [self._event(shape.opening(), ringserve=self._opening_extra())]
        if response.HasField("chunk"):
            text = response.chunk.text
            self._sent_characters += len(text)
            return [self._event(shape.piece(text))] if text else []
        complete = response.complete
        rest = complete.text[self._sent_characters :]
        events = [self._event(shape.piece(rest))] if rest else []
        events.append(self._event(shape.closing(complete.finish_reason), ringserve=self._extra(complete)))
        if self._include_usage:
            events.append(self._named(shape.stream_object) | {"choices": [], "usage": usage_json(complete.usage)})
        return events

    def whole(self, complete: inference_pb2.GenerateComplete) -> Json:
        """The one answer of a turn that is not streamed. `events` has seen its `start`."""
        choice = self._shape.whole(complete.text, complete.finish_reason)
        return self._named(self._shape.whole_object) | {
            "choices": [choice],
            "usage": usage_json(complete.usage),
            "ringserve": self._extra(complete),
        }

    def _named(self, kind: str) -> Json:
        return {"id": f"{self._shape.id_prefix}-{self._start.request_id}", "object": kind, **self._head}

    def _event(self, choice: Json, **more: Json) -> Json:
        usage = {"usage": None} if self._include_usage else {}
        return self._named(self._shape.stream_object) | {"choices": [choice]} | usage | more

    def _opening_extra(self) -> Json:
        start = self._start
        return {
            "request_id": start.request_id,
            "conversation_id": start.conversation_id,
            "prompt_tokens": start.prompt_tokens,
            "cached_tokens": start.cached_tokens,
            "plan": plan_dict(start.plan),
        }

    def _extra(self, complete: inference_pb2.GenerateComplete) -> Json:
        return {
            "request_id": self._start.request_id,
            "conversation_id": self._start.conversation_id,
            "token_ids": list(complete.output_ids),
            "plan": plan_dict(complete.plan),
            "ttft_seconds": complete.ttft_seconds,
            "ttit_seconds": complete.ttit_seconds,
            "seed": complete.seed,
        }


def usage_json(usage: inference_pb2.Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def conversation_json(view: ConversationView) -> Json:
    """A conversation under OpenAI's name for one, with what is known of it in `ringserve`."""
    message = wire_groups.conversation_to(view)
    known = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    known["epoch"] = int(known["epoch"])  # 64-bit numbers stay numbers
    return {"id": view.conversation_id, "object": "conversation", "metadata": {}, "ringserve": known}


def model_json(name: str, created: int, max_positions: int) -> Json:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "ringserve",
        "max_model_len": max_positions,
    }
