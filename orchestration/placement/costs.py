"""Predicted times of prefills on a ring, by a hardware profile or the ring's own rates, and their corrections.

Corrections compare measured turns with predictions. What the cost model leaves out, such as the start of a step, weighs
more in short turns. So a turn is compared with turns of like work only: short turns on a small ring say nothing about
long turns, on that ring or another. The planner and the simulator keep these objects; nothing here calls another
process.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import NamedTuple

import numpy as np

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
class _RingKind:
    """Rings that are alike in everything that a step's time depends on.

    `sum_seconds_a_token` is the time per token of a rank that its sums over tensor parallel processes take,
    `sum_start_seconds` the time per step in which their messages start.
    """

    rates: PrefillRates
    predictor: StepPredictor
    sum_seconds_a_token: float
    sum_start_seconds: float


class StepSeconds(NamedTuple):
    """Seconds of a step by algorithm, `without_sums` over tensor parallel processes; `sums` are the same for all."""

    without_sums: Mapping[str, float]
    sums: float

    def total(self, algorithm: Algorithm) -> float:
        """Return the seconds of the whole step. A decode ring computes a prompt by pass-Q."""
        return self.without_sums[Algorithm.PASS_Q if algorithm is Algorithm.DECODE_RING else algorithm] + self.sums

    @property
    def fastest(self) -> Algorithm:
        """Algorithm that takes least."""
        return Algorithm(min(self.without_sums, key=self.without_sums.__getitem__))


_OfRanks = RingRates | tuple[tuple[float, ...], tuple[float, ...]]
"""Part of a kind's key: the ring's own rates, or, if there is a profile, its ranks' speeds and lateness."""


class RingCosts:
    """Costs of prefills of one model. `profile` stands for every ring; without it each ring's registered rates do."""

    def __init__(self, model: ModelInfo, *, profile: HardwareProfile | None = None) -> None:
        self._model = model
        self._shape = model.shape
        self._profile = profile
        self._shapes: dict[int, ModelShape] = {}
        self._kinds: dict[tuple[_OfRanks, int, int, bool], _RingKind] = {}
        self._of_ring: dict[str, tuple[RingRates, int, int, _RingKind]] = {}  # by name: rates hash slowly

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
        """Return the seconds in which KV moves between `ring` and another ring, with `num_bytes` over each link."""
        if self._profile is not None and num_bytes:
            return ring.rates.link_latency_seconds + num_bytes / self._profile.kv_link_bytes_per_second
        return self.rates(ring, is_cached=False).message_seconds(num_bytes)

    def _kind(self, ring: RingRegistration, is_cached: bool) -> _RingKind:
        # With a profile, rings of the same size are of one kind if their ranks' speeds and lateness are equal. Without
        # one, rates do not depend on cached tokens.
        if self._profile is not None:
            ranks = ring.rates.speeds, ring.rates.lateness
            return self._kind_for((ranks, ring.num_ranks, ring.tp, is_cached), ring)
        known = self._of_ring.get(ring.name)
        if known is not None and known[0] is ring.rates and known[1] == ring.num_ranks and known[2] == ring.tp:
            return known[3]
        if len(self._of_ring) >= MAX_KNOWN:
            self._of_ring.clear()
        kind = self._kind_for((ring.rates, ring.num_ranks, ring.tp, False), ring)
        self._of_ring[ring.name] = ring.rates, ring.num_ranks, ring.tp, kind
        return kind

    def _kind_for(self, key: tuple[_OfRanks, int, int, bool], ring: RingRegistration) -> _RingKind:
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) >= MAX_KNOWN:
                self._kinds.clear()
            kind = self._kinds[key] = self._make_kind(ring, is_cached=key[3])
        return kind

    def _make_kind(self, ring: RingRegistration, is_cached: bool) -> _RingKind:
        rates = self._rates_for(ring, is_cached)
        seconds_a_token = start = 0.0
        if ring.tp > 1 and self._profile is not None:
            seconds_a_token = sum_seconds(self._shape, self._profile, ring.tp, 1)
        elif ring.tp > 1:
            # One sum after the embedding, and one after each attention and each MLP. The processes' links are taken to
            # be as fast as the ring's.
            num_sums = 1 + 2 * self._model.num_layers
            num_bytes = 2 * (ring.tp - 1) / ring.tp * self._model.hidden_size * self._model.element_bytes
            seconds_a_token = num_sums * num_bytes / rates.ring.link_bytes_per_second
            # If the ring measured `step_seconds`, these include the start of the sums' messages.
            start = 0.0 if rates.ring.step_seconds else num_sums * rates.ring.link_latency_seconds
        return _RingKind(
            rates=rates,
            predictor=StepPredictor(self.shape(ring), rates, ring.num_ranks),
            sum_seconds_a_token=seconds_a_token,
            sum_start_seconds=start,
        )

    def _rates_for(self, ring: RingRegistration, is_cached: bool) -> PrefillRates:
        """Return the rates of the profile, or without one of the ring itself."""
        if self._profile is None:
            return PrefillRates(ring=ring.rates)
        found = self._profile.prefill.rates(ring.num_ranks, is_cached=is_cached)
        return replace(found, ring=replace(found.ring, speeds=ring.rates.speeds, lateness=ring.rates.lateness))


WINDOW = 32
"""Number of latest turns of a kind from which its factor is computed."""
LEAST = 5
"""Fewest turns of a kind for which it has a factor of its own: the median of five ignores two outliers."""
LIKE = 4
"""Base of the classes of like work: 1 to 4 work units, 4 to 16, and so on."""
NEIGHBOUR = 0.9
"""Correlation between the logarithms of the factors of two neighbouring classes of work."""
SPREAD, NOISE = 0.5, 0.2
"""Standard deviations of logarithms: SPREAD of factors from one service to another, NOISE of one turn's ratio about the
factor of its kind. Services that measured their rates beside other starting processes had factors of 0.55 to 1.2
(docs/decisions/0038)."""
FARTHEST = 4.0
"""If a class's factor is at least this, or at most its inverse, it says nothing about other classes: then the cause is
not the rates but, for example, a first turn that compiles, or time per step that the rates leave out."""

TurnKind = tuple[Algorithm, int, bool | None]
"""Key of a factor: an algorithm, the exponent of the largest power of LIKE that is not above the turn's work, and
whether cached tokens precede the turn (None: with and without them)."""


@dataclass(slots=True)
class _Ratios:
    """Measured over predicted seconds of the latest turns, each with the name of its ring.

    `factor` is kept, because it is read more often than the ratios change.
    """

    latest: deque[tuple[str, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    factor: float = 1.0

    def note(self, ring: str, ratio: float) -> None:
        self.latest.append((ring, ratio))
        self.factor = median(ratio for _, ratio in self.latest)

    def forget(self, ring: str) -> None:
        kept = [each for each in self.latest if each[0] != ring]
        if len(kept) < len(self.latest):
            self.latest = deque(kept, maxlen=WINDOW)
            self.factor = median(ratio for _, ratio in kept) if kept else 1.0

    @property
    def is_known(self) -> bool:
        return len(self.latest) >= LEAST


@dataclass(slots=True)
class _Ring:
    """Ratios of one incarnation of a ring, with the rates that it measured."""

    incarnation: str
    rates: RingRates
    ratios: dict[TurnKind, _Ratios] = field(default_factory=dict)

    def is_same(self, ring: RingRegistration) -> bool:
        return (self.incarnation, self.rates) == (ring.incarnation, ring.rates)


class RingCorrections:
    """Factors of measured over predicted seconds, by ring, algorithm and class of work.

    `note` takes predictions without a correction. A factor is the median of a kind's turns, which changes only when
    half of them agree: one slow turn does not change it, nor do slow turns that are a third of them. Ratios from before
    a ring was rebuilt, or measured itself again, are forgotten. A ring with too few turns of a kind takes the factor of
    all rings together, since the cost model leaves out the same for each of them.

    If even all rings together have had too few turns of a kind, the factor is estimated from turns of other classes of
    work, because wrong rates affect all classes. A class counts less the more its work differs. One prompt of 2,048
    tokens says most of what can be known of one of 6,000. The estimate is the mean of a Gaussian process over the
    classes of work, whose covariance is SPREAD^2 * NEIGHBOUR^distance. It is the same for all rings, so that one slow
    turn does not keep later turns away from its ring.

    There are also separate factors for turns with and without cached tokens. A plan predicts with these how long a ring
    is busy. Rings are compared by the joint factor: otherwise the extra time of a step after cached tokens would count
    against every ring that retains KV (docs/decisions/0026).
    """

    def __init__(self) -> None:
        self._rings: dict[str, _Ring] = {}
        self._all: dict[TurnKind, _Ratios] = {}
        self._by_others: dict[tuple[Algorithm, int], float] = {}

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
        known = self._known(ring)
        if known is None:
            known = self._rings[ring.name] = _Ring(ring.incarnation, ring.rates)
        for kind in (_kind_of(algorithm, work), _kind_of(algorithm, work, is_cached)):
            for by_kind in (known.ratios, self._all):
                by_kind.setdefault(kind, _Ratios()).note(ring.name, measured / predicted)
        self._by_others.clear()

    def factor(
        self, ring: RingRegistration, algorithm: Algorithm, work: float, *, is_cached: bool | None = None
    ) -> float:
        """Return the factor for predictions of turns of so many work units; 1 while no turn is known.

        If `is_cached` is given, only turns with (True) or without cached tokens (False) count, if enough are known.
        """
        kind = _kind_of(algorithm, work, is_cached)
        known = self._known(ring)
        own = known.ratios.get(kind) if known is not None else None
        if own is not None and own.is_known:
            return own.factor
        among_all = self._all.get(kind)
        if among_all is not None and among_all.is_known:
            return among_all.factor
        return self._factor_by_others(*kind[:2]) if is_cached is None else self.factor(ring, algorithm, work)

    def _known(self, ring: RingRegistration) -> _Ring | None:
        """Return the ratios of a ring as it is now.

        If the ring has measured other rates, its ratios are removed from those of all rings together, too.
        """
        known = self._rings.get(ring.name)
        if known is None or known.is_same(ring):
            return known
        if known.rates != ring.rates:
            for ratios in self._all.values():
                ratios.forget(ring.name)
            self._by_others.clear()
        del self._rings[ring.name]
        return None

    def _factor_by_others(self, algorithm: Algorithm, power: int) -> float:
        """Return the factor of a class of work, estimated from all rings' turns; 1 if no turn is known."""
        if not self._all:
            return 1.0
        if (algorithm, power) not in self._by_others:
            told = {
                other: ratios
                for (name, other, is_cached), ratios in self._all.items()
                if (name, is_cached) == (algorithm, None)
                and ratios.latest
                and 1.0 / FARTHEST < ratios.factor < FARTHEST
            }
            powers = np.array(list(told), dtype=np.float64)
            logs = np.log([ratios.factor for ratios in told.values()])
            noise = np.array([NOISE**2 / len(ratios.latest) for ratios in told.values()])
            covariance = SPREAD**2 * NEIGHBOUR ** np.abs(powers[:, None] - powers) + np.diag(noise)
            weights = SPREAD**2 * NEIGHBOUR ** np.abs(powers - power)
            self._by_others[algorithm, power] = math.exp(weights @ np.linalg.solve(covariance, logs))
        return self._by_others[algorithm, power]

    def of_ring(self, ring: RingRegistration) -> Sequence[Correction]:
        """Return one correction for each measured kind of turn, least work first."""
        known = self._known(ring)
        if known is None:
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


def _kind_of(algorithm: Algorithm, work: float, is_cached: bool | None = None) -> TurnKind:
    # `frexp` gives the exponent of two, and half of it is the power of LIKE = 4: 4 ** power <= work < 4 ** (power + 1),
    # and 0 for less work.
    return algorithm, max(0, math.frexp(work)[1] - 1) // 2, is_cached
