"""Batch changes on the wire, between the ranks of one ring: msgpack, written and read field by field."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import msgpack

from workers.decode.batch import Admission, BatchChange, Growth, Prompt
from workers.sampling.parameters import Sampling, TokenBias, TokenHistory

SIXTY_FOUR_BITS = 0xFFFF_FFFF_FFFF_FFFF
"""All that a draw uses of a seed, and all that fits the wire."""
SAMPLING_FIELDS = tuple(field.name for field in fields(Sampling))


def encode_change(change: BatchChange) -> bytes:
    admitted = [
        [
            item.sequence_id,
            item.token_id,
            item.position,
            item.held,
            item.blocks,
            _encode_sampling(item.sampling),
            _encode_history(item.history),
        ]
        for item in change.admitted
    ]
    grown = [[item.sequence_id, item.blocks] for item in change.grown]
    encoded = msgpack.packb([change.removed, admitted, grown, _encode_prompt(change.prompt)])
    assert isinstance(encoded, bytes)
    return encoded


def decode_change(payload: bytes) -> BatchChange:
    removed, admitted, grown, prompt = msgpack.unpackb(payload, use_list=False)
    return BatchChange(
        removed=removed,
        admitted=tuple(
            Admission(
                sequence_id, token_id, position, held, blocks, _decode_sampling(sampling), _decode_history(history)
            )
            for sequence_id, token_id, position, held, blocks, sampling, history in admitted
        ),
        grown=tuple(Growth(sequence_id, blocks) for sequence_id, blocks in grown),
        prompt=_decode_prompt(prompt),
    )


def _encode_prompt(prompt: Prompt | None) -> list[Any] | None:
    if prompt is None:
        return None
    sampling, history = _encode_sampling(prompt.sampling), _encode_history(prompt.history)
    return [prompt.sequence_id, prompt.token_ids, prompt.held, prompt.blocks, sampling, history]


def _decode_prompt(values: tuple[Any, ...] | None) -> Prompt | None:
    if values is None:
        return None
    sequence_id, token_ids, held, blocks, sampling, history = values
    return Prompt(sequence_id, token_ids, held, blocks, _decode_sampling(sampling), _decode_history(history))


def _encode_sampling(sampling: Sampling) -> list[Any]:
    values = {name: getattr(sampling, name) for name in SAMPLING_FIELDS}
    values["seed"] &= SIXTY_FOUR_BITS
    values["logit_bias"] = [[item.token_id, item.bias] for item in sampling.logit_bias]
    return list(values.values())


def _decode_sampling(values: tuple[Any, ...]) -> Sampling:
    named = dict(zip(SAMPLING_FIELDS, values, strict=True))
    named["logit_bias"] = tuple(TokenBias(token_id, bias) for token_id, bias in named["logit_bias"])
    return Sampling(**named)


def _encode_history(history: TokenHistory) -> list[Any]:
    return [history.num_generated, history.prompt_ids, history.answer_ids]


def _decode_history(values: tuple[Any, ...]) -> TokenHistory:
    num_generated, prompt_ids, answer_ids = values
    return TokenHistory(num_generated=num_generated, prompt_ids=prompt_ids, answer_ids=answer_ids)
