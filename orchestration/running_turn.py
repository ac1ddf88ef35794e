"""A turn between `begin_turn` and `end_turn`, as the router sees it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np

from cp_core.errors import RingserveError
from orchestration.conversations import Conversation
from orchestration.groups import Group
from orchestration.turn import PrefillDone, PromptMode, Reservation, TurnRequest
from workers.steps import TokenIds


@dataclass(slots=True)
class RunningTurn:
    """`on_prefill` and `on_decode` are the rings' reservations, None until they have answered.

    `attempt` counts the times that its KV is made for the decode ring; `decoded` are tokens whose KV belongs to that.
    """

    turn_id: str
    request: TurnRequest
    conversation: Conversation
    prompt: TokenIds
    mode: PromptMode
    prefill: Group
    decode: Group
    match_tokens: int = 0
    on_prefill: Reservation | None = None
    on_decode: Reservation | None = None
    prefilling: asyncio.Task[PrefillDone] | None = None
    ending: asyncio.Task[int] | None = None
    lease: asyncio.TimerHandle | None = None
    stop_error: RingserveError | None = None
    attempt: int = 1
    decoded: TokenIds = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    resuming: asyncio.Task[None] | None = None

    @property
    def token_ids(self) -> TokenIds:
        """All whose KV the decode ring is to get."""
        return np.concatenate([self.prompt, self.decoded])

    @property
    def is_kept(self) -> bool:
        """Whether the KV outlives the turn."""
        return bool(self.request.conversation_id)

    @property
    def sequence_id(self) -> str:
        return self.request.conversation_id or self.turn_id
