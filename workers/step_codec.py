"""Batch changes on the wire, between the ranks of one ring: msgpack, written and read field by field."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import msgpack

from workers.decode_batch import Admission, BatchChange, Growth
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
            [item.history.num_generated, item.history.prompt_ids, item.history.answer_ids],
        ]
        for item in change.admitted
    ]
    grown = [[item.sequence_id, item.blocks] for item in change.grown]
    encoded = msgpack.packb([change.removed, admitted, grown])
    assert isinstance(encoded, bytes)
    return encoded


def decode_change(payload: bytes) -> BatchChange:
    removed, admitted, grown = msgpack.unpackb(payload, use_list=False)
    return BatchChange(
        removed=removed,
        admitted=tuple(
            Admission(
                sequence_id, token_id, position, held, blocks, _decode_sampling(sampling), _decode_history(history)
            )
            for sequence_id, token_id, position, held, blocks, sampling, history in admitted
        ),
        grown=tuple(Growth(sequence_id, blocks) for sequence_id, blocks in grown),
    )


def _encode_sampling(sampling: Sampling) -> list[Any]:
    values = {name: getattr(sampling, name) for name in SAMPLING_FIELDS}
    values["seed"] &= SIXTY_FOUR_BITS
    values["logit_bias"] = [[item.token_id, item.bias] for item in sampling.logit_bias]
    return list(values.values())


def _decode_sampling(values: tuple[Any, ...]) -> Sampling:
    named = dict(zip(SAMPLING_FIELDS, values, strict=True))
    named["logit_bias"] = tuple(TokenBias(token_id, bias) for token_id, bias in named["logit_bias"])
    return Sampling(**named)


def _decode_history(values: tuple[Any, ...]) -> TokenHistory:
    num_generated, prompt_ids, answer_ids = values
    return TokenHistory(num_generated=num_generated, prompt_ids=prompt_ids, answer_ids=answer_ids)
