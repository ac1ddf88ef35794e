"""One turn on a decode ring, from its reservation to its end: its states, its answer, its KV and its times.

The leader, registry, engine, feed and room of the same ring share these objects. Nothing here calls another process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from ringserve.cp_core.errors import InvalidRequest, RingserveError
from ringserve.cp_core.layout.shards import ShardMap, appended
from ringserve.orchestration.protocol.turns import (
    Attributes,
    FinishedEvent,
    PrefillDone,
    PrefillReport,
    Reservation,
    Reserve,
    ScoredEvent,
    SentKv,
    TimeSpan,
    just_ended,
)
from ringserve.orchestration.ring.kv_pool import KvPool, SequenceKv
from ringserve.workers.protocol.steps import DRAFT_TEXT_TOKENS, AdmitSequence, FinishReason, TokenIds
from ringserve.workers.protocol.transfers import TransferKey
from ringserve.workers.sampling.parameters import TokenHistory, TokenLogprobs

ARROWS = {
    "RESERVED": {"STREAMING", "SEALED", "PREEMPTED", "ABORTED"},
    "STREAMING": {"SEALED", "PREEMPTED", "ABORTED"},
    "SEALED": {"ADMITTED", "DONE", "ABORTED"},
    "ADMITTED": {"STARVED", "PREEMPTED", "DONE", "ABORTED"},
    "STARVED": {"ADMITTED", "PREEMPTED", "DONE", "ABORTED"},
    "PREEMPTED": {"RESUMING", "DONE", "ABORTED"},
    "RESUMING": {"RESERVED", "PREEMPTED", "DONE", "ABORTED"},
    "ABORTED": set(),
    "DONE": set(),
}
"""Transitions of DecodeTurnState, by name: the states that may follow each state."""


class DecodeTurnState(Enum):
    """States of a turn on a decode ring, from the hand-off of its KV to its end.

    RESERVED ──first token──> STREAMING ────all KV arrived─────> SEALED ──first token known──> ADMITTED ──> DONE
        │                         │                                │                             │
        └─────────────────────────┴──────────────> ABORTED <───────┴─────────────────────────────┘

    RESERVED ──all KV arrived before the first token, or the ring computed the prompt itself──> SEALED
    SEALED ──the first token ends the answer──> DONE

    ADMITTED ──block tables full──> STARVED ──new blocks──> ADMITTED                 the KV stays on the ring
    ADMITTED, STARVED ──an older turn needs the blocks──> PREEMPTED                  the KV is dropped
    PREEMPTED ──new blocks──> RESUMING ──the router begins a new attempt──> RESERVED
    RESUMING, RESERVED, STREAMING ──the attempt failed──> PREEMPTED

    STARVED, PREEMPTED and RESUMING may also go to ABORTED and DONE, as ADMITTED does.

    The decode leader owns the decode ring's blocks in every state. Until SEALED the ranks' receivers may write to them,
    or the decode loop if the ring computes the prompt itself. In ADMITTED the decode loop may write to them.
    ABORTED, DONE and PREEMPTED are reached only after both have stopped writing: only then do the blocks return to the
    pool. The prefill ring's blocks of the sequence stay pinned until `finish_sends` returns, because its ranks read
    them until then.
    """

    RESERVED = auto()
    STREAMING = auto()
    SEALED = auto()
    ADMITTED = auto()
    STARVED = auto()
    PREEMPTED = auto()
    RESUMING = auto()
    ABORTED = auto()
    DONE = auto()

    def to(self, following: DecodeTurnState) -> DecodeTurnState:
        """Return `following`. A transition that the diagram lacks is a bug: AssertionError."""
        assert following.name in ARROWS[self.name], f"no turn goes from {self.name} to {following.name}"
        return following

    @property
    def is_over(self) -> bool:
        """True if no transition follows."""
        return not ARROWS[self.name]

    @property
    def is_decoding(self) -> bool:
        """True from admission to preemption or end: the KV is on the ring, and the decode loop may have added to it."""
        return self in (DecodeTurnState.ADMITTED, DecodeTurnState.STARVED)


@dataclass(frozen=True, slots=True)
class Attempt:
    """Latest attempt to bring the turn's KV onto the ring; the leader replaces it whole when the turn is resumed.

    The prompt of a resumed turn is the turn's own prompt and the tokens decoded before its preemption.
    """

    request: Reserve
    key: TransferKey
    reservation: Reservation


@dataclass(slots=True)
class Answer:
    """Tokens of the answer, which the ring's events append, and its length, which the reader may set.

    `logprobs`, if requested, cover the tokens that this ring decoded. Earlier ones may have come from another ring.
    `num_drafted` of the tokens followed drafts that proved right. `num_finished` is the length; None until the reader
    sets it. If the reader decides on the end (`ends_by_text`), `own_end` is why the ring stopped decoding before that;
    else None.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_drafted: int = 0
    num_finished: int | None = None
    own_end: FinishReason | None = None

    @property
    def finish_reason(self) -> FinishReason:
        """Finish reason of an answer whose reader set its length: `own_end` if it kept all tokens, else STOP."""
        is_whole = self.own_end is not None and self.num_finished == len(self.tokens)
        return self.own_end if is_whole and self.own_end is not None else FinishReason.STOP


@dataclass(slots=True)
class TurnTasks:
    """Work in progress for a turn; the leader starts it and the registry waits for it when the turn ends.

    `copying` copies shared blocks. Then the ring computes the prompt in `prefilling`, or KV comes from another ring
    and `sealing` waits for it. `sends` send KV to other rings. `ending` is the end itself.
    """

    ending: asyncio.Task[None] | None = None
    sealing: asyncio.Task[None] | None = None
    prefilling: asyncio.Task[PrefillDone] | None = None
    copying: asyncio.Task[None] | None = None
    sends: dict[asyncio.Task[SentKv], TransferKey] = field(default_factory=dict)
    timers: list[asyncio.TimerHandle] = field(default_factory=list)

    def stop_timers(self) -> None:
        """Cancel the deadline and the attach timeout."""
        for timer in self.timers:
            timer.cancel()

    def stop_sealing(self) -> None:
        """Stop waiting for the KV of the latest attempt."""
        if self.sealing is not None:
            self.sealing.cancel()

    async def until_idle(self) -> None:
        """Wait for sends, copies and the prompt; their errors go to their own callers."""
        await asyncio.gather(*self.sends, *filter(None, [self.copying, self.prefilling]), return_exceptions=True)


@dataclass(slots=True)
class TurnTimes:
    """Times and transfers of a turn on the ring, for its last event and its trace. Times are of `time.monotonic`.

    `origins` says how the turn's KV reached the ring, once per attempt.
    """

    reserved_at: float = field(default_factory=time.monotonic)
    first_token_at: float = 0.0
    handoff_seconds: float = 0.0
    migrated_bytes: int = 0
    migration_seconds: float = 0.0
    origins: list[TimeSpan] = field(default_factory=list)

    def note_migration(self, ring: str, attempt: int, sent: SentKv) -> None:
        """Record that the KV of an attempt is whole on `ring` now; `sent.seconds` count from its first byte."""
        self.migrated_bytes += sent.payload_bytes
        self.migration_seconds += sent.seconds
        where: Attributes = {"ringserve.ring": ring, "ringserve.attempt": attempt}
        self.origins.append(just_ended("migration", sent.seconds, {**where, "ringserve.bytes": sent.payload_bytes}))

    def note_prompt(self, ring: str, attempt: int, report: PrefillReport) -> None:
        """Record that `ring` itself has just computed the prompt, in one step."""
        (chunk,) = report.chunks
        where: Attributes = {"ringserve.ring": ring, "ringserve.attempt": attempt}
        attributes: Attributes = {
            **where,
            "ringserve.tokens.start": chunk.tokens.start,
            "ringserve.tokens.stop": chunk.tokens.stop,
            "ringserve.algorithm": chunk.algorithm.value,
        }
        step = just_ended("prefill", report.prefill_seconds, attributes)
        queue = TimeSpan(name="queue", began=min(self.reserved_at, step.began), ended=step.began, attributes=where)
        self.origins += [queue, step]


@dataclass(slots=True)
class DecodeTurn:
    """Turn on a decode ring and its parts, each written by one owner.

    The leader writes `attempt` and `state`. The room writes `room` and the states between ADMITTED and RESUMING. The
    feed writes `left_batch`.

    `arrival` orders the ring's turns. `prompt_tokens` are those before the answer. `is_prefilled`: the prompt was
    computed, and the first token of the answer has come. `room` is how many tokens of the sequence have a slot in its
    block tables. `owners` are the ranks that store the decoded tokens after `sequence.shards`, in order. `error` is why
    the turn failed; None if it runs or ended well. `num_attempts` also counts the attempts that the router could not
    begin. `opening` are the events before the first token, `end` is the last of all. `reader` is the latest stream that
    reads the turn; it waits for `changed`.
    """

    attempt: Attempt
    pool: KvPool
    sequence: SequenceKv
    arrival: int
    prompt_tokens: int
    room: int
    answer: Answer = field(default_factory=Answer)
    owners: list[int] = field(default_factory=list)
    state: DecodeTurnState = DecodeTurnState.RESERVED
    is_prefilled: bool = False
    error: RingserveError | None = None
    num_attempts: int = 1
    opening: list[PrefillReport | ScoredEvent] = field(default_factory=list)
    end: FinishedEvent | RingserveError | None = None
    reader: object | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    left_batch: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: TurnTasks = field(default_factory=TurnTasks)
    times: TurnTimes = field(default_factory=TurnTimes)

    @property
    def request(self) -> Reserve:
        """Request of the latest attempt."""
        return self.attempt.request

    @property
    def reservation(self) -> Reservation:
        """Reservation of the latest attempt."""
        return self.attempt.reservation

    @property
    def turn_id(self) -> str:
        return self.request.turn_id

    @property
    def is_ending(self) -> bool:
        return self.tasks.ending is not None

    def to(self, state: DecodeTurnState) -> None:
        """Enter the next state."""
        self.state = self.state.to(state)

    def add_token(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Append the newest token to the answer."""
        if self.answer.tokens and not self.times.handoff_seconds:
            self.times.handoff_seconds = time.monotonic() - self.times.first_token_at
        self.answer.tokens.append(token_id)
        if logprobs is not None:
            self.answer.logprobs.append(logprobs)
        self.changed.set()

    def end_with(self, end: FinishedEvent | RingserveError) -> None:
        """Set the last event."""
        self.end = end
        self.changed.set()

    def reason_to_end(self) -> FinishReason | None:
        """Return the finish reason if the newest token ends the answer."""
        sampling, tokens = self.request.sampling, self.answer.tokens
        if tokens[-1] in sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(tokens) >= sampling.max_tokens else None

    @property
    def kv_tokens(self) -> int:
        """Tokens of the sequence whose KV exists: all but the newest, whose KV the next step computes."""
        return self.prompt_tokens + len(self.answer.tokens) - 1

    @property
    def final_tokens(self) -> int:
        """Largest number of tokens that the sequence may reach."""
        return self.prompt_tokens + self.request.sampling.max_tokens

    @property
    def held(self) -> tuple[int, ...]:
        """Tokens of the sequence on each rank, decoded ones among them."""
        return tuple(count + self.owners.count(rank) for rank, count in enumerate(self.sequence.shards.held))

    def finish(self, num_tokens: int) -> None:
        """Set the answer to its first `num_tokens` tokens; only the first call counts.

        Raises InvalidRequest if the answer has fewer tokens.
        """
        answer = self.answer
        if not 1 <= num_tokens <= len(answer.tokens):
            raise InvalidRequest(
                f"num_tokens: {num_tokens} is out of range; turn {self.turn_id} has {len(answer.tokens)} tokens"
            )
        if answer.num_finished is None:
            answer.num_finished = num_tokens

    def cut(self) -> None:
        """Drop tokens after the set length, and their KV. Called when the decode loop adds no more tokens."""
        if self.answer.num_finished is not None:
            self.note_decoded()
            num_dropped = len(self.answer.tokens) - self.answer.num_finished
            for dropped in (self.answer.tokens, self.answer.logprobs):
                del dropped[len(dropped) - num_dropped :]
            self.sequence.shards = self.sequence.shards.truncate(self.kv_tokens)

    def admission(self, tail_tokens: int = 0) -> AdmitSequence:
        """Return the command to join the batch with the newest token, whose own KV the next step computes.

        It says where the newest `tail_tokens` tokens are stored.
        """
        shards, tokens = self.note_decoded(), self.answer.tokens
        return AdmitSequence(
            sequence_id=self.turn_id,
            token_id=tokens[-1],
            position=shards.num_tokens,
            held=shards.held,
            blocks=tuple(self.sequence.table(rank) for rank in range(shards.num_ranks)),
            sampling=self.request.sampling,
            history=TokenHistory.of(self.request.sampling, self.request.penalized_ids, tokens),
            text=self._text(),
            tail=shards.newest(tail_tokens),
        )

    def _text(self) -> TokenIds:
        """Return the newest tokens of prompt and answer; none if the request brought no text."""
        known = self.request.draft_text
        if not len(known):
            return known
        num_answered = self.request.num_tokens - self.prompt_tokens
        return np.concatenate([known[: len(known) - num_answered], self.answer.tokens])[-DRAFT_TEXT_TOKENS:]

    def note_decoded(self) -> ShardMap:
        """Enter the KV of decoded tokens into the sequence's shards; return the shards of all its KV."""
        shards = self.sequence.shards
        if self.owners:
            self.sequence.shards = shards.extend(appended(shards.num_tokens, self.owners, shards.num_ranks))
            self.owners.clear()
        return self.sequence.shards

    def spans(self, ring: str, ended: float) -> Sequence[TimeSpan]:
        """Return the trace spans of a turn that ends on `ring`; a turn that ends early has fewer.

        Each transfer of the whole KV has a `migration`, from the first byte to the seal. A ring that computed the
        prompt itself has `queue`, from the reservation, and `prefill` instead. `hand-off` lasts from the first token,
        which the prefill computes, to the second. `decode` lasts from there to the end.
        """
        times, where = self.times, {"ringserve.ring": ring}
        if not times.handoff_seconds:
            return list(times.origins)
        began = times.first_token_at + times.handoff_seconds
        counts = {"ringserve.tokens": len(self.answer.tokens), "ringserve.attempts": self.num_attempts}
        return [
            *times.origins,
            TimeSpan(name="hand-off", began=times.first_token_at, ended=began, attributes=where),
            TimeSpan(name="decode", began=began, ended=ended, attributes={**where, **counts}),
        ]
