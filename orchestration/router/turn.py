"""A turn between `begin_turn` and `end_turn`, as the router sees it."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, field

import numpy as np

from cp_core.errors import RingserveError
from orchestration.conversations.store import Conversation
from orchestration.placement.cached_kv import RetainedPrefix
from orchestration.placement.registry import LoadShare, RegisteredRing
from orchestration.placement.wanted_turn import Choice, WantedTurn
from orchestration.protocol.turns import PrefillDone, PromptMode, Reservation, RetainingRing, TurnRequest
from workers.protocol.prefill_steps import TokenIds


def new_turn_id() -> str:
    return f"turn-{uuid.uuid4().hex[:16]}"


@dataclass(slots=True)
class RunningTurn:
    """`on_prefill` and `on_decode` are the rings' reservations, None until they have answered.

    `attempt` counts the times that its KV is made for the decode ring; `decoded` are tokens whose KV belongs to that.
    `left` are rings that keep some of the conversation and are none of the turn's; from `pulled_from` its prefill ring
    fetches. `refused` are rings that had no room for it, or were gone. Where it is placed anew it gets another
    `turn_id`.

    Where the decode ring computes the prompt itself there is no `prefill` ring, until the turn has to be resumed.
    `is_on_prefill_ring`: that ring has begun to make the turn's KV, and holds no other tokens of the conversation.
    """

    turn_id: str
    request: TurnRequest
    conversation: Conversation
    prompt: TokenIds
    mode: PromptMode
    wanted: WantedTurn
    choice: Choice
    placed: LoadShare
    refused: list[RegisteredRing] = field(default_factory=list)
    on_prefill: Reservation | None = None
    on_decode: Reservation | None = None
    left: list[RetainedPrefix] = field(default_factory=list)
    pulled_from: RetainingRing | None = None
    prefilling: asyncio.Task[PrefillDone] | None = None
    ending: asyncio.Task[int] | None = None
    lease: asyncio.TimerHandle | None = None
    stop_error: RingserveError | None = None
    attempt: int = 1
    decoded: TokenIds = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    resuming: asyncio.Task[None] | None = None
    is_on_prefill_ring: bool = False

    @property
    def prefill(self) -> RegisteredRing | None:
        return None if self.choice.is_direct else self.choice.prefill

    @property
    def decode(self) -> RegisteredRing:
        return self.choice.decode

    @property
    def rings(self) -> tuple[RegisteredRing, ...]:
        """The rings that have, or are to have, KV of the turn."""
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)

    @property
    def match_tokens(self) -> int:
        """How many tokens of the prompt begin the conversation so far; the last one of the prompt is none of them."""
        return self.wanted.match_tokens

    def match_on(self, ring: RegisteredRing) -> int:
        """Of those, how many a ring may take from what it keeps: none where it is not the conversation's own.

        What another ring still has of the conversation may be of an earlier state that has been overwritten since; and
        so may what its own prefill ring has beyond what the books say, where turns since did without that ring.
        """
        return self.wanted.known_on(ring)

    def match_to_reserve(self, ring: RegisteredRing) -> int:
        """As `match_on`, but of a later attempt a ring that made KV for it before holds the turn's own tokens alone."""
        holds_own = self.attempt > 1 and (ring is self.decode or self.is_on_prefill_ring)
        return len(self.token_ids) - 1 if holds_own else self.match_on(ring)

    @property
    def token_ids(self) -> TokenIds:
        """All whose KV the decode ring is to get."""
        # A prompt of a million tokens is 8 MB: it is copied only where there is something to add.
        return np.concatenate([self.prompt, self.decoded]) if len(self.decoded) else self.prompt

    @property
    def max_kv_tokens(self) -> int:
        """What its KV may come to."""
        return len(self.prompt) + self.request.sampling.max_tokens

    @property
    def is_retained(self) -> bool:
        """Whether the KV outlives the turn."""
        return bool(self.request.conversation_id)

    @property
    def retained_on_prefill(self) -> int:
        """What is left there of the conversation's KV if the turn fails. One that it did not come to keeps it all."""
        return 0 if self.prefill is None else self._kept(self.prefill, self.on_prefill)

    @property
    def retained_on_decode(self) -> int:
        """As `retained_on_prefill`."""
        return self._kept(self.decode, self.on_decode)

    def _kept(self, ring: RegisteredRing, reservation: Reservation | None) -> int:
        """A ring that refused has cut nothing beyond what agrees."""
        match = self.match_on(ring) if self.is_retained else 0
        return match if reservation is None else min(match, reservation.retained_tokens)

    @property
    def kv_id(self) -> str:
        return self.request.conversation_id or self.turn_id
