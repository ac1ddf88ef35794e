"""Tools that a request offers to the model, and its choice among them, in OpenAI's form."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringserve.cp_core.errors import InvalidRequest
from ringserve.services.gateway.constraints import ANY_OBJECT, JSON_OPTIONS
from ringserve.services.gateway.openai.calls import CallForm, Function, calls_grammar
from ringserve.services.gateway.openai.fields import boolean, shown, text
from ringserve.services.gateway.requests import RequestReader
from ringserve.v1 import inference_pb2

TOOL_FIELDS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})
CHOICES = ("none", "auto", "required")
MAX_TOOLS = 128
NAME = re.compile(r"[a-zA-Z0-9_.:-]{1,128}")
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Tools of a request. `described` is what the chat template shows, `functions` the ones that may be called."""

    described: Sequence[Mapping[str, Any]]
    functions: Sequence[Function]
    must_call: bool
    one_call: bool

    def hold(self, params: inference_pb2.SamplingParams, form: CallForm, reader: RequestReader) -> None:
        """Hold an answer to calls of the functions, as far as the request asks for it. Raises InvalidRequest.

        A form that the answer has besides is that of its text.
        """
        kind = params.WhichOneof("constraint")
        if kind not in (None, "json_schema", "json_object"):
            raise InvalidRequest(f"structured_outputs: {kind} is not allowed with tools; leave one out")
        schema = json.loads(params.json_schema) if kind == "json_schema" else ANY_OBJECT if kind else None
        if not (kind or self.must_call or self.one_call or any(each.is_strict for each in self.functions)):
            return
        params.grammar = calls_grammar(
            form,
            self.functions,
            reader.special_token,
            must_call=self.must_call,
            one_call=self.one_call,
            text_schema=None if schema is None else guided(schema),
        )
        try:
            reader.check_constraint(params)
        except InvalidRequest as error:
            raise InvalidRequest(str(error).replace("sampling_params.grammar: ", "tools: ", 1)) from None


def guided(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema with the options of all schemas here."""
    return {**schema, "x-guidance": JSON_OPTIONS}


def closed(schema: Any) -> Any:
    """Return the schema of arguments whose objects have no other properties than those it names, unless it says more.

    Small models invent arguments where they may. Schemas that are put together (`allOf`) stay as they are.
    """
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for name in {"properties", "$defs", "definitions"} & found.keys():
        if isinstance(found[name], dict):
            found[name] = {key: closed(value) for key, value in found[name].items()}
    for name in {"anyOf", "oneOf"} & found.keys():
        if isinstance(found[name], list):
            found[name] = [closed(value) for value in found[name]]
    if "items" in found:
        found["items"] = closed(found["items"])
    if "properties" in found and not {"anyOf", "oneOf", "$ref"} & found.keys():
        found.setdefault("additionalProperties", False)
    return found


def read_offer(values: Mapping[str, Any]) -> Offer | None:
    """Return the tools that may be called; None where there are none. Raises InvalidRequest."""
    tools = values.get("tools", [])
    choice = values.get("tool_choice", "auto" if tools else "none")
    one_call = not boolean("parallel_tool_calls", values.get("parallel_tool_calls", True))
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools: {shown(tools)} is not allowed; give a list of at most {MAX_TOOLS} tools")
    functions = [_function(f"tools[{place}]", tool) for place, tool in enumerate(tools)]
    names = [each.name for each in functions]
    if len(set(names)) < len(names):
        raise InvalidRequest(f"tools: {shown(names)} names a function twice; names must differ")
    named = _named(choice)
    if named is None and choice not in CHOICES:
        raise InvalidRequest(
            f"tool_choice: {shown(choice)} is not allowed; use one of {', '.join(CHOICES)}, or name a function"
        )
    if choice == "none" or (choice == "auto" and not tools):
        return None
    if named is not None and named not in names:
        raise InvalidRequest(f"tool_choice: there is no function {shown(named)} among the tools")
    if not tools:
        raise InvalidRequest("tool_choice: 'required' is not allowed without tools")
    return Offer(
        described=[{"type": "function", "function": tool["function"]} for tool in tools],
        functions=[each for each in functions if named in (None, each.name)],
        must_call=named is not None or choice == "required",
        one_call=one_call or named is not None,
    )


def _arguments(schema: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if not schema:
        return NO_PARAMETERS
    found: Mapping[str, Any] = schema if '"allOf"' in json.dumps(schema) else closed(schema)
    return found


def _named(choice: Any) -> str | None:
    if not isinstance(choice, dict) or choice.get("type") != "function":
        return None
    function = choice.get("function")
    return text("tool_choice.function.name", function.get("name") if isinstance(function, dict) else None)


def _function(name: str, tool: Any) -> Function:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict):
        raise InvalidRequest(f'{name}: {shown(tool)} is not allowed; give {{"type": "function", "function": ...}}')
    called = text(f"{name}.function.name", function.get("name"))
    if not NAME.fullmatch(called):
        raise InvalidRequest(f"{name}.function.name: {shown(called)} is not allowed; use letters, digits and _-.:")
    schema = function.get("parameters")
    if schema is not None and not isinstance(schema, dict):
        raise InvalidRequest(f"{name}.function.parameters: {shown(schema)} is not allowed; give a JSON schema")
    strict = function.get("strict")
    return Function(
        name=called,
        schema=guided(_arguments(schema)),
        is_strict=strict is not None and boolean(f"{name}.function.strict", strict),
    )
