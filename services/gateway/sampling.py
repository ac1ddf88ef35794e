"""Reader of SamplingParams. Errors name the field, its value and what is allowed."""

from __future__ import annotations

import math
import secrets
from typing import TypeVar

import numpy as np

from ringserve.cp_core.errors import InvalidRequest
from ringserve.services.gateway.text import REPLACEMENT, StopRule
from ringserve.v1 import inference_pb2
from ringserve.workers.protocol.prefill_steps import TokenIds
from ringserve.workers.protocol.ranks import ModelInfo
from ringserve.workers.sampling.parameters import SamplingParameters, TokenBias

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


def read_sampling(params: inference_pb2.SamplingParams, model: ModelInfo) -> SamplingParameters:
    """Return how the tokens of one answer are drawn. Raises InvalidRequest."""
    temperature = _within("temperature", params.temperature, 0.0, MAX_TEMPERATURE)
    # An answer of no stated length has the room that the router finds, at most this.
    max_tokens = params.max_tokens if params.HasField("max_tokens") else model.max_positions
    _within("max_tokens", max_tokens, 1, model.max_positions)
    _within("min_tokens", params.min_tokens, 0, max_tokens)
    stops = _stop_token_ids(params, model)
    if params.min_tokens and len(stops) >= model.vocab_size:
        raise InvalidRequest(
            f"sampling_params.min_tokens: {params.min_tokens} is not allowed where every token is a stop token; "
            f"allowed is 0"
        )
    stop_rule(params)
    return SamplingParameters(
        temperature=temperature,
        seed=params.seed if params.HasField("seed") else secrets.randbits(63),
        max_tokens=max_tokens,
        stop_token_ids=stops,
        top_p=_top_p(params),
        top_k=params.top_k,
        min_p=_within("min_p", params.min_p, 0.0, 1.0),
        presence_penalty=_within("presence_penalty", params.presence_penalty, -MAX_PENALTY, MAX_PENALTY),
        frequency_penalty=_within("frequency_penalty", params.frequency_penalty, -MAX_PENALTY, MAX_PENALTY),
        repetition_penalty=_repetition_penalty(params),
        logit_bias=_logit_bias(params, model),
        min_tokens=params.min_tokens,
        logprobs=_num_top("logprobs", params.logprobs, model) if params.HasField("logprobs") else None,
        prompt_logprobs=_num_top("prompt_logprobs", params.prompt_logprobs, model)
        if params.HasField("prompt_logprobs")
        else None,
        ends_by_text=bool(params.stop),
    )


def stop_rule(params: inference_pb2.SamplingParams) -> StopRule:
    """Return where the text of an answer ends. Raises InvalidRequest."""
    _within("stop", len(params.stop), 0, MAX_STOPS, "strings")
    for place, stop in enumerate(params.stop):
        _within(f"stop[{place}]", len(stop), 1, MAX_STOP_LENGTH, "characters")
        if REPLACEMENT in stop:
            # U+FFFD stands for bytes of an incomplete character, which must not stop an answer.
            raise InvalidRequest(
                f"sampling_params.stop[{place}]: {stop!r} holds the replacement character U+FFFD; any other is allowed"
            )
    return StopRule(
        strings=tuple(params.stop),
        is_shown=params.include_stop_str_in_output,
        min_tokens=params.min_tokens,
        shows_special=params.HasField("skip_special_tokens") and not params.skip_special_tokens,
    )


def num_completions(params: inference_pb2.SamplingParams) -> int:
    """Return the number of answers. Raises InvalidRequest."""
    return _within("n", params.n if params.HasField("n") else 1, 1, MAX_COMPLETIONS)


def check_vocabulary(field: str, ids: TokenIds, vocab_size: int) -> None:
    """Check that the model knows every token. Raises InvalidRequest, which names the first unknown one."""
    outside = np.flatnonzero((ids >= vocab_size) | (ids < 0))
    if len(outside):
        place = int(outside[0])
        raise InvalidRequest(
            f"{field}[{place}]: token {int(ids[place])} is outside the vocabulary; allowed are 0 to {vocab_size - 1}"
        )


def _within(name: str, value: N, lowest: N, highest: N, unit: str = "") -> N:
    """Return `value` if it is a number in the range. Raises InvalidRequest."""
    if math.isfinite(value) and lowest <= value <= highest:
        return value
    what = f"{value} {unit} are" if unit else f"{value} is"
    raise InvalidRequest(
        f"sampling_params.{name}: {what} out of range; allowed are {_spelt(lowest)} to {_spelt(highest)}"
    )


def _spelt(number: float) -> str:
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
    return _within("repetition_penalty", params.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)


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
    _within("logit_bias", len(params.logit_bias), 0, MAX_BIASES, "tokens")
    biases = []
    for token_id, bias in sorted(params.logit_bias.items()):
        if token_id >= model.vocab_size:
            raise InvalidRequest(
                f"sampling_params.logit_bias: token {token_id} is outside the vocabulary; "
                f"allowed are 0 to {model.vocab_size - 1}"
            )
        biases.append(TokenBias(token_id, _within(f"logit_bias[{token_id}]", bias, -MAX_BIAS, MAX_BIAS)))
    return tuple(biases)


def _num_top(name: str, num_top: int, model: ModelInfo) -> int:
    return _within(name, num_top, 0, min(MAX_LOGPROBS, model.vocab_size))
