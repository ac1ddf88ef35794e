"""Turn retries of both Python clients. All attempts have the same request id, so the service sees one request.

| what failed | tried again |
|---|---|
| no room (`CapacityExceeded`), no ring (`NotBegun`) | a few times: the turn was refused before any work |
| the request id is in use (`Busy`) | after `NotBegun` or a loss: then our own earlier attempt is being ended |
| the gateway is gone or stops (`Unreachable`, `Stopping`) | for `resume_seconds`, after the tokens that have come; |
| | refusals in that time do not end the retries |
| anything else | no: the gateway retries by itself if that can help |

A turn goes on at the same gateway or another. Its tokens, text and usage are those of a turn with a single attempt.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from ringserve.errors import Busy, CapacityExceeded, NotBegun, RingserveError, Stopping, Unreachable


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Retry bounds. The delay doubles from attempt to attempt, and is never shorter than the server asks for.

    A refused turn has `max_attempts` attempts in a row. A lost one is resumed for `resume_seconds` after its loss, or
    after its latest token if there was one since; 0: never. If no gateway has answered yet, attempts go on for
    `connect_seconds`.
    """

    max_attempts: int = 4
    first_delay_seconds: float = 0.2
    max_delay_seconds: float = 5.0
    resume_seconds: float = 30.0
    connect_seconds: float = 30.0


NO_RETRIES = RetryPolicy(max_attempts=1, resume_seconds=0.0, connect_seconds=0.0)
MAX_RESUMPTIONS = 1000
"""Most resumptions of one turn: from a gateway that breaks its streams again and again no answer is ever complete."""

MAX_LOST_DELAY_SECONDS = 0.25
"""Longest delay between two attempts after a loss, while a gateway may be starting again. Most of these attempts fail
without a connection, since gRPC itself limits how often it tries an address."""


def is_lost(error: RingserveError) -> bool:
    """Return whether a turn whose stream failed so may still run, or may have ended well, at the service."""
    return isinstance(error, Unreachable | Stopping)


class Retries:
    """Attempts at one request. `deadline` is a time of the caller's clock, None if there is none."""

    def __init__(self, policy: RetryPolicy, *, deadline: float | None) -> None:
        self._policy = policy
        self._deadline = deadline
        self._num_failed = 0  # in a row
        self._num_resumed = 0
        self._lost_at: float | None = None
        self._has_begun = False  # an attempt of ours may run
        self._has_answered = False

    def delay_after(
        self, error: RingserveError, *, has_tokens: bool, now: float, has_answered: bool = True
    ) -> float | None:
        """Return the seconds until the next attempt; None: there is none.

        `has_tokens`: the latest attempt brought some. `has_answered`: a gateway has begun the turn.
        """
        if has_tokens:
            self._num_failed, self._lost_at = 0, None
        self._has_answered = has_answered or isinstance(error, Stopping)
        self._num_failed += 1
        if not self._may_repeat(error, now):
            return None
        longest = min(self._policy.max_delay_seconds, MAX_LOST_DELAY_SECONDS) if is_lost(error) else None
        delay = self._policy.first_delay_seconds * 2 ** (self._num_failed - 1)
        delay = min(delay, longest or self._policy.max_delay_seconds)
        # Many clients are refused at once; a random delay spreads their next attempts.
        hint = error.retry_after_seconds if isinstance(error, CapacityExceeded) else None
        delay = max(delay * random.uniform(0.5, 1.0), hint or 0.0)
        return None if self._deadline is not None and now + delay >= self._deadline else delay

    def _may_repeat(self, error: RingserveError, now: float) -> bool:
        if is_lost(error):
            self._num_resumed, self._has_begun = self._num_resumed + 1, True
            self._lost_at = now if self._lost_at is None else self._lost_at
            return self._may_resume(now)
        was_refused = isinstance(error, CapacityExceeded | NotBegun) or (isinstance(error, Busy) and self._has_begun)
        self._has_begun = self._has_begun or isinstance(error, NotBegun)
        if was_refused and self._lost_at is not None:
            return self._may_resume(now)
        return was_refused and self._num_failed < self._policy.max_attempts

    def _may_resume(self, now: float) -> bool:
        """Return whether a turn that was lost, and has no token since, is sent again."""
        seconds = self._policy.resume_seconds if self._has_answered else self._policy.connect_seconds
        is_in_time = self._lost_at is not None and now - self._lost_at < seconds
        return is_in_time and self._num_resumed <= MAX_RESUMPTIONS
