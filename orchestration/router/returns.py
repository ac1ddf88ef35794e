"""Rings that are away for a while, and the turns that wait for them instead of failing.

    serves ──restart──> drains ──leaves──> away ──announces a new incarnation──> serves
                                            ^
    drained ──────────────undrain───────────+

While a role has no ring that takes turns and one of it is to come back, new turns wait: in the order in which they
came, each until its own deadline, and all of them for no longer than the ring is given to come back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from cp_core.errors import CapacityExceeded, DeadlineExceeded, RingserveError
from orchestration.placement.registry import RingRegistry
from orchestration.protocol.rings import ROLES, RingEvent
from orchestration.protocol.turns import RingRegistration

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Returning:
    """`registration` is what the ring announced last. It is given until `until`, on the event loop's clock."""

    registration: RingRegistration
    until: float
    leaving_nodes: set[str] = field(default_factory=set)


class RingReturns:
    """What the router expects back. `seconds` is how long a ring may take from its good-bye until it serves again,
    `max_waiting` bounds the turns that wait.
    """

    def __init__(self, registry: RingRegistry, *, seconds: float, max_waiting: int) -> None:
        self._registry = registry
        self._seconds = seconds
        self._max_waiting = max_waiting
        self._rings: dict[str, _Returning] = {}
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._wanted: asyncio.Queue[RingEvent] = asyncio.Queue()

    # --- rings -------------------------------------------------------------------------------------------------------

    def expect(self, registration: RingRegistration, drain_seconds: float, leaving_node: str = "") -> None:
        """A ring that serves, or drains already, is to leave within `drain_seconds` and to come back."""
        until = asyncio.get_running_loop().time() + drain_seconds + self._seconds
        ring = self._rings.setdefault(registration.name, _Returning(registration, until))
        ring.until = max(ring.until, until)
        if leaving_node:
            ring.leaving_nodes.add(leaving_node)

    def bring_back(self, registration: RingRegistration) -> None:
        """A ring that has left is to come back. Idempotent."""
        if registration.name not in self._rings:
            self.expect(registration, 0.0)
            self._wanted.put_nowait(RingEvent(ring=registration.name))

    def forget(self, name: str) -> None:
        """A ring is to stay, or to stay away. Turns that waited for it are served or refused."""
        if self._rings.pop(name, None) is not None:
            self._wake()

    def is_expected(self, name: str) -> bool:
        return name in self._rings

    def note(self, registration: RingRegistration) -> None:
        """What a ring announced just now, when the registry knows it."""
        ring = self._rings.get(registration.name)
        if ring is not None and registration.is_leaving:
            self._wanted.put_nowait(RingEvent(ring=registration.name, leaving_nodes=tuple(sorted(ring.leaving_nodes))))
        elif ring is not None and _is_back(registration, ring.registration):
            log.info("ring %s is back", registration.name)
            del self._rings[registration.name]
        self._wake()

    async def next_wanted(self) -> RingEvent:
        """The next ring that has left and is wanted again."""
        return await self._wanted.get()

    def away(self) -> Sequence[RingRegistration]:
        """Rings that have left and are to come back, as they were."""
        rings = (ring.registration for ring in self._rings.values())
        return [ring for ring in rings if self._registry.find(ring.name) is None]

    # --- turns -------------------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Turns that wait for a ring."""
        return len(self._waiting)

    def is_waiting(self, request_id: str) -> bool:
        return request_id in self._waiting

    def end_wait(self, request_id: str, error: RingserveError) -> bool:
        """End a waiting turn with `error`. False where none of that name waits."""
        waiting = self._waiting.get(request_id)
        if waiting is None or waiting.done():
            return False
        waiting.set_exception(error)
        return True

    async def until_served(self, request_id: str, deadline: float) -> bool:
        """Wait while a role has no ring and one is to come back; whether that was so. `deadline` is the turn's, on the
        event loop's clock.

        Returns at once where every role is served, and where nothing is to be waited for. Raises DeadlineExceeded,
        CapacityExceeded where too many wait, and what `end_wait` was told.
        """
        loop, has_waited = asyncio.get_running_loop(), False
        while (ring := self._awaited()) is not None:
            if not has_waited:
                self._check_room(ring)
                log.info("request %s waits for ring %s", request_id, ring.registration.name)
            has_waited = True
            await self._wait(request_id, min(deadline, ring.until))
            if loop.time() >= deadline:
                raise DeadlineExceeded(
                    f"the turn waited for {ring.registration.role} ring {ring.registration.name} to come back until "
                    f"its deadline"
                )
            if loop.time() >= ring.until:
                log.warning("ring %s did not come back in time", ring.registration.name)
                self.forget(ring.registration.name)
        return has_waited

    async def _wait(self, request_id: str, until: float) -> None:
        waiting = self._waiting[request_id] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout_at(until):
                await waiting
        except TimeoutError:
            return
        finally:
            del self._waiting[request_id]

    def _awaited(self) -> _Returning | None:
        """The ring that a turn of now has to wait for; None where none is missing, or one is that will not come."""
        if not self._rings:
            return None  # as nearly always: nobody looks through a thousand rings for each turn
        missing = [role for role in ROLES if not self._registry.ready(role)]
        found = None
        for role in missing:
            coming = [ring for ring in self._rings.values() if ring.registration.role == role]
            if not coming:
                return None
            found = max(coming, key=lambda ring: ring.until)
        return found

    def _check_room(self, ring: _Returning) -> None:
        if len(self._waiting) >= self._max_waiting:
            name = ring.registration.name
            raise CapacityExceeded(
                f"{len(self._waiting)} turns wait for ring {name} to come back and at most {self._max_waiting} are "
                f"allowed; retry later"
            )

    def _wake(self) -> None:
        """Let all go on that wait for nothing any more. They wake in the order in which they came."""
        if self._waiting and self._awaited() is None:
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_result(None)


def _is_back(now: RingRegistration, before: RingRegistration) -> bool:
    """Not where it lost a rank while it drained: that ring leaves still."""
    return now.incarnation != before.incarnation and not now.is_draining
