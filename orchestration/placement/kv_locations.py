"""Locations of a conversation's KV. Also the turn to be placed, and the rings chosen for it.

The locations are a frozen map, replaced by a new one with the next epoch at each change:

    epoch 0: nowhere  --a turn, a fork, a move, a turn that failed-->  epoch 1  -->  epoch 2  --> ...

So readers see all of a change or nothing of it. The store and the router keep these maps. The map says where KV was
put. Rings may have evicted it since; a ring that was rebuilt has another incarnation and no KV at all.
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

    `shards` says which of the ring's ranks has which tokens, for any number of ranks.
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
        """Yield the role and location of each location that is not None."""
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
    """Return the role whose rings should evict a sequence first, if rings of both roles retain it.

    Each role gets half of the sequences.
    """
    return ("prefill", "decode")[zlib.crc32(kv_id.encode()) % 2]


@dataclass(frozen=True, kw_only=True, slots=True)
class WantedTurn:
    """Turn to be placed. The first `match_tokens` tokens of its prompt agree with KV at the conversation's locations.

    If the conversation has no KV, `prefill` and `decode` may be places of other histories' KV, which the turn shares;
    then `shared` has the ids of these histories, by role. `algorithm` is the one asked for, if any. `refused_direct` is
    the name of a decode ring that was to compute the prompt itself and then could not. Turns of one `cache_key` prefer
    the same rings.
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
        """Return what `retained_on` does, but also if the ring was rebuilt since."""
        place = self._place(ring)
        return 0 if place is None or place.ring != ring.name else min(self.match_tokens, place.num_tokens)

    def shares_on(self, ring: RegisteredRing) -> str:
        """Return the id of the sequence whose KV it would share on a ring; empty if it shares none."""
        return self.shared.get(ring.role, "") if self.has_kv_on(ring) else ""

    def has_kv_on(self, ring: RegisteredRing) -> bool:
        """Return whether a ring has KV that the turn would use, of its conversation or shared, by the map."""
        place = self._place(ring)
        return place is not None and place.ring == ring.name

    def _place(self, ring: RegisteredRing) -> KvLocation | None:
        return self.prefill if ring.role == "prefill" else self.decode


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Rings of a turn. `alternatives` has the compared rings, and is empty if there was no choice.

    `remarks` says why the choice is an exception, in a sentence each.

    The prompt is computed in `prefill_seconds`, after `wait_seconds`. `is_direct`: the decode ring computes the prompt
    itself, and `prefill` is the ring that would compute it otherwise. `direct` is the prediction for the decode ring,
    None if it could not compute the prompt.
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
