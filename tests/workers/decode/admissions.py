"""Admissions of sequences to a decode batch."""

from __future__ import annotations

from typing import Any

from ringserve.workers.protocol.steps import AdmitSequence
from ringserve.workers.sampling.parameters import SamplingParameters


def admission(name: str = "a", held: tuple[int, ...] = (3, 2), **changes: Any) -> AdmitSequence:
    fields: dict[str, Any] = {
        "token_id": 9,
        "position": sum(held),
        "blocks": tuple(tuple(range(100 * rank, 100 * rank + 40, 2)) for rank in range(len(held))),
        "sampling": SamplingParameters(max_tokens=4, stop_token_ids=(7,)),
    }
    return AdmitSequence(sequence_id=name, held=held, **fields | changes)
