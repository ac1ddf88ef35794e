"""What rings that drain keep of conversations goes to other rings of their role, the last used first.

A ring that drains announces itself again and again. Each time it is told how many conversations are still to be moved,
turns that use one included, and stays until there are none; its own deadline ends that. A conversation for which there
is no room elsewhere, or whose move fails, is given up: its next turn computes it again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

from cp_core.errors import CapacityExceeded, RingserveError
from orchestration.conversations.move_counts import MoveCounts
from orchestration.conversations.mover import ConversationMover
from orchestration.conversations.store import Conversation, ConversationStore
from orchestration.placement.registry import RegisteredRing, RingRegistry
from orchestration.protocol.views import DrainView, MoveReason

log = logging.getLogger(__name__)

MOVES_AT_ONCE = 2
"""From one ring: a move waits for both rings' answers as long as for its bytes."""
MAX_TARGETS = 3
"""Rings that are asked to take one conversation."""


@dataclass(slots=True)
class _Drain:
    """`given_up` are conversations, by id, that stay behind. `work` ends when all that were idle have been tried."""

    ring: RegisteredRing
    incarnation: str
    num_moved: int = 0
    num_left: int = 0
    num_no_room: int = 0
    num_failed: int = 0
    moved_bytes: int = 0
    has_left: bool = False
    given_up: set[str] = field(default_factory=set)
    work: asyncio.Task[None] | None = None


class DrainMoves:
    """Empties the rings that drain. `spawn` runs work in the router's background. `waits_for_rings` says of a request
    that its turn begins only when a ring has come back: its conversation keeps none from leaving.
    """

    def __init__(
        self,
        store: ConversationStore,
        rings: RingRegistry,
        mover: ConversationMover,
        counts: MoveCounts,
        spawn: Callable[[Coroutine[None, None, None]], asyncio.Task[None]],
        waits_for_rings: Callable[[str], bool],
    ) -> None:
        self._store = store
        self._rings = rings
        self._mover = mover
        self._counts = counts
        self._spawn = spawn
        self._waits_for_rings = waits_for_rings
        self._drains: dict[str, _Drain] = {}

    def go_on(self, ring: RegisteredRing) -> int:
        """A ring drains, still. Returns how many conversations are to be moved from it, or used by turns meanwhile."""
        drain = self._drains.get(ring.name)
        if drain is None or drain.incarnation != ring.registration.incarnation or drain.has_left:
            drain = self._drains[ring.name] = _Drain(ring, ring.registration.incarnation)
        here = self._store.placed_at(ring.role, ring.name, drain.incarnation)
        left = [
            each
            for each in here
            if each.conversation_id not in drain.given_up and not self._waits_for_rings(each.running_request)
        ]
        drain.num_left = len(left)
        idle = [each for each in left if each.is_idle]
        if idle and (drain.work is None or drain.work.done()):
            drain.work = self._spawn(self._empty(drain, idle))
        return drain.num_left

    def left(self, name: str) -> None:
        """A ring has said good-bye."""
        if name in self._drains:
            self._drains[name].has_left = True

    def serves(self, name: str) -> None:
        """A ring takes turns, as ever or again."""
        self._drains.pop(name, None)

    def views(self) -> tuple[DrainView, ...]:
        """Of rings that drain, and of those that have left."""
        return tuple(
            DrainView(
                role=drain.ring.role,
                ring=name,
                has_left=drain.has_left,
                running_turns=drain.ring.num_turns,
                num_moved=drain.num_moved,
                num_left=drain.num_left,
                num_no_room=drain.num_no_room,
                num_failed=drain.num_failed,
                moved_bytes=drain.moved_bytes,
            )
            for name, drain in self._drains.items()
        )

    async def _empty(self, drain: _Drain, idle: list[Conversation]) -> None:
        try:
            kept = await self._mover.retained_on(drain.ring, idle)
        except RingserveError as error:
            log.warning("ring %s drains and cannot be emptied yet: %s", drain.ring.name, error)
            return
        order = sorted(zip(idle, kept, strict=True), key=lambda each: each[0].last_used, reverse=True)
        waiting = deque(order)
        async with asyncio.TaskGroup() as group:
            for _ in range(MOVES_AT_ONCE):
                group.create_task(self._move_each(drain, waiting))

    async def _move_each(self, drain: _Drain, waiting: deque[tuple[Conversation, int]]) -> None:
        ring = drain.ring
        while waiting and self._is_draining(drain):
            conversation, num_tokens = waiting.popleft()
            place = conversation.places.at(ring.role)
            if place is None or place.ring != ring.name or not self._store.can_move(conversation):
                continue  # used meanwhile, and moved by its turn; or it comes up again with a later announcement
            if num_tokens:
                await self._move(drain, conversation, num_tokens)
            else:
                conversation.places = conversation.places.put(ring.role, None)  # evicted before

    def _is_draining(self, drain: _Drain) -> bool:
        ring = drain.ring
        return self._rings.named(ring.role, ring.name) is ring and ring.registration.is_draining

    async def _move(self, drain: _Drain, conversation: Conversation, num_tokens: int) -> None:
        name, failure = conversation.conversation_id, ""
        for target in self._targets(drain.ring, num_tokens):
            if not self._store.can_move(conversation):
                return  # a turn has come between two attempts
            try:
                taken = await self._mover.move(conversation, drain.ring, target, num_tokens, MoveReason.DRAIN)
            except CapacityExceeded:
                target.spare_tokens = 0  # until it tells more
            except RingserveError as error:
                failure = str(error)
            else:
                drain.num_moved += 1
                drain.moved_bytes += taken.payload_bytes
                drain.num_left = max(0, drain.num_left - 1)
                return
        drain.given_up.add(name)
        drain.num_left = max(0, drain.num_left - 1)
        if failure:
            drain.num_failed += 1
            self._counts.failed(drain.ring.role, MoveReason.DRAIN)
            log.warning("%s cannot be moved from ring %s: %s", name, drain.ring.name, failure)
        else:
            drain.num_no_room += 1
            log.info("%s stays behind on ring %s: %d tokens fit nowhere else", name, drain.ring.name, num_tokens)

    def _targets(self, source: RegisteredRing, num_tokens: int) -> list[RegisteredRing]:
        """The emptiest first."""
        others = [ring for ring in self._rings.ready(source.role) if ring is not source]
        fitting = [ring for ring in others if ring.spare_tokens >= num_tokens]
        return sorted(fitting, key=lambda ring: ring.spare_tokens, reverse=True)[:MAX_TARGETS]
