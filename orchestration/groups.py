"""The rings a router can use, as they announced themselves, and how busy it takes them to be."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orchestration.turn import GroupRegistration

RingKind = tuple[int, int, int, int]
"""Ranks, processes a rank, and powers of two near to the measured rates of matrix products and links."""


@dataclass(slots=True, eq=False)
class Group:
    """One ring. `is_ready` falls when a call finds it gone and rises with its next announcement.

    What it announces is seconds old when the next turn comes, so the router adds what it has placed there since.
    `busy_until` is on the registry's clock (a decode ring is busy with prompts that it computes itself), `free_tokens`
    falls with every turn until the ring tells it anew, and `last_placed` counts the router's choices.
    """

    registration: GroupRegistration
    is_ready: bool = True
    num_turns: int = 0
    num_prefilling: int = 0
    busy_until: float = 0.0
    free_tokens: int = 0
    last_placed: int = 0
    kind: RingKind = (0, 0, 0, 0)

    @property
    def takes_turns(self) -> bool:
        return self.is_ready and not self.registration.is_draining

    @property
    def name(self) -> str:
        return self.registration.name

    @property
    def role(self) -> str:
        return self.registration.role

    def announce(self, registration: GroupRegistration, now: float) -> None:
        """Take over what the ring says of itself. One that tells no rate keeps the router's own estimate."""
        self.registration, self.is_ready = registration, True
        self.kind = _kind_of(registration)
        if registration.work_rate > 0.0:
            self.busy_until = now + registration.waiting_work / registration.work_rate
        free = registration.free_tokens
        self.free_tokens = registration.capacity_tokens if free is None else free

    def queue_seconds(self, now: float) -> float:
        """How long the prompts that wait on a ring are predicted to take."""
        return max(0.0, self.busy_until - now)


class Placed:
    """A turn's share of two rings' load, from the choice to the end of its prefill. Whoever placed it says when."""

    def __init__(self, computing: Group, clock: Callable[[], float]) -> None:
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


class GroupRegistry:
    """All rings by role and name. `clock` tells seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._groups: dict[str, dict[str, Group]] = {"prefill": {}, "decode": {}}
        self._num_placed = 0
        self._left: dict[str, str] = {}  # incarnations of rings that have said good-bye, by name

    def register(self, registration: GroupRegistration) -> bool:
        """Enter a ring, its new incarnation, that it still lives, drains or leaves. True where it is news."""
        groups, name = self._groups[registration.role], registration.name
        known = groups.get(name)
        if self._left.get(name) == registration.incarnation:
            return False  # told before it left, and late
        if registration.is_leaving:
            self._left[name] = registration.incarnation
            return groups.pop(name, None) is not None
        self._left.pop(name, None)
        if known is None:
            known = groups[name] = Group(registration)
            is_news = True
        else:
            before = known.registration
            is_news = before.incarnation != registration.incarnation or not known.is_ready
            is_news = is_news or before.is_draining != registration.is_draining
        known.announce(registration, self.clock())
        return is_news

    def all(self) -> list[Group]:
        return [*self._groups["prefill"].values(), *self._groups["decode"].values()]

    def ready(self, role: str) -> Sequence[Group]:
        """Those that serve and take turns, in the order in which they came."""
        return [group for group in self._groups[role].values() if group.takes_turns]

    def find(self, name: str) -> Group | None:
        """A ring of either role."""
        return self._groups["prefill"].get(name) or self._groups["decode"].get(name)

    def has_left(self, name: str) -> bool:
        """Whether a ring of that name was here, drained and left."""
        return name in self._left

    def named(self, role: str, name: str) -> Group | None:
        return self._groups[role].get(name)

    def place(self, prefill: Group | None, decode: Group, *, prefill_seconds: float, num_tokens: int) -> Placed:
        """Count a turn of `num_tokens` tokens to its rings, until they announce their own figures.

        `prefill` None: the decode ring computes the prompt, in `prefill_seconds` all the same.
        """
        now = self.clock()
        self._num_placed += 1
        for group in (decode,) if prefill is None else (prefill, decode):
            group.last_placed = self._num_placed
            group.free_tokens = max(0, group.free_tokens - num_tokens)
        computing = prefill or decode
        computing.busy_until = max(computing.busy_until, now) + prefill_seconds
        computing.num_prefilling += 1
        return Placed(computing, self.clock)


def _kind_of(registration: GroupRegistration) -> RingKind:
    rates = registration.rates
    measured = (rates.gemm_flops, rates.link_bytes_per_second)
    speed, link = (round(math.log2(rate)) if rate > 0.0 else 0 for rate in measured)
    return registration.num_ranks, registration.tp, speed, link
