"""Reader of a GenerateRequest, its SamplingParams, and the grammar of a constrained answer, for both endpoints.

Errors name the field, its value and the allowed values.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np
from llguidance import LLMatcher, grammar_from

from ringserve.cp_core.errors import ContextTooLong, InvalidRequest, NotFound
from ringserve.mapping import enum_name
from ringserve.orchestration.protocol.plans import MAX_LOSS, MAX_TTFT, Bound, PromptMode
from ringserve.orchestration.protocol.turns import LostTurn, TurnRequest
from ringserve.services.auth.authenticator import ScopedRouter
from ringserve.services.auth.tenants import Tenant
from ringserve.services.gateway.text import REPLACEMENT, StopRule, TextCodec
from ringserve.services.rpc.wire.contract import prompt_mode_from
from ringserve.v1 import inference_pb2
from ringserve.workers.protocol.ranks import ModelInfo
from ringserve.workers.protocol.steps import Algorithm, TokenIds
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
ANY_OBJECT = {"type": "object"}
JSON_OPTIONS: Any = {  # llguidance's own type exists only for type checkers
    "lenient": False,
    "whitespace_pattern": r"[ \n\r\t]{1,20}",
    "json_allow_general_unicode_escapes": True,
}
"""Options for every schema. Only a lenient schema ignores unknown keywords; white space has at most 20 characters."""
MAX_CHOICES = 4096
LOOK_AROUND = re.compile(r"\(\?<?[=!]")
"""Beginning of a look-ahead or look-behind in a pattern."""
MAX_ID_LENGTH = 256
MAX_TTL_SECONDS = 1e9
MAX_MESSAGES = 4096
"""Messages per chat: the chat template processes all of them."""
MAX_ABORTS = 1024
"""Requests per abort call: the router looks each of them up."""
ROLES = ("system", "user", "assistant", "tool")
PASS_KV_OR_NONE = (inference_pb2.ALGORITHM_UNSPECIFIED, inference_pb2.ALGORITHM_PASS_KV)
"""Algorithms that a request with a bound may ask for."""


def read_sampling(params: inference_pb2.SamplingParams, model: ModelInfo) -> SamplingParameters:
    """Return one answer's sampling parameters. Raises InvalidRequest."""
    temperature = _check_range("temperature", params.temperature, 0.0, MAX_TEMPERATURE)
    # Without max_tokens, the router lets the answer use all positions that the prompt leaves free.
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


def lenient_schema(schema: Any) -> dict[str, Any]:
    """Return a lenient copy of a schema: what a grammar cannot enforce is ignored, as OpenAI's `strict: false` asks.

    Example: `{"type": "array", "uniqueItems": true}` becomes a schema whose items may be equal.
    """
    found: dict[str, Any] = _without_look_around(schema)
    return {**found, "x-guidance": JSON_OPTIONS | {"lenient": True}}


def _without_look_around(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_look_around(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    keeps_pattern = not (isinstance(pattern := schema.get("pattern"), str) and LOOK_AROUND.search(pattern))
    return {name: _without_look_around(value) for name, value in schema.items() if keeps_pattern or name != "pattern"}


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
        raise InvalidRequest(f"{name}: it is not a valid grammar: {' '.join(str(error).split())[:300]}") from None
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
        raise InvalidRequest("it is not JSON; give a schema as JSON") from None
    if not isinstance(schema, dict):
        raise InvalidRequest("a schema is a JSON object")
    if is_lenient:
        schema = lenient_schema(schema)
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


class RequestReader:
    """Reader that knows the model's vocabulary and tokenizer, and the longest turn in seconds."""

    def __init__(self, model: ModelInfo, codec: TextCodec, max_seconds: float, names: Sequence[str]) -> None:
        """Read requests for a model. `names` are the names it answers to; errors quote the first."""
        self._model = model
        self._codec = codec
        self._max_seconds = max_seconds
        self._grammars = Grammars(codec.to_json, model.vocab_size, model.eos_token_ids)
        self._names = names

    def read(
        self, request: inference_pb2.GenerateRequest, seconds_left: float | None, router: ScopedRouter
    ) -> TurnRequest:
        """Check a request and return its turn, with the ids and quota of `router`'s tenant.

        `seconds_left` is the client's own deadline. Raises InvalidRequest; NotFound for another model.
        """
        self._check_model(request.model)
        mode = prompt_mode_from(request.prompt_mode)
        if mode is None or mode is PromptMode.NEW:
            raise InvalidRequest(f"prompt_mode: {request.prompt_mode} is not one of 0, 1, 2")
        if request.WhichOneof("input") == "chat":
            if mode is PromptMode.APPEND:
                raise InvalidRequest("prompt_mode: chat messages are the whole history; APPEND needs text or token ids")
            mode = PromptMode.WHOLE_HISTORY
        answers = read_num_completions(request.sampling_params)
        if request.conversation_id and answers > 1:
            raise InvalidRequest(
                f"sampling_params.n: {answers} answers cannot all continue one conversation; allowed with a "
                f"conversation_id is 1"
            )
        deadline = self._max_seconds if seconds_left is None else min(seconds_left, self._max_seconds)
        return TurnRequest(
            request_id=router.scope(
                check_identifier("request_id", request.request_id) or f"req-{uuid.uuid4().hex[:16]}"
            ),
            conversation_id=router.scope(check_identifier("conversation_id", request.conversation_id)),
            kv_quota=router.kv_quota,
            prompt_mode=mode,
            token_ids=self.prompt(request),
            sampling=self._sampling(request.sampling_params, is_chat=request.WhichOneof("input") == "chat"),
            deadline_seconds=max(deadline, 0.001),
            conversation_ttl_seconds=_time_to_live(request),
            wait=request.wait,
            priority=_priority(request.priority, router.tenant),
            no_cache=request.no_cache,
            cache_key=_cache_key(router.tenant.name, request.cache_key),
            prediction=self._prediction(request.prediction),
            expected_tokens=_expected_tokens(request),
            algorithm=_algorithm(request.algorithm),
            bound=read_bound(request),
            is_open_ended=not request.sampling_params.HasField("max_tokens"),
            resume=self._resume(request),
            num_special=self._codec.num_special if request.WhichOneof("input") == "text" else 0,
        )

    def _prediction(self, text: str) -> TokenIds:
        self._check_length("prediction", len(text))
        return self._codec.encode(text, adds_special=False)

    def _sampling(self, params: inference_pb2.SamplingParams, *, is_chat: bool) -> SamplingParameters:
        sampling = replace(read_sampling(params, self._model), banned=read_banned(params, self._codec))
        if is_chat and not params.ignore_eos:
            stops = {*sampling.stop_token_ids, *self._codec.chat_ends}
            sampling = replace(sampling, stop_token_ids=tuple(sorted(stops)))
        return replace(sampling, grammar=make_grammar(params, self._grammars))

    def end_chat(self, params: inference_pb2.SamplingParams) -> None:
        """Add the tokenizer's own EOS to the stop tokens of a chat whose prompt is sent as tokens."""
        if not params.ignore_eos:
            params.stop_token_ids.extend(self._codec.chat_ends)

    def _resume(self, request: inference_pb2.GenerateRequest) -> LostTurn | None:
        if not request.HasField("resume"):
            return None
        check_name("request_id", request.request_id)
        if read_num_completions(request.sampling_params) > 1:
            raise InvalidRequest(f"resume: {request.sampling_params.n} answers cannot be resumed; allowed is 1")
        if not request.sampling_params.HasField("seed"):
            raise InvalidRequest("resume: sampling_params.seed is not given; give that of the `start` you received")
        received = np.array(request.resume.received, dtype=np.int64)
        check_vocabulary("resume.received", received, self._model.vocab_size)
        return LostTurn(token_ids=tuple(received.tolist()), prompt_tokens=request.resume.prompt_tokens)

    def tokenize(
        self,
        request: inference_pb2.GenerateRequest,
        *,
        adds_special: bool = True,
        opens_answer: bool = True,
        values: Mapping[str, Any] | None = None,
    ) -> TokenIds:
        """Return the tokens of a request's text or chat; may be empty. Raises InvalidRequest."""
        if request.WhichOneof("input") == "text":
            self._check_length("input.text", len(request.text))
            return self._codec.encode(request.text, adds_special=adds_special)
        messages = _messages(request.chat)
        self._check_length("input.chat", sum(len(content) for _, content in messages))
        return self._codec.encode_chat(messages, opens_answer=opens_answer, values=values)

    def tokenize_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        num_characters: int,
        *,
        opens_answer: bool = True,
        continues_last: bool = False,
        values: Mapping[str, Any] | None = None,
    ) -> TokenIds:
        """Return the prompt tokens of a chat with calls or tools. Raises InvalidRequest."""
        check_messages([message["role"] for message in messages])
        self._check_length("input.chat", num_characters)
        return self._codec.encode_template(
            messages, tools, opens_answer=opens_answer, continues_last=continues_last, values=values
        )

    def tokenize_following(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        num_characters: int,
        last_token: int,
        values: Mapping[str, Any],
    ) -> TokenIds:
        """Return the tokens of messages that follow a conversation's answer. Raises InvalidRequest."""
        check_messages([message["role"] for message in messages])
        self._check_length("input.chat", num_characters)
        return self._codec.encode_following(
            messages, tools, last_token, {*self._model.eos_token_ids, *self._codec.chat_ends}, values
        )

    def special_token(self, text: str) -> int | None:
        """Return the id of a text that is exactly one special token, else None."""
        return self._grammars.special_token(text)

    def check_constraint(self, params: inference_pb2.SamplingParams) -> None:
        """Check the constraint on an answer. Raises InvalidRequest."""
        make_grammar(params, self._grammars)

    def detokenize(self, token_ids: Sequence[int], field: str = "tokens") -> str:
        """Return the text of tokens, special ones included. Raises InvalidRequest, which names `field`."""
        check_vocabulary(field, np.asarray(token_ids, dtype=np.int64), self._model.vocab_size)
        return self._codec.decode_all(token_ids)

    def count(self, request: inference_pb2.CountTokensRequest) -> int:
        """Count a prompt's tokens. Raises InvalidRequest; NotFound for another model."""
        self._check_model(request.model)
        kind = request.WhichOneof("input")
        prompt = inference_pb2.GenerateRequest()
        if kind == "text":
            prompt.text = request.text
        elif kind is not None:
            getattr(prompt, kind).CopyFrom(getattr(request, kind))
        return len(self.prompt(prompt))

    def _check_model(self, name: str) -> None:
        if name and name not in self._names:
            raise NotFound(f"model: there is no model {name!r:.100}; served is {self._names[0]!r}")

    def prompt(self, request: inference_pb2.GenerateRequest) -> TokenIds:
        """Return the prompt's tokens, at least one. Raises InvalidRequest."""
        kind = request.WhichOneof("input")
        if kind in ("text", "chat"):
            ids = self.tokenize(request)
        elif kind == "tokenized":
            # numpy reads protobuf's array at once: half a million ids take 0.3 ms, an iterator takes 15 ms.
            ids = np.array(request.tokenized.input_ids, dtype=np.int64)
        else:
            raise InvalidRequest("input: none given; send text, tokenized or chat")
        if request.HasField("truncate_prompt_tokens"):
            ids = self._truncate(request, ids)
        if not len(ids):
            raise InvalidRequest(f"input.{kind}: the prompt has 0 tokens, at least 1 is needed")
        # Check texts too: a tokenizer may know tokens without an embedding in the model.
        check_vocabulary(f"input.{kind}", ids, self._model.vocab_size)
        return ids

    def _truncate(self, request: inference_pb2.GenerateRequest, ids: TokenIds) -> TokenIds:
        kept, most = request.truncate_prompt_tokens, self._model.max_positions - 1
        if request.conversation_id:
            raise InvalidRequest(f"truncate_prompt_tokens: {kept} is not allowed with a conversation_id; leave one out")
        if kept == 0 or not -1 <= kept <= most:
            raise InvalidRequest(
                f"truncate_prompt_tokens: {kept} is out of range; allowed are 1 to {most}, and -1 for as many as fit"
            )
        if kept == -1:
            params = request.sampling_params
            kept = max(self._model.max_positions - (params.max_tokens if params.HasField("max_tokens") else 1), 1)
        return ids[-kept:]

    def _check_length(self, field: str, num_characters: int) -> None:
        """Refuse a text before tokenizing it if it must have more tokens than the model has positions."""
        limit = self._model.max_positions * self._codec.max_characters
        if num_characters > limit:
            raise ContextTooLong(
                f"{field}: {num_characters} characters are too many; this model's maximum context length is "
                f"{self._model.max_positions} tokens, which hold at most {limit}"
            )


def _expected_tokens(request: inference_pb2.GenerateRequest) -> int | None:
    if not request.HasField("expected_tokens"):
        return None
    if not request.conversation_id:
        raise InvalidRequest(f"expected_tokens: {request.expected_tokens} is given without a conversation_id")
    return request.expected_tokens


def _cache_key(tenant: str, key: str) -> str:
    """Return the digest that the router uses to choose rings. Keys may name users, so only a digest leaves here."""
    return blake2b(f"{tenant}/{key}".encode(), digest_size=16).hexdigest() if key else ""


def _time_to_live(request: inference_pb2.GenerateRequest) -> float | None:
    if not request.HasField("conversation_ttl_seconds"):
        return None
    seconds = request.conversation_ttl_seconds
    if not 0 <= seconds <= MAX_TTL_SECONDS:
        raise InvalidRequest(
            f"conversation_ttl_seconds: {seconds} is out of range; allowed are 0 (never) to {MAX_TTL_SECONDS:g}"
        )
    if not request.conversation_id:
        raise InvalidRequest(f"conversation_ttl_seconds: {seconds:g} is given without a conversation_id")
    return seconds


def check_identifier(field: str, value: str) -> str:
    """Check an id that a client chose, and return it; it may be empty. Raises InvalidRequest.

    Example: `check_identifier("id", "a b")` is "a b"; an id with a newline raises.
    """
    if len(value) > MAX_ID_LENGTH:
        raise InvalidRequest(f"{field}: {len(value)} characters are too many; at most {MAX_ID_LENGTH} are allowed")
    if not value.isprintable():
        raise InvalidRequest(f"{field}: {value!r} holds characters that cannot be printed")
    return value


def check_name(field: str, value: str) -> str:
    """Check an id that must not be empty, and return it. Raises InvalidRequest."""
    if not value:
        raise InvalidRequest(f"{field}: '' is not allowed; name a {field.split('_')[0]}")
    return check_identifier(field, value)


def check_request_ids(names: Sequence[str]) -> list[str]:
    """Check the request ids of an abort, and return them. Raises InvalidRequest."""
    if len(names) > MAX_ABORTS:
        raise InvalidRequest(f"request_ids: {len(names)} are too many; at most {MAX_ABORTS} are allowed")
    return [check_identifier(f"request_ids[{place}]", name) for place, name in enumerate(names)]


def _priority(value: int, tenant: Tenant) -> int:
    if not tenant.min_priority <= value <= tenant.max_priority:
        raise InvalidRequest(
            f"priority: {value} is out of range; allowed are {tenant.min_priority} to {tenant.max_priority}"
        )
    return value


def _algorithm(value: int) -> Algorithm | None:
    if not value:
        return None
    name = enum_name(inference_pb2.Algorithm, value)
    if name not in tuple(Algorithm):
        raise InvalidRequest(
            f"algorithm: {value} is unknown; allowed are {', '.join(Algorithm)}; without it the router chooses"
        )
    return Algorithm(name)


def _messages(chat: inference_pb2.ChatInput) -> list[tuple[str, str]]:
    check_messages([message.role for message in chat.messages])
    return [(message.role, message.content) for message in chat.messages]


def check_messages(roles: Sequence[str]) -> None:
    """Check a chat's number of messages and their roles. Raises InvalidRequest."""
    if not roles:
        raise InvalidRequest("input.chat.messages: none given; at least 1 is needed")
    if len(roles) > MAX_MESSAGES:
        raise InvalidRequest(f"input.chat.messages: {len(roles)} are too many; at most {MAX_MESSAGES} are allowed")
    for place, role in enumerate(roles):
        if role not in ROLES:
            raise InvalidRequest(
                f"input.chat.messages[{place}].role: {role!r} is not allowed; use one of {', '.join(ROLES)}"
            )


def read_bound(request: inference_pb2.GenerateRequest) -> Bound | None:
    """Return a request's bound on loss or TTFT, None without one. Raises InvalidRequest."""
    has_loss, has_ttft = request.HasField("max_loss"), request.HasField("max_ttft")
    if not (has_loss or has_ttft):
        return None
    if has_loss and has_ttft:
        raise InvalidRequest(f"max_loss: {request.max_loss:g} is given beside max_ttft; give one of them")
    name, value = (MAX_LOSS, request.max_loss) if has_loss else (MAX_TTFT, request.max_ttft)
    if not math.isfinite(value) or value < 0 or (has_ttft and not value):
        allowed = "nats, 0 or more" if has_loss else "seconds above 0"
        raise InvalidRequest(f"{name}: {value:g} is not allowed; give {allowed}")
    if value and request.algorithm not in PASS_KV_OR_NONE:
        asked = inference_pb2.Algorithm.Name(request.algorithm)
        raise InvalidRequest(f"algorithm: {asked} is always exact; with {name} only ALGORITHM_PASS_KV is allowed")
    return Bound(name=name, limit=value)
