"""Retries of a turn: only before its first token, and only where a second attempt cannot run the turn twice.

Every attempt has the same request id; the router runs one attempt of an id at a time.

| what failed | tried again |
|---|---|
| no room (`CapacityExceeded`) | yes: the turn was refused whole |
| no ring, or a gateway that stops (`NotBegun`) | yes: the same |
| a process could not be reached (`Unavailable`) | where the request is repeatable: its progress is unknown |
| the request id still runs (`Busy`) | after such a loss: our own first attempt is being ended |
| anything else, or anything after the first token | no |
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from cp_core.errors import Busy, CapacityExceeded, NotBegun, RingserveError, Unavailable


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Bounds of retries. The delay doubles from attempt to attempt, and is never shorter than the server asks for."""

    max_attempts: int = 4
    first_delay_seconds: float = 0.2
    max_delay_seconds: float = 5.0


NO_RETRIES = RetryPolicy(max_attempts=1)


class Retries:
    """Attempts at one request. `deadline` is a time of the caller's clock, None where there is none."""

    def __init__(self, policy: RetryPolicy, *, is_repeatable: bool, deadline: float | None) -> None:
        self._policy = policy
        self._is_repeatable = is_repeatable
        self._deadline = deadline
        self._failed = 0
        self._was_lost = False

    def delay_after(self, error: RingserveError, *, has_tokens: bool, now: float) -> float | None:
        """Return the seconds until the next attempt; None: there is none."""
        self._failed += 1
        if has_tokens or self._failed >= self._policy.max_attempts or not self._may_repeat(error):
            return None
        delay = min(self._policy.first_delay_seconds * 2 ** (self._failed - 1), self._policy.max_delay_seconds)
        # Many clients are refused at once; a random delay spreads their next attempts.
        hint = error.retry_after_seconds if isinstance(error, CapacityExceeded) else None
        delay = max(delay * random.uniform(0.5, 1.0), hint or 0.0)
        return None if self._deadline is not None and now + delay >= self._deadline else delay

    def _may_repeat(self, error: RingserveError) -> bool:
        if isinstance(error, CapacityExceeded):
            return True
        if isinstance(error, Busy):
            return self._was_lost
        if isinstance(error, NotBegun) or (isinstance(error, Unavailable) and self._is_repeatable):
            self._was_lost = True
            return True
        return False
