"""Answers of OpenAI's Responses API: one item per text and per tool call, as one object or as stream events.

The HTTP application makes one `ItemAnswer` per request, which holds all of its state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ringserve.cp_core.errors import Unavailable
from ringserve.services.gateway.openai.errors import error_body
from ringserve.services.gateway.openai.responses import Json
from ringserve.services.gateway.openai.tools import AnswerForm, CallPiece, CallStart, Said, Thought
from ringserve.services.rpc.answer import message_dict
from ringserve.v1 import inference_pb2

ECHOED: Mapping[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "truncation": "disabled",
}
"""Request fields that the response repeats, with their defaults."""


class ItemAnswer:
    """Answer to one Responses API request: an item for each text and each call."""

    def __init__(
        self,
        body: Mapping[str, Any],
        model_name: str,
        form: AnswerForm,
        response_id: Callable[[], str] = str,
        keep: Callable[[Json], None] = lambda _: None,
    ) -> None:
        """Read thoughts and tool calls as `form` says. `response_id` returns "" for an unstored response.

        `keep` gets the whole response.
        """
        self._keep = keep
        self._response_id = response_id
        self._previous = body.get("previous_response_id") or None
        self._model_name = model_name
        self._echoed = {name: default if body.get(name) is None else body[name] for name, default in ECHOED.items()}
        self._reader = form.make_reader()
        self._created = time.time()
        self._name = ""
        self._items: list[Json] = []
        self._sent_characters = 0
        self._num_events = 0
        self._complete: inference_pb2.GenerateComplete | None = None

    @property
    def ends_with(self) -> bytes:
        """Line to send after the last event. Streams of the Responses API have none."""
        return b""

    def events(self, place: int, response: inference_pb2.GenerateResponse) -> list[Json]:
        """Return the stream events for one response."""
        if response.HasField("start"):
            self._name = response.start.request_id
            opening = self._response("in_progress")
            return [
                self._event("response.created", response=opening),
                self._event("response.in_progress", response=opening),
            ]
        if response.HasField("chunk"):
            self._sent_characters += len(response.chunk.text)
            return self._make_events(self._reader.push(response.chunk.text))
        self._complete = response.complete
        rest = self._reader.push(response.complete.text[self._sent_characters :])
        is_cut = response.complete.finish_reason == inference_pb2.FINISH_REASON_LENGTH
        events = self._make_events([*rest, *self._reader.finish(is_cut=is_cut)])
        if not any(item["type"] != "reasoning" for item in self._items):
            events += [*self._close(), *self._open_text()]  # an empty answer still has one text item
        return events + self._close()

    def last_events(self) -> list[Json]:
        """Return the events after the answer. Raises Unavailable if it is incomplete."""
        whole = self.whole()
        return [self._event(f"response.{whole['status']}", response=whole)]

    def failure(self, error: Exception) -> list[Json]:
        """Return the events that end a stream with an error."""
        told = error_body(error)["error"]
        return [self._event("error", message=told["message"], code=told["code"], param=told["param"])]

    def whole(self) -> Json:
        """Return the whole response. Raises Unavailable if the answer is incomplete."""
        complete = self._complete
        if complete is None:
            raise Unavailable("the stream ended without a completion")
        is_cut = complete.finish_reason == inference_pb2.FINISH_REASON_LENGTH
        usage = complete.usage
        found = self._response("incomplete" if is_cut else "completed") | {
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
            "completed_at": time.time(),
            "ringserve": {"plan": message_dict(complete.plan), "token_ids": list(complete.output_ids)},
        }
        if is_cut:
            found["incomplete_details"] = {"reason": "max_output_tokens"}
        self._keep(found)
        return found

    def _response(self, status: str) -> Json:
        return {
            "id": self._response_id() or f"resp_{self._name}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._model_name,
            "output": list(self._items),
            "previous_response_id": self._previous,
            "store": bool(self._response_id()),
            "usage": None,
            **self._echoed,
        }

    def _event(self, kind: str, **fields: Any) -> Json:
        event = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return event

    def _make_events(self, said: list[Said]) -> list[Json]:
        return [event for each in said for event in self._events_of_part(each)]

    def _events_of_part(self, said: Said) -> list[Json]:
        match said:
            case CallStart():
                call = {"name": said.name, "call_id": said.call_id, "arguments": ""}
                return [*self._close(), *self._open({"type": "function_call", "id": f"fc_{said.call_id}", **call})]
            case CallPiece():
                self._items[-1]["arguments"] += said.text
                return [self._item_event("response.function_call_arguments.delta", delta=said.text)]
            case Thought():
                opening = [] if self._is_open("reasoning") else [*self._close(), *self._open_thoughts()]
                self._items[-1]["content"][0]["text"] += said.text
                return [*opening, self._part_event("response.reasoning_text.delta", delta=said.text)]
            case _:
                opening = [] if self._is_open("message") else [*self._close(), *self._open_text()]
                self._items[-1]["content"][0]["text"] += said
                return [*opening, self._part_event("response.output_text.delta", delta=said, logprobs=[])]

    def _is_open(self, kind: str) -> bool:
        return bool(self._items) and self._items[-1]["type"] == kind and self._items[-1]["status"] == "in_progress"

    def _open_text(self) -> list[Json]:
        name = f"msg_{self._name}_{len(self._items)}"
        opening = self._open({"type": "message", "id": name, "role": "assistant", "content": []})
        part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._items[-1] = self._items[-1] | {"content": [part]}
        return [*opening, self._part_event("response.content_part.added", part=dict(part))]

    def _open_thoughts(self) -> list[Json]:
        name = f"rs_{self._name}_{len(self._items)}"
        opening = self._open({"type": "reasoning", "id": name, "summary": [], "content": []})
        part: Json = {"type": "reasoning_text", "text": ""}
        self._items[-1] = self._items[-1] | {"content": [part]}
        return [*opening, self._part_event("response.content_part.added", part=dict(part))]

    def _open(self, item: Json) -> list[Json]:
        self._items.append(item | {"status": "in_progress"})
        return [
            self._event("response.output_item.added", output_index=len(self._items) - 1, item=dict(self._items[-1]))
        ]

    def _close(self) -> list[Json]:
        """End the open item, if any."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return []
        item = self._items[-1]
        is_cut = self._complete is not None and self._complete.finish_reason == inference_pb2.FINISH_REASON_LENGTH
        if item["type"] == "message":
            (part,) = item["content"]
            ends = [
                self._part_event("response.output_text.done", text=part["text"], logprobs=[]),
                self._part_event("response.content_part.done", part=part),
            ]
        elif item["type"] == "reasoning":
            (part,) = item["content"]
            ends = [
                self._part_event("response.reasoning_text.done", text=part["text"]),
                self._part_event("response.content_part.done", part=part),
            ]
        else:
            given = {"name": item["name"], "arguments": item["arguments"]}
            ends = [self._item_event("response.function_call_arguments.done", **given)]
        item["status"] = "incomplete" if is_cut else "completed"
        return [*ends, self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)]

    def _item_event(self, kind: str, **fields: Any) -> Json:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **fields)

    def _part_event(self, kind: str, **fields: Any) -> Json:
        return self._item_event(kind, content_index=0, **fields)
