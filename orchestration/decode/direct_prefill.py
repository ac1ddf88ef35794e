"""A turn whose decode ring computes the prompt itself: a few new tokens after KV that the ring keeps."""

from __future__ import annotations

import time

from cp_core.errors import CapacityExceeded, TurnCancelled
from cp_core.layout.shards import ShardMap, TokenRange, balanced_layout
from orchestration.decode.engine import DecodeEngine
from orchestration.decode.turn import DecodeTurn
from orchestration.protocol.handoff import HandoffState
from orchestration.protocol.turns import Admit, PlannedChunk, PrefillReport
from workers.protocol.decode_commands import ComputePrompt
from workers.protocol.prefill_steps import Algorithm, TokenIds
from workers.sampling.parameters import TokenHistory


def direct_shards(retained_tokens: int, num_tokens: int, held: tuple[int, ...]) -> ShardMap:
    """Where a ring that computes tokens [retained_tokens, num_tokens) itself stores them: where each is computed."""
    return balanced_layout(retained_tokens, num_tokens - retained_tokens, held).shard_map()


def check_direct(ring: str, num_new: int, max_tokens: int) -> None:
    """Raises CapacityExceeded where more is to be computed than the ring does between two steps of its batch.

    The router knows what the ring kept when it was told last; some of it may have been evicted since.
    """
    if num_new > max_tokens:
        raise CapacityExceeded(
            f"decode ring {ring}: {num_new} tokens of the prompt are not kept and it computes {max_tokens} at most"
        )


async def compute_prompt(engine: DecodeEngine, turn: DecodeTurn, token_ids: TokenIds) -> Admit:
    """Compute what the ring does not keep of a reserved turn's prompt -> its first token; the turn's KV is whole then.

    The turn's blocks are written until this returns, or until `engine.leave` does. Raises TurnCancelled where the turn
    ended before, Unavailable.
    """
    if turn.is_ending:  # nothing comes between this and the batch that knows of the prompt: `leave` finds it there
        raise TurnCancelled(f"turn {turn.turn_id} ended before its prompt was computed")
    request, sequence = turn.request, turn.sequence
    new = TokenRange(turn.reservation.retained_tokens, turn.prompt_tokens)
    prompt = ComputePrompt(
        sequence_id=turn.turn_id,
        token_ids=tuple(token_ids[new.start : new.stop].tolist()),
        held=sequence.shards.held,
        blocks=tuple(sequence.table(rank) for rank in range(sequence.shards.num_ranks)),
        sampling=request.sampling,
        history=TokenHistory.of(request.sampling, request.penalized_ids),
    )
    event = await engine.compute(turn, prompt)
    if event.token_id is None or turn.is_ending:
        raise TurnCancelled(f"turn {turn.turn_id} ended before its prompt was computed")
    assert event.prompt_seconds is not None, "the loop times its prompts"
    sequence.shards = sequence.shards.extend(turn.reservation.shards)
    turn.state = turn.state.to(HandoffState.SEALED)
    report = PrefillReport(
        prefill_seconds=event.prompt_seconds,
        queue_seconds=max(0.0, time.monotonic() - turn.reserved_at - event.prompt_seconds),
        chunks=(PlannedChunk(tokens=new, algorithm=Algorithm.DECODE_RING, num_turns=1),),
    )
    return Admit(
        turn_id=turn.turn_id,
        attempt=request.attempt,
        first_token=event.token_id,
        report=report,
        logprobs=event.logprobs,
    )
