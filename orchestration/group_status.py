"""How a ring is, asked from its leader; one that does not answer is lost."""

from __future__ import annotations

from cp_core.errors import RingserveError
from orchestration.groups import Group
from orchestration.ports import Peers
from orchestration.ring import RingState
from orchestration.turn import GroupRegistration
from orchestration.views import GroupStatus


async def status_of(group: Group, peers: Peers) -> GroupStatus:
    """Never raises for a ring that cannot be reached."""
    registration = group.registration
    endpoint = registration.endpoint
    port = peers.prefill(endpoint) if registration.role == "prefill" else peers.decode(endpoint)
    try:
        return await port.get_status()
    except RingserveError:
        return status_without(registration, "lost")


def status_without(registration: GroupRegistration, state: str) -> GroupStatus:
    """Of a ring that cannot be asked: what it announced last."""
    return GroupStatus(
        role=registration.role,
        name=registration.name,
        endpoint=registration.endpoint,
        incarnation=registration.incarnation,
        state=state,
        num_ranks=registration.num_ranks,
        tp=registration.tp,
    )


async def withdraw_if_lost(group: Group, peers: Peers) -> None:
    """Take no more turns to a ring that does not serve; it announces itself when it does again."""
    if (await status_of(group, peers)).state != RingState.READY:
        group.is_ready = False
