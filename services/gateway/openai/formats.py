"""Forms that an answer is held to: OpenAI's `response_format` and vLLM's `structured_outputs`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ringserve.cp_core.errors import InvalidRequest
from ringserve.services.gateway.openai.fields import boolean, shown, stops, text
from ringserve.v1 import inference_pb2

FORMAT_FIELDS = frozenset({"response_format", "structured_outputs"})
FORMATS = ("text", "json_object", "json_schema")
STRUCTURES = ("json", "regex", "choice", "grammar", "json_object")


def put_constraint(params: inference_pb2.SamplingParams, values: Mapping[str, Any]) -> None:
    """Put the form that a request asks for into its sampling parameters. Raises InvalidRequest."""
    if "response_format" in values:
        put_format(params, "response_format", values["response_format"])
    if "structured_outputs" not in values:
        return
    if params.WhichOneof("constraint"):
        raise InvalidRequest("structured_outputs: not allowed with response_format; leave one out")
    name, given = "structured_outputs", values["structured_outputs"]
    if not isinstance(given, dict):
        raise InvalidRequest(f"{name}: {shown(given)} is not allowed; give an object")
    chosen = [key for key, value in given.items() if value is not None]
    if len(chosen) != 1 or chosen[0] not in STRUCTURES:
        raise InvalidRequest(f"{name}: {shown(chosen)} is not allowed; give one of {', '.join(STRUCTURES)}")
    _put_structure(params, f"{name}.{chosen[0]}", chosen[0], given[chosen[0]])


def _put_structure(params: inference_pb2.SamplingParams, name: str, kind: str, value: Any) -> None:
    match kind:
        case "json":
            params.json_schema = value if isinstance(value, str) else schema_text(name, value)
        case "choice":
            if not isinstance(value, list):
                raise InvalidRequest(f"{name}: {shown(value)} is not allowed; give a list of strings")
            params.choice.items.extend(stops(name, value))
            params.choice.SetInParent()  # an empty list is refused by name later
        case "json_object":
            params.json_object = boolean(name, value)
        case "regex":
            params.regex = text(name, value)
        case _:
            params.grammar = text(name, value)


def put_format(params: inference_pb2.SamplingParams, name: str, given: Any) -> None:
    """Put OpenAI's format of an answer into sampling parameters. Raises InvalidRequest, which calls it `name`.

    Chats have a schema under `json_schema`, responses beside `type`.
    """
    kind = given.get("type") if isinstance(given, dict) else None
    if kind not in FORMATS:
        raise InvalidRequest(f"{name}.type: {shown(kind)} is not allowed; use one of {', '.join(FORMATS)}")
    if kind == "json_object":
        params.json_object = True
    if kind == "json_schema":
        within, inner = (f"{name}.json_schema", given["json_schema"]) if "json_schema" in given else (name, given)
        if not isinstance(inner, dict):
            raise InvalidRequest(f"{within}: {shown(inner)} is not allowed; give an object with a schema")
        params.json_schema = schema_text(f"{within}.schema", inner.get("schema"))


def schema_text(name: str, schema: Any) -> str:
    """Return a schema of a request as text. Raises InvalidRequest."""
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{name}: {shown(schema)} is not allowed; give a JSON schema")
    return text(name, json.dumps(schema, ensure_ascii=False))
