"""Rebalancing of retained KV between the rings of a role, for two causes: a ring drains, or a ring is full.

A ring that drains announces itself repeatedly. Each time it is told how many conversations are still to be moved, those
in use by turns included, and it stays until there are none or its own deadline ends. The most recently used
conversations are moved first. A conversation that fits nowhere else, or whose move fails, stays behind: its next turn
computes its KV again.

If a decode ring is about to evict, the KV that was unused for longest is moved to a ring with room, if computing it
again would take much longer than moving it. Prefill rings evict instead: a decode ring retains the same KV. Only a few
moves are made per announcement of a ring, so that the links stay free for turns. The router calls this when a ring
announces itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ringserve.cp_core.errors import CapacityExceeded, RingserveError
from ringserve.orchestration.conversations.mover import ConversationMover, MoveCounts
from ringserve.orchestration.conversations.store import Conversation, ConversationStore
from ringserve.orchestration.placement.planner import Planner
from ringserve.orchestration.placement.registry import RegisteredRing, RingRegistry
from ringserve.orchestration.protocol.views import MoveReason
from ringserve.orchestration.tasks import TaskSet
from ringserve.views import RingDrain

log = logging.getLogger(__name__)

MOVES_AT_ONCE = 2
"""Moves that run at once from a ring that drains. A move waits as long for the rings' answers as for its bytes."""
MAX_TARGETS = 3
"""Most rings that are asked to take one conversation."""
FULL_SHARE = 0.1
"""A ring counts as full if less than this share of its capacity is spare."""
TARGET_SHARE = 0.4
"""A ring takes KV from full ones if more than this share is spare: far more, so that nothing moves back and forth."""
MOVES_OF_FULL = 4
"""Most moves after one announcement of a full ring."""
CONSIDERED = 64
"""How many of a full ring's least recently used conversations are considered for these moves."""
WORTH = 2.0
"""KV is moved if computing it again takes over this many times as long as moving it: it may never be used again."""


@dataclass(slots=True)
class _Drain:
    """Drain of one incarnation of a ring.

    `given_up` are conversations, by id, that stay behind. `work` is the task that moves the conversations that were
    idle at its start; it ends when each was tried.
    """

    ring: RegisteredRing
    incarnation: str
    num_moved: int = 0
    num_remaining: int = 0
    num_no_room: int = 0
    num_failed: int = 0
    moved_bytes: int = 0
    has_left: bool = False
    given_up: set[str] = field(default_factory=set)
    work: asyncio.Task[None] | None = None


class DrainRebalancing:
    """Rebalancing away from rings that drain.

    `waits_for_rings(request_id)` is true if the request's turn cannot begin before a ring returns. The conversation of
    such a turn does not keep a ring from leaving.
    """

    def __init__(
        self,
        store: ConversationStore,
        rings: RingRegistry,
        mover: ConversationMover,
        counts: MoveCounts,
        tasks: TaskSet,
        waits_for_rings: Callable[[str], bool],
    ) -> None:
        self._store = store
        self._rings = rings
        self._mover = mover
        self._counts = counts
        self._tasks = tasks
        self._waits_for_rings = waits_for_rings
        self._drains: dict[str, _Drain] = {}

    def continue_drain(self, ring: RegisteredRing) -> int:
        """Begin or continue to empty a ring that drains. Return how many conversations are to be moved, or in use."""
        drain = self._drains.get(ring.name)
        if drain is None or drain.incarnation != ring.registration.incarnation or drain.has_left:
            drain = self._drains[ring.name] = _Drain(ring, ring.registration.incarnation)
        here = self._store.placed_at(ring.role, ring.name, drain.incarnation)
        remaining = [
            each
            for each in here
            if each.conversation_id not in drain.given_up and not self._waits_for_rings(each.running_request)
        ]
        drain.num_remaining = len(remaining)
        idle = [each for each in remaining if each.is_idle]
        if idle and (drain.work is None or drain.work.done()):
            drain.work = self._tasks.spawn(self._empty(drain, idle))
        return drain.num_remaining

    def ring_left(self, name: str) -> None:
        """Note that a ring has left."""
        if name in self._drains:
            self._drains[name].has_left = True

    def forget_drain(self, name: str) -> None:
        """Forget the drain of a ring, if any: the ring takes turns."""
        self._drains.pop(name, None)

    def views(self) -> tuple[RingDrain, ...]:
        """Show the rings that drain, and the rings that have left."""
        return tuple(
            RingDrain(
                role=drain.ring.role,
                ring=name,
                has_left=drain.has_left,
                running_turns=drain.ring.num_turns,
                moved=drain.num_moved,
                left=drain.num_remaining,
                no_room=drain.num_no_room,
                failed=drain.num_failed,
                moved_bytes=drain.moved_bytes,
            )
            for name, drain in self._drains.items()
        )

    async def _empty(self, drain: _Drain, idle: list[Conversation]) -> None:
        try:
            retained = await self._mover.retained_on(drain.ring, idle)
        except RingserveError as error:
            log.warning("ring %s drains and cannot be emptied yet: %s", drain.ring.name, error)
            return
        order = sorted(zip(idle, retained, strict=True), key=lambda each: each[0].last_used, reverse=True)
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
                continue  # a turn has moved its KV meanwhile, or uses it now; then a later announcement tries it again
            if num_tokens:
                await self._move(drain, conversation, num_tokens)
            else:
                conversation.places = conversation.places.put(ring.role, None)  # evicted before

    def _is_draining(self, drain: _Drain) -> bool:
        ring = drain.ring
        return self._rings.named(ring.role, ring.name) is ring and ring.registration.is_draining

    async def _move(self, drain: _Drain, conversation: Conversation, num_tokens: int) -> None:
        conversation_id, failure = conversation.conversation_id, ""
        for target in self._targets(drain.ring, num_tokens):
            if not self._store.can_move(conversation):
                return  # a turn has begun between two attempts
            try:
                taken = await self._mover.move(conversation, drain.ring, target, num_tokens, MoveReason.DRAIN)
            except CapacityExceeded:
                target.spare_tokens = 0  # until its next announcement
            except RingserveError as error:
                failure = str(error)
            else:
                drain.num_moved += 1
                drain.moved_bytes += taken.payload_bytes
                drain.num_remaining = max(0, drain.num_remaining - 1)
                return
        drain.given_up.add(conversation_id)
        drain.num_remaining = max(0, drain.num_remaining - 1)
        if failure:
            drain.num_failed += 1
            self._counts.failed(drain.ring.role, MoveReason.DRAIN)
            log.warning("%s cannot be moved from ring %s: %s", conversation_id, drain.ring.name, failure)
        else:
            drain.num_no_room += 1
            log.info(
                "%s stays behind on ring %s: %d tokens fit nowhere else", conversation_id, drain.ring.name, num_tokens
            )

    def _targets(self, source: RegisteredRing, num_tokens: int) -> list[RegisteredRing]:
        """Return the rings that have room, the emptiest first."""
        others = [ring for ring in self._rings.ready(source.role) if ring is not source]
        fitting = [ring for ring in others if ring.spare_tokens >= num_tokens]
        return sorted(fitting, key=lambda ring: ring.spare_tokens, reverse=True)[:MAX_TARGETS]


class FullRebalancing:
    """Rebalancing away from decode rings that are about to evict."""

    def __init__(
        self,
        store: ConversationStore,
        rings: RingRegistry,
        planner: Planner,
        mover: ConversationMover,
        counts: MoveCounts,
        tasks: TaskSet,
    ) -> None:
        self._store = store
        self._rings = rings
        self._planner = planner
        self._mover = mover
        self._counts = counts
        self._tasks = tasks
        self._work: dict[str, asyncio.Task[None]] = {}
        # Rings with much room, by their latest announcement. In the long run all rings are full. Then this is empty, so
        # that an announcement need not look at every other ring.
        self._roomy: dict[str, RegisteredRing] = {}

    def note(self, ring: RegisteredRing) -> None:
        """Relieve a ring that takes turns, if its announcement says that it is full."""
        if ring.role != "decode":
            return
        if _spare_share(ring) > TARGET_SHARE:
            self._roomy[ring.name] = ring
        else:
            self._roomy.pop(ring.name, None)
        if ring.spare_tokens >= FULL_SHARE * ring.registration.capacity_tokens:
            return
        if ring.name in self._work or self._target(ring, 0) is None:
            return
        work = self._work[ring.name] = self._tasks.spawn(self._relieve(ring))
        work.add_done_callback(lambda _: self._work.pop(ring.name))

    async def _relieve(self, ring: RegisteredRing) -> None:
        here = self._store.placed_at(ring.role, ring.name, ring.registration.incarnation)
        idle = sorted((each for each in here if each.is_idle), key=lambda each: each.last_used)[:CONSIDERED]
        oldest = [each for each in idle if self._is_worth_moving(each, ring)][:MOVES_OF_FULL]
        try:
            retained = await self._mover.retained_on(ring, oldest)
        except RingserveError as error:
            log.info("full ring %s cannot be relieved: %s", ring.name, error)
            return
        for conversation, num_tokens in zip(oldest, retained, strict=True):
            target = self._target(ring, num_tokens)
            if not num_tokens or target is None or not self._store.can_move(conversation):
                continue
            try:
                await self._mover.move(conversation, ring, target, num_tokens, MoveReason.FULL)
            except CapacityExceeded:
                target.spare_tokens = 0  # until its next announcement
            except RingserveError as error:
                self._counts.failed(ring.role, MoveReason.FULL)
                log.warning("%s cannot be moved from ring %s: %s", conversation.conversation_id, ring.name, error)

    def _target(self, ring: RegisteredRing, num_tokens: int) -> RegisteredRing | None:
        """Return the emptiest other ring, if so many tokens fit there and more than TARGET_SHARE of it is spare now."""
        here = [other for name, other in self._roomy.items() if self._rings.named(ring.role, name) is other]
        others = [other for other in here if other.takes_turns and other is not ring]
        emptiest = max(others, key=_spare_share, default=None)
        if emptiest is None or emptiest.spare_tokens < num_tokens:
            return None
        return emptiest if _spare_share(emptiest) > TARGET_SHARE else None

    def _is_worth_moving(self, conversation: Conversation, ring: RegisteredRing) -> bool:
        """Return whether computing the KV that only this ring retains takes much longer than moving all that it has."""
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
