"""A decode ring that is about to evict gives what it keeps longest unused to one with room, where that is worth it.

What a ring evicts must be computed again; what is moved in time need not. Prefill rings evict: what they keep a decode
ring keeps too. One ring is relieved by few moves at a time, so that turns find the links free.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine

from cp_core.errors import CapacityExceeded, RingserveError
from orchestration.conversations.move_counts import MoveCounts
from orchestration.conversations.mover import ConversationMover
from orchestration.conversations.store import Conversation, ConversationStore
from orchestration.placement.planner import Planner
from orchestration.placement.registry import RegisteredRing, RingRegistry
from orchestration.protocol.views import MoveReason

log = logging.getLogger(__name__)

LITTLE = 0.1
"""A ring with less than this share of its room to spare is full."""
ENOUGH = 0.4
"""With more than this share to spare a ring takes from others: far from full itself, so nothing goes to and fro."""
MOVES_AT_ONCE = 4
"""After each announcement of a full ring."""
CONSIDERED = 64
"""Conversations, the least recently used ones, of which these are chosen."""
WORTH = 2.0
"""What is moved would take this many times as long to be computed again: it may never be asked for."""


class FullMoves:
    """`spawn` runs work in the router's background."""

    def __init__(
        self,
        store: ConversationStore,
        rings: RingRegistry,
        planner: Planner,
        mover: ConversationMover,
        counts: MoveCounts,
        spawn: Callable[[Coroutine[None, None, None]], asyncio.Task[None]],
    ) -> None:
        self._store = store
        self._rings = rings
        self._planner = planner
        self._mover = mover
        self._counts = counts
        self._spawn = spawn
        self._work: dict[str, asyncio.Task[None]] = {}

    def note(self, ring: RegisteredRing) -> None:
        """A ring that takes turns has told how full it is."""
        if ring.role != "decode" or ring.spare_tokens >= LITTLE * ring.registration.capacity_tokens:
            return
        if ring.name in self._work or self._target(ring, 0) is None:
            return
        work = self._work[ring.name] = self._spawn(self._relieve(ring))
        work.add_done_callback(lambda _: self._work.pop(ring.name))

    async def _relieve(self, ring: RegisteredRing) -> None:
        here = self._store.placed_at(ring.role, ring.name, ring.registration.incarnation)
        idle = sorted((each for each in here if each.is_idle), key=lambda each: each.last_used)[:CONSIDERED]
        oldest = [each for each in idle if self._is_worth_moving(each, ring)][:MOVES_AT_ONCE]
        try:
            kept = await self._mover.retained_on(ring, oldest)
        except RingserveError as error:
            log.info("full ring %s cannot be relieved: %s", ring.name, error)
            return
        for conversation, num_tokens in zip(oldest, kept, strict=True):
            target = self._target(ring, num_tokens)
            if not num_tokens or target is None or not self._store.can_move(conversation):
                continue
            try:
                await self._mover.move(conversation, ring, target, num_tokens, MoveReason.FULL)
            except CapacityExceeded:
                target.spare_tokens = 0  # until it tells more
            except RingserveError as error:
                self._counts.failed(ring.role, MoveReason.FULL)
                log.warning("%s cannot be moved from ring %s: %s", conversation.conversation_id, ring.name, error)

    def _target(self, ring: RegisteredRing, num_tokens: int) -> RegisteredRing | None:
        """The emptiest other ring, if it has enough to spare after taking so many tokens."""
        others = [other for other in self._rings.ready(ring.role) if other is not ring]
        emptiest = max(others, key=_spare_share, default=None)
        if emptiest is None or emptiest.spare_tokens < num_tokens:
            return None
        return emptiest if _spare_share(emptiest) > ENOUGH else None

    def _is_worth_moving(self, conversation: Conversation, ring: RegisteredRing) -> bool:
        """Whether what only this ring keeps takes much longer to be computed than all of it to be moved."""
        place = conversation.decode
        total = 0 if place is None else place.num_tokens
        on_prefill = 0 if conversation.prefill is None else conversation.prefill.num_tokens
        prefill = next(iter(self._rings.ready("prefill")), None)
        if total <= on_prefill or prefill is None:
            return False
        again = self._planner.predict_prefill(total, on_prefill, prefill.registration)
        return again > WORTH * self._planner.predict_move(total, ring.registration, ring.registration)


def _spare_share(ring: RegisteredRing) -> float:
    return ring.spare_tokens / max(1, ring.registration.capacity_tokens)
