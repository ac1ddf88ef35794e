"""Rings that operators take out of service and bring back, and the turns that wait for rings to return.

    serves ──restart──> drains ──leaves──> away ──announces a new incarnation──> serves
                                            ^
    drained for good ─────undrain───────────+

A ring that is away is to return. New turns wait while a role has no ring that takes turns, but one that is to return.
They go on in order of arrival; each waits until its own deadline at most, and none longer than the ring may take.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ringserve.cp_core.errors import Busy, CapacityExceeded, DeadlineExceeded, InvalidRequest, NotFound, RingserveError
from ringserve.orchestration.placement.registry import RegisteredRing, RingRegistry
from ringserve.orchestration.placement.scaling import LoadMeter, RoleScaler, ScalingSettings, emptiest
from ringserve.orchestration.protocol.ports import Peers, PrefillPort
from ringserve.orchestration.protocol.rings import ROLES, RingEvent
from ringserve.orchestration.protocol.turns import RingRegistration
from ringserve.orchestration.protocol.views import EventKind

log = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""Seconds between two looks at the load."""
SCALED_DRAIN_SECONDS = 600.0
"""Seconds that the turns of a ring have to end, if the ring is drained because it is not needed."""
MAX_SECONDS = 86_400.0
"""Seconds that a drain may take at most."""


@dataclass(slots=True, eq=False)
class _Returning:
    """Ring that is to return. `registration` is its last announcement.

    It must have returned at `until`, on the event loop's clock.
    """

    registration: RingRegistration
    until: float
    leaving_nodes: set[str] = field(default_factory=set)


class RingReturns:
    """Registry of the rings that are to return, and of the turns that wait for them.

    `seconds` is how long a ring may take from the end of its drain until it serves again. `max_waiting` bounds the
    turns that wait.
    """

    def __init__(self, registry: RingRegistry, *, seconds: float, max_waiting: int) -> None:
        self._registry = registry
        self._seconds = seconds
        self._max_waiting = max_waiting
        self._rings: dict[str, _Returning] = {}
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._wanted: asyncio.Queue[RingEvent] = asyncio.Queue()
        self._news = asyncio.Event()

    # --- rings -------------------------------------------------------------------------------------------------------

    def expect(self, registration: RingRegistration, drain_seconds: float, leaving_node: str = "") -> None:
        """Expect a ring that serves, or drains already, to leave within `drain_seconds` and then to return."""
        until = asyncio.get_running_loop().time() + drain_seconds + self._seconds
        ring = self._rings.setdefault(registration.name, _Returning(registration, until))
        ring.until = max(ring.until, until)
        if leaving_node:
            ring.leaving_nodes.add(leaving_node)

    def bring_back(self, registration: RingRegistration) -> None:
        """Have a ring that has left started again. Idempotent."""
        if registration.name not in self._rings:
            self.expect(registration, 0.0)
            self._wanted.put_nowait(RingEvent(ring=registration.name))

    def forget(self, name: str) -> None:
        """Expect a ring no longer. Turns that waited for it are served or refused."""
        if self._rings.pop(name, None) is not None:
            self._wake()

    def is_expected(self, name: str) -> bool:
        """Return whether a ring is to return."""
        return name in self._rings

    def note(self, registration: RingRegistration) -> None:
        """Take notice of an announcement that the registry has entered."""
        self._news.set()
        self._news = asyncio.Event()
        ring = self._rings.get(registration.name)
        if ring is not None and registration.is_leaving:
            self._wanted.put_nowait(RingEvent(ring=registration.name, leaving_nodes=tuple(sorted(ring.leaving_nodes))))
        elif ring is not None and _is_back(registration, ring.registration):
            log.info("ring %s is back", registration.name)
            del self._rings[registration.name]
        self._wake()

    def note_silence(self, name: str, seconds: float) -> None:
        """Have a leader replaced that has not announced its ring for `seconds`."""
        self._wanted.put_nowait(RingEvent(ring=name, silent_seconds=seconds))

    def note_parked(self, name: str, is_parked: bool) -> None:
        """Tell whoever started a ring whether this router has parked it.

        If the router dies, parked rings are brought back.
        """
        self._wanted.put_nowait(RingEvent(ring=name, parked=is_parked))

    async def until_news(self, seconds: float) -> None:
        """Wait until an announcement changes the registry, for `seconds` at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()

    async def next_event(self) -> RingEvent:
        """Wait for the next event for whoever starts rings, and return it."""
        return await self._wanted.get()

    def away(self) -> Sequence[RingRegistration]:
        """Return the rings that have left and are to return, as they were."""
        rings = (ring.registration for ring in self._rings.values())
        return [ring for ring in rings if self._registry.find(ring.name) is None]

    # --- turns -------------------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Turns that wait for a ring."""
        return len(self._waiting)

    def is_waiting(self, request_id: str) -> bool:
        """Return whether a request waits for a ring."""
        return request_id in self._waiting

    def end_wait(self, request_id: str, error: RingserveError) -> bool:
        """End the wait of a request with `error`. Return False if no request of that id waits."""
        waiting = self._waiting.get(request_id)
        if waiting is None or waiting.done():
            return False
        waiting.set_exception(error)
        return True

    async def until_served(self, request_id: str, deadline: float) -> bool:
        """Wait while a role has no ring that takes turns, but one that is to return. Return whether it has waited.

        `deadline` is the turn's, on the event loop's clock. Returns at once if every role is served, and if no ring is
        to return. Raises DeadlineExceeded, CapacityExceeded if too many wait, and the error of `end_wait`.
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
        """Return the ring that a new turn waits for; None if each role has one, or if a role will get none."""
        if not self._rings:
            return None  # the usual case: a thousand rings are not searched for each turn
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
        """Wake the turns that need wait no longer, in order of arrival."""
        if self._waiting and self._awaited() is None:
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_result(None)


class Drains:
    """Commands of operators, passed on to the leaders. Through `returns` whoever started a ring starts it again."""

    def __init__(self, peers: Peers, rings: RingRegistry, returns: RingReturns) -> None:
        self._peers = peers
        self._rings = rings
        self._returns = returns

    async def drain(self, name: str, seconds: float, *, force: bool) -> None:
        """Send no new turns to a ring. It leaves when its turns have ended and its conversations have moved.

        The ring leaves after `seconds` at the latest. Idempotent. Raises NotFound, InvalidRequest, Unavailable; Busy if
        no other ring of its role takes turns, unless forced.
        """
        _check_seconds(seconds)
        ring = self._require(name)
        role = ring.registration.role
        others = [other for other in self._rings.all() if other.registration.role == role and other is not ring]
        if not force and not any(other.takes_turns for other in others):
            raise Busy(
                f"ring: {name} is the only {role} ring that takes turns; restart it, start another first, or force it"
            )
        self._returns.forget(name)  # a drain cancels an earlier restart
        await self._port(ring).drain(seconds)

    async def restart(self, name: str, seconds: float, *, leaving_node: str = "") -> None:
        """Drain a ring and have it started again; new turns wait for it if no other ring takes them.

        With `leaving_node` the ring starts again when the node at that address is gone. Works for the only ring of a
        role as well, and for a ring that has left. Idempotent. Raises NotFound, InvalidRequest, Unavailable.
        """
        _check_seconds(seconds)
        if (left := self._left(name)) is not None:
            self._returns.bring_back(left)
            return
        ring = self._require(name)
        was_expected = self._returns.is_expected(name)
        self._returns.expect(ring.registration, seconds, leaving_node)
        try:
            await self._port(ring).drain(seconds)
        except BaseException:
            if not was_expected:
                self._returns.forget(name)
            raise

    async def undrain(self, name: str) -> None:
        """Let a ring take turns again, or start it again if it has left. Idempotent. Raises NotFound, Unavailable."""
        if (left := self._left(name)) is not None:
            self._returns.bring_back(left)
            return
        await self._port(self._require(name)).undrain()
        self._returns.forget(name)

    def _left(self, name: str) -> RingRegistration | None:
        """Return the last announcement of a ring that has left."""
        return self._rings.left(name) if self._rings.find(name) is None else None

    def _require(self, name: str) -> RegisteredRing:
        ring = self._rings.find(name)
        if ring is None:
            known = ", ".join(other.name for other in self._rings.all()) or "none"
            raise NotFound(f"ring: {name!r} is not known; there are {known}")
        return ring

    def _port(self, ring: RegisteredRing) -> PrefillPort:
        return self._peers.leader(ring.role, ring.registration.endpoint)


class Scaling:
    """Drains that the router itself orders: rings leave while fewer are enough, and return when they are needed.

    `least` has the least number of rings that serve, by role. Roles that it lacks are not scaled. Rings that operators
    have drained stay away.
    """

    def __init__(
        self,
        rings: RingRegistry,
        drains: Drains,
        returns: RingReturns,
        settings: ScalingSettings,
        least: Mapping[str, int],
    ) -> None:
        self._rings = rings
        self._drains = drains
        self._returns = returns
        self._meter = LoadMeter(rings, settings)
        self._least = least
        self._scalers: dict[str, RoleScaler] = {}
        self._settings = settings
        self._parked: dict[str, list[str]] = {role: [] for role in ROLES}

    async def run(self) -> None:
        """Look at the load again and again. If a leader cannot be reached, the next look tries again."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for role in self._least:
                try:
                    await self.look(role)
                except RingserveError as error:
                    log.warning("the number of %s rings stays as it is: %s", role, error)

    async def look(self, role: str) -> None:
        """Drain rings of a role, or bring some back, until it has as many as it needs. Raises RingserveError."""
        parked = self._parked[role] = [name for name in self._parked[role] if self._is_away(name)]
        returning = sum(self._returns.is_expected(name) for name in parked)
        load = self._meter.prefill(returning) if role == "prefill" else self._meter.decode(returning)
        most = load.serving + len(parked)
        # `most` counts no rings that are lost or that operators have drained: the router cannot bring them back.
        scaler = self._scalers.setdefault(role, RoleScaler(self._settings, self._least[role]))
        wanted = scaler.wanted(load, most, self._rings.clock())
        away = [name for name in parked if not self._returns.is_expected(name)]
        for name in away[: max(0, wanted - load.serving - returning)]:
            log.info("ring %s is brought back: %d %s rings are needed", name, wanted, role)
            self._rings.events.note(EventKind.RING, name, f"ring {name} is brought back for the load")
            await self._drains.undrain(name)
            self._returns.note_parked(name, False)
        serving = list(self._rings.ready(role))
        for _ in range(load.serving - wanted):
            ring = emptiest(serving, self._rings.clock())
            serving.remove(ring)
            log.info("ring %s is not needed: %d %s rings are", ring.name, wanted, role)
            self._rings.events.note(EventKind.RING, ring.name, f"ring {ring.name} is not needed for the load")
            await self._drains.drain(ring.name, SCALED_DRAIN_SECONDS, force=False)
            parked.append(ring.name)
            self._returns.note_parked(ring.name, True)

    def _is_away(self, name: str) -> bool:
        """Return whether a ring that was parked still drains or is away."""
        ring = self._rings.find(name)
        return ring is None or ring.registration.is_draining


def _is_back(now: RingRegistration, before: RingRegistration) -> bool:
    """Return whether a ring has returned. One that lost a rank while it drained is new as well, but still drains."""
    return now.incarnation != before.incarnation and not now.is_draining


def _check_seconds(seconds: float) -> None:
    if not (math.isfinite(seconds) and 0 <= seconds <= MAX_SECONDS):
        raise InvalidRequest(f"seconds: {seconds:g} is not allowed; use 0 to {MAX_SECONDS:g}")
