"""Several prompts of one request: their turns side by side, and one answer of all."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from ringserve.cp_core.errors import RingserveError
from ringserve.services.gateway.openai.errors import error_body
from ringserve.services.gateway.openai.responses import Json, TurnAnswer
from ringserve.v1 import inference_pb2

log = logging.getLogger(__name__)

Response = inference_pb2.GenerateResponse
AT_ONCE = 8
"""Prompts of one request that are served at a time."""
DONE = b"data: [DONE]\n\n"


class Answer(Protocol):
    """Answer to one request, in the shape of its endpoint."""

    @property
    def ends_with(self) -> bytes:
        """Line after the last event of a stream."""

    def events(self, place: int, response: Response) -> list[Json]:
        """Return the events that a stream sends for a response to the prompt at `place`."""

    def last_events(self) -> list[Json]:
        """Return the events that a stream sends after the last response. Raises Unavailable where one lacks."""

    def failure(self, error: Exception) -> list[Json]:
        """Return the events that end a stream with an error."""

    def whole(self) -> Json:
        """Return the one object of an answer that is not streamed, after all responses. Raises Unavailable."""


Placed = AsyncGenerator[tuple[int, inference_pb2.GenerateResponse], None]


async def whole_of(responses: Placed, answer: Answer) -> dict[str, Any]:
    async with aclosing(responses) as closing:
        async for place, response in closing:
            answer.events(place, response)
    return answer.whole()


async def events_of(responses: Placed, answer: Answer) -> AsyncGenerator[bytes, None]:
    """Yield the lines of a stream. An error after the first event is one more event, and the last."""
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
            log.exception("a stream met an internal error")
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
    """Answers to the prompts of one request. Choices are numbered through: those of the first prompt come first."""

    def __init__(self, answers: Sequence[TurnAnswer], num_choices: int, name: str) -> None:
        """`num_choices` is the number of each prompt, and `name` the id of the whole."""
        self._answers = answers
        self._num_choices = num_choices
        self._name = name

    @property
    def ends_with(self) -> bytes:
        """Line after the last event of a stream."""
        return DONE

    def failure(self, error: Exception) -> list[Json]:
        """Return the events that end a stream with an error."""
        return [error_body(error)]

    def events(self, place: int, response: Response) -> list[Json]:
        """Return the events that a stream sends for a response to the prompt at `place`."""
        return [self._numbered(place, event) for event in self._answers[place].events(response)]

    def last_events(self) -> list[Json]:
        """Return the events that a stream sends after the last answer. Raises Unavailable for an incomplete one."""
        last = [answer.last_events() for answer in self._answers]
        if not last[0]:
            return []
        events = [event for events in last for event in events]
        return [self._numbered(0, events[0]) | {"usage": _sum_of([event["usage"] for event in events])}]

    def whole(self) -> Json:
        """Return the one object of answers that are not streamed, after all responses. Raises Unavailable."""
        parts = [self._numbered(place, answer.whole()) for place, answer in enumerate(self._answers)]
        if len(parts) == 1:
            return parts[0]
        return parts[0] | {
            "choices": [choice for part in parts for choice in part["choices"]],
            "usage": _sum_of([part["usage"] for part in parts]),
            "ringserve": {"prompts": [part["ringserve"] for part in parts]},
        }

    def _numbered(self, place: int, part: Json) -> Json:
        if len(self._answers) == 1:
            return part
        choices = [choice | {"index": choice["index"] + place * self._num_choices} for choice in part["choices"]]
        return part | {"id": self._name, "choices": choices}


def _sum_of(usages: Sequence[Json]) -> Json:
    """Return the sum of usages."""
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    return {name: sum(usage[name] for usage in usages) for name in names} | {
        "prompt_tokens_details": {"cached_tokens": cached}
    }
