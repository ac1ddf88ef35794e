"""One turn on a decode ring, from its reservation to its end. `handoff` draws the states."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from cp_core.errors import InvalidRequest, RingserveError
from cp_core.layout.shards import ShardMap, appended, level_counts
from orchestration.protocol.handoff import HandoffState
from orchestration.protocol.kv import SentKv
from orchestration.protocol.tracing import Attributes, Stretch, just_ended
from orchestration.protocol.turns import PrefillDone, PrefillReport, Reservation, Reserve, TokensEvent, TurnEvent
from orchestration.ring.kv_pool import KvPool, SequenceKv
from workers.protocol.decode_commands import AdmitSequence, FinishReason
from workers.protocol.transfers import TransferKey
from workers.sampling.parameters import TokenHistory, TokenLogprobs


@dataclass(slots=True)
class DecodeTurn:
    """`events` is what the gateway's stream reads; an error in it is its last item.

    `arrival` orders the ring's turns. `request`, `key` and `reservation` are those of the latest attempt, whose prompt
    is the turn's own `prompt_tokens` and, after a preemption, what was decoded until then; `num_attempts` also counts
    those that the router could not begin. `room` tokens of the sequence find a slot in its block tables. The ring
    itself computes the prompt in `prefilling`, or KV comes from elsewhere and `sealing` waits for it.
    """

    request: Reserve
    key: TransferKey
    pool: KvPool
    sequence: SequenceKv
    reservation: Reservation
    arrival: int
    prompt_tokens: int
    room: int
    state: HandoffState = HandoffState.RESERVED
    tokens: list[int] = field(default_factory=list)
    report: PrefillReport | None = None
    events: asyncio.Queue[TurnEvent | RingserveError] = field(default_factory=asyncio.Queue)
    is_streamed: bool = False
    is_paused: bool = False
    num_attempts: int = 1
    left_batch: asyncio.Event = field(default_factory=asyncio.Event)
    ending: asyncio.Task[None] | None = None
    sealing: asyncio.Task[None] | None = None
    prefilling: asyncio.Task[PrefillDone] | None = None
    sends: set[asyncio.Task[SentKv]] = field(default_factory=set)
    copying: asyncio.Task[None] | None = None
    timers: list[asyncio.TimerHandle] = field(default_factory=list)
    migrated_bytes: int = 0
    migration_seconds: float = 0.0
    handoff_seconds: float = 0.0
    # How its KV came to be here, each time.
    origins: list[Stretch] = field(default_factory=list)
    # How many tokens make the answer, where the reader says so; and how it ends if they are all.
    num_finished: int | None = None
    own_end: FinishReason | None = None
    reserved_at: float = field(default_factory=time.monotonic)
    first_token_at: float = 0.0

    @property
    def turn_id(self) -> str:
        return self.request.turn_id

    @property
    def is_ending(self) -> bool:
        return self.ending is not None

    def finish_reason_of(self, token: int) -> FinishReason | None:
        """Whether the turn ends with its newest token."""
        if token in self.request.sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= self.request.sampling.max_tokens else None

    def add_token(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Enter the newest token and hand it to the client."""
        if len(self.tokens) == 1:
            self.handoff_seconds = time.monotonic() - self.first_token_at
        self.tokens.append(token_id)
        told = () if logprobs is None else (logprobs,)
        self.events.put_nowait(TokensEvent(token_ids=(token_id,), logprobs=told))

    def note_migration(self, ring: str, payload_bytes: int, seconds: float) -> None:
        """The KV of the latest attempt has just come whole to `ring`, `seconds` after its first byte."""
        self.migrated_bytes += payload_bytes
        self.migration_seconds += seconds
        attributes: Attributes = {
            "ringserve.ring": ring,
            "ringserve.attempt": self.request.attempt,
            "ringserve.bytes": payload_bytes,
        }
        self.origins.append(just_ended("migration", seconds, attributes))

    def note_prompt(self, ring: str, report: PrefillReport) -> None:
        """`ring` itself has just computed the prompt, in one step."""
        (chunk,) = report.chunks
        where: Attributes = {"ringserve.ring": ring, "ringserve.attempt": self.request.attempt}
        attributes: Attributes = {
            **where,
            "ringserve.tokens.start": chunk.tokens.start,
            "ringserve.tokens.stop": chunk.tokens.stop,
            "ringserve.algorithm": chunk.algorithm.value,
        }
        step = just_ended("prefill", report.prefill_seconds, attributes)
        queue = Stretch(name="queue", began=min(self.reserved_at, step.began), ended=step.began, attributes=where)
        self.origins += [queue, step]

    @property
    def kv_tokens(self) -> int:
        """Tokens of the sequence so far but for the newest, whose KV the next step computes."""
        return self.prompt_tokens + len(self.tokens) - 1

    @property
    def final_tokens(self) -> int:
        """The most tokens that the sequence may come to have."""
        return self.prompt_tokens + self.request.sampling.max_tokens

    def held_with(self, num_tokens: int) -> list[int]:
        """What each rank holds when the sequence has `num_tokens` tokens, at least as many as its KV has now."""
        held = self.sequence.shards.held
        growth = level_counts(held, num_tokens - sum(held))
        return [own + more for own, more in zip(held, growth, strict=True)]

    def finish(self, num_tokens: int) -> None:
        """The reader says that its answer is the first `num_tokens` tokens; the first word counts.

        Raises InvalidRequest where there are fewer.
        """
        if not 1 <= num_tokens <= len(self.tokens):
            raise InvalidRequest(
                f"num_tokens: {num_tokens} is out of range; turn {self.turn_id} has {len(self.tokens)} tokens"
            )
        if self.num_finished is None:
            self.num_finished = num_tokens

    def cut(self) -> None:
        """Forget tokens after the answer, and their KV. Nobody may add any more."""
        if self.num_finished is not None:
            del self.tokens[self.num_finished :]
            self.sequence.shards = self.sequence.shards.truncate(self.kv_tokens)

    @property
    def finish_reason(self) -> FinishReason:
        """Of a turn whose reader has finished it."""
        is_whole = self.own_end is not None and self.num_finished == len(self.tokens)
        return self.own_end if is_whole and self.own_end is not None else FinishReason.STOP

    def admission(self) -> AdmitSequence:
        """Join the batch with the newest token, whose own KV is the first to be computed."""
        shards = self.note_decoded()
        return AdmitSequence(
            sequence_id=self.turn_id,
            token_id=self.tokens[-1],
            position=shards.num_tokens,
            held=shards.held,
            blocks=tuple(self.sequence.table(rank) for rank in range(shards.num_ranks)),
            sampling=self.request.sampling,
            history=TokenHistory.of(self.request.sampling, self.request.penalized_ids, self.tokens),
        )

    def note_decoded(self) -> ShardMap:
        """Enter the decoded tokens' KV into the sequence, where it has any. Returns where all KV lies."""
        shards = self.sequence.shards
        if self.state is HandoffState.ADMITTED:
            known = shards.num_tokens
            self.sequence.shards = shards.extend(appended(known, self.kv_tokens - known, shards.held))
        return self.sequence.shards

    def stop_timers(self) -> None:
        for timer in self.timers:
            timer.cancel()


def decode_stretches(turn: DecodeTurn, ring: str, ended: float) -> Sequence[Stretch]:
    """Of a turn that ends on `ring`, however far it came.

    A `migration` for every time that its KV came whole (from the first byte to the seal), or `queue` (from the
    reservation) and `prefill` where the ring itself computed the prompt; `hand-off` (from the first token, which the
    ring makes that computes the prompt, to the second), and `decode` (from there to the end).
    """
    where: Attributes = {"ringserve.ring": ring}
    found = list(turn.origins)
    if not turn.handoff_seconds:
        return found
    began = turn.first_token_at + turn.handoff_seconds
    decoded: Attributes = {**where, "ringserve.tokens": len(turn.tokens), "ringserve.attempts": turn.num_attempts}
    return [
        *found,
        Stretch(name="hand-off", began=turn.first_token_at, ended=began, attributes=where),
        Stretch(name="decode", began=began, ended=ended, attributes=decoded),
    ]
