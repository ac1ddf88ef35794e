"""What a tenant may have running, and begin, at a time. Counted in this process; too much is refused at once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cp_core.errors import CapacityExceeded, InvalidRequest
from services.auth.tenants import Tenant

BUSY_RETRY_SECONDS = 1.0
"""How soon one of a tenant's turns may have ended; nobody knows."""


class TenantLimits:
    """Turns by tenant. `clock` tells seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running: Counter[str] = Counter()
        self._allowance: dict[str, tuple[float, float]] = {}

    @contextmanager
    def turns(self, tenant: Tenant, count: int = 1) -> Iterator[None]:
        """Around so many turns that run together. Raises CapacityExceeded; InvalidRequest where it can never be."""
        limit, running = tenant.max_concurrent_turns, self._running[tenant.name]
        if limit and running + count > limit:
            _check_possible(tenant, count, limit, "at a time")
            raise CapacityExceeded(
                f"tenant {tenant.name!r} runs {running} turns, asks for {count} and may run {limit} at a time",
                BUSY_RETRY_SECONDS,
            )
        self._take_allowance(tenant, count)
        self._running[tenant.name] += count
        try:
            yield
        finally:
            self._running[tenant.name] -= count
            if not self._running[tenant.name]:
                del self._running[tenant.name]

    def _take_allowance(self, tenant: Tenant, count: int) -> None:
        """A bucket that fills evenly and holds what may begin in one minute."""
        limit = tenant.max_turns_per_minute
        if not limit:
            return
        now = self._clock()
        left, then = self._allowance.get(tenant.name, (float(limit), now))
        left = min(float(limit), left + (now - then) * limit / 60)
        if left < count:
            _check_possible(tenant, count, limit, "a minute")
            self._allowance[tenant.name] = (left, now)
            wait = (count - left) * 60 / limit
            raise CapacityExceeded(f"tenant {tenant.name!r} may begin {limit} turns a minute", wait)
        self._allowance[tenant.name] = (left - count, now)


def _check_possible(tenant: Tenant, count: int, limit: int, when: str) -> None:
    """Waiting would not help. Raises InvalidRequest."""
    if count > limit:
        raise InvalidRequest(
            f"sampling_params.n: {count} answers are too many, tenant {tenant.name!r} may have {limit} {when}"
        )
