"""What a turn asks of the rings, and which it gets. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

from orchestration.placement.kv_locations import KvLocation
from orchestration.placement.registry import RegisteredRing
from orchestration.protocol.turns import RingAlternative
from workers.protocol.prefill_steps import Algorithm


@dataclass(frozen=True, kw_only=True, slots=True)
class WantedTurn:
    """A turn to be placed. The first `match_tokens` tokens of its prompt agree with KV at the conversation's places.

    `algorithm` is the one that it asks for. `refused_direct` names the decode ring that could not compute it after all.
    """

    num_tokens: int
    answer_tokens: int
    match_tokens: int = 0
    prefill: KvLocation | None = None
    decode: KvLocation | None = None
    algorithm: Algorithm | None = None
    refused_direct: str = ""

    @property
    def asks_for_direct(self) -> bool:
        """Whether the turn itself wants its decode ring to compute the prompt."""
        return self.algorithm is Algorithm.DECODE_RING

    def retained_on(self, ring: RegisteredRing) -> int:
        """Tokens whose KV a ring keeps, as far as the router knows; the ring may have evicted them since."""
        place = self._place(ring)
        if place is None or place.ring != ring.name or place.incarnation != ring.registration.incarnation:
            return 0
        return min(self.match_tokens, place.num_tokens)

    def known_on(self, ring: RegisteredRing) -> int:
        """As `retained_on`, whether or not the ring was rebuilt since."""
        place = self._place(ring)
        return 0 if place is None or place.ring != ring.name else min(self.match_tokens, place.num_tokens)

    def is_at(self, ring: RegisteredRing) -> bool:
        place = self._place(ring)
        return place is not None and place.ring == ring.name

    def _place(self, ring: RegisteredRing) -> KvLocation | None:
        return self.prefill if ring.role == "prefill" else self.decode


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The rings of a turn, and why. `reason` and `alternatives` are empty where there was no choice.

    `is_direct`: the decode ring computes the prompt itself, and `prefill` is the ring that would have. `direct` is what
    that was predicted to take, None where it was not possible.
    """

    prefill: RegisteredRing
    decode: RegisteredRing
    prefill_seconds: float
    reason: str = ""
    alternatives: tuple[RingAlternative, ...] = ()
    is_direct: bool = False
    direct: RingAlternative | None = None

    @property
    def computing(self) -> RegisteredRing:
        """The ring that computes the prompt."""
        return self.decode if self.is_direct else self.prefill
