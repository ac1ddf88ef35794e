"""Messages of a chat: what the contract has of them, and what only the model's chat template takes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringserve.cp_core.errors import InvalidRequest
from ringserve.services.gateway.openai.fields import shown, text
from ringserve.services.gateway.requests import RequestReader
from ringserve.v1 import inference_pb2
from ringserve.workers.protocol.prefill_steps import TokenIds

ROLES = {"developer": "system"}
"""Roles that chat templates know by another name."""
MESSAGE_FIELDS = frozenset({"role", "content", "tool_calls", "tool_call_id"})
MAX_CALLS = 128
"""Calls of one message of the history."""
Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Template:
    """Input of the chat template of a chat for which the contract has no place: calls, tools, or own values.

    `opens_answer`: the template begins an answer. `continues_last`: the answer goes on in the last message.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    values: Mapping[str, Any]
    opens_answer: bool = True
    continues_last: bool = False

    @property
    def num_characters(self) -> int:
        return len(json.dumps([self.messages, self.tools], ensure_ascii=False))


def read_messages(messages: Any) -> list[Message]:
    """Return messages as chat templates take them. Raises InvalidRequest."""
    if not isinstance(messages, list):
        raise InvalidRequest(f"messages: {shown(messages)} is not allowed; give a list of messages")
    return [_message(f"messages[{place}]", message) for place, message in enumerate(messages)]


def has_calls(messages: Sequence[Message]) -> bool:
    """Return whether messages hold calls of tools or answers to them."""
    return any(len(message) > 2 for message in messages)


def put_messages(request: inference_pb2.GenerateRequest, messages: Sequence[Message]) -> None:
    """Put messages into a request, without what the contract has no place for."""
    request.chat.messages.extend(
        inference_pb2.ChatMessage(role=message["role"], content=message["content"]) for message in messages
    )
    request.chat.SetInParent()  # none are refused by name later


def tokens_of(reader: RequestReader, template: Template) -> TokenIds:
    """Return the tokens that the chat template makes. Raises InvalidRequest."""
    return reader.tokenize_template(
        template.messages,
        template.tools,
        template.num_characters,
        opens_answer=template.opens_answer,
        continues_last=template.continues_last,
        values=template.values,
    )


def following_tokens(reader: RequestReader, template: Template, last_token: int) -> TokenIds:
    """Return the tokens that the chat template makes of messages that follow an answer. Raises InvalidRequest."""
    return reader.tokenize_following(
        template.messages, template.tools, template.num_characters, last_token, template.values
    )


def _message(name: str, message: Any) -> Message:
    if not isinstance(message, dict):
        raise InvalidRequest(f"{name}: {shown(message)} is not allowed; give an object with role and content")
    for field, value in message.items():
        # The name of a speaker is for templates that know several; an answer sent back carries empty lists and nulls.
        if field not in MESSAGE_FIELDS and value not in (None, [], {}) and field != "name":
            raise InvalidRequest(f"{name}.{field[:60]}: not supported; leave it out")
    role = text(f"{name}.role", message.get("role"))
    calls = _calls(f"{name}.tool_calls", message.get("tool_calls"))
    content = message.get("content")
    found: Message = {"role": ROLES.get(role, role)}
    found["content"] = "" if calls and content is None else _content(f"{name}.content", content)
    if calls:
        found["tool_calls"] = calls
    if message.get("tool_call_id") is not None:
        found["tool_call_id"] = text(f"{name}.tool_call_id", message["tool_call_id"])
    return found


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


def _calls(name: str, calls: Any) -> list[Message]:
    """Read the calls of an earlier answer; templates take their arguments as objects."""
    if calls is None:
        return []
    if not isinstance(calls, list) or len(calls) > MAX_CALLS:
        raise InvalidRequest(f"{name}: {shown(calls)} is not allowed; give a list of at most {MAX_CALLS} calls")
    found = []
    for place, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise InvalidRequest(f"{name}[{place}]: {shown(call)} is not allowed; give an object with a function")
        arguments = function.get("arguments") or "{}"
        try:
            parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, dict):
            raise InvalidRequest(f"{name}[{place}].function.arguments: {shown(arguments)} is no JSON object")
        called = {"name": text(f"{name}[{place}].function.name", function.get("name")), "arguments": parsed}
        call_id = text(f"{name}[{place}].id", call.get("id", ""))
        found.append({"id": call_id, "type": "function", "function": called})
    return found
