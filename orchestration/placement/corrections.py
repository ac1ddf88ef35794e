"""How each ring's turns compare with what was predicted for them: a factor for later predictions. Pure Python.

What the model leaves out, as the time in which a step is set going, weighs more the shorter a turn is. So turns are
compared with those of like work only: what short ones take on a small ring must say nothing of long ones, nor of
another ring that is only given long ones.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from cp_core.cost.model import RingRates
from orchestration.protocol.turns import RingRegistration
from orchestration.protocol.views import Correction, RingStatus
from workers.protocol.prefill_steps import Algorithm

WINDOW = 32
"""Turns of a kind that are looked back at."""
LEAST = 5
"""Turns before a factor moves: their median takes no notice of two that are off."""
LIKE = 4
"""Turns are of like work where the next lower power of this is the same: 1 to 4 work units, 4 to 16, and so on."""

Kind = tuple[Algorithm, int]
"""What a factor is of: an algorithm, and the power of LIKE next below the turn's work."""


@dataclass(slots=True)
class _Ratios:
    """Measured over predicted seconds of the latest turns; `factor` is asked for more often than they change."""

    latest: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    factor: float = 1.0

    def note(self, ratio: float) -> None:
        self.latest.append(ratio)
        if self.is_known:
            self.factor = median(self.latest)

    @property
    def is_known(self) -> bool:
        return len(self.latest) >= LEAST


@dataclass(slots=True)
class _Ring:
    """Of one incarnation with the rates it measured of itself."""

    incarnation: str
    rates: RingRates
    ratios: dict[Kind, _Ratios] = field(default_factory=dict)

    def is_same(self, ring: RingRegistration) -> bool:
        return (self.incarnation, self.rates) == (ring.incarnation, ring.rates)


class RingCorrections:
    """The median of measured over predicted seconds, by ring, algorithm and like work; predictions are taken before
    correction.

    A median moves only when half of the turns agree: one slow turn, or a third of them, leave it among the others. What
    a ring was before it was rebuilt, or measured itself again, is forgotten. A ring that has had too few turns of a
    kind is taken to be as all rings together: what the model leaves out, it leaves out for each of them.
    """

    def __init__(self) -> None:
        self._rings: dict[str, _Ring] = {}
        self._all: dict[Kind, _Ratios] = {}

    def note(
        self, ring: RingRegistration, algorithm: Algorithm, work: float, *, predicted: float, measured: float
    ) -> None:
        """A turn of `work` work units took `measured` seconds; a time that is none, or that was predicted as none, is
        left out.
        """
        if not (0.0 < predicted < math.inf and 0.0 < measured < math.inf):
            return
        known = self._rings.get(ring.name)
        if known is None or not known.is_same(ring):
            known = self._rings[ring.name] = _Ring(ring.incarnation, ring.rates)
        kind = _kind_of(algorithm, work)
        for ratios in (known.ratios, self._all):
            ratios.setdefault(kind, _Ratios()).note(measured / predicted)

    def factor(self, ring: RingRegistration, algorithm: Algorithm, work: float) -> float:
        """What predictions for turns of so many work units are to be multiplied by; 1 while too few are known."""
        kind = _kind_of(algorithm, work)
        known = self._rings.get(ring.name)
        own = known.ratios.get(kind) if known is not None and known.is_same(ring) else None
        if own is not None and own.is_known:
            return own.factor
        among_all = self._all.get(kind)
        return among_all.factor if among_all is not None else 1.0

    def of_ring(self, ring: RingRegistration) -> Sequence[Correction]:
        """One for each kind of turns that were measured, those of the least work first."""
        known = self._rings.get(ring.name)
        if known is None or not known.is_same(ring):
            return ()
        return tuple(
            Correction(
                algorithm=algorithm,
                min_work=LIKE**power,
                factor=self.factor(ring, algorithm, LIKE**power),
                num_turns=len(ratios.latest),
            )
            for (algorithm, power), ratios in sorted(known.ratios.items(), key=lambda item: (item[0][1], item[0][0]))
        )

    def shown_in(self, status: RingStatus, ring: RingRegistration) -> RingStatus:
        """A ring's own status, with what it announced and what was learned of it."""
        return replace(
            status,
            rates=ring.rates,
            capacity_tokens=ring.capacity_tokens,
            chunk_tokens=ring.chunk_tokens,
            corrections=tuple(self.of_ring(ring)),
        )


def _kind_of(algorithm: Algorithm, work: float) -> Kind:
    # A power of two a time, as the exponent tells them: 4 ** power <= work < 4 ** (power + 1).
    return algorithm, max(0, math.frexp(work)[1] - 1) // 2
