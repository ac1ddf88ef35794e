"""Requests of the Python client, and the contract's GenerateRequest made of them."""

from __future__ import annotations

import json
import secrets
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict

import google.protobuf.message
from google.protobuf.descriptor import FieldDescriptor

from ringserve.errors import InvalidRequest
from ringserve.mapping import enum_numbers
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

    @classmethod
    def of(cls, item: Message | Mapping[str, Any], shown: str = "message") -> Message:
        """Return a Message as it is, or make one of a dict in OpenAI's form: its content a text or a list of parts.

        Raises InvalidRequest, whose text calls the message by the name `shown`.
        """
        if isinstance(item, Message):
            return item
        if not isinstance(item, Mapping) or item.keys() != {"role", "content"}:
            raise InvalidRequest(f'{shown}: {item!r:.100} is not allowed; a message is {{"role": ..., "content": ...}}')
        role, content = item["role"], item["content"]
        if isinstance(content, Iterable) and not isinstance(content, str | Mapping):
            content = "".join(_part(part, shown) for part in content)
        if not isinstance(role, str) or not isinstance(content, str):
            raise InvalidRequest(f"{shown}: role and content must be texts, not {role!r:.50} and {content!r:.50}")
        return cls(role=role, content=content)


def _part(part: Any, shown: str) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise InvalidRequest(
            f'{shown}.content: the part {part!r:.100} is not allowed; a part is {{"type": "text", "text": ...}}'
        )
    return str(part["text"])


Messages = Sequence[Message | Mapping[str, Any]]
Prompt = str | Sequence[int] | Messages | Message | Mapping[str, Any]
"""A text; token ids, also as an array or tensor; the messages of a chat or one of them, each a Message or a dict."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters; names and meanings follow the contract's SamplingParams. None stands for its default.

    A single stop string, stop token or bad word need not be in a list. `logit_bias` may have token ids as texts, as in
    JSON. `json_schema`, `json_object`, `regex`, `grammar` and `choice` constrain the form of the answer; at most one
    may be given.
    """

    temperature: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop_token_ids: int | Sequence[int] = ()
    ignore_eos: bool = False
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] | Mapping[str, float] | None = None
    min_tokens: int | None = None
    stop: str | Sequence[str] = ()
    include_stop_str_in_output: bool = False
    n: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    json_schema: str | Mapping[str, Any] | None = None
    lenient_schema: bool = False
    json_object: bool | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: Sequence[str] | None = None
    max_draft_tokens: int | None = None
    allowed_token_ids: Sequence[int] = ()
    bad_words: str | Sequence[str] = ()

    def to_message(self) -> inference_pb2.SamplingParams:
        """Return the contract's message. Raises InvalidRequest for a value that the contract's types cannot carry."""
        message = inference_pb2.SamplingParams()
        for field in fields(self):
            _fill(message, field.name, getattr(self, field.name), f"sampling_params.{field.name}")
        return message

    @classmethod
    def of(cls, given: Sampling | Mapping[str, Any] | None) -> Sampling:
        """Return parameters that are given as a dict. Raises InvalidRequest for an unknown name."""
        if isinstance(given, Sampling):
            return given
        names = [field.name for field in fields(cls)]
        unknown = [name for name in given or () if name not in names]
        if unknown:
            raise InvalidRequest(
                f"sampling_params.{unknown[0]}: there is no such parameter; known are {', '.join(names)}"
            )
        return cls(**(given or {}))


class TurnOptions(TypedDict, total=False):
    """Options of one turn. Options that are not described here have the contract's names and meanings.

    `mode` relates the prompt to its conversation: "auto", "append" or "whole_history". `sampling` may be a dict.
    `timeout` in seconds bounds all attempts together. With `no_cache` the turn shares no KV of earlier prompts, and
    without a conversation it leaves none for later ones. Requests of one `cache_key` prefer the same rings. An answer
    that repeats much of `prediction` comes sooner, with the same tokens. With `max_loss` or `max_ttft` the turn may be
    approximate.
    """

    mode: str
    sampling: Sampling | Mapping[str, Any] | None
    timeout: float | None
    request_id: str
    conversation_ttl_seconds: float | None
    wait: bool
    priority: int
    no_cache: bool
    cache_key: str
    prediction: str
    truncate_prompt_tokens: int | None
    algorithm: str
    max_loss: float | None
    max_ttft: float | None
    model: str


class RequestOptions(TurnOptions, total=False):
    """Options of a turn in any conversation, or in none.

    The turn fails with ConversationLost, before any work, unless the conversation remembers exactly `expected_tokens`
    tokens.
    """

    conversation_id: str
    expected_tokens: int | None


OPTIONS = frozenset(RequestOptions.__annotations__)
KINDS = {
    FieldDescriptor.CPPTYPE_STRING: "text",
    FieldDescriptor.CPPTYPE_BOOL: "truth value",
    FieldDescriptor.CPPTYPE_FLOAT: "number",
    FieldDescriptor.CPPTYPE_DOUBLE: "number",
    FieldDescriptor.CPPTYPE_INT32: "whole number",
    FieldDescriptor.CPPTYPE_INT64: "whole number",
}
"""Words for the types of fields."""
RENAMED = {"mode": "prompt_mode", "sampling": "sampling_params"}
"""Options whose name differs from that of the contract's field, with the field's name."""


def make_request(prompt: Prompt, options: Mapping[str, Any]) -> inference_pb2.GenerateRequest:
    """Return the contract's request; `options` are RequestOptions. Raises InvalidRequest, TypeError.

    If the options lack a request id or a seed, one is made: by the id the service recognizes attempts at the same
    request, and with the seed every attempt draws the same tokens.
    """
    unknown = options.keys() - OPTIONS
    if unknown:
        name = min(unknown)
        if name in Sampling.__dataclass_fields__:
            raise TypeError(f"{name!r} is a sampling parameter: pass it as sampling=Sampling({name}={options[name]!r})")
        raise TypeError(f"{name!r} is no option of a turn; allowed are {', '.join(sorted(OPTIONS))}")
    given = dict(options)
    mode = given.pop("mode", "auto")
    if mode not in MODES:
        raise InvalidRequest(f"mode: {mode!r} is not allowed; use one of {', '.join(MODES)}")
    request = inference_pb2.GenerateRequest(
        prompt_mode=MODES[mode], sampling_params=Sampling.of(given.pop("sampling", None)).to_message()
    )
    given.pop("timeout", None)
    for name, value in given.items():
        _fill(request, name, value, name)
    request.request_id = request.request_id or f"req-{uuid.uuid4().hex[:16]}"
    if not request.sampling_params.HasField("seed"):
        request.sampling_params.seed = secrets.randbits(63)
    _fill_prompt(request, prompt)
    return request


def is_chat(prompt: Prompt) -> bool:
    """Return whether a prompt is made of messages."""
    if isinstance(prompt, Message | Mapping):
        return True
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Message | Mapping)


def make_count_request(prompt: Prompt, model: str = "") -> inference_pb2.CountTokensRequest:
    """Return the contract's request for the number of tokens of a prompt. Raises InvalidRequest."""
    request = inference_pb2.CountTokensRequest(model=model)
    _fill_prompt(request, prompt)
    return request


def _fill_prompt(request: inference_pb2.GenerateRequest | inference_pb2.CountTokensRequest, prompt: Prompt) -> None:
    try:
        if isinstance(prompt, str):
            request.text = prompt
            return
        if is_chat(prompt):
            items: Any = [prompt] if isinstance(prompt, Message | Mapping) else prompt
            for place, item in enumerate(items):
                message = Message.of(item, f"prompt[{place}]")
                request.chat.messages.add(role=message.role, content=message.content)
            return
    except UnicodeEncodeError as error:
        shown = error.object[error.start]
        raise InvalidRequest(f"prompt: {shown!r} is a lone surrogate; decode the text as UTF-8") from None
    to_list = getattr(prompt, "tolist", None)  # of arrays and tensors
    ids: Any = to_list() if to_list else prompt
    try:
        request.tokenized.input_ids.extend(ids)
    except ValueError as error:
        raise InvalidRequest(f"prompt: {error}") from None
    except TypeError:
        raise InvalidRequest("prompt: give a text, a sequence of token ids, or a sequence of messages") from None
    request.tokenized.SetInParent()


def _fill(message: google.protobuf.message.Message, name: str, value: Any, shown: str) -> None:
    """Set a field of a message; None leaves it unset. Raises InvalidRequest, whose text names it `shown`."""
    if value is None:
        return
    field = message.DESCRIPTOR.fields_by_name[name]
    try:
        if field.enum_type is not None:
            setattr(message, name, _number(field.enum_type, value))
        elif name == "choice":
            message.choice.CopyFrom(inference_pb2.Choices(items=value))  # type: ignore[attr-defined]
        elif not field.is_repeated:
            setattr(message, name, json.dumps(value) if isinstance(value, Mapping) else value)
        elif field.message_type is not None:  # a map of numbers
            getattr(message, name).update({int(key): each for key, each in value.items()})
        else:
            getattr(message, name).extend([value] if isinstance(value, str | int) else value)
    except (TypeError, ValueError, AttributeError):
        raise InvalidRequest(f"{shown}: {value!r:.100} is not allowed; {_allowed(field)}") from None


def _number(enum: Any, name: str) -> int:
    """Return the number of a short name. Raises ValueError."""
    if name not in enum_numbers(enum):
        raise ValueError(name)
    return enum_numbers(enum)[name]


def _allowed(field: Any) -> str:
    """Describe the values that a field of a message takes."""
    if field.enum_type is not None:
        return f"use one of {', '.join(filter(None, enum_numbers(field.enum_type)))}"
    if field.message_type is not None:
        return "give a list of texts" if field.name == "choice" else "give a mapping of token ids to numbers"
    kind = KINDS.get(field.cpp_type, "whole number from 0")
    return f"give a {kind} or a list of them" if field.is_repeated else f"give a {kind}"
