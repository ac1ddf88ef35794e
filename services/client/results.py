"""Results of both Python clients. Fields have the names of the contract."""

from __future__ import annotations

from dataclasses import dataclass

from ringserve.v1 import inference_pb2
from services.rpc.answer import matched_stop
from services.rpc.wire.mapping import Mapper

MAPPER = Mapper()


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Tokens of one turn. `cached_tokens` of the prompt were not computed again."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, kw_only=True)
class CachedSource:
    """Prompt tokens [start, stop) that were not computed.

    `source` is "kept_on_prefill", "pulled_from_decode" or "pulled_from_other"; `ring` names the other ring.
    """

    source: str
    start: int
    stop: int
    ring: str = ""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """New tokens [start, stop) that one step computed by `algorithm`.

    `num_turns` turns shared the step, this one included; 0 where the chunk is a prediction.
    """

    start: int
    stop: int
    algorithm: str
    num_turns: int


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Predicted time of computing every chunk by `algorithm`."""

    algorithm: str
    predicted_prefill_seconds: float


@dataclass(frozen=True, kw_only=True)
class Failover:
    """Loss of a turn's ring of a role, after so many tokens of the answer, and the rings on which the turn went on.

    `new_tokens` of prompt and answer were computed again. `lost_seconds` passed from the loss to the next token.
    """

    role: str
    cause: str
    after_tokens: int
    prefill_ring: str
    decode_ring: str
    new_tokens: int
    cached_tokens: int
    lost_seconds: float


@dataclass(frozen=True, kw_only=True)
class RingAlternative:
    """Predicted time of the turn on one ring of `num_ranks` ranks of `tp` processes, in seconds.

    A decode ring is an alternative if it can compute the prompt itself. `handoff_seconds` is the transfer of new KV
    from a prefill ring. `stall_seconds` is the total wait of the turns that decode on a decode ring.
    """

    ring: str
    num_ranks: int
    tp: int
    queue_seconds: float
    move_seconds: float
    prefill_seconds: float
    handoff_seconds: float
    stall_seconds: float
    total_seconds: float


@dataclass(frozen=True, kw_only=True)
class SparsePlan:
    """Sparsity of an approximate turn: the share of keys that reached other ranks, and the bound that allowed it.

    Losses are mean KL divergences of answer tokens from exact ones, in nats, as the service's operator measured them.
    """

    keep: float
    sinks: int
    window: int
    bound: str
    limit: float
    predicted_loss: float
    measured_loss: float
    measured_accuracy: float
    measured_tokens: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of a turn: how it is computed and why. Measured values are 0 until they are known; times in seconds.

    With `sparse` the answer is approximate.
    """

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
    failovers: tuple[Failover, ...]
    sparse: SparsePlan | None = None


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Part of an answer, in whole characters. A token that ends within a character has no text yet."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Finished turn. `matched_stop` is the token or string that ended it where `finish_reason` is "stop"."""

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
    """Reader of one turn's responses. `plan` is set after the first response, `answer` after the last.

    `remembered_tokens` are those of the conversation: before a turn that is refused, after one that has ended well, and
    None between.
    """

    def __init__(self, remembered_tokens: int | None = None) -> None:
        self.remembered_tokens = remembered_tokens
        self.plan: Plan | None = None
        self.answer: Answer | None = None
        self._start = inference_pb2.GenerateStart()
        self._shown = 0

    def take(self, response: inference_pb2.GenerateResponse) -> Piece | None:
        """Return the piece that a response brings, if any."""
        if response.HasField("start"):
            self._start = response.start
            self.remembered_tokens = None
            self.plan = MAPPER.from_message(Plan, response.start.plan)
            return None
        if response.HasField("chunk"):
            self._shown += len(response.chunk.text)
            return Piece(text=response.chunk.text, token_ids=tuple(response.chunk.token_ids))
        complete = response.complete
        self.plan = MAPPER.from_message(Plan, complete.plan)
        self.remembered_tokens = complete.usage.prompt_tokens + complete.usage.completion_tokens
        self.answer = Answer(
            request_id=self._start.request_id,
            conversation_id=self._start.conversation_id,
            text=complete.text,
            token_ids=tuple(complete.output_ids),
            finish_reason=complete.finish_reason,
            matched_stop=matched_stop(complete),
            usage=MAPPER.from_message(Usage, complete.usage),
            plan=self.plan,
            ttft_seconds=complete.ttft_seconds,
            ttit_seconds=complete.ttit_seconds,
            seed=complete.seed,
        )
        rest = complete.text[self._shown :]
        return Piece(text=rest, token_ids=()) if rest else None
