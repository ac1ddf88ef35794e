"""Reader of SamplingParams, with the grammar of a constrained answer.

Errors name the field, its value and the allowed values.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from typing import Any, TypeVar

import numpy as np
from llguidance import LLMatcher, grammar_from

from ringserve.cp_core.errors import InvalidRequest
from ringserve.services.gateway.text import REPLACEMENT, StopRule, TextCodec
from ringserve.v1 import inference_pb2
from ringserve.workers.protocol.prefill_steps import TokenIds
from ringserve.workers.protocol.ranks import ModelInfo
from ringserve.workers.sampling.grammar import MAX_GRAMMAR_CHARACTERS, Grammars
from ringserve.workers.sampling.parameters import SamplingParameters, TokenBias, TokenSequence

N = TypeVar("N", int, float)

MAX_TEMPERATURE = 100.0
MAX_PENALTY = 2.0
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 100.0
MAX_BIAS = 100.0
MAX_BIASES = 1024
MAX_LOGPROBS = 20
MAX_STOP_TOKENS = 256
MAX_STOPS = 16
MAX_STOP_LENGTH = 256
MAX_COMPLETIONS = 16
MAX_ALLOWED = 4096
MAX_BAD_WORDS = 256


def read_sampling(params: inference_pb2.SamplingParams, model: ModelInfo) -> SamplingParameters:
    """Return one answer's sampling parameters. Raises InvalidRequest."""
    temperature = _check_range("temperature", params.temperature, 0.0, MAX_TEMPERATURE)
    # Without max_tokens, the router gives the answer the room it finds, up to the model's positions.
    max_tokens = params.max_tokens if params.HasField("max_tokens") else model.max_positions
    _check_range("max_tokens", max_tokens, 1, model.max_positions)
    _check_range("min_tokens", params.min_tokens, 0, max_tokens)
    stops = _stop_token_ids(params, model)
    if params.min_tokens and len(stops) >= model.vocab_size:
        raise InvalidRequest(
            f"sampling_params.min_tokens: {params.min_tokens} is not allowed if every token is a stop token; "
            f"allowed is 0"
        )
    read_stop_rule(params)
    return SamplingParameters(
        temperature=temperature,
        seed=params.seed if params.HasField("seed") else secrets.randbits(63),
        max_tokens=max_tokens,
        stop_token_ids=stops,
        top_p=_top_p(params),
        top_k=params.top_k,
        min_p=_check_range("min_p", params.min_p, 0.0, 1.0),
        presence_penalty=_check_range("presence_penalty", params.presence_penalty, -MAX_PENALTY, MAX_PENALTY),
        frequency_penalty=_check_range("frequency_penalty", params.frequency_penalty, -MAX_PENALTY, MAX_PENALTY),
        repetition_penalty=_repetition_penalty(params),
        logit_bias=_logit_bias(params, model),
        min_tokens=params.min_tokens,
        logprobs=_read_num_logprobs("logprobs", params.logprobs, model) if params.HasField("logprobs") else None,
        prompt_logprobs=_read_num_logprobs("prompt_logprobs", params.prompt_logprobs, model)
        if params.HasField("prompt_logprobs")
        else None,
        ends_by_text=bool(params.stop),
        allowed_ids=_allowed_ids(params, model),
        max_drafts=params.max_draft_tokens if params.HasField("max_draft_tokens") else None,
    )


def read_stop_rule(params: inference_pb2.SamplingParams) -> StopRule:
    """Return the rule for stop strings. Raises InvalidRequest."""
    _check_range("stop", len(params.stop), 0, MAX_STOPS, "strings")
    for place, stop in enumerate(params.stop):
        _check_range(f"stop[{place}]", len(stop), 1, MAX_STOP_LENGTH, "characters")
        if REPLACEMENT in stop:
            # U+FFFD also stands for an incomplete character, which must not stop an answer.
            raise InvalidRequest(
                f"sampling_params.stop[{place}]: {stop!r} holds the replacement character U+FFFD; any other is allowed"
            )
    return StopRule(
        strings=tuple(params.stop),
        is_shown=params.include_stop_str_in_output,
        min_tokens=params.min_tokens,
        shows_special=params.HasField("skip_special_tokens") and not params.skip_special_tokens,
    )


def read_num_completions(params: inference_pb2.SamplingParams) -> int:
    """Return the number of answers, 1 by default. Raises InvalidRequest."""
    return _check_range("n", params.n if params.HasField("n") else 1, 1, MAX_COMPLETIONS)


def check_vocabulary(field: str, ids: TokenIds, vocab_size: int) -> None:
    """Check that the model knows every token. Raises InvalidRequest, which names the first unknown token."""
    outside = np.flatnonzero((ids >= vocab_size) | (ids < 0))
    if len(outside):
        place = int(outside[0])
        raise InvalidRequest(
            f"{field}[{place}]: token {int(ids[place])} is outside the vocabulary; allowed are 0 to {vocab_size - 1}"
        )


def _check_range(name: str, value: N, lowest: N, highest: N, unit: str = "") -> N:
    """Return `value` if it is a number in the range. Raises InvalidRequest."""
    if math.isfinite(value) and lowest <= value <= highest:
        return value
    what = f"{value} {unit} are" if unit else f"{value} is"
    raise InvalidRequest(
        f"sampling_params.{name}: {what} out of range; allowed are {_format_limit(lowest)} to {_format_limit(highest)}"
    )


def _format_limit(number: float) -> str:
    return f"{number:g}" if isinstance(number, float) else str(number)


def _top_p(params: inference_pb2.SamplingParams) -> float:
    if not params.HasField("top_p"):
        return 1.0
    if not 0.0 < params.top_p <= 1.0:
        raise InvalidRequest(
            f"sampling_params.top_p: {params.top_p} is out of range; allowed are numbers above 0, up to 1"
        )
    return params.top_p


def _repetition_penalty(params: inference_pb2.SamplingParams) -> float:
    if not params.HasField("repetition_penalty"):
        return 1.0
    return _check_range("repetition_penalty", params.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)


def _stop_token_ids(params: inference_pb2.SamplingParams, model: ModelInfo) -> tuple[int, ...]:
    if len(params.stop_token_ids) > MAX_STOP_TOKENS:
        raise InvalidRequest(
            f"sampling_params.stop_token_ids: {len(params.stop_token_ids)} are given, at most {MAX_STOP_TOKENS} "
            f"are allowed"
        )
    stops = np.fromiter(params.stop_token_ids, dtype=np.int64)
    check_vocabulary("sampling_params.stop_token_ids", stops, model.vocab_size)
    ends = () if params.ignore_eos else model.eos_token_ids
    return tuple(sorted({*stops.tolist(), *ends}))


def _logit_bias(params: inference_pb2.SamplingParams, model: ModelInfo) -> tuple[TokenBias, ...]:
    _check_range("logit_bias", len(params.logit_bias), 0, MAX_BIASES, "tokens")
    biases = []
    for token_id, bias in sorted(params.logit_bias.items()):
        if token_id >= model.vocab_size:
            raise InvalidRequest(
                f"sampling_params.logit_bias: token {token_id} is outside the vocabulary; "
                f"allowed are 0 to {model.vocab_size - 1}"
            )
        biases.append(TokenBias(token_id, _check_range(f"logit_bias[{token_id}]", bias, -MAX_BIAS, MAX_BIAS)))
    return tuple(biases)


def _allowed_ids(params: inference_pb2.SamplingParams, model: ModelInfo) -> tuple[int, ...]:
    _check_range("allowed_token_ids", len(params.allowed_token_ids), 0, MAX_ALLOWED, "tokens")
    allowed = np.fromiter(params.allowed_token_ids, dtype=np.int64)
    check_vocabulary("sampling_params.allowed_token_ids", allowed, model.vocab_size)
    return tuple(sorted(set(allowed.tolist())))


def read_banned(params: inference_pb2.SamplingParams, codec: TextCodec) -> tuple[TokenSequence, ...]:
    """Return the token sequences of `bad_words`, at the beginning of a text and after a space. Raises InvalidRequest.

    Example: "cat" bans the tokens of "cat" and of " cat".
    """
    _check_range("bad_words", len(params.bad_words), 0, MAX_BAD_WORDS, "texts")
    banned = set()
    for place, word in enumerate(params.bad_words):
        _check_range(f"bad_words[{place}]", len(word), 1, MAX_STOP_LENGTH, "characters")
        for text in (word.lstrip() or word, " " + word.lstrip()):
            banned.add(tuple(codec.encode(text, adds_special=False).tolist()))
    return tuple(TokenSequence(each) for each in sorted(banned - {()}))


def _read_num_logprobs(name: str, num_top: int, model: ModelInfo) -> int:
    return _check_range(name, num_top, 0, min(MAX_LOGPROBS, model.vocab_size))


ANY_OBJECT = {"type": "object"}
JSON_OPTIONS: Any = {  # llguidance's own type exists only for type checkers
    "lenient": False,
    "whitespace_pattern": r"[ \n\r\t]{1,20}",
    "json_allow_general_unicode_escapes": True,
}
"""Options for every schema: only a lenient schema (`wish`) ignores keywords, and spaces must come to an end."""
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


def make_grammar(params: inference_pb2.SamplingParams, grammars: Grammars) -> str:
    """Return the answer's grammar for llguidance, empty without a constraint. Raises InvalidRequest."""
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
            return _make_schema_grammar(params.json_schema, is_lenient=params.lenient_schema)
        case "json_object":
            if not params.json_object:
                raise InvalidRequest("false is not allowed; leave it out")
            return LLMatcher.grammar_from_json_schema(ANY_OBJECT, overrides=JSON_OPTIONS)
        case "choice":
            return _make_choice_grammar(list(params.choice.items))
        case "regex":
            return LLMatcher.grammar_from_regex(_check_filled(params.regex))
        case _:
            return grammar_from("grammar", _check_filled(params.grammar))


def _make_schema_grammar(text: str, *, is_lenient: bool) -> str:
    """Return a JSON schema's grammar, which keeps the schema's order of properties."""
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


def _make_choice_grammar(choices: list[str]) -> str:
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise InvalidRequest(f"{len(choices)} choices are given; allowed are 1 to {MAX_CHOICES}")
    _check_length("".join(choices))
    return grammar_from("choice", json.dumps(choices))


def _check_filled(text: str) -> str:
    if not text:
        raise InvalidRequest("'' is not allowed; leave it out")
    _check_length(text)
    return text


def _check_length(text: str) -> None:
    """Refuse a long text before parsing it."""
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise InvalidRequest(f"{len(text)} characters are too many; at most {MAX_GRAMMAR_CHARACTERS} are allowed")
