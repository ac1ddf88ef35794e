"""Translation of OpenAI's JSON to a GenerateRequest.

Shapes and types are checked here; values where gRPC's are checked too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cp_core.errors import InvalidRequest, NotFound
from ringserve.v1 import inference_pb2
from services.gateway.openai.fields import (
    CACHE_KEYS,
    OURS,
    SAMPLING,
    boolean,
    check_names,
    integer,
    shown,
    text,
    token_ids,
)

DEFAULT_TEMPERATURE = 1.0
"""Default temperature of OpenAI. Over gRPC it is 0."""
CHAT_MAX_TOKENS = 1024
"""Default `max_tokens` of a chat. OpenAI's is the model's limit; a ring has to reserve the room first."""

COMMON = frozenset({"model", "stream", "stream_options"})
CHAT = COMMON | {"messages", "logprobs", "top_logprobs"}
COMPLETION = COMMON | {"prompt", "prompt_mode", "logprobs"}
ROLES = {"developer": "system"}
"""Roles that chat templates know by another name."""
MESSAGE_FIELDS = frozenset({"role", "content"})
PROMPT_MODES = {
    "auto": inference_pb2.PROMPT_MODE_UNSPECIFIED,
    "append": inference_pb2.PROMPT_MODE_APPEND,
    "whole_history": inference_pb2.PROMPT_MODE_WHOLE_HISTORY,
}


@dataclass(frozen=True, kw_only=True)
class HttpTurn:
    """Turn asked for over HTTP, and the form of its answer."""

    request: inference_pb2.GenerateRequest
    stream: bool
    include_usage: bool


class HttpRequestReader:
    """Reader of requests for one model, with its longest sequence."""

    def __init__(self, model_name: str, max_positions: int) -> None:
        self._model_name = model_name
        # a quarter: the rest is for the prompt
        self._chat_max_tokens = min(CHAT_MAX_TOKENS, max(1, max_positions // 4))

    def chat(self, body: Any) -> HttpTurn:
        """Read a request. Raises InvalidRequest, and NotFound for another model."""
        values = self._values(body, CHAT)
        messages = values.get("messages")
        if not isinstance(messages, list):
            raise InvalidRequest(f"messages: {shown(messages)} is not allowed; give a list of messages")
        turn = self._turn(values)
        turn.request.chat.messages.extend(_message(place, message) for place, message in enumerate(messages))
        if not messages:
            turn.request.chat.SetInParent()
        params = turn.request.sampling_params
        num_top = integer(32)("top_logprobs", values.get("top_logprobs", 0))
        if boolean("logprobs", values.get("logprobs", False)):
            params.logprobs = num_top
        elif num_top:
            raise InvalidRequest("top_logprobs: only allowed where logprobs is true")
        if not params.HasField("max_tokens"):
            params.max_tokens = self._chat_max_tokens
        return turn

    def completion(self, body: Any) -> HttpTurn:
        """Read a request. Raises InvalidRequest, and NotFound for another model."""
        values = self._values(body, COMPLETION)
        prompt = _one_prompt(values.get("prompt"))
        turn = self._turn(values)
        if isinstance(prompt, str):
            turn.request.text = text("prompt", prompt)
        else:
            turn.request.tokenized.input_ids.extend(token_ids("prompt", prompt))
            turn.request.tokenized.SetInParent()
        mode = text("prompt_mode", values.get("prompt_mode", "auto"))
        if mode not in PROMPT_MODES:
            raise InvalidRequest(f"prompt_mode: {shown(mode)} is not allowed; use one of {', '.join(PROMPT_MODES)}")
        turn.request.prompt_mode = PROMPT_MODES[mode]
        if "logprobs" in values:
            turn.request.sampling_params.logprobs = integer(32)("logprobs", values["logprobs"])
        return turn

    def _values(self, body: Any, own: frozenset[str]) -> dict[str, Any]:
        """Return the fields that are not null."""
        if not isinstance(body, dict):
            raise InvalidRequest("the body must be a JSON object")
        values = {name: value for name, value in body.items() if value is not None}
        check_names(values, own)
        self.check_model(text("model", values.get("model", "")))
        return values

    def check_model(self, name: str) -> None:
        """Check the name of the model. Raises InvalidRequest, NotFound."""
        if not name:
            raise InvalidRequest(f"model: none given; served is {self._model_name!r}")
        if name != self._model_name:
            raise NotFound(f"model: there is no model {shown(name)}; served is {self._model_name!r}")

    def _turn(self, values: dict[str, Any]) -> HttpTurn:
        request = inference_pb2.GenerateRequest(
            sampling_params=_sampling(values),
            cache_key=next(filter(None, [text(name, values.get(name, "")) for name in CACHE_KEYS]), ""),
            **{name: read(name, values[name]) for name, read in OURS.items() if name in values},
        )
        stream = boolean("stream", values.get("stream", False))
        options = values.get("stream_options", {})
        if not isinstance(options, dict):
            raise InvalidRequest(f"stream_options: {shown(options)} is not allowed; give an object")
        if options and not stream:
            raise InvalidRequest("stream_options: only allowed where stream is true")
        # include_obfuscation pads events against eavesdroppers who measure them; its absence changes no answer.
        for name in options.keys() - {"include_usage", "include_obfuscation"}:
            raise InvalidRequest(f"stream_options.{name[:60]}: there is no such field")
        usage = options.get("include_usage")
        include_usage = usage is not None and boolean("stream_options.include_usage", usage)
        return HttpTurn(request=request, stream=stream, include_usage=include_usage)


def _sampling(values: dict[str, Any]) -> inference_pb2.SamplingParams:
    given: dict[str, Any] = {"temperature": DEFAULT_TEMPERATURE}
    for name, (field, read) in SAMPLING.items():
        if name in values:
            given[field] = read(name, values[name])
    try:
        return inference_pb2.SamplingParams(**given)
    except ValueError as error:  # a number that only fits in more bits than the contract has for it
        raise InvalidRequest(f"sampling_params: {error}") from None


def _message(place: int, message: Any) -> inference_pb2.ChatMessage:
    name = f"messages[{place}]"
    if not isinstance(message, dict):
        raise InvalidRequest(f"{name}: {shown(message)} is not allowed; give an object with role and content")
    for field, value in message.items():
        # The name of a speaker is for templates that know several; an answer sent back carries empty lists and nulls.
        if field not in MESSAGE_FIELDS and value not in (None, [], {}) and field != "name":
            raise InvalidRequest(f"{name}.{field[:60]}: not supported; leave it out")
    role = text(f"{name}.role", message.get("role"))
    return inference_pb2.ChatMessage(
        role=ROLES.get(role, role), content=_content(f"{name}.content", message.get("content"))
    )


def _content(name: str, content: Any) -> str:
    """Read content: a string, or text parts, which are joined."""
    if not isinstance(content, list):
        return text(name, content)
    pieces = []
    for place, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise InvalidRequest(f'{name}[{place}]: only {{"type": "text", "text": ...}} is supported')
        pieces.append(text(f"{name}[{place}].text", part.get("text")))
    return "".join(pieces)


def _one_prompt(prompt: Any) -> str | list[Any]:
    """Read the prompt of a completion: a text or token ids, or a list of one of them."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise InvalidRequest(f"prompt: {len(prompt)} prompts are given, 1 a request is supported")
        prompt = prompt[0]
    if not isinstance(prompt, str | list):
        raise InvalidRequest(f"prompt: {shown(prompt)} is not allowed; give a string or a list of token ids")
    return prompt
