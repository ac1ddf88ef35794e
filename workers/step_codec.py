"""Batch changes on the wire, between the ranks of one ring: msgpack, written and read field by field."""

from __future__ import annotations

import msgpack

from workers.decode_batch import Admission, BatchChange, Growth


def encode_change(change: BatchChange) -> bytes:
    admitted = [
        [item.sequence_id, item.token_id, item.position, item.held, item.blocks, item.temperature, item.seed]
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
            Admission(sequence_id, token_id, position, held, blocks, temperature, seed)
            for sequence_id, token_id, position, held, blocks, temperature, seed in admitted
        ),
        grown=tuple(Growth(sequence_id, blocks) for sequence_id, blocks in grown),
    )
