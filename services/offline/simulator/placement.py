"""Placement policies of simulated turns: the router's own, two that ignore KV, and one with exact queues.

The simulation runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from ringserve.cp_core.errors import Unavailable
from ringserve.orchestration.placement.kv_locations import Choice, WantedTurn
from ringserve.orchestration.placement.placer import RingPlacer
from ringserve.orchestration.placement.planner import Planner, RetainedPrefix
from ringserve.orchestration.placement.registry import RegisteredRing
from ringserve.services.offline.simulator.cluster import Cluster
from ringserve.services.offline.simulator.rings import SimulatedPrefillRing

MAX_MORE_TURNS = 8
"""Most turns by which a decode ring with the conversation's KV may exceed the emptiest one and still be chosen."""


class PlacementPolicy(Protocol):
    """Policy that chooses rings; the router's `RingPlacer` is one."""

    def choose(self, turn: WantedTurn, refused: Collection[RegisteredRing] = ()) -> Choice:
        """Choose the rings of a turn. Raises Unavailable if all rings have refused."""
        ...


class RoundRobin:
    """Policy that takes the next ring of each pool, regardless of its KV."""

    def __init__(self, cluster: Cluster, planner: Planner) -> None:
        self._rings = {
            "prefill": [ring.entry for ring in cluster.prefill.values()],
            "decode": [ring.entry for ring in cluster.decode.values()],
        }
        self._next = {"prefill": 0, "decode": 0}
        self._planner = planner

    def choose(self, turn: WantedTurn, refused: Collection[RegisteredRing] = ()) -> Choice:
        return _choice(self._planner, turn, self._following("prefill", refused), self._following("decode", refused))

    def _following(self, role: str, refused: Collection[RegisteredRing]) -> RegisteredRing:
        rings = self._rings[role]
        for _ in rings:
            ring = rings[self._next[role] % len(rings)]
            self._next[role] += 1
            if ring not in refused:
                return ring
        raise Unavailable(f"every {role} ring has refused the turn")


class LeastLoaded:
    """Policy that takes the prefill ring with the shortest queue and the decode ring with the fewest turns."""

    def __init__(self, cluster: Cluster, planner: Planner) -> None:
        self._registry = cluster.registry
        self._planner = planner

    def choose(self, turn: WantedTurn, refused: Collection[RegisteredRing] = ()) -> Choice:
        def accepts(ring: RegisteredRing) -> bool:
            return ring not in refused and ring.free_tokens >= turn.num_tokens

        def has_not_refused(ring: RegisteredRing) -> bool:
            return ring not in refused

        prefills = self._registry.least_busy(accepts) or self._registry.least_busy(has_not_refused)
        decode = self._registry.least_loaded(accepts) or self._registry.least_loaded(has_not_refused)
        if not prefills or decode is None:
            raise Unavailable("every ring of a pool has refused the turn")
        return _choice(self._planner, turn, min(prefills, key=lambda ring: ring.busy_until), decode)


class KvAware:
    """Policy that knows every queue exactly.

    It takes the prefill ring with the earliest end of the prefill: the conversation's own or the idlest other ring.
    It takes the conversation's own decode ring unless another ring has far fewer turns.
    """

    def __init__(self, cluster: Cluster, planner: Planner) -> None:
        self._prefill: Mapping[str, SimulatedPrefillRing] = cluster.prefill
        self._decode = [ring.entry for ring in cluster.decode.values()]
        self._planner = planner

    def choose(self, turn: WantedTurn, refused: Collection[RegisteredRing] = ()) -> Choice:
        decodes = [ring for ring in self._decode if ring not in refused]
        prefills = [ring for ring in self._prefill.values() if ring.entry not in refused]
        if not decodes or not prefills:
            raise Unavailable("every ring of a pool has refused the turn")
        decode = min(decodes, key=lambda ring: ring.num_turns)
        decode = next(
            (own for own in _own(turn, decodes) if own.num_turns <= decode.num_turns + MAX_MORE_TURNS), decode
        )
        idlest = min(prefills, key=lambda ring: (ring.predicted_wait, ring.entry.num_turns))
        options = [_choice(self._planner, turn, ring, decode) for ring in _own(turn, [r.entry for r in prefills])]
        options.append(_choice(self._planner, turn, idlest.entry, decode))
        return min(options, key=lambda each: self._prefill[each.prefill.name].predicted_wait + each.prefill_seconds)


def _own(turn: WantedTurn, rings: Sequence[RegisteredRing]) -> list[RegisteredRing]:
    return [ring for ring in rings if turn.has_kv_on(ring)]


def _choice(planner: Planner, turn: WantedTurn, prefill: RegisteredRing, decode: RegisteredRing) -> Choice:
    on_decode = RetainedPrefix(decode.registration, turn.retained_on(decode))
    move, seconds = planner.predict_turn(turn.num_tokens, turn.retained_on(prefill), prefill.registration, on_decode)
    return Choice(prefill=prefill, decode=decode, prefill_seconds=move + seconds)


ROUTER = "router"
POLICIES: dict[str, Callable[[Cluster, Planner], PlacementPolicy]] = {
    ROUTER: lambda cluster, planner: RingPlacer(cluster.registry, planner),
    "least_loaded": LeastLoaded,
    "round_robin": RoundRobin,
    "kv_aware": KvAware,
}
