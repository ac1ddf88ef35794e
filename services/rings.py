"""What an operator asks of the rings through the router's own door: to drain, to come back, and how they are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from cp_core.errors import DeadlineExceeded
from orchestration.ring import RingState
from orchestration.views import DrainView, GroupStatus, ServerView
from services.auth.tls import PeerTls
from services.peers import GrpcPeers, GrpcRouter

POLL_SECONDS = 0.5
LEAVE_SECONDS = 30.0
"""Past its deadline, for a ring to end what it holds and to say that it leaves."""


async def drain_ring(
    router: str, tls: PeerTls | None, ring: str, *, seconds: float, force: bool, progress: Callable[[str], None]
) -> DrainView | None:
    """Let a ring drain, and wait until it has left. `progress` gets a line whenever there is less left to do.

    Returns how it went; None where the router was started anew meanwhile. Raises NotFound, Busy, InvalidRequest,
    Unavailable, DeadlineExceeded.
    """
    shown: str | None = None
    seen: DrainView | None = None

    def has_left(view: ServerView) -> bool:
        nonlocal shown, seen
        seen = next((drain for drain in view.drains if drain.ring == ring), seen)
        status = _status_of(view, ring)
        if status is None:
            return True
        running = status.num_requests_running + status.num_requests_waiting
        line = f"ring {ring} drains, {running} turns are under way{_moves_told(seen)}"
        if line != shown:
            progress(line)
            shown = line
        return False

    async def ask(door: GrpcRouter) -> None:
        await door.drain_ring(ring, seconds, force=force)
        await _until(door, ring, has_left, seconds + LEAVE_SECONDS, "leave")

    await _with_router(router, tls, ask)
    return seen


def _moves_told(drain: DrainView | None) -> str:
    return "" if drain is None else f", {drain.num_moved} conversations are moved and {drain.num_left} left"


async def undrain_ring(router: str, tls: PeerTls | None, ring: str, *, seconds: float) -> None:
    """Let a ring take turns again, and wait until it does. Raises NotFound, Unavailable, DeadlineExceeded."""

    def serves(view: ServerView) -> bool:
        status = _status_of(view, ring)
        return status is not None and status.state == RingState.READY and not status.is_draining

    async def ask(door: GrpcRouter) -> None:
        await door.undrain_ring(ring)
        await _until(door, ring, serves, seconds, "serve again")

    await _with_router(router, tls, ask)


async def _with_router(endpoint: str, tls: PeerTls | None, ask: Callable[[GrpcRouter], Awaitable[None]]) -> None:
    peers = GrpcPeers(tls)
    try:
        await ask(peers.router(endpoint))
    finally:
        await peers.close()


async def _until(door: GrpcRouter, ring: str, holds: Callable[[ServerView], bool], seconds: float, what: str) -> None:
    """Look again and again: the router tells nobody by itself."""
    deadline = time.monotonic() + seconds
    while True:
        if holds(await door.get_server_info()):
            return
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"ring {ring} did not {what} within {seconds:.0f} s")
        await asyncio.sleep(POLL_SECONDS)


def _status_of(view: ServerView, ring: str) -> GroupStatus | None:
    return next((group for group in view.groups if group.name == ring), None)
