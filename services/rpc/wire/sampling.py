"""How tokens are drawn, and how likely they were, on the wire."""

from __future__ import annotations

from collections.abc import Iterable

from ringserve.v1 import inference_pb2, rings_pb2
from workers.sampling.parameters import SamplingParameters, TokenBias, TokenLogprobs


def sampling_to(sampling: SamplingParameters) -> rings_pb2.Sampling:
    return rings_pb2.Sampling(
        temperature=sampling.temperature,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        stop_token_ids=sampling.stop_token_ids,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=[rings_pb2.TokenBias(token_id=item.token_id, bias=item.bias) for item in sampling.logit_bias],
        min_tokens=sampling.min_tokens,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        ends_by_text=sampling.ends_by_text,
    )


def sampling_from(message: rings_pb2.Sampling) -> SamplingParameters:
    return SamplingParameters(
        temperature=message.temperature,
        seed=message.seed,
        max_tokens=message.max_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        logit_bias=tuple(TokenBias(item.token_id, item.bias) for item in message.logit_bias),
        min_tokens=message.min_tokens,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        ends_by_text=message.ends_by_text,
    )


def logprobs_to(logprobs: TokenLogprobs) -> inference_pb2.TokenLogprobs:
    return inference_pb2.TokenLogprobs(
        token_id=logprobs.token_id,
        logprob=logprobs.logprob,
        rank=logprobs.rank,
        top_token_ids=logprobs.top_ids,
        top_logprobs=logprobs.top_logprobs,
    )


def logprobs_from(message: inference_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        token_id=message.token_id,
        logprob=message.logprob,
        rank=message.rank,
        top_ids=tuple(message.top_token_ids),
        top_logprobs=tuple(message.top_logprobs),
    )


def all_logprobs_to(logprobs: Iterable[TokenLogprobs]) -> list[inference_pb2.TokenLogprobs]:
    return [logprobs_to(each) for each in logprobs]


def all_logprobs_from(messages: Iterable[inference_pb2.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(logprobs_from(message) for message in messages)
