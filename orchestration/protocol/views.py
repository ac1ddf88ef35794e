"""Words of the views in `ringserve.views`, such as kinds of events, and the checks of health. Pure functions.

Health endpoints ask `ring_fault` and `service_fault`. They look at progress: a living process that makes no steps is a
fault.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from ringserve.cp_core.layout.shards import ShardMap
from ringserve.orchestration.protocol.rings import RingState
from ringserve.views import Range, RankShard, RingInfo, ServerInfo
from ringserve.workers.protocol.ranks import RankStatus


class MoveReason(StrEnum):
    """Reasons why retained KV moves between rings.

    TURN: a turn pulls KV from a ring that its conversation leaves. DRAIN: the ring drains. FULL: the ring is about to
    evict.
    """

    TURN = "turn"
    DRAIN = "drain"
    FULL = "full"


class EventKind(StrEnum):
    """Event kinds. RING: a ring came, drains, left or returned.

    LOST: a ring lost a rank or its leader, or was started again. REBUILT: the ring serves again after that. FAILOVER: a
    turn lost a ring or its gateway and went on. REFUSAL: a turn got no rings. EVICTION: a ring made room by dropping
    retained KV.
    """

    RING = "ring"
    LOST = "lost"
    REBUILT = "rebuilt"
    FAILOVER = "failover"
    REFUSAL = "refusal"
    EVICTION = "eviction"


def rank_shards(shards: ShardMap) -> tuple[RankShard, ...]:
    """Return the tokens of each rank, for a view."""
    return tuple(
        RankShard(num_tokens=held.num_tokens, ranges=tuple(Range(start=each.start, stop=each.stop) for each in held))
        for held in shards.ranks
    )


def ring_fault(status: RingInfo, ranks: Iterable[RankStatus], stuck_seconds: float) -> str:
    """Return one sentence on why no turns should be sent to a ring; empty if it serves.

    A rank is stuck if it has work and made no step for `stuck_seconds`. A transfer is stuck if it began and got no byte
    for as long.
    """
    if status.state != RingState.READY:
        return f"ring {status.name} is {status.state}"
    if status.draining:
        return f"ring {status.name} drains"
    for rank in ranks:
        if rank.running and rank.seconds_since_step > stuck_seconds:
            return f"a rank of ring {status.name} made no step for {rank.seconds_since_step:.0f} s"
        if rank.stalled_seconds > stuck_seconds:
            return f"a transfer to ring {status.name} got no byte for {rank.stalled_seconds:.0f} s"
    return ""


def service_fault(view: ServerInfo) -> str:
    """Return one sentence on why no turns should be sent to the service; empty if it serves.

    It serves if each role has a ring that takes turns, or one that is to return: turns wait for such a ring.
    """
    return roles_fault(view.rings)


def roles_fault(rings: Iterable[RingInfo]) -> str:
    """Return one sentence on a role without rings and why they cannot be rebuilt; empty if each role has rings."""
    rings = tuple(rings)
    serving_roles = {
        ring.role for ring in rings if ring.restarting or (ring.state == RingState.READY and not ring.draining)
    }
    role = next((role for role in ("prefill", "decode") if role not in serving_roles), "")
    failures = (
        f"; {ring.name} cannot be rebuilt: {ring.failure}" for ring in rings if ring.role == role and ring.failure
    )
    return f"no {role} ring takes turns{''.join(failures)}" if role else ""
