"""Which rings a simulated turn goes to: as the router decides, in turn, or with what no router knows: every queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cp_core.layout import spread
from orchestration.groups import GroupRegistry
from orchestration.placement import RingPlacer
from orchestration.placement_map import Placement
from orchestration.planner import Planner
from orchestration.simulator.decode_ring import SimulatedDecodeRing
from orchestration.simulator.prefill_ring import SimulatedPrefillRing
from orchestration.wanted_turn import WantedTurn

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
    """Where a conversation's last turn ran; None before its first. Tokens are those that it left there."""

    prefill: SimulatedPrefillRing | None = None
    decode: SimulatedDecodeRing | None = None
    prefill_tokens: int = 0
    decode_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedTurn:
    """A turn to be placed: `history_tokens` of its prompt are the conversation's so far."""

    prompt_tokens: int
    history_tokens: int
    output_tokens: int
    where: Whereabouts


Chosen = tuple[SimulatedPrefillRing, SimulatedDecodeRing]
PredictSeconds = Callable[[SimulatedPrefillRing, SimulatedDecodeRing], float]


class PlacementPolicy(Protocol):
    """`predict` gives the planned prefill seconds of the turn at hand on a pair of rings."""

    def choose(self, turn: AskedTurn, predict: PredictSeconds) -> Chosen: ...


class RouterPlacement:
    """The router's own: it knows of the rings what they announce, and of conversations where it has put them."""

    def __init__(self, rings: Rings, planner: Planner) -> None:
        self._placer = RingPlacer(rings.registry, planner)
        self._prefill = {ring.group.name: ring for ring in rings.prefill}
        self._decode = {ring.group.name: ring for ring in rings.decode}

    def choose(self, turn: AskedTurn, predict: PredictSeconds) -> Chosen:
        where = turn.where
        wanted = WantedTurn(
            num_tokens=turn.prompt_tokens,
            answer_tokens=turn.output_tokens,
            match_tokens=min(turn.history_tokens, turn.prompt_tokens - 1),
            prefill=_placement(where.prefill, where.prefill_tokens),
            decode=_placement(where.decode, where.decode_tokens),
        )
        choice = self._placer.choose(wanted)
        return self._prefill[choice.prefill.name], self._decode[choice.decode.name]


class RoundRobin:
    """The next ring of each pool, whatever it holds."""

    def __init__(self, rings: Rings, planner: Planner) -> None:
        self._rings = rings
        self._next = 0

    def choose(self, turn: AskedTurn, predict: PredictSeconds) -> Chosen:
        self._next += 1
        prefill, decode = self._rings.prefill, self._rings.decode
        return prefill[self._next % len(prefill)], decode[self._next % len(decode)]


class KvAware:
    """Knows every queue and all kept KV as they are. The prefill ring where waiting and computing end first: that which
    holds the conversation, or the idlest other. The decode ring that holds it, unless others have many turns fewer.
    """

    def __init__(self, rings: Rings, planner: Planner) -> None:
        self._rings = rings

    def choose(self, turn: AskedTurn, predict: PredictSeconds) -> Chosen:
        where = turn.where
        idlest = min(self._rings.decode, key=lambda ring: ring.group.num_turns)
        holds = where.decode
        decode = holds if holds and holds.group.num_turns <= idlest.group.num_turns + MAX_MORE_TURNS else idlest
        quickest = min(self._rings.prefill, key=lambda ring: (ring.predicted_wait, ring.group.num_turns))
        candidates = [quickest] if where.prefill in (None, quickest) else [where.prefill, quickest]
        prefill = min(
            (ring for ring in candidates if ring), key=lambda ring: ring.predicted_wait + predict(ring, decode)
        )
        return prefill, decode


POLICIES: dict[str, Callable[[Rings, Planner], PlacementPolicy]] = {
    "router": RouterPlacement,
    "round_robin": RoundRobin,
    "kv_aware": KvAware,
}


def _placement(ring: SimulatedPrefillRing | SimulatedDecodeRing | None, num_tokens: int) -> Placement | None:
    if ring is None:
        return None
    registration = ring.group.registration
    return Placement(
        group=registration.name,
        incarnation=registration.incarnation,
        shards=spread(0, num_tokens, (0,) * registration.num_ranks),
    )
