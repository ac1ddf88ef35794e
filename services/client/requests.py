"""Requests of the Python client, and the contract's GenerateRequest made of them."""

from __future__ import annotations

import json
import secrets
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict

from cp_core.errors import InvalidRequest
from ringserve.v1 import inference_pb2

MODES = {
    "auto": inference_pb2.PROMPT_MODE_UNSPECIFIED,
    "append": inference_pb2.PROMPT_MODE_APPEND,
    "whole_history": inference_pb2.PROMPT_MODE_WHOLE_HISTORY,
}


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message of a chat. `role` is "system", "user", "assistant" or "tool"."""

    role: str
    content: str


Prompt = str | Sequence[int] | Sequence[Message]
"""A text, token ids, or the messages of a chat."""


REPEATED = ("stop", "stop_token_ids")
"""Fields of Sampling that are sequences; a single stop string may stand alone."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters; names and meanings are those of the contract's SamplingParams. None: its default.

    The last five hold the answer to a form, and exclude each other.
    """

    temperature: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop: str | Sequence[str] = ()
    include_stop_str_in_output: bool = False
    json_schema: str | Mapping[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: Sequence[str] | None = None

    def to_message(self) -> inference_pb2.SamplingParams:
        """Return the contract's message. Raises InvalidRequest for a value that the contract's types cannot carry."""
        message = inference_pb2.SamplingParams()
        for field in fields(self):
            value = getattr(self, field.name)
            try:
                if field.name in REPEATED:
                    getattr(message, field.name).extend([value] if isinstance(value, str) else value)
                elif field.name == "choice" and value is not None:
                    message.choice.CopyFrom(inference_pb2.Choices(items=value))
                elif field.name == "json_schema" and isinstance(value, Mapping):
                    message.json_schema = json.dumps(value)
                elif value is not None:
                    setattr(message, field.name, value)
            except (TypeError, ValueError):
                raise InvalidRequest(f"sampling_params.{field.name}: {value!r} is not allowed") from None
        return message


class TurnOptions(TypedDict, total=False):
    """Options of one turn.

    `mode` relates the prompt to its conversation: "auto", "append" or "whole_history". `timeout` in seconds bounds all
    attempts together.
    """

    mode: str
    sampling: Sampling | None
    timeout: float | None


class RequestOptions(TurnOptions, total=False):
    """Options of a turn of any conversation, or of none.

    The turn fails with ConversationLost, before any work, unless the conversation remembers `expected_tokens`. With
    `no_cache` it shares no KV of earlier prompts, and without a conversation it leaves none for later ones. Requests of
    one `cache_key` prefer the same rings.
    """

    conversation_id: str
    request_id: str
    expected_tokens: int | None
    no_cache: bool
    cache_key: str


def request_of(
    prompt: Prompt,
    conversation_id: str,
    mode: str,
    sampling: Sampling,
    request_id: str,
    expected_tokens: int | None = None,
    *,
    no_cache: bool = False,
    cache_key: str = "",
) -> inference_pb2.GenerateRequest:
    """Return the contract's request. Raises InvalidRequest.

    A request id and a seed are always there: by them the service knows the attempts at one request.
    """
    if mode not in MODES:
        raise InvalidRequest(f"mode: {mode!r} is not allowed; use one of {', '.join(MODES)}")
    request = inference_pb2.GenerateRequest(
        request_id=request_id or f"req-{uuid.uuid4().hex[:16]}",
        conversation_id=conversation_id,
        prompt_mode=MODES[mode],
        sampling_params=sampling.to_message(),
        expected_tokens=expected_tokens,
        no_cache=no_cache,
        cache_key=cache_key,
    )
    if not request.sampling_params.HasField("seed"):
        request.sampling_params.seed = secrets.randbits(63)
    if isinstance(prompt, str):
        request.text = prompt
        return request
    ids = [item for item in prompt if isinstance(item, int)]
    messages = [item for item in prompt if isinstance(item, Message)]
    if len(ids) == len(prompt):
        try:
            request.tokenized.input_ids.extend(ids)
        except ValueError as error:
            raise InvalidRequest(f"prompt: {error}") from None
        request.tokenized.SetInParent()
    elif len(messages) == len(prompt):
        request.chat.messages.extend(
            inference_pb2.ChatMessage(role=message.role, content=message.content) for message in messages
        )
    else:
        raise InvalidRequest("prompt: give a text, a sequence of token ids, or a sequence of messages")
    return request
