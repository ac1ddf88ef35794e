"""Commands of an operator to the router: drain rings, bring them back, restart them.

`ringserve drain`, `undrain`, `restart` and `status` call them, and the local cluster.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ringserve.cp_core.errors import DeadlineExceeded, NotFound, Unavailable
from ringserve.cp_core.transport.peer_tls import PeerTls
from ringserve.orchestration.protocol.rings import AWAY, RingState
from ringserve.services.rpc.peers import GrpcPeers, GrpcRouter
from ringserve.views import RingDrain, RingInfo, ServerInfo

POLL_SECONDS = 0.5
LEAVE_SECONDS = 30.0
"""Seconds past its deadline for a ring to release its turns and to report that it leaves."""


@dataclass(frozen=True, kw_only=True)
class RouterAccess:
    """Access to the router. `progress` gets one line for each change. `secret`: see `GrpcPeers`."""

    endpoint: str
    tls: PeerTls | None
    progress: Callable[[str], None]
    secret: str | None = None

    @asynccontextmanager
    async def router(self) -> AsyncIterator[GrpcRouter]:
        peers = GrpcPeers(self.tls, secret=self.secret)
        try:
            yield peers.router(self.endpoint)
        finally:
            await peers.close()


async def read_server_info(access: RouterAccess) -> ServerInfo:
    """Return the state of the service, as the router knows it. Raises Unavailable."""
    async with access.router() as router:
        return await router.get_server_info()


async def drain_ring(access: RouterAccess, ring: str, *, seconds: float, force: bool) -> RingDrain | None:
    """Drain a ring, and wait until it has left.

    Returns the result; None if the router was restarted meanwhile. Raises NotFound, Busy, InvalidRequest,
    Unavailable, DeadlineExceeded.
    """
    async with access.router() as router:
        await router.drain_ring(ring, seconds, force=force)
        return await _until_left(router, ring, seconds, access.progress)


async def drain_node(access: RouterAccess, node: str, *, seconds: float) -> list[str]:
    """Drain every ring with a rank on a node, and wait until they have left.

    They start again when the node is gone. Returns their names, without those whose leaders cannot be reached. Raises
    Unavailable, DeadlineExceeded.
    """
    async with access.router() as router:
        rings = [ring.name for ring in (await router.get_server_info()).rings if node in ring.nodes]
        told = await _told(rings, lambda ring: router.restart_ring(ring, seconds, leaving_node=node), access.progress)
        for ring in told:
            await _until_left(router, ring, seconds, access.progress)
        return told


async def drain_all(access: RouterAccess, *, seconds: float) -> None:
    """Drain all rings at once, because the service ends, and wait until they have left. Raises as `drain_node`."""
    async with access.router() as router:
        rings = [ring.name for ring in (await router.get_server_info()).rings if ring.state != AWAY]
        for ring in await _told(rings, lambda ring: router.drain_ring(ring, seconds, force=True), access.progress):
            await _until_left(router, ring, seconds, access.progress)


async def _told(
    rings: Sequence[str], tell: Callable[[str], Awaitable[None]], progress: Callable[[str], None]
) -> list[str]:
    """Tell every ring; return the rings that could be told."""
    told = []
    for ring in rings:
        try:
            await tell(ring)
        except (NotFound, Unavailable) as error:
            progress(f"ring {ring} cannot be drained: {error}")
        else:
            told.append(ring)
    return told


async def restart_ring(access: RouterAccess, ring: str, *, seconds: float, start_seconds: float) -> None:
    """Drain a ring, start it again, and wait until it serves.

    Raises NotFound, InvalidRequest, Unavailable, DeadlineExceeded.
    """
    async with access.router() as router:
        before = _status_of(await router.get_server_info(), ring)
        was = before.incarnation if before is not None and before.state != AWAY else ""
        await router.restart_ring(ring, seconds)
        access.progress(f"ring {ring} restarts")

        def is_back(view: ServerInfo) -> bool:
            status = _status_of(view, ring)
            return _serves(status) and status is not None and status.incarnation != was

        await _until(router, ring, is_back, seconds + LEAVE_SECONDS + start_seconds, "serve again")


async def undrain_ring(access: RouterAccess, ring: str, *, seconds: float) -> None:
    """Let a ring take turns again, and wait until it does. Raises NotFound, Unavailable, DeadlineExceeded."""
    async with access.router() as router:
        await router.undrain_ring(ring)
        await _until(router, ring, lambda view: _serves(_status_of(view, ring)), seconds, "serve again")


def _serves(status: RingInfo | None) -> bool:
    return status is not None and status.state == RingState.READY and not status.draining


async def _until_left(
    router: GrpcRouter, ring: str, seconds: float, progress: Callable[[str], None]
) -> RingDrain | None:
    shown = ""
    seen: RingDrain | None = None

    def has_left(view: ServerInfo) -> bool:
        nonlocal shown, seen
        seen = next((drain for drain in view.drains if drain.ring == ring), seen)
        status = _status_of(view, ring)
        if status is None or status.state == AWAY or _serves(status):
            return True
        running = status.num_requests_running + status.num_requests_waiting
        line = f"ring {ring} drains, {running} turns are under way{_moves_told(seen)}"
        if line != shown:
            progress(line)
            shown = line
        return False

    await _until(router, ring, has_left, seconds + LEAVE_SECONDS, "leave")
    return seen


def _moves_told(drain: RingDrain | None) -> str:
    return "" if drain is None else f", {drain.moved} conversations have been moved, {drain.left} not yet"


async def _until(router: GrpcRouter, ring: str, holds: Callable[[ServerInfo], bool], seconds: float, what: str) -> None:
    """Poll the router until a condition holds. Raises DeadlineExceeded."""
    deadline = time.monotonic() + seconds
    while not holds(await router.get_server_info()):
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"ring {ring} did not {what} within {seconds:.0f} s")
        await asyncio.sleep(POLL_SECONDS)


def _status_of(view: ServerInfo, name: str) -> RingInfo | None:
    return next((ring for ring in view.rings if ring.name == name), None)
