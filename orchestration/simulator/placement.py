"""Which rings a simulated turn goes to: as the router decides today, in turn, or by what each would take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cp_core.layout import ShardMap
from orchestration.conversations import Placement
from orchestration.groups import GroupRegistry
from orchestration.simulator.decode_ring import SimulatedDecodeRing
from orchestration.simulator.prefill_ring import SimulatedPrefillRing

# Decode rings are compared by their turns alone: nearer ones than this are no reason to leave a conversation's KV.
MAX_MORE_TURNS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Rings:
    """All rings of a simulated cluster, by pool; `registry` is the router's own, which knows them all."""

    registry: GroupRegistry
    prefill: Sequence[SimulatedPrefillRing]
    decode: Sequence[SimulatedDecodeRing]


@dataclass(slots=True, eq=False)
class Whereabouts:
    """Where a conversation's last turn ran; None before its first."""

    prefill: SimulatedPrefillRing | None = None
    decode: SimulatedDecodeRing | None = None


Chosen = tuple[SimulatedPrefillRing, SimulatedDecodeRing]
PredictSeconds = Callable[[SimulatedPrefillRing, SimulatedDecodeRing], float]


class PlacementPolicy(Protocol):
    """`predict` gives the planned prefill seconds of the turn at hand on a pair of rings."""

    def choose(self, where: Whereabouts, predict: PredictSeconds) -> Chosen: ...


class RouterPlacement:
    """The router's own registry: the rings that hold the conversation, else those with the fewest turns."""

    def __init__(self, rings: Rings) -> None:
        self._registry = rings.registry
        self._prefill = {ring.group.name: ring for ring in rings.prefill}
        self._decode = {ring.group.name: ring for ring in rings.decode}

    def choose(self, where: Whereabouts, predict: PredictSeconds) -> Chosen:
        prefill = self._registry.choose("prefill", _placement(where.prefill))
        decode = self._registry.choose("decode", _placement(where.decode))
        return self._prefill[prefill.name], self._decode[decode.name]


class RoundRobin:
    """The next ring of each pool, whatever it holds."""

    def __init__(self, rings: Rings) -> None:
        self._rings = rings
        self._next = 0

    def choose(self, where: Whereabouts, predict: PredictSeconds) -> Chosen:
        self._next += 1
        prefill, decode = self._rings.prefill, self._rings.decode
        return prefill[self._next % len(prefill)], decode[self._next % len(decode)]


class KvAware:
    """The prefill ring where waiting and computing end first: that which holds the conversation, or the idlest other.
    The decode ring that holds it, unless others have many turns fewer.
    """

    def __init__(self, rings: Rings) -> None:
        self._rings = rings

    def choose(self, where: Whereabouts, predict: PredictSeconds) -> Chosen:
        idlest = min(self._rings.decode, key=lambda ring: ring.group.num_turns)
        holds = where.decode
        decode = holds if holds and holds.group.num_turns <= idlest.group.num_turns + MAX_MORE_TURNS else idlest
        quickest = min(self._rings.prefill, key=lambda ring: (ring.predicted_wait, ring.group.num_turns))
        candidates = [quickest] if where.prefill in (None, quickest) else [where.prefill, quickest]
        prefill = min(
            (ring for ring in candidates if ring), key=lambda ring: ring.predicted_wait + predict(ring, decode)
        )
        return prefill, decode


POLICIES: dict[str, Callable[[Rings], PlacementPolicy]] = {
    "router": RouterPlacement,
    "round_robin": RoundRobin,
    "kv_aware": KvAware,
}


def _placement(ring: SimulatedPrefillRing | SimulatedDecodeRing | None) -> Placement | None:
    if ring is None:
        return None
    registration = ring.group.registration
    return Placement(
        group=registration.name,
        incarnation=registration.incarnation,
        shards=ShardMap.empty(registration.num_ranks),
    )
