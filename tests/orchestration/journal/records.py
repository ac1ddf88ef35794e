"""Records of turns for tests of the journal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ringserve.orchestration.journal.schema import journal_path
from ringserve.orchestration.protocol.journal import BegunRecord, CommittedRecord, RingIncarnation, StoredConversation
from ringserve.orchestration.protocol.plans import PromptMode, SparsePlan, TurnPlan
from ringserve.orchestration.protocol.turns import KvQuota, TurnRequest
from ringserve.workers.protocol.steps import Algorithm, FinishReason
from ringserve.workers.sampling.parameters import SamplingParameters, TokenBias

FILE = journal_path(Path(), "").name
"""Journal of a model without a fingerprint."""

SAMPLING = SamplingParameters(
    temperature=0.5, seed=7, max_tokens=9, stop_token_ids=(1, 2), logit_bias=(TokenBias(3, -1.0),), logprobs=2
)

SPARSE = SparsePlan(
    keep=0.5,
    sinks=4,
    window=8,
    bound="max_loss",
    limit=0.1,
    predicted_loss=0.05,
    measured_loss=0.04,
    measured_accuracy=1.0,
    measured_tokens=100,
)
PLAN = TurnPlan(
    algorithm=Algorithm.PASS_KV,
    reason="",
    new_tokens=2,
    cached_tokens=0,
    prefill_ring="prefill-0",
    decode_ring="decode-0",
    prefill_ranks=2,
    decode_ranks=2,
    cached_sources=(),
    chunks=(),
    predicted_prefill_seconds=0.0,
    alternatives=(),
    prompt_mode=PromptMode.NEW,
)


def begun(turn_id: str, conversation_id: str, tokens: Sequence[int], base: int = 0) -> BegunRecord:
    """Return the record of a turn whose prompt is `tokens` behind `base` tokens of its conversation."""
    return BegunRecord(
        turn_id=turn_id,
        request=TurnRequest(
            request_id=f"request of {turn_id}",
            conversation_id=conversation_id,
            prompt_mode=PromptMode.APPEND,
            token_ids=np.asarray(tokens, dtype=np.int64),
            sampling=SAMPLING,
            deadline_seconds=60.0,
            conversation_ttl_seconds=5.0,
            priority=3,
            algorithm=Algorithm.PASS_Q,
            kv_quota=KvQuota(tenant="t", max_tokens=10),
        ),
        base_tokens=base,
        prefill=RingIncarnation(ring="prefill-0", incarnation="a"),
        decode=RingIncarnation(ring="decode-0", incarnation="b"),
        attempt=1,
        begun_at=100.0,
    )


def committed(turn_id: str, answer: Sequence[int]) -> CommittedRecord:
    """Return the record of a turn that ended with an answer."""
    return CommittedRecord(
        turn_id=turn_id,
        answer=np.asarray(answer, dtype=np.int64),
        finish_reason=FinishReason.STOP,
        kv_tokens=len(answer),
        ended_at=200.0,
    )


def fork(new_id: str, num_tokens: int) -> StoredConversation:
    """Return a new conversation of so many tokens."""
    return StoredConversation(
        conversation_id=new_id,
        num_tokens=num_tokens,
        num_turns=0,
        forked_from="",
        ttl_seconds=0.0,
        last_used=300.0,
        last_turn="",
    )
