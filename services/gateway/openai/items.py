"""Requests for OpenAI's responses, whose input is a list of items, as requests of chats."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ringserve.cp_core.errors import InvalidRequest
from ringserve.services.gateway.openai.fields import CACHE_KEYS, INERT, OURS, SAMPLING, boolean, shown, text
from ringserve.services.gateway.openai.stored import Links, ResponseName, digest

Json = dict[str, Any]
RESPONSE_FIELDS = frozenset(
    {
        *("background", "chat_template_kwargs", "include", "input", "instructions", "max_output_tokens", "model"),
        *("parallel_tool_calls", "previous_response_id", "reasoning", "store", "stream", "stream_options"),
        *("structured_outputs", "text", "tool_choice", "tools", "truncation"),
        *(SAMPLING.keys() - {"n", "max_tokens", "max_completion_tokens"}),
        *OURS,
        *CACHE_KEYS,
        *INERT,
    }
)
PLAIN: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "include": ([],),
    "reasoning": ({}, {"effort": "none"}),
    "truncation": ("disabled",),
}
"""Fields of which only these values are served."""
PARTS = ("input_text", "output_text", "text")
RENAMED = {"response_format": "text.format", "max_tokens": "max_output_tokens"}
"""Names of a chat's fields -> those of a response's."""


def chat_of(body: Any, *, keeps_unknown: bool) -> dict[str, Any]:
    """Return the request of a chat that says the same. Raises InvalidRequest.

    Unknown fields are left in it where `keeps_unknown`: its reader refuses or ignores them.
    """
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    given = {name: value for name, value in body.items() if value is not None}
    for name in ("previous_response_id", "store"):
        given.pop(name, None)
    for name in given.keys() - RESPONSE_FIELDS:
        if not keeps_unknown:
            raise InvalidRequest(f"{name[:60]}: there is no such field")
    for name, allowed in PLAIN.items():
        if name in given and given.pop(name) not in allowed:
            raise InvalidRequest(f"{name}: {shown(body[name])} is not supported; leave it out")
    messages = _messages(given.pop("input", None))
    if "instructions" in given:
        messages.insert(0, {"role": "system", "content": text("instructions", given.pop("instructions"))})
    options = given.pop("text", {})
    if not isinstance(options, dict):
        raise InvalidRequest(f"text: {shown(options)} is not allowed; give an object with a format")
    chat = {name: value for name, value in given.items() if name != "max_output_tokens"} | {"messages": messages}
    if options.get("format") is not None:
        chat["response_format"] = options["format"]
    if "max_output_tokens" in given:
        chat["max_tokens"] = given["max_output_tokens"]
    if "tools" in given:
        chat["tools"] = _tools(given["tools"])
    choice = given.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "function":
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    return chat


def links_of(body: Any) -> Links:
    """Return the links of a request for a response to others. Raises InvalidRequest, NotFound."""
    given = {name: value for name, value in body.items() if value is not None}
    instructions, tools = given.get("instructions", ""), given.get("tools", [])
    return Links(
        previous=ResponseName.read(text("previous_response_id", given.get("previous_response_id", ""))),
        is_stored=boolean("store", given.get("store", True)) and not given.get("conversation_id"),
        instructions=digest(instructions) if instructions else "",
        tools=digest(json.dumps(tools, sort_keys=True)) if tools else "",
    )


def renamed(error: InvalidRequest) -> InvalidRequest:
    """Return an error of a chat that names a response's fields."""
    message = str(error)
    for chats, ours in RENAMED.items():
        if message.startswith((f"{chats}:", f"{chats}.", f"{chats}[")):
            return InvalidRequest(ours + message[len(chats) :])
    return error


def _tools(tools: Any) -> Any:
    """Return tools in the form of chats, where a function is one field."""
    if not isinstance(tools, list):
        return tools
    return [
        {"type": tool.get("type"), "function": {name: tool[name] for name in tool if name != "type"}}
        if isinstance(tool, dict)
        else tool
        for tool in tools
    ]


def _messages(given: Any) -> list[Json]:
    """Return the messages of an input: a text, or items. Calls that follow each other are one message."""
    if isinstance(given, str):
        return [{"role": "user", "content": text("input", given)}]
    if not isinstance(given, list):
        raise InvalidRequest(f"input: {shown(given)} is not allowed; give a string or a list of items")
    if not given:
        raise InvalidRequest("input: none given; at least 1 item is needed")
    messages: list[Json] = []
    for place, item in enumerate(given):
        name = f"input[{place}]"
        kind = item.get("type", "message") if isinstance(item, dict) else None
        match kind:
            case "message":
                messages.append(
                    {
                        "role": text(f"{name}.role", item.get("role")),
                        "content": _content(f"{name}.content", item.get("content")),
                    }
                )
            case "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                call = {"id": text(f"{name}.call_id", item.get("call_id")), "type": "function", "function": function}
                if not (messages and messages[-1]["role"] == "assistant"):
                    messages.append({"role": "assistant", "content": ""})
                messages[-1].setdefault("tool_calls", []).append(call)
            case "function_call_output":
                content = _content(f"{name}.output", item.get("output"))
                call_id = text(f"{name}.call_id", item.get("call_id"))
                messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
            case _:
                raise InvalidRequest(
                    f"{name}.type: {shown(kind)} is not supported; use message, function_call or function_call_output"
                )
    return messages


def _content(name: str, content: Any) -> str:
    if not isinstance(content, list):
        return text(name, content)
    for place, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") not in PARTS:
            raise InvalidRequest(f"{name}[{place}]: only parts of text are supported (type {', '.join(PARTS)})")
    return "".join(text(f"{name}[{place}].text", part.get("text")) for place, part in enumerate(content))
