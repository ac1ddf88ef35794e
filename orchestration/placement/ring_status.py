"""How a ring is, asked from its leader; one that does not answer is lost."""

from __future__ import annotations

from cp_core.errors import RingserveError
from orchestration.placement.registry import RegisteredRing
from orchestration.protocol.ports import Peers
from orchestration.protocol.rings import RingState
from orchestration.protocol.turns import RingRegistration
from orchestration.protocol.views import RingStatus


async def status_of(ring: RegisteredRing, peers: Peers) -> RingStatus:
    """Never raises for a ring that cannot be reached."""
    registration = ring.registration
    try:
        return await peers.leader(registration.role, registration.endpoint).get_status()
    except RingserveError:
        return status_without(registration, "lost")


def status_without(registration: RingRegistration, state: str) -> RingStatus:
    """Of a ring that cannot be asked: what it announced last."""
    return RingStatus(
        role=registration.role,
        name=registration.name,
        endpoint=registration.endpoint,
        incarnation=registration.incarnation,
        state=state,
        num_ranks=registration.num_ranks,
        tp=registration.tp,
    )


async def withdraw_if_lost(ring: RegisteredRing, peers: Peers) -> None:
    """Take no more turns to a ring that does not serve; it announces itself when it does again."""
    if (await status_of(ring, peers)).state != RingState.READY:
        ring.is_ready = False
