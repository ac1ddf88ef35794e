"""Plans and their chunks on the wire."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cp_core.layout.shards import TokenRange
from orchestration.protocol.turns import CachedSource, PlannedChunk, PromptMode, RingAlternative, TurnPlan
from ringserve.v1 import inference_pb2
from workers.protocol.prefill_steps import Algorithm


def chunks_to(chunks: Iterable[PlannedChunk]) -> list[inference_pb2.Chunk]:
    return [
        inference_pb2.Chunk(
            start=chunk.tokens.start, stop=chunk.tokens.stop, algorithm=chunk.algorithm, num_turns=chunk.num_turns
        )
        for chunk in chunks
    ]


def chunks_from(chunks: Iterable[inference_pb2.Chunk]) -> tuple[PlannedChunk, ...]:
    return tuple(
        PlannedChunk(
            tokens=TokenRange(chunk.start, chunk.stop),
            algorithm=Algorithm(chunk.algorithm),
            num_turns=chunk.num_turns,
        )
        for chunk in chunks
    )


def plan_to(plan: TurnPlan) -> inference_pb2.Plan:
    return inference_pb2.Plan(
        algorithm=plan.algorithm,
        reason=plan.reason,
        new_tokens=plan.new_tokens,
        cached_tokens=plan.cached_tokens,
        prefill_ring=plan.prefill_ring,
        decode_ring=plan.decode_ring,
        prefill_ranks=plan.prefill_ranks,
        decode_ranks=plan.decode_ranks,
        cached_sources=[
            inference_pb2.CachedSource(
                source=item.source, start=item.tokens.start, stop=item.tokens.stop, ring=item.ring
            )
            for item in plan.cached_sources
        ],
        chunks=chunks_to(plan.chunks),
        predicted_prefill_seconds=plan.predicted_prefill_seconds,
        alternatives=[
            inference_pb2.Alternative(algorithm=name, predicted_prefill_seconds=seconds)
            for name, seconds in plan.alternatives
        ],
        prompt_mode=plan.prompt_mode,
        ring_alternatives=[
            inference_pb2.RingAlternative(
                ring=item.ring,
                num_ranks=item.num_ranks,
                tp=item.tp,
                queue_seconds=item.queue_seconds,
                move_seconds=item.move_seconds,
                prefill_seconds=item.prefill_seconds,
                total_seconds=item.total_seconds,
                handoff_seconds=item.handoff_seconds,
                stall_seconds=item.stall_seconds,
            )
            for item in plan.ring_alternatives
        ],
    )


def plan_from(message: inference_pb2.Plan) -> TurnPlan:
    return TurnPlan(
        algorithm=Algorithm(message.algorithm),
        reason=message.reason,
        new_tokens=message.new_tokens,
        cached_tokens=message.cached_tokens,
        prefill_ring=message.prefill_ring,
        decode_ring=message.decode_ring,
        prefill_ranks=message.prefill_ranks,
        decode_ranks=message.decode_ranks,
        cached_sources=tuple(
            CachedSource(source=item.source, tokens=TokenRange(item.start, item.stop), ring=item.ring)
            for item in message.cached_sources
        ),
        chunks=chunks_from(message.chunks),
        predicted_prefill_seconds=message.predicted_prefill_seconds,
        alternatives=tuple((item.algorithm, item.predicted_prefill_seconds) for item in message.alternatives),
        prompt_mode=PromptMode(message.prompt_mode),
        ring_alternatives=tuple(
            RingAlternative(
                ring=item.ring,
                num_ranks=item.num_ranks,
                tp=item.tp,
                queue_seconds=item.queue_seconds,
                move_seconds=item.move_seconds,
                prefill_seconds=item.prefill_seconds,
                handoff_seconds=item.handoff_seconds,
                stall_seconds=item.stall_seconds,
            )
            for item in message.ring_alternatives
        ),
    )


def note_lost(plan: inference_pb2.Plan, num_tokens: int) -> None:
    """Of a plan's cached tokens the last `num_tokens` were computed after all: another ring did not send them."""
    if not num_tokens:
        return
    plan.cached_tokens -= num_tokens
    plan.new_tokens += num_tokens
    lost = plan.cached_sources.pop()
    plan.reason += f"; ring {lost.ring} did not send its {num_tokens} tokens, which were computed"


def note_chunks(plan: inference_pb2.Plan, chunks: Sequence[PlannedChunk]) -> None:
    """Replace a plan's predicted chunks by those that were computed; its algorithm is that of most of their tokens."""
    del plan.chunks[:]
    plan.chunks.extend(chunks_to(chunks))
    tokens = dict.fromkeys(Algorithm, 0)
    for chunk in chunks:
        tokens[chunk.algorithm] += len(chunk.tokens)
    algorithm = max(tokens, key=lambda name: tokens[name])
    if tokens[algorithm] > tokens[Algorithm(plan.algorithm)]:
        plan.reason += f"; computed by {algorithm}, in steps shared with other turns"
        plan.algorithm = algorithm
