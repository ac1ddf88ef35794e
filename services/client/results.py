"""What a client gets, in Python's types. Field names are the contract's."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Self

from google.protobuf.message import Message as ProtoMessage

from ringserve.v1 import inference_pb2
from services.rpc.answer import matched_stop


def _scalars(kind: type[Any], message: ProtoMessage) -> dict[str, Any]:
    """The fields of a dataclass that a message has by the same name and that are plain values there."""
    plain = {field.name for field in message.DESCRIPTOR.fields if field.message_type is None}
    return {field.name: getattr(message, field.name) for field in fields(kind) if field.name in plain}


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Tokens of one turn. `cached_tokens` of the prompt were not computed again."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, kw_only=True)
class CachedSource:
    """Prompt tokens [start, stop) came from "kept_on_prefill", "pulled_from_decode" or "pulled_from_other".

    Of the last `ring` is the name.
    """

    source: str
    start: int
    stop: int
    ring: str = ""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """New tokens [start, stop) were computed in one step by `algorithm`."""

    start: int
    stop: int
    algorithm: str


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """What computing every chunk by `algorithm` was predicted to take."""

    algorithm: str
    predicted_prefill_seconds: float


@dataclass(frozen=True, kw_only=True)
class RingAlternative:
    """What the turn was predicted to take on one prefill ring, of `num_ranks` ranks of `tp` processes; in seconds."""

    ring: str
    num_ranks: int
    tp: int
    queue_seconds: float
    move_seconds: float
    prefill_seconds: float
    total_seconds: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a turn is computed and why. What is measured is 0 until it is known; times in seconds."""

    algorithm: str
    reason: str
    prompt_mode: str
    new_tokens: int
    cached_tokens: int
    prefill_ring: str
    decode_ring: str
    prefill_ranks: int
    decode_ranks: int
    predicted_prefill_seconds: float
    prefill_seconds: float
    queue_seconds: float
    migrated_bytes: int
    migration_seconds: float
    pulled_bytes: int
    pull_seconds: float
    handoff_seconds: float
    cached_sources: tuple[CachedSource, ...]
    chunks: tuple[Chunk, ...]
    alternatives: tuple[Alternative, ...]
    ring_alternatives: tuple[RingAlternative, ...]

    @classmethod
    def from_message(cls, plan: inference_pb2.Plan) -> Self:
        return cls(
            **_scalars(cls, plan),
            cached_sources=tuple(CachedSource(**_scalars(CachedSource, item)) for item in plan.cached_sources),
            chunks=tuple(Chunk(**_scalars(Chunk, item)) for item in plan.chunks),
            alternatives=tuple(Alternative(**_scalars(Alternative, item)) for item in plan.alternatives),
            ring_alternatives=tuple(
                RingAlternative(**_scalars(RingAlternative, item)) for item in plan.ring_alternatives
            ),
        )


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What came at once: whole characters. Half a character's token comes with no text."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A finished turn. `matched_stop` is the token or string that ended it where `finish_reason` is "stop"."""

    request_id: str
    conversation_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    matched_stop: int | str | None
    usage: Usage
    plan: Plan
    ttft_seconds: float
    ttit_seconds: float
    seed: int


class AnswerReader:
    """Reads one turn's responses. `plan` is there after the first one, `answer` after the last."""

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.answer: Answer | None = None
        self._start = inference_pb2.GenerateStart()
        self._shown = 0

    def take(self, response: inference_pb2.GenerateResponse) -> Piece | None:
        """The piece that a response brings, if any."""
        if response.HasField("start"):
            self._start = response.start
            self.plan = Plan.from_message(response.start.plan)
            return None
        if response.HasField("chunk"):
            self._shown += len(response.chunk.text)
            return Piece(text=response.chunk.text, token_ids=tuple(response.chunk.token_ids))
        complete = response.complete
        self.plan = Plan.from_message(complete.plan)
        self.answer = Answer(
            request_id=self._start.request_id,
            conversation_id=self._start.conversation_id,
            text=complete.text,
            token_ids=tuple(complete.output_ids),
            finish_reason=complete.finish_reason,
            matched_stop=matched_stop(complete),
            usage=Usage(**_scalars(Usage, complete.usage)),
            plan=self.plan,
            ttft_seconds=complete.ttft_seconds,
            ttit_seconds=complete.ttit_seconds,
            seed=complete.seed,
        )
        rest = complete.text[self._shown :]
        return Piece(text=rest, token_ids=()) if rest else None
