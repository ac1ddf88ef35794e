"""One turn on a decode ring, from its reservation to its end. `handoff` draws the states."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from cp_core.errors import RingserveError
from cp_core.layout import ShardMap, appended
from orchestration.handoff import HandoffState
from orchestration.kv_pool import KvPool, SequenceKv
from orchestration.turn import PrefillReport, Reservation, Reserve, TurnEvent
from workers.steps import AdmitSequence, FinishReason, TransferKey, TransferReport


@dataclass(slots=True)
class DecodeTurn:
    """`events` is what the gateway's stream reads; an error in it is its last item."""

    request: Reserve
    key: TransferKey
    pool: KvPool
    sequence: SequenceKv
    reservation: Reservation
    state: HandoffState = HandoffState.RESERVED
    tokens: list[int] = field(default_factory=list)
    report: PrefillReport | None = None
    events: asyncio.Queue[TurnEvent | RingserveError] = field(default_factory=asyncio.Queue)
    is_streamed: bool = False
    in_batch: bool = False
    left_batch: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    ending: asyncio.Task[None] | None = None
    sealing: asyncio.Task[None] | None = None
    pulls: set[asyncio.Task[list[TransferReport]]] = field(default_factory=set)
    copying: asyncio.Task[None] | None = None
    timers: list[asyncio.TimerHandle] = field(default_factory=list)
    migrated_bytes: int = 0
    migration_seconds: float = 0.0
    handoff_seconds: float = 0.0
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

    def admission(self) -> AdmitSequence:
        """Join the batch with the prefill ring's first token, whose own KV is the first to be computed."""
        ranks = range(self.sequence.shards.num_ranks)
        return AdmitSequence(
            sequence_id=self.turn_id,
            token_id=self.tokens[0],
            position=self.request.num_tokens,
            held=self.sequence.shards.held,
            blocks=tuple(self.sequence.table(rank) for rank in ranks),
            sampling=self.request.sampling,
            num_generated=1,
        )

    def note_decoded(self) -> ShardMap:
        """Enter the decoded tokens' KV into the sequence; the newest token has none. Returns where all KV lies."""
        num_tokens = self.request.num_tokens
        decoded = appended(num_tokens, len(self.tokens) - 1, self.sequence.shards.held)
        self.sequence.shards = self.sequence.shards.extend(decoded)
        return self.sequence.shards

    def stop_timers(self) -> None:
        for timer in self.timers:
            timer.cancel()

    def note_first_step(self) -> None:
        """The batch returned its first token of this turn."""
        self.handoff_seconds = time.monotonic() - self.first_token_at
