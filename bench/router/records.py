"""Journal records of turns that ended well, as a router writes them.

The router bench and the tests of the journal and the router call it. Pure functions.
"""

from __future__ import annotations

from ringserve.orchestration.protocol.journal import BegunRecord, CommittedRecord, RingIncarnation
from ringserve.orchestration.protocol.plans import PromptMode
from ringserve.orchestration.protocol.turns import TurnRequest
from ringserve.workers.protocol.steps import FinishReason, TokenIds
from ringserve.workers.sampling.parameters import SamplingParameters

DEADLINE_SECONDS = 60.0


def turn_request(
    request_id: str, conversation_id: str, prompt: TokenIds, max_tokens: int, mode: PromptMode = PromptMode.NEW
) -> TurnRequest:
    """Return the request of a greedy turn."""
    return TurnRequest(
        request_id=request_id,
        conversation_id=conversation_id,
        prompt_mode=mode,
        token_ids=prompt,
        sampling=SamplingParameters(temperature=0.0, seed=0, max_tokens=max_tokens, stop_token_ids=()),
        deadline_seconds=DEADLINE_SECONDS,
    )


def first_turn(
    turn_id: str, conversation_id: str, prompt: TokenIds, answer: TokenIds, prefill: str = "", decode: str = "decode-0"
) -> tuple[BegunRecord, CommittedRecord]:
    """Return the records of a conversation's first turn, whose prompt `decode` computed if `prefill` is empty."""
    begun = BegunRecord(
        turn_id=turn_id,
        request=turn_request(turn_id, conversation_id, prompt, len(answer)),
        base_tokens=0,
        prefill=RingIncarnation(ring=prefill, incarnation="first") if prefill else None,
        decode=RingIncarnation(ring=decode, incarnation="first"),
        attempt=1,
        begun_at=0.0,
    )
    committed = CommittedRecord(
        turn_id=turn_id,
        answer=answer,
        finish_reason=FinishReason.STOP,
        kv_tokens=len(prompt) + len(answer) - 1,
        ended_at=0.0,
    )
    return begun, committed
