"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ringserve.v1 import inference_pb2
from services.gateway.text import REPLACEMENT

Json = dict[str, Any]
Decode = Callable[[Sequence[int]], str]
"""The text of token ids. Half a character is shown as a replacement character."""


def chat_logprobs(found: Iterable[inference_pb2.TokenLogprobs], decode: Decode) -> Json:
    """`logprobs` of a chat's choice."""
    content = [
        _token(each.token_id, each.logprob, decode)
        | {"top_logprobs": [_token(token_id, logprob, decode) for token_id, logprob in _top(each)]}
        for each in found
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(found: Iterable[inference_pb2.TokenLogprobs], decode: Decode, offset: int) -> Json:
    """`logprobs` of a completion's choice, whose first token's text begins `offset` characters into the answer."""
    tokens, offsets = [], []
    for each in found:
        tokens.append(decode([each.token_id]))
        offsets.append(offset)
        offset += len(tokens[-1])
    return {
        "tokens": tokens,
        "token_logprobs": [each.logprob for each in found],
        "top_logprobs": [{decode([token_id]): logprob for token_id, logprob in reversed(_top(each))} for each in found],
        "text_offset": offsets,
    }


def _top(logprobs: inference_pb2.TokenLogprobs) -> list[tuple[int, float]]:
    return list(zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True))


def _token(token_id: int, logprob: float, decode: Decode) -> Json:
    text = decode([token_id])
    return {"token": text, "logprob": logprob, "bytes": None if REPLACEMENT in text else list(text.encode())}
