"""Numbers of rings by demand: arriving work and the wait for prefill, turns and KV for decode.

A number of rings is wanted at which they are busy for a share of their time only, and that clears a backlog while
another ring would start. More rings are wanted at once; fewer only if fewer would have done for a while.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from ringserve.orchestration.placement.registry import RegisteredRing, RingRegistry


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingSettings:
    """Goals of the numbers of rings. Times in seconds.

    `busy_share` is the part of its time that a prefill ring is to compute, and the part of a decode ring's places and
    KV that turns are to take. A backlog is to be computed within `clear_seconds`, about a ring's start. Fewer rings
    must have been enough for `shrink_seconds`. Work is averaged over `window_seconds`.
    """

    busy_share: float = 0.6
    max_wait: float = 2.0
    clear_seconds: float = 60.0
    shrink_seconds: float = 300.0
    window_seconds: float = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleLoad:
    """Load of a role's rings: `demand` in rings that work all the time, `wait` of a new turn in seconds."""

    serving: int
    coming: int
    demand: float
    wait: float = 0.0


class RoleScaler:
    """Wanted number of rings of one role, at least `least`."""

    def __init__(self, settings: ScalingSettings, least: int) -> None:
        self._settings = settings
        self._least = least
        self._wanted: deque[tuple[float, int]] = deque()  # (time, rings that the load wanted) of the last while
        self._began: float | None = None

    def wanted(self, load: RoleLoad, most: int, now: float) -> int:
        """Return how many rings are to serve, of the `most` that there are."""
        settings = self._settings
        needed = math.ceil(load.demand / settings.busy_share)
        if load.wait > settings.max_wait and not load.coming:
            needed = max(needed, load.serving + 1)
        needed = min(most, max(self._least, needed))
        self._began = now if self._began is None else self._began
        self._wanted.append((now, needed))
        while self._wanted[0][0] < now - settings.shrink_seconds:
            self._wanted.popleft()
        current = load.serving + load.coming
        if needed >= current or now - self._began < settings.shrink_seconds:
            return max(needed, min(current, most))
        return min(current, max(number for _, number in self._wanted))


class LoadMeter:
    """Load of the rings of a registry, at successive looks."""

    def __init__(self, rings: RingRegistry, settings: ScalingSettings) -> None:
        self._rings = rings
        self._settings = settings
        self._placed: deque[tuple[float, float]] = deque([(rings.clock(), rings.placed_seconds)])

    def prefill(self, coming: int) -> RoleLoad:
        """Return the load of the prefill rings: seconds of work a second, with the backlog."""
        now, settings = self._rings.clock(), self._settings
        serving = self._rings.ready("prefill")
        self._placed.append((now, self._rings.placed_seconds))
        while len(self._placed) > 2 and self._placed[1][0] < now - settings.window_seconds:
            self._placed.popleft()
        began, before = self._placed[0]
        arriving = (self._rings.placed_seconds - before) / max(now - began, 1.0)
        waits = [ring.queue_seconds(now) for ring in serving]
        backlog = max(0.0, sum(waits) - len(waits) * settings.max_wait)
        wait = min(waits, default=0.0)
        return RoleLoad(
            serving=len(serving), coming=coming, demand=arriving + backlog / settings.clear_seconds, wait=wait
        )

    def decode(self, coming: int) -> RoleLoad:
        """Return the load of the decode rings: of their places in batches and of their KV, whichever is fuller."""
        serving = self._rings.ready("decode")
        places = sum(ring.num_turns / max(1, ring.registration.max_batch) for ring in serving)
        kv = sum(1.0 - ring.free_tokens / max(1, ring.registration.capacity_tokens) for ring in serving)
        full = all(ring.num_turns >= ring.registration.max_batch > 0 for ring in serving)
        return RoleLoad(
            serving=len(serving), coming=coming, demand=max(places, kv), wait=math.inf if full and serving else 0.0
        )


def emptiest(rings: Iterable[RegisteredRing], now: float) -> RegisteredRing:
    """Return the ring whose end costs least: of the fewest turns, then of the least work, then of the least KV."""
    return min(
        rings,
        key=lambda ring: (
            ring.num_turns + ring.num_prefilling,
            ring.queue_seconds(now),
            ring.registration.capacity_tokens - ring.free_tokens,
            ring.number,
        ),
    )
