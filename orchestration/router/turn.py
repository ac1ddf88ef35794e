"""State of one turn between `begin_turn` and `end_turn`, as the router sees it."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from cp_core.errors import RingserveError
from orchestration.conversations.store import Conversation
from orchestration.placement.kv_locations import Choice, WantedTurn
from orchestration.placement.planner import RetainedPrefix
from orchestration.placement.registry import LoadShare, RegisteredRing
from orchestration.protocol.turns import PrefillDone, PromptMode, Reservation, RetainingRing, TurnRequest
from workers.protocol.prefill_steps import TokenIds


def new_turn_id() -> str:
    """Return an id that no other turn has."""
    return f"turn-{uuid.uuid4().hex[:16]}"


class TurnState(Enum):
    """States of a running turn; `RunningTurn` draws the transitions."""

    RESERVING = auto()
    PREFILLING = auto()
    DECODING = auto()
    RESUMING = auto()
    ENDING = auto()
    ENDED = auto()


ALLOWED = {
    TurnState.RESERVING: {TurnState.PREFILLING, TurnState.ENDING},
    TurnState.PREFILLING: {TurnState.DECODING, TurnState.RESUMING, TurnState.ENDING},
    TurnState.DECODING: {TurnState.RESUMING, TurnState.ENDING},
    TurnState.RESUMING: {TurnState.PREFILLING, TurnState.RESUMING, TurnState.ENDING},
    TurnState.ENDING: {TurnState.ENDED},
    TurnState.ENDED: set(),
}


@dataclass(slots=True)
class RunningTurn:
    """Turn whose rings have been chosen.

        RESERVING ──all rings have reserved──> PREFILLING ──prompt computed──> DECODING
         │  │  ^                                │  │   ^                        │  │
         │  └──┘ refused: other rings, new id   │  │   └──reserved── RESUMING <─┘  │ preempted; has room again
         │                                      │  └──preempted early──> │  ^      │
         │                                      │                        │  └─ a resumption failed: next attempt
         └──────────────────────────────────────┴────────────────────────┴──────> ENDING ──> ENDED

    Before RESERVING a request waits for its conversation and for rings that return; it is no turn yet. A failure in any
    state leads to ENDING, as the decode leader's `end_turn` does. ENDING settles both rings and updates the
    conversation; ENDED has left the registry.

    Who writes: `begin.TurnReservations` the rings and reservations, `attempts.TurnAttempts` attempts and prefills,
    `registry.TurnRegistry` the ids and the end.

    `on_prefill` and `on_decode` are the rings' reservations, None until the rings have answered. `refused` are rings
    that had no room for the turn, or were gone. `left` are rings that retain KV of the conversation and are none of the
    turn's own; the prefill ring pulls from `pulled_from`.

    `attempt` counts from 1 how often KV is made for the decode ring. `decoded` are generated tokens whose KV a later
    attempt makes as well. Without a `prefill` ring the decode ring computes the prompt, until the turn is resumed.
    `retain_tokens` are the tokens that the decode ring is to retain after the end.
    `is_on_prefill_ring`: that ring has begun to make the turn's KV, and holds no other tokens of the conversation.
    """

    turn_id: str
    request: TurnRequest
    conversation: Conversation
    prompt: TokenIds
    mode: PromptMode
    wanted: WantedTurn
    choice: Choice
    load_share: LoadShare
    state: TurnState = TurnState.RESERVING
    refused: list[RegisteredRing] = field(default_factory=list)
    on_prefill: Reservation | None = None
    on_decode: Reservation | None = None
    left: list[RetainedPrefix] = field(default_factory=list)
    pulled_from: RetainingRing | None = None
    attempt: int = 1
    decoded: TokenIds = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    prefilling: asyncio.Task[PrefillDone] | None = None
    resuming: asyncio.Task[None] | None = None
    is_on_prefill_ring: bool = False
    ending: asyncio.Task[None] | None = None
    retain_tokens: int = 0
    lease: asyncio.TimerHandle | None = None
    stop_error: RingserveError | None = None

    def to(self, following: TurnState) -> None:
        """Take the next state. A transition that the diagram lacks is a bug."""
        assert following in ALLOWED[self.state], f"no turn goes from {self.state.name} to {following.name}"
        self.state = following

    @property
    def is_over(self) -> bool:
        """True if the turn has ended, or is about to."""
        return self.state in (TurnState.ENDING, TurnState.ENDED)

    @property
    def prefill(self) -> RegisteredRing | None:
        """Prefill ring; None where the decode ring computes the prompt."""
        return None if self.choice.is_direct else self.choice.prefill

    @property
    def decode(self) -> RegisteredRing:
        """Decode ring."""
        return self.choice.decode

    @property
    def rings(self) -> tuple[RegisteredRing, ...]:
        """Rings that have, or are to have, KV of the turn."""
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)

    @property
    def kv_id(self) -> str:
        """Id under which the rings hold the KV: the conversation's, or the turn's where there is none."""
        return self.request.conversation_id or self.turn_id

    @property
    def match_tokens(self) -> int:
        """Number of prompt tokens that begin the conversation so far, the prompt's last token excluded."""
        return self.wanted.match_tokens

    def match_on(self, ring: RegisteredRing) -> int:
        """Return how many of the matching tokens a ring may reuse: 0 where the ring is not the conversation's own.

        Another ring may still hold KV of an earlier state that has been overwritten since. The conversation's own
        prefill ring may hold such KV beyond its location's end, where later turns did without that ring.
        """
        return self.wanted.known_on(ring)

    def match_to_reserve(self, ring: RegisteredRing) -> int:
        """Return how many tokens a ring is asked to retain when it reserves.

        In a later attempt, a ring that made KV for this turn before holds the turn's own tokens alone.
        """
        holds_own = self.attempt > 1 and (ring is self.decode or self.is_on_prefill_ring)
        return len(self.token_ids) - 1 if holds_own else self.match_on(ring)

    @property
    def token_ids(self) -> TokenIds:
        """All tokens whose KV the decode ring is to get."""
        # A prompt of a million tokens is 8 MB: it is copied only where there is something to add.
        return np.concatenate([self.prompt, self.decoded]) if len(self.decoded) else self.prompt

    @property
    def max_kv_tokens(self) -> int:
        """Tokens that its KV may come to."""
        return len(self.prompt) + self.request.sampling.max_tokens

    @property
    def is_retained(self) -> bool:
        """True if the KV outlives the turn."""
        return bool(self.request.conversation_id)

    @property
    def retained_on_prefill(self) -> int:
        """Tokens of the conversation whose KV stays on the prefill ring if the turn fails."""
        return 0 if self.prefill is None else self._retained(self.prefill, self.on_prefill)

    @property
    def retained_on_decode(self) -> int:
        """Tokens of the conversation whose KV stays on the decode ring if the turn fails."""
        return self._retained(self.decode, self.on_decode)

    def _retained(self, ring: RegisteredRing, reservation: Reservation | None) -> int:
        # A ring that refused has cut nothing beyond what agrees with the prompt.
        match = self.match_on(ring) if self.is_retained else 0
        return match if reservation is None else min(match, reservation.retained_tokens)
