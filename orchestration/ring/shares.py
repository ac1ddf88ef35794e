"""Share of each tenant in what a ring has: one tenant's turns never take all of what others ask for too."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from ringserve.cp_core.errors import CapacityExceeded
from ringserve.orchestration.protocol.turns import Reserve

FREE_SHARES = 3.0
"""A tenant's turns may take at most this many times what is left then. One flood fills three quarters, two 6/7."""
PRESENT_SECONDS = 600.0
"""Time after a tenant's latest turn for which others leave room for the next."""


def exceeds_share(mine: float, asked: float, total: float, limit: float) -> bool:
    """Return whether a tenant that has `mine` of the `total` may not add `asked`, since others need room.

    A tenant with nothing is within its share. Source: dynamic queue thresholds (Choudhury, Hahne 1998).
    Example: with 70 of 70 in a queue of 100, 10 more exceed the share, and as many of another tenant do not.
    """
    return mine > 0 and mine + asked > FREE_SHARES * (limit - total - asked)


class TenantShares:
    """Shares of the tenants of one ring. A lone tenant may have all: shares hold while several ask."""

    def __init__(self, ring: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._ring = ring
        self._clock = clock
        self._asked: dict[str, float] = {}

    def note(self, tenant: str) -> None:
        """Note that a tenant asks for a turn; "" is none."""
        now = self._clock()
        self._asked = {name: at for name, at in self._asked.items() if now - at < PRESENT_SECONDS}
        if tenant:
            self._asked[tenant] = now

    def check(
        self,
        unit: str,
        tenant: str,
        *,
        mine: float,
        asked: float,
        total: float,
        limit: float,
        retry: float | None = None,
    ) -> None:
        """Check that a tenant may add `asked` to `mine`. Raises CapacityExceeded, with the seconds to `retry` after."""
        if self._asked.keys() - {tenant} and exceeds_share(mine, asked, total, limit):
            raise CapacityExceeded(
                f"{self._ring}: tenant {tenant!r} has {mine:.0f} {unit} under way, this turn adds {asked:.0f}, and a "
                f"share of {limit:.0f} is left to other tenants; retry later",
                retry_after_seconds=retry,
            )

    def check_turns(
        self, request: Reserve, others: Iterable[Reserve], *, max_turns: int, kv_tokens: int, retry: float | None = None
    ) -> None:
        """Check that a turn may join the ring's turns. One that has begun needs no share. Raises CapacityExceeded."""
        tenant, turns = request.tenant, list(others)
        self.note(tenant)
        if len(turns) >= max_turns:
            raise CapacityExceeded(
                f"{self._ring}: {len(turns)} turns are under way and at most {max_turns} are allowed; retry later",
                retry_after_seconds=retry,
            )
        if request.has_begun:
            return
        own = [turn.num_tokens for turn in turns if turn.tenant == tenant]
        total = sum(turn.num_tokens for turn in turns)
        self.check("turns", tenant, mine=len(own), asked=1, total=len(turns), limit=max_turns, retry=retry)
        asked = request.num_tokens
        self.check("KV tokens", tenant, mine=sum(own), asked=asked, total=total, limit=kv_tokens, retry=retry)
