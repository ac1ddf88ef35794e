"""Predicted times of prefills on a ring, by a hardware profile or the ring's own rates, and their corrections.

Corrections compare measured turns with predictions. What the model leaves out, such as the start of a step, weighs more
the shorter a turn is. So a turn is compared with turns of like work only: short turns on a small ring say nothing about
long ones, nor about a ring that gets long ones only.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import NamedTuple

from ringserve.cp_core.cost.model import ModelShape, PrefillRates
from ringserve.cp_core.cost.prefill import sum_seconds
from ringserve.cp_core.cost.profile import HardwareProfile
from ringserve.cp_core.cost.sparse import sparse_seconds
from ringserve.cp_core.cost.steps import StepPredictor
from ringserve.cp_core.layout.sparsity import Sparsity
from ringserve.orchestration.protocol.turns import RingRegistration
from ringserve.views import Correction, RingInfo, RingRates
from ringserve.workers.model.info import tensor_share
from ringserve.workers.protocol.ranks import ModelInfo
from ringserve.workers.protocol.steps import Algorithm

MAX_KNOWN = 4096
"""Kinds of rings whose predictors are cached. Each new measurement of a ring's rates makes another kind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kind:
    """Rings that are alike in everything that a step's time depends on.

    For the sums over a rank's tensor parallel processes it has the seconds of each of the rank's tokens, and the
    seconds in which a step's messages start.
    """

    rates: PrefillRates
    predictor: StepPredictor
    sum_seconds_a_token: float
    sum_start_seconds: float


class StepSeconds(NamedTuple):
    """Seconds of a step by algorithm, and of its sums over tensor parallel processes, which are the same in all."""

    of: Mapping[str, float]
    sums: float

    def by(self, algorithm: Algorithm) -> float:
        """Return the seconds of the whole step. A decode ring computes a prompt by pass-Q."""
        return self.of[Algorithm.PASS_Q if algorithm is Algorithm.DECODE_RING else algorithm] + self.sums

    @property
    def fastest(self) -> Algorithm:
        """Algorithm that takes least."""
        return Algorithm(min(self.of, key=self.of.__getitem__))


_OfRanks = RingRates | tuple[tuple[float, ...], tuple[float, ...]]
"""Part of a kind's key: a ring's own rates, or beside a profile the speeds and the lateness of its ranks."""


class RingCosts:
    """Costs of prefills of one model. `profile` stands for every ring; without it each ring's registered rates do."""

    def __init__(self, model: ModelInfo, *, profile: HardwareProfile | None = None) -> None:
        self._model = model
        self._shape = model.shape
        self._profile = profile
        self._shapes: dict[int, ModelShape] = {}
        self._kinds: dict[tuple[_OfRanks, int, int, bool], _Kind] = {}
        self._of_ring: dict[str, tuple[RingRates, int, int, _Kind]] = {}  # by name: rates hash slowly

    def rates(self, ring: RingRegistration, *, is_cached: bool) -> PrefillRates:
        """Return the rates of one rank in a step, after cached tokens or without."""
        return self._kind(ring, is_cached).rates

    def shape(self, ring: RingRegistration) -> ModelShape:
        """Return the shape of the model's share that one tensor parallel process computes."""
        if ring.tp not in self._shapes:
            self._shapes[ring.tp] = tensor_share(self._model, ring.tp).shape
        return self._shapes[ring.tp]

    def seconds(self, ring: RingRegistration, new_tokens: int, cached_tokens: int) -> StepSeconds:
        """Return the seconds of one step by each algorithm: T new tokens after P cached ones."""
        kind = self._kind(ring, cached_tokens > 0)
        sums = kind.sum_start_seconds + -(-new_tokens // ring.num_ranks) * kind.sum_seconds_a_token
        return StepSeconds(kind.predictor.seconds(new_tokens, cached_tokens), sums)

    def direct_seconds(self, ring: RingRegistration, new_tokens: int, cached_tokens: int) -> float:
        """Return the seconds of one step by pass-Q alone, by which decode rings compute prompts."""
        kind = self._kind(ring, cached_tokens > 0)
        sums = kind.sum_start_seconds + -(-new_tokens // ring.num_ranks) * kind.sum_seconds_a_token
        return kind.predictor.cost(Algorithm.PASS_Q, new_tokens, cached_tokens).total_seconds + sums

    def sparse_seconds(self, ring: RingRegistration, sparsity: Sparsity, new_tokens: int, cached_tokens: int) -> float:
        """Return the seconds of one step by pass-KV with a sparsity."""
        kind = self._kind(ring, cached_tokens > 0)
        sums = kind.sum_start_seconds + -(-new_tokens // ring.num_ranks) * kind.sum_seconds_a_token
        return sums + sparse_seconds(self.shape(ring), kind.rates, ring.num_ranks, sparsity, new_tokens, cached_tokens)

    def pull_seconds(self, ring: RingRegistration, num_bytes: float) -> float:
        """Return the seconds in which KV comes from a decode ring, `num_bytes` over each link."""
        if self._profile is not None and num_bytes:
            return ring.rates.link_latency_seconds + num_bytes / self._profile.kv_link_bytes_per_second
        return self.rates(ring, is_cached=False).message_seconds(num_bytes)

    def _kind(self, ring: RingRegistration, is_cached: bool) -> _Kind:
        # A profile stands for all rings of a size whose ranks are alike. Without one, cached tokens change nothing.
        if self._profile is not None:
            ranks = ring.rates.speeds, ring.rates.lateness
            return self._known((ranks, ring.num_ranks, ring.tp, is_cached), ring)
        known = self._of_ring.get(ring.name)
        if known is not None and known[0] is ring.rates and known[1] == ring.num_ranks and known[2] == ring.tp:
            return known[3]
        if len(self._of_ring) >= MAX_KNOWN:
            self._of_ring.clear()
        kind = self._known((ring.rates, ring.num_ranks, ring.tp, False), ring)
        self._of_ring[ring.name] = ring.rates, ring.num_ranks, ring.tp, kind
        return kind

    def _known(self, key: tuple[_OfRanks, int, int, bool], ring: RingRegistration) -> _Kind:
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) >= MAX_KNOWN:
                self._kinds.clear()
            kind = self._kinds[key] = self._made(ring, is_cached=key[3])
        return kind

    def _made(self, ring: RingRegistration, is_cached: bool) -> _Kind:
        rates = self._given(ring, is_cached)
        seconds_a_token = start = 0.0
        if ring.tp > 1 and self._profile is not None:
            seconds_a_token = sum_seconds(self._shape, self._profile, ring.tp, 1)
        elif ring.tp > 1:
            # Of the embedding, and after each attention and MLP; taken to pass links like the ring's.
            num_sums = 1 + 2 * self._model.num_layers
            num_bytes = 2 * (ring.tp - 1) / ring.tp * self._model.hidden_size * self._model.element_bytes
            seconds_a_token = num_sums * num_bytes / rates.ring.link_bytes_per_second
            # A step that was measured has its sums' messages in it.
            start = 0.0 if rates.ring.step_seconds else num_sums * rates.ring.link_latency_seconds
        return _Kind(
            rates=rates,
            predictor=StepPredictor(self.shape(ring), rates, ring.num_ranks),
            sum_seconds_a_token=seconds_a_token,
            sum_start_seconds=start,
        )

    def _given(self, ring: RingRegistration, is_cached: bool) -> PrefillRates:
        """Return the rates of the profile, or without one of the ring itself."""
        if self._profile is None:
            return PrefillRates(ring=ring.rates)
        found = self._profile.prefill.rates(ring.num_ranks, is_cached=is_cached)
        return replace(found, ring=replace(found.ring, speeds=ring.rates.speeds, lateness=ring.rates.lateness))


WINDOW = 32
"""Turns of a kind that a factor is computed from."""
LEAST = 5
"""Turns before a factor changes: the median of five ignores two outliers."""
LIKE = 4
"""Base of the classes of like work: 1 to 4 work units, 4 to 16, and so on."""

Kind = tuple[Algorithm, int, bool | None]
"""Key of a factor: an algorithm, the power of LIKE next below the turn's work, and whether cached tokens precede it.

None stands for turns of both kinds."""


@dataclass(slots=True)
class _Ratios:
    """Measured over predicted seconds of the latest turns.

    `factor` is cached: it is read more often than they change.
    """

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
    """Ratios of one incarnation of a ring, with the rates that it measured."""

    incarnation: str
    rates: RingRates
    ratios: dict[Kind, _Ratios] = field(default_factory=dict)

    def is_same(self, ring: RingRegistration) -> bool:
        return (self.incarnation, self.rates) == (ring.incarnation, ring.rates)


class RingCorrections:
    """Median of measured over predicted seconds, by ring, algorithm and like work; predictions are uncorrected ones.

    A median changes only when half of the turns agree: one slow turn, or a third of them, do not count. Ratios from
    before a ring was rebuilt, or measured itself again, are forgotten. A ring with too few turns of a kind takes the
    factor of all rings together, since the model leaves out the same for each of them.

    Turns after cached tokens also have factors of their own, and so have turns without any: a plan predicts with them
    how long a ring is busy. Rings are compared by the factor of both: else what a step after cached tokens takes in
    addition would speak against every cache (docs/decisions/0026).
    """

    def __init__(self) -> None:
        self._rings: dict[str, _Ring] = {}
        self._all: dict[Kind, _Ratios] = {}

    def note(
        self,
        ring: RingRegistration,
        algorithm: Algorithm,
        work: float,
        *,
        predicted: float,
        measured: float,
        is_cached: bool = False,
    ) -> None:
        """Enter that a turn of `work` work units took `measured` seconds.

        Times that are not positive and finite are ignored.
        """
        if not (0.0 < predicted < math.inf and 0.0 < measured < math.inf):
            return
        known = self._rings.get(ring.name)
        if known is None or not known.is_same(ring):
            known = self._rings[ring.name] = _Ring(ring.incarnation, ring.rates)
        for kind in (_kind_of(algorithm, work), _kind_of(algorithm, work, is_cached)):
            for ratios in (known.ratios, self._all):
                ratios.setdefault(kind, _Ratios()).note(measured / predicted)

    def factor(
        self, ring: RingRegistration, algorithm: Algorithm, work: float, *, is_cached: bool | None = None
    ) -> float:
        """Return the factor for predictions of turns of so many work units; 1 while too few turns are known.

        If `is_cached` is given, only turns with (True) or without cached tokens (False) count, if enough are known.
        """
        kind = _kind_of(algorithm, work, is_cached)
        known = self._rings.get(ring.name)
        own = known.ratios.get(kind) if known is not None and known.is_same(ring) else None
        if own is not None and own.is_known:
            return own.factor
        among_all = self._all.get(kind)
        if is_cached is not None and (among_all is None or not among_all.is_known):
            return self.factor(ring, algorithm, work)
        return among_all.factor if among_all is not None else 1.0

    def of_ring(self, ring: RingRegistration) -> Sequence[Correction]:
        """Return one correction for each measured kind of turn, least work first."""
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
            for (algorithm, power, is_cached), ratios in sorted(
                known.ratios.items(), key=lambda item: (item[0][1], item[0][0])
            )
            if is_cached is None
        )

    def shown_in(self, status: RingInfo, ring: RingRegistration) -> RingInfo:
        """Return a ring's own status with its announced figures and its corrections."""
        return replace(
            status,
            rates=ring.rates,
            capacity_tokens=ring.capacity_tokens,
            chunk_tokens=ring.chunk_tokens,
            corrections=tuple(self.of_ring(ring)),
        )


def _kind_of(algorithm: Algorithm, work: float, is_cached: bool | None = None) -> Kind:
    # A power of two a time, as the exponent tells them: 4 ** power <= work < 4 ** (power + 1).
    return algorithm, max(0, math.frexp(work)[1] - 1) // 2, is_cached
