"""The rings a router can use, as they announced themselves, and how busy it takes them to be."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import count

from orchestration.placement.ring_order import RingOrder
from orchestration.protocol.turns import RingRegistration

RingKind = tuple[int, int, int, int]
"""Ranks, processes a rank, and powers of two near to the measured rates of matrix products and links."""


TURN_SECONDS = 0.02
"""What a turn more in a decode batch costs those of the batch: about 0.1 ms a step for an answer of 200 tokens."""
WAIT_SECONDS = 1.0
"""What each turn beyond a full decode batch waits for a place in it: answers take seconds."""


class RegisteredRing:
    """One ring. `is_ready` falls when a call finds it gone and rises with its next announcement.

    What it announces is seconds old when the next turn comes, so the router adds what it has placed there since.
    `busy_until` is on the registry's clock (a decode ring is busy with prompts that it computes itself), `free_tokens`
    falls with every turn until the ring tells it anew, as `spare_tokens` does with what is moved there, and
    `last_placed` counts the router's choices. `number` counts the rings as they came. A ring enters itself in `changed`
    when its place among others may be another one.
    """

    __slots__ = (
        "_busy_until",
        "_changed",
        "_last_placed",
        "_num_turns",
        "free_tokens",
        "is_ready",
        "kind",
        "num_prefilling",
        "number",
        "registration",
        "spare_tokens",
    )

    def __init__(
        self, registration: RingRegistration, number: int = 0, changed: set[RegisteredRing] | None = None
    ) -> None:
        self.registration = registration
        self.number = number
        self.is_ready = True
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
        """Take over what the ring says of itself. One that tells no rate keeps the router's own estimate."""
        self.registration, self.is_ready = registration, True
        self.kind = _kind_of(registration)
        self.spare_tokens = registration.spare_tokens
        self.tell(registration.waiting_work, registration.work_rate, registration.free_tokens, now)

    def tell(self, waiting_work: float, work_rate: float, free_tokens: int | None, now: float) -> None:
        """What changes from one announcement to the next; see `RingRegistration`."""
        if work_rate > 0.0:
            self._busy_until = now + waiting_work / work_rate
        self.free_tokens = self.registration.capacity_tokens if free_tokens is None else free_tokens
        self._changed.add(self)

    def leave(self) -> None:
        """It is none of the registry's any more."""
        self._changed = set()

    def queue_seconds(self, now: float) -> float:
        """How long the prompts that wait on a ring are predicted to take."""
        return max(0.0, self._busy_until - now)

    @property
    def load_seconds(self) -> float:
        """What a turn more on a decode ring is taken to wait for those that are there."""
        limit = self.registration.max_batch
        waiting = max(0, self._num_turns - limit + 1) if limit else 0
        return TURN_SECONDS * self._num_turns + WAIT_SECONDS * waiting


class LoadShare:
    """A turn's share of two rings' load, from the choice to the end of its prefill. Whoever placed it says when."""

    def __init__(self, computing: RegisteredRing, clock: Callable[[], float]) -> None:
        self._computing = computing
        self._clock = clock
        self._is_over = False

    def end_prefill(self) -> None:
        """Nothing of the turn's prompt waits to be computed any more. Idempotent."""
        if self._is_over:
            return
        self._is_over = True
        self._computing.num_prefilling -= 1
        if not self._computing.num_prefilling:
            # Nobody else's turns wait there: what was predicted beyond now was too much.
            self._computing.busy_until = min(self._computing.busy_until, self._clock())


class RingRegistry:
    """All rings by role and name. `clock` tells seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._rings: dict[str, dict[str, RegisteredRing]] = {"prefill": {}, "decode": {}}
        self._num_placed = 0
        self._numbers = count(1)
        self._order = RingOrder()
        self._left: dict[str, RingRegistration] = {}  # what rings announced that have said good-bye, by name

    def register(self, registration: RingRegistration) -> bool:
        """Enter a ring, its new incarnation, that it still lives, drains or leaves. True where it is news."""
        rings, name = self._rings[registration.role], registration.name
        known = rings.get(name)
        left = self._left.get(name)
        if left is not None and left.incarnation == registration.incarnation:
            return False  # told before it left, and late
        if registration.is_leaving:
            self._left[name] = registration
            gone = rings.pop(name, None)
            if gone is not None:
                self._order.remove(gone)
            return gone is not None
        self._left.pop(name, None)
        if known is None:
            known = rings[name] = RegisteredRing(registration, next(self._numbers), self._order.changed)
            is_news = True
        else:
            before = known.registration
            is_news = before.incarnation != registration.incarnation or not known.is_ready
            is_news = is_news or before.is_draining != registration.is_draining
        known.announce(registration, self.clock())
        return is_news

    def all(self) -> list[RegisteredRing]:
        return [*self._rings["prefill"].values(), *self._rings["decode"].values()]

    def ready(self, role: str) -> Sequence[RegisteredRing]:
        """Those that serve and take turns, in the order in which they came."""
        return [ring for ring in self._rings[role].values() if ring.takes_turns]

    def find(self, name: str) -> RegisteredRing | None:
        """A ring of either role."""
        return self._rings["prefill"].get(name) or self._rings["decode"].get(name)

    def left(self, name: str) -> RingRegistration | None:
        """The good-bye of a ring of that name that was here, drained and left."""
        return self._left.get(name)

    def named(self, role: str, name: str) -> RegisteredRing | None:
        return self._rings[role].get(name)

    def num_rings(self, role: str) -> int:
        """Whether or not they are ready."""
        return len(self._rings[role])

    def least_busy(self, accepts: Callable[[RegisteredRing], bool]) -> list[RegisteredRing]:
        """Of each kind of prefill ring that which will be idle first, of idle ones that which had no turn the longest;
        of those that are accepted. In the order in which they came.
        """
        return self._order.least_busy(self.clock(), accepts)

    def least_loaded(self, accepts: Callable[[RegisteredRing], bool]) -> RegisteredRing | None:
        """The decode ring of the least load, of equals that which had no turn the longest; of those accepted."""
        return self._order.least_loaded(accepts)

    def place(
        self, prefill: RegisteredRing | None, decode: RegisteredRing, *, prefill_seconds: float, num_tokens: int
    ) -> LoadShare:
        """Count a turn of `num_tokens` tokens to its rings, until they announce their own figures.

        `prefill` None: the decode ring computes the prompt, in `prefill_seconds` all the same.
        """
        now = self.clock()
        self._num_placed += 1
        for ring in (decode,) if prefill is None else (prefill, decode):
            ring.last_placed = self._num_placed
            ring.free_tokens = max(0, ring.free_tokens - num_tokens)
        computing = prefill or decode
        computing.busy_until = max(computing.busy_until, now) + prefill_seconds
        computing.num_prefilling += 1
        return LoadShare(computing, self.clock)


def _kind_of(registration: RingRegistration) -> RingKind:
    rates = registration.rates
    measured = (rates.gemm_flops, rates.link_bytes_per_second)
    speed, link = (round(math.log2(rate)) if rate > 0.0 else 0 for rate in measured)
    return registration.num_ranks, registration.tp, speed, link
