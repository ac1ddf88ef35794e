"""Share of each tenant in the queues of a ring: one tenant's turns never fill a queue that others use too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ringserve.cp_core.errors import CapacityExceeded
from ringserve.orchestration.protocol.turns import Reserve

FREE_SHARES = 3.0
"""A tenant's turns may take at most this many times what a queue has free. Alone they fill three quarters of it."""


def exceeds_share(mine: float, asked: float, total: float, limit: float) -> bool:
    """Return whether a tenant that has `mine` of the `total` in a queue may not add `asked`, since others need room.

    A tenant with nothing in the queue is within its share. Source: dynamic queue thresholds (Choudhury, Hahne 1998).
    Example: with 70 of 70 in a queue of 100, 10 more exceed the share, and as many of another tenant do not.
    """
    return mine > 0 and mine + asked > FREE_SHARES * (limit - total - asked)


def check_turns(ring: str, tenant: str, requests: Iterable[Reserve], limit: int) -> None:
    """Check that a ring with these turns may take another one. Raises CapacityExceeded."""
    tenants = Counter(request.tenant for request in requests)
    count = tenants.total()
    if count >= limit:
        raise CapacityExceeded(f"{ring}: {count} turns are under way and at most {limit} are allowed; retry later")
    if tenant and exceeds_share(tenants[tenant], 1, count, limit):
        raise CapacityExceeded(
            f"{ring}: {tenants[tenant]} turns of tenant {tenant!r} are under way, and other tenants keep a share of "
            f"{limit}; retry later"
        )
