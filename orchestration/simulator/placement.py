"""Which rings a simulated turn goes to: as the router decides, by less than it knows, or by what no router knows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from cp_core.errors import Unavailable
from orchestration.cached_kv import KeptOn
from orchestration.groups import Group
from orchestration.placement import RingPlacer
from orchestration.planner import Planner
from orchestration.simulator.cluster import Cluster
from orchestration.simulator.prefill_ring import SimulatedPrefillRing
from orchestration.wanted_turn import Choice, WantedTurn

MAX_MORE_TURNS = 8
"""Decode rings are compared by their turns alone: fewer more than this are no reason to leave a conversation's KV."""


class PlacementPolicy(Protocol):
    """The router's `RingPlacer` is one."""

    def choose(self, turn: WantedTurn, refused: Collection[Group] = ()) -> Choice:
        """Raises Unavailable where all rings have refused."""
        ...


class RoundRobin:
    """The next ring of each pool, whatever it holds."""

    def __init__(self, cluster: Cluster, planner: Planner) -> None:
        self._groups = {
            "prefill": [ring.group for ring in cluster.prefill.values()],
            "decode": [ring.group for ring in cluster.decode.values()],
        }
        self._next = {"prefill": 0, "decode": 0}
        self._planner = planner

    def choose(self, turn: WantedTurn, refused: Collection[Group] = ()) -> Choice:
        return _choice(self._planner, turn, self._following("prefill", refused), self._following("decode", refused))

    def _following(self, role: str, refused: Collection[Group]) -> Group:
        groups = self._groups[role]
        for _ in groups:
            group = groups[self._next[role] % len(groups)]
            self._next[role] += 1
            if group not in refused:
                return group
        raise Unavailable(f"every {role} ring has refused the turn")


class LeastLoaded:
    """The rings of the shortest queue and of the fewest turns, as far as the router knows, whatever they hold."""

    def __init__(self, cluster: Cluster, planner: Planner) -> None:
        self._registry = cluster.registry
        self._planner = planner

    def choose(self, turn: WantedTurn, refused: Collection[Group] = ()) -> Choice:
        def accepts(group: Group) -> bool:
            return group not in refused and group.free_tokens >= turn.num_tokens

        def is_other(group: Group) -> bool:
            return group not in refused

        prefills = self._registry.least_busy(accepts) or self._registry.least_busy(is_other)
        decode = self._registry.least_loaded(accepts) or self._registry.least_loaded(is_other)
        if not prefills or decode is None:
            raise Unavailable("every ring of a pool has refused the turn")
        return _choice(self._planner, turn, min(prefills, key=lambda group: group.busy_until), decode)


class KvAware:
    """Knows every queue as it is. The prefill ring where waiting and computing end first: the conversation's own, or
    the idlest other. Its own decode ring, unless others have many turns fewer.
    """

    def __init__(self, cluster: Cluster, planner: Planner) -> None:
        self._prefill: Mapping[str, SimulatedPrefillRing] = cluster.prefill
        self._decode = [ring.group for ring in cluster.decode.values()]
        self._planner = planner

    def choose(self, turn: WantedTurn, refused: Collection[Group] = ()) -> Choice:
        decodes = [group for group in self._decode if group not in refused]
        prefills = [ring for ring in self._prefill.values() if ring.group not in refused]
        if not decodes or not prefills:
            raise Unavailable("every ring of a pool has refused the turn")
        decode = min(decodes, key=lambda group: group.num_turns)
        decode = next(
            (own for own in _own(turn, decodes) if own.num_turns <= decode.num_turns + MAX_MORE_TURNS), decode
        )
        idlest = min(prefills, key=lambda ring: (ring.predicted_wait, ring.group.num_turns))
        options = [_choice(self._planner, turn, group, decode) for group in _own(turn, [r.group for r in prefills])]
        options.append(_choice(self._planner, turn, idlest.group, decode))
        return min(options, key=lambda each: self._prefill[each.prefill.name].predicted_wait + each.prefill_seconds)


def _own(turn: WantedTurn, groups: Sequence[Group]) -> list[Group]:
    return [group for group in groups if turn.is_at(group)]


def _choice(planner: Planner, turn: WantedTurn, prefill: Group, decode: Group) -> Choice:
    on_decode = KeptOn(decode.registration, turn.kept_on(decode))
    move, seconds = planner.predict_turn(turn.num_tokens, turn.kept_on(prefill), prefill.registration, on_decode)
    return Choice(prefill=prefill, decode=decode, prefill_seconds=move + seconds)


POLICIES: dict[str, Callable[[Cluster, Planner], PlacementPolicy]] = {
    "router": lambda cluster, planner: RingPlacer(cluster.registry, planner),
    "least_loaded": LeastLoaded,
    "round_robin": RoundRobin,
    "kv_aware": KvAware,
}
