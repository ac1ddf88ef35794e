"""Scaling of a simulated cluster: rings are off while fewer suffice, by the router's own rule or by how busy they are.

Used by `simulation.Simulation`. A ring that is to be switched off takes no turns, ends those that it has, and forgets
its KV. A ring that is switched on again serves after `start_seconds`, and counts as on from the start of that time.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace

from ringserve.orchestration.placement.registry import RegisteredRing
from ringserve.orchestration.placement.scaling import LoadMeter, RoleScaler, ScalingSettings, emptiest
from ringserve.services.offline.simulator.cluster import Cluster
from ringserve.services.offline.simulator.rings import Clock, SimulatedDecodeRing, SimulatedPrefillRing

WAYS = ("none", "load", "busy")
"""none: no ring is switched off. load: by the router's rule. busy: by the share of time in which rings compute, as
Kubernetes' HPA does by the use of CPUs."""
HPA_SECONDS = 15.0
HPA_TOLERANCE = 0.1
HPA_SHRINK_SECONDS = 300.0
"""Defaults of Kubernetes' HorizontalPodAutoscaler."""

SimulatedRing = SimulatedPrefillRing | SimulatedDecodeRing


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingShape:
    """How a simulated cluster scales. `way` is one of WAYS, and each role keeps at least `least` rings.

    A ring takes `start_seconds` to start. In the way `busy`, the goal is that rings compute for the share
    `settings.busy_share` of their time.
    """

    way: str = "none"
    least: int = 1
    start_seconds: float = 90.0
    settings: ScalingSettings = field(default_factory=ScalingSettings)


class _Hpa:
    """Number of replicas as Kubernetes' HPA chooses it by utilisation."""

    def __init__(self, least: int, target: float) -> None:
        self._least = least
        self._target = target
        self._wanted: deque[tuple[float, int]] = deque()

    def wanted(self, current: int, busy: float, most: int, now: float) -> int:
        ratio = busy / self._target
        needed = current if abs(ratio - 1.0) <= HPA_TOLERANCE else math.ceil(current * ratio)
        needed = min(most, max(self._least, needed))
        self._wanted.append((now, needed))
        while self._wanted[0][0] < now - HPA_SHRINK_SECONDS:
            self._wanted.popleft()
        return needed if needed > current else min(current, max(number for _, number in self._wanted))


class _Pool:
    """Rings of one role by their state: serving, starting, draining, and off."""

    def __init__(self, rings: list[SimulatedRing]) -> None:
        self.rings = {ring.entry.name: ring for ring in rings}
        self.serving = set(self.rings)
        self.starting: set[str] = set()
        self.draining: set[str] = set()
        self.ring_seconds = 0.0

    @property
    def num_on(self) -> int:
        return len(self.serving) + len(self.starting) + len(self.draining)


class ClusterScaling:
    """Scaling of a simulated cluster; `look` is called every LOOK_SECONDS."""

    def __init__(self, cluster: Cluster, clock: Clock, shape: ScalingShape) -> None:
        self._cluster = cluster
        self._clock = clock
        self._shape = shape
        self.pools = {"prefill": _Pool([*cluster.prefill.values()]), "decode": _Pool([*cluster.decode.values()])}
        self._meter = LoadMeter(cluster.registry, shape.settings)
        self._scalers = {role: RoleScaler(shape.settings, shape.least) for role in self.pools}
        self._hpas = {role: _Hpa(shape.least, shape.settings.busy_share) for role in self.pools}
        self._busy_before = dict.fromkeys(self.pools, 0.0)
        self._counted_until = self._hpa_at = clock.now

    def count(self) -> None:
        """Count the seconds of the rings that are on."""
        seconds = self._clock.now - self._counted_until
        for pool in self.pools.values():
            pool.ring_seconds += seconds * pool.num_on
        self._counted_until = self._clock.now

    def look(self) -> None:
        """Switch off rings that have drained, then drain or start rings of each role by its way."""
        self.count()
        for pool in self.pools.values():
            for name in [name for name in pool.draining if not pool.rings[name].entry.num_turns]:
                pool.draining.discard(name)
                self._cluster.forget_kv(pool.rings[name])
        if self._shape.way == "load":
            for role, pool in self.pools.items():
                coming = len(pool.starting)
                load = self._meter.prefill(coming) if role == "prefill" else self._meter.decode(coming)
                self._scale(pool, self._scalers[role].wanted(load, len(pool.rings), self._clock.now))
        elif self._shape.way == "busy" and self._clock.now - self._hpa_at >= HPA_SECONDS:
            for role, pool in self.pools.items():
                busy = sum(ring.busy_seconds for ring in pool.rings.values())
                share = (busy - self._busy_before[role]) / (self._clock.now - self._hpa_at) / max(1, len(pool.serving))
                self._busy_before[role] = busy
                current = len(pool.serving) + len(pool.starting)
                self._scale(pool, self._hpas[role].wanted(current, min(share, 1.0), len(pool.rings), self._clock.now))
            self._hpa_at = self._clock.now

    def _scale(self, pool: _Pool, wanted: int) -> None:
        for _ in range(wanted - len(pool.serving) - len(pool.starting)):
            self._start(pool)
        for _ in range(len(pool.serving) - wanted):
            ring = emptiest((pool.rings[name].entry for name in pool.serving), self._clock.now)
            pool.serving.discard(ring.name)
            pool.draining.add(ring.name)
            _set_draining(ring, True)

    def _start(self, pool: _Pool) -> None:
        """Let a ring serve again: at once if it drains, and once it has loaded its model if it is off."""
        if pool.draining:
            name = min(pool.draining)
            pool.draining.discard(name)
            pool.serving.add(name)
            _set_draining(pool.rings[name].entry, False)
            return
        off = sorted(pool.rings.keys() - pool.serving - pool.starting)
        if not off:
            return
        pool.starting.add(off[0])

        def serve() -> None:
            self.count()
            pool.starting.discard(off[0])
            pool.serving.add(off[0])
            _set_draining(pool.rings[off[0]].entry, False)

        self._clock.after(self._shape.start_seconds, serve)


def _set_draining(ring: RegisteredRing, is_draining: bool) -> None:
    ring.registration = replace(ring.registration, is_draining=is_draining)
