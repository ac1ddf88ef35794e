"""How many conversations keep a cluster's prefill rings busy for a given share of their time."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from cp_core.layout.shards import TokenRange
from services.offline.simulator.cluster import ClusterShape, StepTimes
from services.offline.simulator.trace import MadeTrace, TracedConversation, TraceShape

SAMPLE = 10_000
"""Conversations whose mean is taken: of a long tail, the mean of fewer differs by more than 5% from run to run."""


def conversations_for(busy_share: float, cluster: ClusterShape, shape: TraceShape, seed: int) -> int:
    """Of `shape`, whatever number that has, if nothing that was computed once is computed again. One at least."""
    times = StepTimes(cluster)
    sample = MadeTrace(replace(shape, num_conversations=SAMPLE), seed)
    mean = sum(prefill_seconds(times, conversation) for conversation in sample) / SAMPLE
    return max(1, round(busy_share * cluster.prefill.num_rings * shape.seconds / mean))


def prefill_seconds(times: StepTimes, conversation: TracedConversation) -> float:
    """Of all its turns, each after all before it, alone on a ring."""
    turns = conversation.turns
    starts = accumulate((turn.new_tokens + turn.output_tokens for turn in turns), initial=0)
    return sum(
        times.alone(TokenRange(start, start + turn.new_tokens)) for start, turn in zip(starts, turns, strict=False)
    )
