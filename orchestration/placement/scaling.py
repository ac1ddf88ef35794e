"""Wanted numbers of rings, by demand.

For prefill rings it is the work that arrives and the wait of a new turn; for decode rings it is the turns and their KV.
So many rings are wanted that each is busy for only a share of its time, and that a backlog is cleared in about the time
in which another ring would start. More rings are wanted at once; fewer only after a while in which fewer would have
been enough at every look. The router and the simulator ask it; it reads the registry and changes nothing there.
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
    KV that turns are to take. A backlog is to be computed within `clear_seconds`, about as long as a ring takes to
    start. A ring is given up only after fewer would have been enough for `shrink_seconds`. Work is averaged over
    `window_seconds`.
    """

    busy_share: float = 0.6
    max_wait: float = 2.0
    clear_seconds: float = 60.0
    shrink_seconds: float = 300.0
    window_seconds: float = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleLoad:
    """Load of a role's rings: `serving` ones take turns, `coming` ones are starting.

    `demand` is the number of rings that would be busy all the time; `wait` is how many seconds a new turn would wait.
    """

    serving: int
    coming: int
    demand: float
    wait: float = 0.0


class RoleScaler:
    """Wanted number of rings of one role, at least `least`."""

    def __init__(self, settings: ScalingSettings, least: int) -> None:
        self._settings = settings
        self._least = least
        # (time, rings that the load needed), for the last `shrink_seconds`
        self._wanted: deque[tuple[float, int]] = deque()
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
    """Return the ring that costs least to give up.

    That is the one with the fewest turns; among equals, the one with the least waiting work, then with the least KV.
    """
    return min(
        rings,
        key=lambda ring: (
            ring.num_turns + ring.num_prefilling,
            ring.queue_seconds(now),
            ring.registration.capacity_tokens - ring.free_tokens,
            ring.number,
        ),
    )
