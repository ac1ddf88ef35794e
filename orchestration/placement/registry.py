"""Registry of the rings that a router can use, as they announced themselves, with an estimate of their load.

The router owns it; placement, drains and rebalancing read it. Only `status_of` and `withdraw_if_lost` call rings.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, Generic, TypeVar

from ringserve.cp_core.errors import RingserveError, Unavailable
from ringserve.orchestration.placement.events import EventLog
from ringserve.orchestration.protocol.ports import Peers
from ringserve.orchestration.protocol.rings import LOST, RingStanding, RingState
from ringserve.orchestration.protocol.turns import RingRegistration
from ringserve.orchestration.protocol.views import EventKind
from ringserve.views import RingInfo

T = TypeVar("T")
Item = TypeVar("Item")
RingKind = tuple[int, int, int, int]
"""Number of ranks, processes per rank, and the base-2 logarithms of the rates of matrix products and links, rounded."""

LEASE_TICKS = 8
"""Ticks that a ring's lease lasts, not seconds: a router that stands still counts one tick, so no ring looks lost."""
STATUS_SECONDS = 2.0
"""Seconds for a ring's leader to tell its status."""

TURN_SECONDS = 0.02
"""Seconds that one more turn in a decode batch costs the batch: 0.1 ms a step for an answer of 200 tokens."""
WAIT_SECONDS = 1.0
"""Seconds that each turn beyond a full decode batch waits for a place in it: answers take seconds."""

SLACK = 64
"""Outdated entries are removed from a heap if it has more entries than twice its items and this many."""


class RegisteredRing:
    """Ring in the registry.

    `is_ready` becomes False if a call finds the ring gone, and True with the ring's next announcement. An announcement
    is seconds old when the next turn comes, so the router adds the load that it has placed there since. `busy_until` is
    on the registry's clock; a decode ring is busy with prompts that it computes itself. `free_tokens` falls with every
    turn, and `spare_tokens` with KV that is moved there, until the ring announces them anew. `last_placed` is the
    number of the router's choice that placed the latest turn there. `number` is the ring's place in order of arrival. A
    ring enters itself in `changed` when its place in the order of rings may change.

    Each announcement renews the ring's lease, of which `silent_ticks` have passed. `lost` is the error of a ring whose
    lease has ended or whose incarnation is gone, until it is announced again.
    """

    __slots__ = (
        "_busy_until",
        "_calls",
        "_changed",
        "_last_placed",
        "_num_turns",
        "free_tokens",
        "is_ready",
        "kind",
        "lost",
        "num_prefilling",
        "number",
        "registration",
        "silent_ticks",
        "spare_tokens",
    )

    def __init__(
        self, registration: RingRegistration, number: int = 0, changed: set[RegisteredRing] | None = None
    ) -> None:
        self.registration = registration
        self.number = number
        self.is_ready = True
        self.lost: Unavailable | None = None
        self.silent_ticks = 0
        self._calls: set[asyncio.Future[Any]] = set()
        self.num_prefilling = 0
        self.free_tokens = 0
        self.spare_tokens = 0
        self.kind = _kind_of(registration)
        self._num_turns = 0
        self._busy_until = 0.0
        self._last_placed = 0
        self._changed = set() if changed is None else changed

    @property
    def takes_turns(self) -> bool:
        """True if new turns may go there."""
        return self.is_ready and not self.registration.is_draining

    @property
    def name(self) -> str:
        return self.registration.name

    @property
    def role(self) -> str:
        return self.registration.role

    @property
    def num_turns(self) -> int:
        return self._num_turns

    @num_turns.setter
    def num_turns(self, value: int) -> None:
        self._num_turns = value
        self._changed.add(self)

    @property
    def busy_until(self) -> float:
        return self._busy_until

    @busy_until.setter
    def busy_until(self, value: float) -> None:
        self._busy_until = value
        self._changed.add(self)

    @property
    def last_placed(self) -> int:
        return self._last_placed

    @last_placed.setter
    def last_placed(self, value: int) -> None:
        self._last_placed = value
        self._changed.add(self)

    def announce(self, registration: RingRegistration, now: float) -> None:
        """Take over an announcement. If it has no work rate, the router keeps its own estimate of the ring's queue."""
        self.registration, self.is_ready, self.silent_ticks = registration, not registration.is_rebuilding, 0
        if self.is_ready:
            self.lost = None
        self.kind = _kind_of(registration)
        self.spare_tokens = registration.spare_tokens
        self.take_figures(registration.waiting_work, registration.work_rate, registration.free_tokens, now)

    def take_figures(self, waiting_work: float, work_rate: float, free_tokens: int | None, now: float) -> None:
        """Take over the figures that change from one announcement to the next; see `RingRegistration`."""
        if work_rate > 0.0:
            self._busy_until = now + waiting_work / work_rate
        self.free_tokens = self.registration.capacity_tokens if free_tokens is None else free_tokens
        self._changed.add(self)

    def lose(self, error: Unavailable) -> None:
        """Take no more turns, and fail the guarded calls to the ring with `error`."""
        self.is_ready, self.lost = False, error
        for call in self._calls:
            if not call.done():
                call.set_exception(error)

    def guarded(self, call: Awaitable[T]) -> asyncio.Future[T]:
        """Make a call to the ring's leader. If the ring is lost, it is cancelled and the future raises Unavailable."""
        # Callbacks, not a task, join the call with the loss of the ring: a turn makes several calls, and a task costs
        # more than a callback.
        answer: asyncio.Future[T] = asyncio.ensure_future(call)
        guarded: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        if self.lost is not None:
            answer.cancel()  # before it begins
            guarded.set_exception(self.lost)
        self._calls.add(guarded)

        def end(_: asyncio.Future[T]) -> None:
            self._calls.discard(guarded)
            answer.cancel()

        guarded.add_done_callback(end)
        answer.add_done_callback(lambda _: _pass_on(answer, guarded))
        return guarded

    def leave(self) -> None:
        """Stop entering changes in the registry's order: the ring has left."""
        self._changed = set()

    def queue_seconds(self, now: float) -> float:
        """Return the predicted seconds of the prompts that wait on the ring."""
        return max(0.0, self._busy_until - now)

    @property
    def load_seconds(self) -> float:
        """Seconds that one more turn on a decode ring waits for the turns that are there."""
        limit = self.registration.max_batch
        waiting = max(0, self._num_turns - limit + 1) if limit else 0
        return TURN_SECONDS * self._num_turns + WAIT_SECONDS * waiting


class LoadShare:
    """Share of one turn in two rings' load, from the choice of rings to the end of its prefill."""

    def __init__(self, computing: RegisteredRing, clock: Callable[[], float], seconds: float) -> None:
        self._computing = computing
        self._clock = clock
        self._seconds = seconds
        self._is_over = False

    def correct(self, seconds: float) -> None:
        """Replace the prompt's predicted seconds by those of the plan, which knows what KV the rings have evicted."""
        if not self._is_over:
            self._computing.busy_until += seconds - self._seconds
            self._seconds = seconds

    def end_prefill(self) -> None:
        """End the share: no part of the turn's prompt waits to be computed any more. Idempotent."""
        if self._is_over:
            return
        self._is_over = True
        self._computing.num_prefilling -= 1
        if not self._computing.num_prefilling:
            # No other turn waits there: the time predicted beyond now was too much.
            self._computing.busy_until = min(self._computing.busy_until, self._clock())


class Ordered(Generic[Item]):
    """Heap in which an item's latest entry counts; earlier entries are skipped when they reach the top.

    Keys of one heap compare with each other, and no two items in it have equal keys.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, Item]] = []
        self._latest: dict[Item, int] = {}
        self._entries = count()

    def __len__(self) -> int:
        return len(self._latest)

    def put(self, item: Item, key: object) -> None:
        """Enter the item, or move it."""
        number = next(self._entries)
        self._latest[item] = number
        heapq.heappush(self._heap, (key, number, item))
        if len(self._heap) > 2 * len(self._latest) + SLACK:
            self._heap = [entry for entry in self._heap if self._latest.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def discard(self, item: Item) -> None:
        """Remove the item. Idempotent."""
        self._latest.pop(item, None)

    def first(self, accepts: Callable[[Item], bool]) -> Item | None:
        """Return the accepted item of the least key. It takes time in proportion to the items of lesser keys."""
        refused = []
        found = None
        while self._heap:
            entry = self._heap[0]
            _, number, item = entry
            if self._latest.get(item) != number:
                heapq.heappop(self._heap)
            elif accepts(item):
                found = item
                break
            else:
                refused.append(heapq.heappop(self._heap))
        for entry in refused:
            heapq.heappush(self._heap, entry)
        return found


Accepts = Callable[[RegisteredRing], bool]


class RingOrder:
    """Ring order. A ring enters itself in `changed` when its place may change, and is placed at the next choice.

    A choice takes longer with each better ring that is not accepted, not with the number of rings.
    """

    def __init__(self) -> None:
        self.changed: set[RegisteredRing] = set()
        self._prefill: dict[RingKind, _PrefillQueues] = {}
        self._queues_of: dict[RegisteredRing, _PrefillQueues] = {}
        self._decode: Ordered[RegisteredRing] = Ordered()

    def remove(self, ring: RegisteredRing) -> None:
        """Remove a ring that has left. Its later changes, as its last turns end, are ignored."""
        self.changed.discard(ring)
        ring.leave()
        self._decode.discard(ring)
        if (queues := self._queues_of.pop(ring, None)) is not None:
            queues.discard(ring)

    def least_busy(self, now: float, accepts: Accepts) -> list[RegisteredRing]:
        """Return the prefill ring of each kind that will be idle first, among those accepted, in order of arrival.

        Among idle rings it is the one whose latest turn was placed longest ago.
        """
        self._enter_changed()
        found = (queues.first(now, accepts) for queues in self._prefill.values())
        return sorted((ring for ring in found if ring is not None), key=lambda ring: ring.number)

    def least_loaded(self, accepts: Accepts) -> RegisteredRing | None:
        """Return the decode ring of the least load among those accepted.

        Among rings of equal load it is the one whose latest turn was placed longest ago.
        """
        self._enter_changed()
        return self._decode.first(accepts)

    def _enter_changed(self) -> None:
        for ring in self.changed:
            if ring.role == "decode":
                self._decode.put(ring, (ring.load_seconds, ring.last_placed, ring.number))
            else:
                self._enter_prefill(ring)
        self.changed.clear()

    def _enter_prefill(self, ring: RegisteredRing) -> None:
        queues = self._prefill.get(ring.kind)
        if queues is None:
            queues = self._prefill[ring.kind] = _PrefillQueues()
        before = self._queues_of.get(ring)
        if before is not None and before is not queues:
            before.discard(ring)
        self._queues_of[ring] = queues
        queues.put(ring)


class _PrefillQueues:
    """Prefill rings of one kind: busy ones by when they end, idle ones by when they last had a turn."""

    def __init__(self) -> None:
        self._busy: Ordered[RegisteredRing] = Ordered()
        self._idle: Ordered[RegisteredRing] = Ordered()

    def put(self, ring: RegisteredRing) -> None:
        self._idle.discard(ring)
        self._busy.put(ring, (ring.busy_until, ring.last_placed, ring.number))

    def discard(self, ring: RegisteredRing) -> None:
        self._busy.discard(ring)
        self._idle.discard(ring)

    def first(self, now: float, accepts: Accepts) -> RegisteredRing | None:
        while (ended := self._busy.first(_any)) is not None and ended.busy_until <= now:
            self._busy.discard(ended)
            self._idle.put(ended, (ended.last_placed, ended.number))
        return self._idle.first(accepts) or self._busy.first(accepts)


def _any(ring: RegisteredRing) -> bool:
    return True


class RingRegistry:
    """Registry of all rings by role and name. `clock` tells seconds.

    `on_lost` is called with a ring that is lost, before its turns' calls to it fail. News of rings enter `events`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, events: EventLog | None = None) -> None:
        self.clock = clock
        self.events = events or EventLog()
        self.on_lost: Callable[[RegisteredRing, Unavailable], None] = lambda ring, error: None
        self._rings: dict[str, dict[str, RegisteredRing]] = {"prefill": {}, "decode": {}}
        self._num_placed = 0
        self.placed_seconds = 0.0
        """Predicted seconds of all prompts that were placed on prefill rings."""
        self._numbers = count(1)
        self._order = RingOrder()
        self._left: dict[str, RingRegistration] = {}  # last announcements of rings that have left, by name

    def register(self, registration: RingRegistration) -> bool:
        """Enter an announcement: a ring is new, was rebuilt, lives, drains or leaves. Return whether that is news."""
        rings, name = self._rings[registration.role], registration.name
        known = rings.get(name)
        left = self._left.get(name)
        if left is not None and left.incarnation == registration.incarnation:
            return False  # sent before the ring left, and arrived late
        if registration.is_leaving:
            self._left[name] = registration
            gone = rings.pop(name, None)
            if gone is not None:
                self._order.remove(gone)
                self.events.note(EventKind.RING, name, f"ring {name} has left")
            return gone is not None
        self._left.pop(name, None)
        if known is None:
            known = rings[name] = RegisteredRing(registration, next(self._numbers), self._order.changed)
            is_news = True
            self.events.note(EventKind.RING, name, f"ring {name} serves with {registration.size}")
        else:
            before = known.registration
            is_news = before.incarnation != registration.incarnation or not known.is_ready
            if before.is_draining != registration.is_draining:
                is_news = True
                doing = "drains" if registration.is_draining else "takes turns again"
                self.events.note(EventKind.RING, name, f"ring {name} {doing}")
            if registration.is_rebuilding:
                is_news = not before.is_rebuilding
                self._lose(known, f"ring {name} lost a rank and is being rebuilt")
            elif before.incarnation != registration.incarnation:
                self._lose(known, f"ring {name} was started again")
            if known.lost is not None and not registration.is_rebuilding:
                self.events.note(EventKind.REBUILT, name, f"ring {name} serves again")
            evicted = registration.num_evictions - before.num_evictions
            if evicted > 0 and before.incarnation == registration.incarnation:
                self.events.note(EventKind.EVICTION, name, f"ring {name} dropped retained KV to make room", evicted)
        known.announce(registration, self.clock())
        return is_news

    def tick(self) -> list[RegisteredRing]:
        """Count a tick of every lease. Return the rings whose lease has ended with it."""
        ended = []
        for ring in self.all():
            ring.silent_ticks += 1
            if ring.silent_ticks == LEASE_TICKS + 1:
                self._lose(ring, f"the leader of ring {ring.name} sends no heartbeat")
                ended.append(ring)
        return ended

    def _lose(self, ring: RegisteredRing, why: str) -> None:
        if ring.lost is None:
            self.events.note(EventKind.LOST, ring.name, why)
            error = Unavailable(f"{why}; retry")
            self.on_lost(ring, error)
            ring.lose(error)

    def all(self) -> list[RegisteredRing]:
        """Return every ring."""
        return [*self._rings["prefill"].values(), *self._rings["decode"].values()]

    def ready(self, role: str) -> Sequence[RegisteredRing]:
        """Return the rings that serve and take turns, in order of arrival."""
        return [ring for ring in self._rings[role].values() if ring.takes_turns]

    def find(self, name: str) -> RegisteredRing | None:
        """Return a ring of either role."""
        return self._rings["prefill"].get(name) or self._rings["decode"].get(name)

    def left(self, name: str) -> RingRegistration | None:
        """Return the last announcement of a ring of that name that has left."""
        return self._left.get(name)

    def drained(self, role: str) -> list[str]:
        """Return the names of a role's rings if every ring drains or has left; otherwise an empty list."""
        present = [ring.registration for ring in self._rings[role].values()]
        left = [registration for registration in self._left.values() if registration.role == role]
        drains = all(registration.is_draining for registration in present)
        return sorted(registration.name for registration in (*present, *left)) if drains else []

    def failures(self, role: str) -> list[tuple[str, str]]:
        """Return (name, reason) of a role's rings that could not be rebuilt so far."""
        present = (ring.registration for ring in self._rings[role].values())
        return sorted((each.name, each.failure) for each in present if each.is_rebuilding and each.failure)

    def state_of(self, name: str) -> RingStanding:
        """Return how a ring stands with the router.

        A ring that left before the router's restart counts as STARTING, because the router has no record of it.
        """
        ring = self.find(name)
        if ring is None:
            return RingStanding.AWAY if name in self._left else RingStanding.STARTING
        if not ring.is_ready:
            return RingStanding.LOST
        return RingStanding.DRAINING if ring.registration.is_draining else RingStanding.READY

    def named(self, role: str, name: str) -> RegisteredRing | None:
        """Return a ring by role and name."""
        return self._rings[role].get(name)

    def num_rings(self, role: str) -> int:
        """Return the number of rings of a role, ready or not."""
        return len(self._rings[role])

    def least_busy(self, accepts: Callable[[RegisteredRing], bool]) -> list[RegisteredRing]:
        """Return the prefill ring of each kind that will be idle first, among those accepted, in order of arrival.

        Among idle rings it is the one whose latest turn was placed longest ago.
        """
        return self._order.least_busy(self.clock(), accepts)

    def least_loaded(self, accepts: Callable[[RegisteredRing], bool]) -> RegisteredRing | None:
        """Return the decode ring of the least load among those accepted.

        Among rings of equal load it is the one whose latest turn was placed longest ago.
        """
        return self._order.least_loaded(accepts)

    def place(
        self, prefill: RegisteredRing | None, decode: RegisteredRing, *, prefill_seconds: float, num_tokens: int
    ) -> LoadShare:
        """Add a turn of `num_tokens` tokens to the load of its rings, until they announce their own figures.

        `prefill` None: the decode ring computes the prompt, in `prefill_seconds` all the same.
        """
        now = self.clock()
        self._num_placed += 1
        self.placed_seconds += 0.0 if prefill is None else prefill_seconds
        for ring in (decode,) if prefill is None else (prefill, decode):
            ring.last_placed = self._num_placed
            ring.free_tokens = max(0, ring.free_tokens - num_tokens)
        computing = prefill or decode
        computing.busy_until = max(computing.busy_until, now) + prefill_seconds
        computing.num_prefilling += 1
        return LoadShare(computing, self.clock, prefill_seconds)


def _pass_on(answer: asyncio.Future[T], waiting: asyncio.Future[T]) -> None:
    """Give `waiting` the result, error or cancellation of `answer`, unless it has ended already."""
    error = None if answer.cancelled() else answer.exception()  # retrieved in any case, so that asyncio does not log it
    if waiting.done():
        return
    if answer.cancelled():
        waiting.cancel()
    elif error is not None:
        waiting.set_exception(error)
    else:
        waiting.set_result(answer.result())


def _kind_of(registration: RingRegistration) -> RingKind:
    rates = registration.rates
    measured = (rates.gemm_flops, rates.link_bytes_per_second)
    speed, link = (round(math.log2(rate)) if rate > 0.0 else 0 for rate in measured)
    return registration.num_ranks, registration.tp, speed, link


async def status_of(ring: RegisteredRing, peers: Peers) -> RingInfo:
    """Ask a ring's leader for its status. The state of a ring that cannot be reached is "lost"; no error is raised.

    A ring that is being rebuilt is asked why that fails, but stays "rebuilding" until it is announced again.
    """
    registration = ring.registration
    if ring.lost is not None and not registration.is_rebuilding:
        return status_without(registration, LOST)
    try:
        async with asyncio.timeout(STATUS_SECONDS):
            status = await peers.leader(registration.role, registration.endpoint).get_status()
    except (RingserveError, TimeoutError):
        return status_without(registration, RingState.REBUILDING if registration.is_rebuilding else LOST)
    return replace(status, state=RingState.REBUILDING) if registration.is_rebuilding else status


def status_without(registration: RingRegistration, state: str, *, is_draining: bool = False) -> RingInfo:
    """Return the status of a ring that cannot be asked, by its last announcement."""
    return RingInfo(
        role=registration.role,
        name=registration.name,
        endpoint=registration.endpoint,
        incarnation=registration.incarnation,
        state=state,
        num_ranks=registration.num_ranks,
        tp=registration.tp,
        draining=is_draining,
    )


async def withdraw_if_lost(ring: RegisteredRing, peers: Peers) -> None:
    """Place no more turns on a ring if it does not serve. It announces itself when it serves again."""
    if (await status_of(ring, peers)).state != RingState.READY:
        ring.is_ready = False
