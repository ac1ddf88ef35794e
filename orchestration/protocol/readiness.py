"""Whether work gets on, and not merely whether processes live: what keeps a ring or the service from serving now."""

from __future__ import annotations

from collections.abc import Iterable

from orchestration.protocol.rings import RingState
from orchestration.protocol.views import RingStatus, ServerView
from workers.protocol.ranks import RankStatus


def ring_fault(status: RingStatus, ranks: Iterable[RankStatus], stuck_seconds: float) -> str:
    """One sentence on why a ring should get no turns; empty where it serves.

    A rank that works and made no step for `stuck_seconds`, or a transfer that began and got no byte for so long, is
    stuck, whatever its process says.
    """
    if status.state != RingState.READY:
        return f"ring {status.name} is {status.state}"
    if status.is_draining:
        return f"ring {status.name} drains"
    for rank in ranks:
        if rank.running and rank.seconds_since_step > stuck_seconds:
            return f"a rank of ring {status.name} made no step for {rank.seconds_since_step:.0f} s"
        if rank.stalled_seconds > stuck_seconds:
            return f"a transfer to ring {status.name} got no byte for {rank.stalled_seconds:.0f} s"
    return ""


def service_fault(view: ServerView) -> str:
    """One sentence on why no turn could be served; empty where a ring of each role takes turns, or comes back: turns
    wait for it.
    """
    taking = {
        ring.role
        for ring in view.rings
        if ring.is_restarting or (ring.state == RingState.READY and not ring.is_draining)
    }
    return next((f"no {role} ring takes turns" for role in ("prefill", "decode") if role not in taking), "")
