"""Rings that operators take out of service, and bring back."""

from __future__ import annotations

import asyncio
import logging
import math

from cp_core.errors import Busy, InvalidRequest, NotFound
from orchestration.groups import Group, GroupRegistry
from orchestration.ports import DecodePort, Peers, PrefillPort

log = logging.getLogger(__name__)

MAX_SECONDS = 86_400.0


class Drains:
    """The operator's word to the leaders. Who started a ring starts it again: `next_return` tells which."""

    def __init__(self, peers: Peers, groups: GroupRegistry) -> None:
        self._peers = peers
        self._groups = groups
        self._returns: asyncio.Queue[str] = asyncio.Queue()

    async def drain(self, name: str, seconds: float, *, force: bool) -> None:
        """Let a ring take no new turns and leave when those that run have ended and its conversations have been moved,
        `seconds` at most. Idempotent.

        Raises NotFound, InvalidRequest, Unavailable; Busy where no other ring of its role takes turns, unless forced.
        """
        if not (math.isfinite(seconds) and 0 <= seconds <= MAX_SECONDS):
            raise InvalidRequest(f"seconds: {seconds:g} is not allowed; use 0 to {MAX_SECONDS:g}")
        group = self._require(name)
        role = group.registration.role
        others = [other for other in self._groups.all() if other.registration.role == role and other is not group]
        if not force and not any(other.takes_turns for other in others):
            raise Busy(f"ring: {name} is the only {role} ring that takes turns; start another first, or force it")
        await self._port(group).drain(seconds)

    async def undrain(self, name: str) -> None:
        """Let a ring take turns again; one that has left is started again. Raises NotFound, Unavailable. Idempotent."""
        group = self._groups.find(name)
        if group is None and self._groups.has_left(name):
            self._returns.put_nowait(name)
            return
        await self._port(self._require(name)).undrain()

    async def next_return(self) -> str:
        """The next ring that has left and is wanted again."""
        return await self._returns.get()

    def _require(self, name: str) -> Group:
        group = self._groups.find(name)
        if group is None:
            known = ", ".join(other.name for other in self._groups.all()) or "none"
            raise NotFound(f"ring: {name!r} is not known; there are {known}")
        return group

    def _port(self, group: Group) -> PrefillPort | DecodePort:
        registration = group.registration
        find = self._peers.prefill if registration.role == "prefill" else self._peers.decode
        return find(registration.endpoint)
