"""Conversion between the control plane's dataclasses and the messages of the contract.

Used by the gateway, by peers and by servicers. `Mapper` converts by field names; this file lists the exceptions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ringserve.cp_core.layout.shards import ShardMap, TokenRange
from ringserve.mapping import Mapper, Mirror, check_ids, enum_name, enum_number
from ringserve.orchestration.protocol.plans import CachedSource, PlannedChunk, PromptMode, RingAlternative, TurnPlan
from ringserve.orchestration.protocol.turns import (
    EndingEvent,
    FinishedEvent,
    PrefillReport,
    RingRegistration,
    ScoredEvent,
    TokensEvent,
    TurnEvent,
)
from ringserve.v1 import inference_pb2, rings_pb2
from ringserve.workers.protocol.ranks import ModelInfo
from ringserve.workers.protocol.steps import Algorithm, TokenIds
from ringserve.workers.sampling.parameters import TokenLogprobs

PROMPT_MODES = {
    PromptMode.AUTO: inference_pb2.PROMPT_MODE_UNSPECIFIED,
    PromptMode.APPEND: inference_pb2.PROMPT_MODE_APPEND,
    PromptMode.WHOLE_HISTORY: inference_pb2.PROMPT_MODE_WHOLE_HISTORY,
    PromptMode.NEW: inference_pb2.PROMPT_MODE_NEW,
}


def prompt_mode_from(value: int) -> PromptMode | None:
    """Return the mode that a number stands for in the contract, or None for an undefined number."""
    return next((mode for mode, number in PROMPT_MODES.items() if number == value), None)


def ids_to(ids: TokenIds) -> bytes:
    """Return token ids as little-endian int32."""
    return ids.astype("<i4").tobytes()


def ids_from(data: bytes) -> TokenIds:
    """Return the token ids of little-endian int32 bytes. Raises InvalidRequest."""
    check_ids(data)
    return np.frombuffer(data, dtype="<i4").astype(np.int64)


def shards_to(shards: ShardMap) -> list[inference_pb2.RankShard]:
    """Return one message for each rank: its ranges in stored order, and the number of their tokens."""
    return [
        inference_pb2.RankShard(
            num_tokens=ranges.num_tokens,
            ranges=[inference_pb2.Range(start=item.start, stop=item.stop) for item in ranges],
        )
        for ranges in shards.ranks
    ]


def shards_from(shards: Iterable[inference_pb2.RankShard]) -> ShardMap:
    return ShardMap.of((TokenRange(item.start, item.stop) for item in shard.ranges) for shard in shards)


def _alternatives_to(alternatives: Iterable[tuple[str, float]]) -> list[inference_pb2.Alternative]:
    return [inference_pb2.Alternative(algorithm=name, predicted_prefill_seconds=value) for name, value in alternatives]


def _alternatives_from(messages: Iterable[inference_pb2.Alternative]) -> tuple[tuple[str, float], ...]:
    return tuple((each.algorithm, each.predicted_prefill_seconds) for each in messages)


SPECIAL: dict[Any, Any] = {
    TokenIds: (ids_to, ids_from),
    ShardMap: (shards_to, shards_from),
    tuple[tuple[str, float], ...]: (_alternatives_to, _alternatives_from),
}

MIRRORS: dict[type, Mirror] = {
    CachedSource: Mirror(renamed={"tokens": ("start", "stop")}),
    PlannedChunk: Mirror(renamed={"tokens": ("start", "stop")}),
    # The gateway writes measured values into the message.
    TurnPlan: Mirror(
        elsewhere=(
            "prefill_seconds",
            "queue_seconds",
            "migrated_bytes",
            "migration_seconds",
            "pulled_bytes",
            "pull_seconds",
            "handoff_seconds",
            "failovers",
        )
    ),
    # A ring's inventory travels with its announcement.
    RingRegistration: Mirror(elsewhere=("epoch", "inventory")),
    RingAlternative: Mirror(derived=("total_seconds",)),
    TokenLogprobs: Mirror(renamed={"top_ids": "top_token_ids"}),
}

MAPPER = Mapper(MIRRORS, SPECIAL, {PromptMode: PROMPT_MODES})
to_message = MAPPER.to_message
from_message = MAPPER.from_message

EVENTS: dict[type[TurnEvent], tuple[str, Any]] = {
    TokensEvent: ("tokens", rings_pb2.Tokens),
    PrefillReport: ("prefilled", rings_pb2.PrefillReport),
    ScoredEvent: ("scored", rings_pb2.PromptScored),
    EndingEvent: ("ending", rings_pb2.Ending),
    FinishedEvent: ("finished", rings_pb2.Finished),
}
"""Field of `TurnEvent`, and its message, for each kind of event."""

_KINDS = {name: kind for kind, (name, _) in EVENTS.items()}


def event_to(event: TurnEvent) -> rings_pb2.TurnEvent:
    name, message = EVENTS[type(event)]
    return rings_pb2.TurnEvent(**{name: to_message(message, event)})


def event_from(message: rings_pb2.TurnEvent) -> TurnEvent:
    name = message.WhichOneof("event") or "finished"
    return from_message(_KINDS[name], getattr(message, name))


def model_info_to(model: ModelInfo, path: str, name: str) -> inference_pb2.GetModelInfoResponse:
    return inference_pb2.GetModelInfoResponse(
        model_path=path,
        model_name=name,
        model_type=model.model_type,
        dtype=model.dtype,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        vocab_size=model.vocab_size,
        max_context_length=model.max_positions,
        eos_token_ids=model.eos_token_ids,
        kv_bytes_per_token=model.kv_bytes_per_token,
        num_parameters=model.num_parameters,
        intermediate_size=model.intermediate_size,
    )


def all_logprobs_to(logprobs: Iterable[TokenLogprobs]) -> list[inference_pb2.TokenLogprobs]:
    return [to_message(inference_pb2.TokenLogprobs, each) for each in logprobs]


def note_lost(plan: inference_pb2.Plan, num_tokens: int) -> None:
    """Count the last `num_tokens` cached tokens of a plan as computed: another ring did not send them."""
    if not num_tokens:
        return
    plan.cached_tokens -= num_tokens
    plan.new_tokens += num_tokens
    lost = plan.cached_sources.pop()
    plan.remarks.append(f"ring {lost.ring} did not send its {num_tokens} tokens, so they were computed")


def note_chunks(plan: inference_pb2.Plan, chunks: Sequence[PlannedChunk]) -> None:
    """Replace a plan's predicted chunks by the computed ones, and its algorithm by the one with most tokens."""
    del plan.chunks[:]
    plan.chunks.extend(to_message(inference_pb2.Chunk, chunk) for chunk in chunks)
    tokens = dict.fromkeys(Algorithm, 0)
    for chunk in chunks:
        tokens[chunk.algorithm] += len(chunk.tokens)
    algorithm = max(tokens, key=lambda name: tokens[name])
    if tokens[algorithm] > tokens[Algorithm(enum_name(inference_pb2.Algorithm, plan.algorithm))]:
        plan.remarks.append(f"computed by {algorithm}, in steps shared with other turns")
        plan.algorithm = enum_number(inference_pb2.Algorithm, algorithm)
