"""Description of the HTTP API in OpenAPI's form, made of its routes and of the tables of its fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from starlette.routing import Route

from ringserve.orchestration.protocol.turns import MAX_PRIORITY
from ringserve.services.gateway.openai import fields
from ringserve.services.gateway.openai.fields import CACHE_KEYS, INERT, NEUTRAL, OURS, SAMPLING, Reader, integer
from ringserve.services.gateway.openai.formats import FORMATS
from ringserve.services.gateway.openai.items import PLAIN, RESPONSE_FIELDS
from ringserve.services.gateway.openai.requests import CHAT, COMPLETION, DETOKENIZE, MAX_PROMPTS, PROMPT_MODES, TOKENIZE
from ringserve.services.gateway.openai.tools import MAX_TOOLS

Json = dict[str, Any]


def _whole(low: int, high: int) -> Json:
    return {"type": "integer", "minimum": low, "maximum": high}


TOKEN: Json = _whole(0, 2**32 - 1)
TOKENS: Json = {"type": "array", "items": TOKEN}
NUMBER: Json = {"type": "number"}
BOOLEAN: Json = {"type": "boolean"}
TEXT: Json = {"type": "string"}
TEXTS: Json = {"type": "array", "items": TEXT}
OF_READERS: Mapping[Reader, Json] = {
    fields.number: NUMBER,
    fields.boolean: BOOLEAN,
    fields.text: TEXT,
    fields.token_ids: TOKENS,
    fields.stops: {"anyOf": [TEXT, TEXTS]},
    fields.top_k: _whole(-1, 2**32 - 1),
    fields.logit_bias: {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": NUMBER,
    },
    fields.priority: _whole(-MAX_PRIORITY, MAX_PRIORITY),
    integer(32): TOKEN,
    integer(64): _whole(0, 2**64 - 1),
}
"""Schema of what each reader of a field takes."""

PART: Json = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": TEXT},
}
CONTENT: Json = {"anyOf": [TEXT, {"type": "array", "items": PART}]}
FUNCTION: Json = {
    "type": "object",
    "required": ["name"],
    "properties": {"name": TEXT, "description": {}, "parameters": {"type": "object"}, "strict": BOOLEAN},
}
TOOL: Json = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {"type": {"const": "function"}, "function": FUNCTION},
}
CALL: Json = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "id": TEXT,
        "function": {"type": "object", "required": ["name"], "properties": {"name": TEXT, "arguments": TEXT}},
    },
}
MESSAGE: Json = {
    "type": "object",
    "required": ["role"],
    "properties": {"role": TEXT, "content": CONTENT, "tool_calls": {"type": "array", "items": CALL}, "name": {}},
    "anyOf": [
        {"required": ["content"]},
        {"required": ["tool_calls"], "properties": {"tool_calls": {"type": "array", "minItems": 1}}},
    ],
}
OWN: Mapping[str, Json] = {
    "model": {"type": "string", "minLength": 1},
    "stream": BOOLEAN,
    "stream_options": {
        "type": "object",
        "properties": {"include_usage": {"anyOf": [BOOLEAN, {"type": "null"}]}, "include_obfuscation": {}},
        "additionalProperties": False,
    },
    "messages": {"type": "array", "items": MESSAGE},
    "prompt": {
        "anyOf": [
            TEXT,
            TOKENS,
            {"type": "array", "items": {"anyOf": [TEXT, TOKENS]}, "minItems": 1, "maxItems": MAX_PROMPTS},
        ]
    },
    "tools": {"type": "array", "items": TOOL, "maxItems": MAX_TOOLS},
    "tool_choice": {
        "anyOf": [
            {"enum": ["none", "auto"]},
            {"const": "required", "description": "Only with tools."},
            {
                "type": "object",
                "required": ["type", "function"],
                "properties": {"type": {"const": "function"}, "function": {"type": "object", "required": ["name"]}},
            },
        ]
    },
    "parallel_tool_calls": BOOLEAN,
    "response_format": {
        "type": "object",
        "required": ["type"],
        "properties": {"type": {"enum": list(FORMATS)}, "json_schema": {"type": "object"}},
    },
    "structured_outputs": {
        "type": "object",
        "minProperties": 1,
        "properties": {
            name: {"anyOf": [schema, {"type": "null"}]}
            for name, schema in {
                "json": {"anyOf": [{"type": "object"}, TEXT]},
                "regex": TEXT,
                "choice": TEXTS,
                "grammar": TEXT,
                "json_object": BOOLEAN,
            }.items()
        },
        "additionalProperties": {"type": "null"},
        "description": "One of these is given.",
    },
    "prompt_mode": {"type": "string", "enum": list(PROMPT_MODES)},
    "top_logprobs": TOKEN,
    "echo": BOOLEAN,
    "chat_template_kwargs": {"type": "object"},
    "add_special_tokens": BOOLEAN,
    "add_generation_prompt": BOOLEAN,
    "continue_final_message": BOOLEAN,
    "return_token_strs": BOOLEAN,
    "tokens": TOKENS,
}
"""Fields that only some kinds of request have."""
CONVERSATION: Json = {
    "type": "object",
    "required": ["id", "forked_from"],
    "properties": {"id": TEXT, "forked_from": TEXT, "at_token": TOKEN},
}


def _turn(own: frozenset[str], required: str, others: Mapping[str, Json]) -> Json:
    """Return the schema of a request for a turn."""
    found: dict[str, Json] = {name: OF_READERS[reader] for name, (_, reader) in SAMPLING.items()}
    found |= {name: OF_READERS[reader] for name, reader in OURS.items()}
    found |= dict.fromkeys(CACHE_KEYS, TEXT)
    found |= {name: {"description": "Without effect."} for name in INERT}
    found |= {name: {"enum": list(values), "description": "Not served."} for name, values in NEUTRAL.items()}
    found |= {name: others.get(name) or OWN[name] for name in own}
    return _request(found, ["model", required])


def _request(found: Mapping[str, Json], required: list[str]) -> Json:
    """Return the schema of a request; null stands for a field that is not given."""
    properties = {
        name: schema if name in required else {"anyOf": [schema, {"type": "null"}]}
        for name, schema in sorted(found.items())
    }
    return {"type": "object", "required": required, "properties": properties}


ITEM: Json = {
    "type": "object",
    "properties": {"type": {"enum": ["message", "function_call", "function_call_output"]}, "role": TEXT},
}
RESPONSE: Json = _request(
    {name: OF_READERS[SAMPLING[name][1]] for name in RESPONSE_FIELDS & SAMPLING.keys()}
    | {name: OF_READERS[reader] for name, reader in OURS.items()}
    | dict.fromkeys(CACHE_KEYS, TEXT)
    | {name: {"description": "Without effect."} for name in INERT}
    | {name: {"enum": list(values), "description": "Not served."} for name, values in PLAIN.items()}
    | {name: OWN[name] for name in RESPONSE_FIELDS & OWN.keys()}
    | {
        "input": {"anyOf": [TEXT, {"type": "array", "items": ITEM}]},
        "instructions": TEXT,
        "max_output_tokens": TOKEN,
        "previous_response_id": TEXT,
        "store": BOOLEAN,
        "text": {"type": "object", "properties": {"format": {}, "verbosity": {}}},
        "tools": {"type": "array", "items": {"type": "object", "required": ["type", "name"]}, "maxItems": MAX_TOOLS},
        "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}]},
    },
    ["model", "input"],
)
REQUESTS: Mapping[str, Json] = {
    "/v1/chat/completions": _turn(CHAT, "messages", {"logprobs": BOOLEAN}),
    "/v1/completions": _turn(COMPLETION, "prompt", {"logprobs": TOKEN}),
    "/v1/responses": RESPONSE,
    "/tokenize": _request({name: TEXT if name == "prompt" else OWN[name] for name in TOKENIZE}, []),
    "/detokenize": _request({name: OWN[name] for name in DETOKENIZE}, ["tokens"]),
    "/v1/conversations": CONVERSATION,
}
"""Schemas of the bodies of POST."""


class Operation(NamedTuple):
    summary: str
    content_type: str = "application/json"
    answer: Json | None = None
    is_open: bool = False


OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation("Answer a chat; with stream: true as server-sent events."),
    ("POST", "/v1/completions"): Operation("Continue a text or tokens; with stream: true as server-sent events."),
    ("POST", "/v1/responses"): Operation("Answer with items; with stream: true as server-sent events."),
    ("DELETE", "/v1/responses/{name}"): Operation("Delete the conversation of a response."),
    ("GET", "/v1/models"): Operation("List the served model."),
    ("GET", "/v1/models/{name}"): Operation("Show the served model."),
    ("GET", "/health"): Operation("Say whether a turn can be served.", is_open=True),
    ("GET", "/ping"): Operation("Say the same as /health, where other servers' probes ask.", is_open=True),
    ("GET", "/v1/service"): Operation("Show the service: rings, drains, queues."),
    ("GET", "/v1/conversations"): Operation("List the caller's conversations."),
    ("POST", "/v1/conversations"): Operation("Fork a conversation."),
    ("GET", "/v1/conversations/{name}"): Operation("Show a conversation."),
    ("DELETE", "/v1/conversations/{name}"): Operation("Delete a conversation."),
    ("POST", "/tokenize"): Operation(
        "Return the tokens of a text or chat.",
        answer={
            "type": "object",
            "required": ["count", "max_model_len", "tokens", "token_strs"],
            "properties": {
                "count": TOKEN,
                "max_model_len": TOKEN,
                "tokens": TOKENS,
                "token_strs": {"anyOf": [TEXTS, {"type": "null"}]},
            },
        },
    ),
    ("POST", "/detokenize"): Operation(
        "Return the text of tokens.", answer={"type": "object", "required": ["prompt"], "properties": {"prompt": TEXT}}
    ),
    ("GET", "/metrics"): Operation("Show this gateway's metrics for Prometheus.", "text/plain", TEXT),
    ("GET", "/version"): Operation(
        "Return the version of ringserve.",
        answer={"type": "object", "required": ["version"], "properties": {"version": TEXT}},
    ),
}
ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": TEXT,
                "type": TEXT,
                "param": {"anyOf": [TEXT, {"type": "null"}]},
                "code": {"anyOf": [TEXT, {"type": "null"}]},
            },
        }
    },
}


def described_api(routes: Sequence[Route], version: str) -> Json:
    """Return the description of the routes. Raises KeyError for a route without an operation."""
    paths: dict[str, Json] = {}
    for route in routes:
        path = route.path.replace(":path}", "}")
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(path, {})[method.lower()] = _described(method, path)
    return {
        "openapi": "3.1.0",
        "info": {"title": "ringserve", "version": version},
        "security": [{"token": []}, {}],
        "paths": paths,
        "components": {
            "schemas": {"Error": ERROR},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _described(method: str, path: str) -> Json:
    operation = OPERATIONS[method, path]
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    found: Json = {
        "summary": operation.summary,
        "responses": {
            "200": {
                "description": "Done.",
                "content": {operation.content_type: {"schema": operation.answer or {"type": "object"}}},
            },
            "default": {"description": "Refused or failed.", "content": error},
        },
    }
    if operation.is_open:
        found["security"] = [{}]
    if "{name}" in path:
        found["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": TEXT}]
    if method == "POST":
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": REQUESTS[path]}}}
    return found
