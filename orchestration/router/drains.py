"""Rings that operators take out of service, and bring back."""

from __future__ import annotations

import math

from cp_core.errors import Busy, InvalidRequest, NotFound
from orchestration.placement.registry import RegisteredRing, RingRegistry
from orchestration.protocol.ports import Peers, RingPort
from orchestration.protocol.turns import RingRegistration
from orchestration.router.returns import RingReturns

MAX_SECONDS = 86_400.0


class Drains:
    """The operator's word to the leaders. Who started a ring starts it again: `returns` tells which."""

    def __init__(self, peers: Peers, rings: RingRegistry, returns: RingReturns) -> None:
        self._peers = peers
        self._rings = rings
        self._returns = returns

    async def drain(self, name: str, seconds: float, *, force: bool) -> None:
        """Let a ring take no new turns and leave when those that run have ended and its conversations have been moved,
        `seconds` at most. Idempotent.

        Raises NotFound, InvalidRequest, Unavailable; Busy where no other ring of its role takes turns, unless forced.
        """
        _check_seconds(seconds)
        ring = self._require(name)
        role = ring.registration.role
        others = [other for other in self._rings.all() if other.registration.role == role and other is not ring]
        if not force and not any(other.takes_turns for other in others):
            raise Busy(
                f"ring: {name} is the only {role} ring that takes turns; restart it, start another first, or force it"
            )
        self._returns.forget(name)  # where it was to come back, it is not any more
        await self._port(ring).drain(seconds)

    async def restart(self, name: str, seconds: float, *, leaving_node: str = "") -> None:
        """Let a ring drain, as `drain` does, and start again; new turns wait for it where no other ring takes them.

        With `leaving_node` it starts again when the node at that address is gone. Also for the only ring of a role.
        One that has left comes back. Idempotent. Raises NotFound, InvalidRequest, Unavailable.
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
        """Let a ring take turns again; one that has left is started again. Raises NotFound, Unavailable. Idempotent."""
        if (left := self._left(name)) is not None:
            self._returns.bring_back(left)
            return
        await self._port(self._require(name)).undrain()
        self._returns.forget(name)

    def _left(self, name: str) -> RingRegistration | None:
        """What a ring announced that is not here any more."""
        return self._rings.left(name) if self._rings.find(name) is None else None

    def _require(self, name: str) -> RegisteredRing:
        ring = self._rings.find(name)
        if ring is None:
            known = ", ".join(other.name for other in self._rings.all()) or "none"
            raise NotFound(f"ring: {name!r} is not known; there are {known}")
        return ring

    def _port(self, ring: RegisteredRing) -> RingPort:
        return self._peers.leader(ring.role, ring.registration.endpoint)


def _check_seconds(seconds: float) -> None:
    if not (math.isfinite(seconds) and 0 <= seconds <= MAX_SECONDS):
        raise InvalidRequest(f"seconds: {seconds:g} is not allowed; use 0 to {MAX_SECONDS:g}")
