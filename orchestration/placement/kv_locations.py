"""Locations of a conversation's KV, one frozen map for each state, numbered by epochs; and a turn's use of them.

    epoch 0: nowhere  --a turn, a fork, a move, a turn that failed-->  epoch 1  -->  epoch 2  --> ...

A change makes the next map from the one before, so that readers see all of a change or nothing of it. The map says
where KV was put. Rings may have evicted it since; a ring that was rebuilt has another incarnation and no KV at all.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from ringserve.cp_core.layout.shards import ShardMap
from ringserve.orchestration.placement.registry import RegisteredRing
from ringserve.orchestration.protocol.plans import RingAlternative
from ringserve.workers.protocol.steps import Algorithm


@dataclass(frozen=True, kw_only=True, slots=True)
class KvLocation:
    """Location of the KV of tokens [0, num_tokens): one incarnation of one ring, since `epoch` of the map.

    `shards` lay the tokens over the ring's ranks, however many it has.
    """

    ring: str
    incarnation: str
    shards: ShardMap
    epoch: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV is there."""
        return self.shards.num_tokens

    def cut(self, num_tokens: int) -> KvLocation:
        """Return the location of at most so many tokens."""
        return self if num_tokens >= self.num_tokens else replace(self, shards=self.shards.truncate(num_tokens))


@dataclass(frozen=True, kw_only=True, slots=True)
class KvLocations:
    """Map of a conversation's KV between turns: at most one ring of each role. `epoch` grows with every change."""

    epoch: int = 0
    prefill: KvLocation | None = None
    decode: KvLocation | None = None

    def at(self, role: str) -> KvLocation | None:
        """Return the location on the ring of a role."""
        return self.prefill if role == "prefill" else self.decode

    def items(self) -> Iterator[tuple[str, KvLocation]]:
        """Return role and location of each that exists."""
        for role in ("prefill", "decode"):
            if (place := self.at(role)) is not None:
                yield role, place

    def put(self, role: str, place: KvLocation | None) -> KvLocations:
        """Return the next map, with the KV of one role elsewhere; None means nowhere."""
        if role == "prefill":
            return self.changed(prefill=place, decode=self.decode)
        return self.changed(prefill=self.prefill, decode=place)

    def changed(self, *, prefill: KvLocation | None, decode: KvLocation | None) -> KvLocations:
        """Return the next map. A location that stays as it was keeps its epoch."""
        epoch = self.epoch + 1
        return KvLocations(
            epoch=epoch, prefill=_since(epoch, self.prefill, prefill), decode=_since(epoch, self.decode, decode)
        )


def _since(epoch: int, before: KvLocation | None, place: KvLocation | None) -> KvLocation | None:
    return place if place is None or place == before else replace(place, epoch=epoch)


def spare_role(kv_id: str) -> str:
    """Return the role whose rings evict a sequence first that rings of both roles retain: half of them for each."""
    return ("prefill", "decode")[zlib.crc32(kv_id.encode()) % 2]


@dataclass(frozen=True, kw_only=True, slots=True)
class WantedTurn:
    """Turn to be placed. The first `match_tokens` tokens of its prompt agree with KV at the conversation's locations.

    If the conversation retains nothing, it shares KV that other histories retain: `shared` has their ids by role.
    `algorithm` is the wanted one. `refused_direct` names the decode ring that could not compute it after all.
    Turns of one `cache_key` prefer the same rings.
    """

    num_tokens: int
    answer_tokens: int
    match_tokens: int = 0
    prefill: KvLocation | None = None
    decode: KvLocation | None = None
    algorithm: Algorithm | None = None
    refused_direct: str = ""
    shared: Mapping[str, str] = field(default_factory=dict)
    cache_key: str = ""

    @property
    def asks_for_direct(self) -> bool:
        """True if the turn asks for its decode ring to compute the prompt."""
        return self.algorithm is Algorithm.DECODE_RING

    def retained_on(self, ring: RegisteredRing) -> int:
        """Return how many matching tokens a ring retains, as far as the router knows.

        The ring may have evicted them since.
        """
        place = self._place(ring)
        if place is None or place.ring != ring.name or place.incarnation != ring.registration.incarnation:
            return 0
        return min(self.match_tokens, place.num_tokens)

    def known_on(self, ring: RegisteredRing) -> int:
        """Return as `retained_on`, whether or not the ring was rebuilt since."""
        place = self._place(ring)
        return 0 if place is None or place.ring != ring.name else min(self.match_tokens, place.num_tokens)

    def shares_on(self, ring: RegisteredRing) -> str:
        """Return the id of the sequence whose KV it would share on a ring; empty if it shares none."""
        return self.shared.get(ring.role, "") if self.is_at(ring) else ""

    def is_at(self, ring: RegisteredRing) -> bool:
        """Return whether a ring is the conversation's own."""
        place = self._place(ring)
        return place is not None and place.ring == ring.name

    def _place(self, ring: RegisteredRing) -> KvLocation | None:
        return self.prefill if ring.role == "prefill" else self.decode


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Rings of a turn. `alternatives` has the compared rings, and is empty if there was no choice.

    `remarks` says why the choice is an exception, in a sentence each.

    The prompt is computed in `prefill_seconds`, after `wait_seconds`. `is_direct`: the decode ring computes it itself,
    and `prefill` is the ring that would have. `direct` is the prediction for that way, None if it was not possible.
    """

    prefill: RegisteredRing
    decode: RegisteredRing
    prefill_seconds: float
    wait_seconds: float = 0.0
    remarks: tuple[str, ...] = ()
    alternatives: tuple[RingAlternative, ...] = ()
    is_direct: bool = False
    direct: RingAlternative | None = None

    @property
    def computing(self) -> RegisteredRing:
        """Ring that computes the prompt."""
        return self.decode if self.is_direct else self.prefill
