"""Tools that a request offers to the model, and its choice among them, in OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringserve.cp_core.errors import InvalidRequest
from ringserve.services.gateway.constraints import ANY_OBJECT, JSON_OPTIONS, wish
from ringserve.services.gateway.openai import models
from ringserve.services.gateway.openai.calls import CallForm, Function, calls_grammar
from ringserve.services.gateway.openai.models import shown
from ringserve.services.gateway.requests import RequestReader
from ringserve.v1 import inference_pb2

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
            text_schema=None if schema is None else (wish if params.lenient_schema else guided)(schema),
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


def read_offer(
    tools: Sequence[models.Function],
    described: Sequence[Mapping[str, Any]],
    choice: str | models.Named | None,
    *,
    one_call: bool = False,
) -> Offer | None:
    """Return the tools that may be called; None if there are none. Raises InvalidRequest.

    `described` are the tools as the client wrote them, in whose order of fields the model is shown them.
    """
    functions = [
        Function(
            name=tool.name,
            schema=(guided if tool.strict else wish)(_arguments(tool.parameters)),
            is_strict=bool(tool.strict),
        )
        for tool in tools
    ]
    names = [each.name for each in functions]
    if len(set(names)) < len(names):
        raise InvalidRequest(f"tools: {shown(names)} names a function twice; names must differ")
    named = choice.name if isinstance(choice, models.Named) else None
    if choice == "none" or (choice in (None, "auto") and not tools):
        return None
    if named is not None and named not in names:
        raise InvalidRequest(f"tool_choice: there is no function {shown(named)} among the tools")
    if not tools:
        raise InvalidRequest("tool_choice: 'required' is not allowed without tools")
    return Offer(
        described=[{"type": "function", "function": each} for each in described],
        functions=[each for each in functions if named in (None, each.name)],
        must_call=named is not None or choice == "required",
        one_call=one_call or named is not None,
    )


def _arguments(schema: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if not schema:
        return NO_PARAMETERS
    found: Mapping[str, Any] = schema if '"allOf"' in json.dumps(schema) else closed(schema)
    return found
