"""Constraints of answers: a client's schema, pattern, list or grammar as one grammar of llguidance's."""

from __future__ import annotations

import json
import re
from typing import Any

from llguidance import LLMatcher, grammar_from

from ringserve.cp_core.errors import InvalidRequest
from ringserve.v1 import inference_pb2
from ringserve.workers.sampling.grammar import MAX_GRAMMAR_CHARACTERS, Grammars

ANY_OBJECT = {"type": "object"}
JSON_OPTIONS: Any = {  # its type is known to checkers alone
    "lenient": False,
    "whitespace_pattern": r"[ \n\r\t]{1,20}",
    "json_allow_general_unicode_escapes": True,
}
"""Options of every schema: no keyword is ignored, unless the schema is a wish (`wish`), and spaces come to an end."""
MAX_CHOICES = 4096
LOOK_AROUND = re.compile(r"\(\?<?[=!]")
"""Beginning of a look-ahead or look-behind in a pattern."""


def wish(schema: Any) -> dict[str, Any]:
    """Return a schema that holds an answer as far as a grammar can, as OpenAI's `strict: false` asks.

    Example: `{"type": "array", "uniqueItems": true}` becomes a schema whose items may be equal.
    """
    found: dict[str, Any] = _without_look_around(schema)
    return {**found, "x-guidance": JSON_OPTIONS | {"lenient": True}}


def _without_look_around(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_look_around(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    is_held = not (isinstance(pattern := schema.get("pattern"), str) and LOOK_AROUND.search(pattern))
    return {name: _without_look_around(value) for name, value in schema.items() if is_held or name != "pattern"}


def grammar_of(params: inference_pb2.SamplingParams, grammars: Grammars) -> str:
    """Return the grammar that holds an answer, empty where there is none. Raises InvalidRequest, before any work."""
    kind = params.WhichOneof("constraint")
    if kind is None:
        return ""
    name = f"sampling_params.{kind}"
    if params.ignore_eos or params.min_tokens:
        other = "ignore_eos" if params.ignore_eos else "min_tokens"
        raise InvalidRequest(f"sampling_params.{other}: not allowed with {kind}, which says where the answer ends")
    try:
        grammar = _grammar(kind, params)
        grammars.check(grammar)
    except InvalidRequest as error:
        raise InvalidRequest(f"{name}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name}: it is no valid grammar: {' '.join(str(error).split())[:300]}") from None
    return grammar


def _grammar(kind: str, params: inference_pb2.SamplingParams) -> str:
    match kind:
        case "json_schema":
            return _of_schema(params.json_schema, is_lenient=params.lenient_schema)
        case "json_object":
            if not params.json_object:
                raise InvalidRequest("false is not allowed; leave it out")
            return LLMatcher.grammar_from_json_schema(ANY_OBJECT, overrides=JSON_OPTIONS)
        case "choice":
            return _of_choices(list(params.choice.items))
        case "regex":
            return LLMatcher.grammar_from_regex(_filled(params.regex))
        case _:
            return grammar_from("grammar", _filled(params.grammar))


def _of_schema(text: str, *, is_lenient: bool) -> str:
    """Return the grammar of a JSON schema, which keeps the order of its properties."""
    _check_length(text)
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidRequest("it is no JSON; give a schema as JSON") from None
    if not isinstance(schema, dict):
        raise InvalidRequest("a schema is a JSON object")
    if is_lenient:
        schema = wish(schema)
    return LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS | {"lenient": is_lenient})


def _of_choices(choices: list[str]) -> str:
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise InvalidRequest(f"{len(choices)} choices are given; allowed are 1 to {MAX_CHOICES}")
    _check_length("".join(choices))
    return grammar_from("choice", json.dumps(choices))


def _filled(text: str) -> str:
    if not text:
        raise InvalidRequest("'' is not allowed; leave it out")
    _check_length(text)
    return text


def _check_length(text: str) -> None:
    """Refuse a long text before it is read."""
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise InvalidRequest(f"{len(text)} characters are too many; at most {MAX_GRAMMAR_CHARACTERS} are allowed")
