"""How each ring's turns compare with what was predicted for them: a factor for later predictions. Pure Python."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace
from statistics import median

from orchestration.turn import GroupRegistration
from orchestration.views import Correction, GroupStatus
from workers.steps import Algorithm, RingRates

WINDOW = 32
"""Turns that are looked back at."""
LEAST = 5
"""Turns before a factor moves: their median takes no notice of two that are off."""


@dataclass(slots=True)
class _Ring:
    """Ratios and their factors by algorithm, of one incarnation with the rates it measured of itself."""

    incarnation: str
    rates: RingRates
    ratios: dict[Algorithm, deque[float]] = field(
        default_factory=lambda: {name: deque(maxlen=WINDOW) for name in Algorithm}
    )
    factors: dict[Algorithm, float] = field(default_factory=lambda: dict.fromkeys(Algorithm, 1.0))


class RingCorrections:
    """The median of measured over predicted seconds, by ring and algorithm; predictions are taken before correction.

    A median moves only when half of the turns agree: one slow turn, or a third of them, leave it among the others. What
    a ring was before it was rebuilt, or measured itself again, is forgotten.
    """

    def __init__(self) -> None:
        self._rings: dict[str, _Ring] = {}

    def note(self, ring: GroupRegistration, algorithm: Algorithm, *, predicted: float, measured: float) -> None:
        """A turn took `measured` seconds; a time that is none, or that was predicted as none, is left out."""
        if not (0.0 < predicted < math.inf and 0.0 < measured < math.inf):
            return
        known = self._rings.get(ring.name)
        if known is None or not _is_same(known, ring):
            known = self._rings[ring.name] = _Ring(ring.incarnation, ring.rates)
        ratios = known.ratios[algorithm]
        ratios.append(measured / predicted)
        # Asked for far more often than it changes.
        known.factors[algorithm] = median(ratios) if len(ratios) >= LEAST else 1.0

    def factor(self, ring: GroupRegistration, algorithm: Algorithm) -> float:
        """What predictions for this ring are to be multiplied by; 1 while too few turns are known."""
        known = self._rings.get(ring.name)
        if known is None or not _is_same(known, ring):
            return 1.0
        return known.factors[algorithm]

    def of_ring(self, ring: GroupRegistration) -> tuple[Correction, ...]:
        """One for each algorithm that turns were measured with."""
        known = self._rings.get(ring.name)
        if known is None or not _is_same(known, ring):
            return ()
        return tuple(
            Correction(algorithm=name, factor=known.factors[name], num_turns=len(ratios))
            for name, ratios in known.ratios.items()
            if ratios
        )

    def shown_in(self, status: GroupStatus, ring: GroupRegistration) -> GroupStatus:
        """A ring's own status, with what it announced and what was learned of it."""
        return replace(
            status,
            rates=ring.rates,
            capacity_tokens=ring.capacity_tokens,
            chunk_tokens=ring.chunk_tokens,
            corrections=self.of_ring(ring),
        )


def _is_same(known: _Ring, ring: GroupRegistration) -> bool:
    return (known.incarnation, known.rates) == (ring.incarnation, ring.rates)
