"""Fits of a hardware profile's constants to published or measured times: least squares of relative errors.

`ringserve calibrate` and the laboratory call it. Its functions are pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ringserve.cp_core.cost.chain import Cuts, quick_cuts
from ringserve.cp_core.cost.decode import StepCost, predict_profiled_step
from ringserve.cp_core.cost.memory import WeightBytes
from ringserve.cp_core.cost.model import CHAIN, ModelShape
from ringserve.cp_core.cost.prefill import predict_turn, step_predictor, sum_seconds
from ringserve.cp_core.cost.profile import HardwareProfile
from ringserve.cp_core.cost.steps import StepPredictor
from ringserve.cp_core.errors import ConfigError

Vector = npt.NDArray[np.float64]

# Change of a constant's logarithm by which the residuals' slopes are measured (finite differences).
SLOPE_STEP = 1e-5
# Maximum change of a constant's logarithm in one round.
MAX_MOVE = 0.5
MAX_ROUNDS = 200
LEAST_GAIN = 1e-8
MAX_DAMPING = 1e12

PREFILL_CONSTANTS = (
    "gemm_flops",
    "attention_flops",
    "link_latency_seconds",
    "rank_overhead_seconds",
    "cached_overhead_seconds",
    "sum_bytes_per_second",
)
CHAIN_CONSTANTS = ("chain_overhead", "chain_overlap")
"""Constants that only chains have. A ring does not measure them when it starts."""
RATIO_WEIGHT = 2.0
"""Factor of a ratio's residual; a sample's is 1. A disturbed machine changes samples more than their ratios."""
DISTURBED = 2.385
"""Constant of Cauchy's weights: a residual of this many scales gets half the weight, and one far beyond almost none. On
clean samples it costs 5% of their information (Holland and Welsch, Communications in Statistics A6, 1977)."""
LEAST_SCALE = 0.05
"""Minimum scale of the residuals: up to this size they are errors of the model itself and keep most of their weight."""
ROBUST_ROUNDS = 5
DECODE_CONSTANTS = (
    "kv_bytes_per_second",
    "attention_seconds",
    "row_seconds",
    "hop_seconds",
    "all_to_all_seconds",
    "ring_seconds",
    "sum_seconds",
    "host_seconds",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillSample:
    """Prefill and the seconds it took. `cuts` are the positions where one step of it ended and the next began.

    `speeds` and `lateness` are by rank, as in RingRates. `chain_cuts` are a chain's cuts in each step; if there are
    none, the cuts follow from the rates.
    """

    cp: int
    tp: int
    algorithm: str
    new_tokens: int
    cached_tokens: int
    seconds: float
    cuts: tuple[int, ...] = ()
    speeds: tuple[float, ...] = ()
    lateness: tuple[float, ...] = ()
    chain_cuts: tuple[Cuts, ...] = ()

    @property
    def steps(self) -> list[tuple[int, int]]:
        """Positions where each step starts and stops."""
        return list(pairwise((self.cached_tokens, *self.cuts, self.cached_tokens + self.new_tokens)))

    def predictor(self, model: ModelShape, profile: HardwareProfile, start: int) -> StepPredictor:
        """Return a profile's predictor of steps that begin at `start`."""
        return step_predictor(model, profile.prefill, self.cp, self.tp, start > 0, self.speeds, self.lateness)


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillRatio:
    """Ratio of one sample's seconds to another's, measured beside it.

    A disturbance slows both, so the ratio is known better than either. `above` and `below` are their indices.
    """

    above: int
    below: int
    value: float


class StepPart(StrEnum):
    """Measured part of a decode step: the whole step, or a part of one layer. Values are fields of `StepCost`."""

    STEP = "total_seconds"
    CALL = "call_seconds"
    ATTENTION = "layer_attention_seconds"
    HOPS = "layer_hops_seconds"
    COLLECTIVE = "layer_collective_seconds"
    WHOLE = "layer_whole_seconds"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSample:
    """Pass-Q decode step of B rows and the seconds of its `part`. Its residual counts `weight` times."""

    cp: int
    tp: int
    batch: int
    context_tokens: int
    part: StepPart
    seconds: float
    weight: float = 1.0


def predicted_prefill(model: ModelShape, profile: HardwareProfile, sample: PrefillSample) -> float:
    """Return the seconds that the profile predicts for a sample, step by step."""
    if sample.chain_cuts:
        return _predicted_chain(model, profile, sample)
    return sum(
        predict_turn(
            model,
            profile,
            cp=sample.cp,
            tp=sample.tp,
            algorithm=sample.algorithm,
            new_tokens=stop - start,
            cached_tokens=start,
            speeds=sample.speeds,
            lateness=sample.lateness,
        ).total_seconds
        for start, stop in sample.steps
    )


def _predicted_chain(model: ModelShape, profile: HardwareProfile, sample: PrefillSample) -> float:
    """Return the seconds that the profile predicts for a chain by the cuts of its steps."""
    seconds = 0.0
    for cuts, (start, stop) in zip(sample.chain_cuts, sample.steps, strict=True):
        seconds += sample.predictor(model, profile, start).chain.of_cuts(cuts, start)
        seconds += sum_seconds(model, profile, sample.tp, -(-(stop - start) // sample.cp))
    return seconds


def with_chain_cuts(model: ModelShape, profile: HardwareProfile, sample: PrefillSample) -> PrefillSample:
    """Return a chain's sample with the cuts that its ranks would choose by `profile`, another sample unchanged."""
    if sample.algorithm != CHAIN:
        return sample
    cuts = [
        quick_cuts(stop - start, start, sample.predictor(model, profile, start).chain.rates)
        for start, stop in sample.steps
    ]
    return replace(sample, chain_cuts=tuple(cuts))


def predicted_step(model: ModelShape, weights: WeightBytes, profile: HardwareProfile, sample: StepSample) -> float:
    """Return the seconds that the profile predicts for a sample."""
    cost: StepCost = predict_profiled_step(
        model,
        weights,
        profile,
        cp=sample.cp,
        tp=sample.tp,
        batch=sample.batch,
        context_tokens=sample.context_tokens,
    )
    return float(getattr(cost, sample.part.value))


def fit_prefill(
    model: ModelShape,
    profile: HardwareProfile,
    samples: Sequence[PrefillSample],
    names: Sequence[str] = PREFILL_CONSTANTS,
    trust: float = 0.0,
    ratios: Sequence[PrefillRatio] = (),
    *,
    is_robust: bool = False,
) -> HardwareProfile:
    """Return `profile` with its constants `names` moved to values that fit the samples best.

    With `trust` above 0 a constant that moves by a factor of e costs as much as a sample that is wrong by the share
    `trust`: constants that the samples hardly determine stay where they are. A ratio's residual is multiplied by
    RATIO_WEIGHT. With `is_robust` samples and ratios that are far off beside the others count for little. Raises
    ConfigError if there are fewer samples than constants.
    """
    _require(samples, names)
    start = np.array([float(getattr(profile.prefill, name)) for name in names])

    def predict(values: Vector) -> Vector:
        moved = _with_prefill(profile, names, values)
        return np.array([predicted_prefill(model, moved, each) for each in samples])

    return _with_prefill(profile, names, _fitted(predict, start, samples, trust, ratios, is_robust=is_robust))


def _fitted(
    predict: Callable[[Vector], Vector],
    start: Vector,
    samples: Sequence[PrefillSample],
    trust: float,
    ratios: Sequence[PrefillRatio],
    *,
    is_robust: bool,
) -> Vector:
    """Return the constants by which `predict` gives the seconds of the samples best."""
    measured = np.log([each.seconds for each in samples])

    def errors(values: Vector) -> tuple[Vector, Vector]:
        """Return the relative errors of samples and of ratios."""
        predicted = np.log(predict(values))
        compared = [predicted[each.above] - predicted[each.below] - np.log(each.value) for each in ratios]
        return predicted - measured, RATIO_WEIGHT * np.array(compared)

    def fitted(begin: Vector, weights: tuple[Vector, Vector]) -> Vector:
        def residuals(values: Vector) -> Vector:
            parts = [np.sqrt(weight) * error for weight, error in zip(weights, errors(values), strict=True)]
            return np.concatenate([*parts, trust * np.log(values / start)])

        return minimise(residuals, begin.tolist())

    found = fitted(start, (np.ones(len(samples)), np.ones(len(ratios))))
    for _ in range(ROBUST_ROUNDS - 1 if is_robust else 0):
        sample_weights, ratio_weights = map(_cauchy_weights, errors(found))
        found = fitted(found, (sample_weights, ratio_weights))
    return found


def _cauchy_weights(errors: Vector) -> Vector:
    """Return weights between 0 and 1: an error that is large beside the others gets a small one."""
    if not len(errors):
        return errors
    # 1.4826 times the median magnitude of normal residuals is their standard deviation.
    scale = max(LEAST_SCALE, 1.4826 * float(np.median(np.abs(errors))))
    return 1.0 / (1.0 + (errors / (DISTURBED * scale)) ** 2)


def fit_decode(
    model: ModelShape,
    weights: WeightBytes,
    profile: HardwareProfile,
    samples: Sequence[StepSample],
    names: Sequence[str] = DECODE_CONSTANTS,
) -> HardwareProfile:
    """Return `profile` with decode constants fitted as `fit_prefill` does. Raises ConfigError for a time of 0 too."""
    _require(samples, names)
    if any(each.seconds <= 0.0 for each in samples):
        raise ConfigError("a sample of a decode step took 0 s; allowed is any time above 0")

    def residuals(values: Vector) -> Vector:
        moved = _with_decode(profile, names, values)
        return np.array(
            [each.weight * np.log(predicted_step(model, weights, moved, each) / each.seconds) for each in samples]
        )

    start = [float(getattr(profile.decode, name)) for name in names]
    return _with_decode(profile, names, minimise(residuals, start))


def _require(samples: Sequence[object], names: Sequence[str]) -> None:
    if len(samples) < len(names):
        raise ConfigError(f"{len(samples)} samples cannot fit {len(names)} constants; at least as many are needed")


def _with_prefill(profile: HardwareProfile, names: Sequence[str], values: Vector) -> HardwareProfile:
    moved: dict[str, Any] = dict(zip(names, map(float, values), strict=True))
    for name in moved.keys() & {"overlap", "chain_overlap"}:
        moved[name] = _share(moved[name])
    return replace(profile, prefill=replace(profile.prefill, **moved))


def _share(value: float) -> float:
    """Return the share that a fitted number above 0 stands for: beyond 1, its inverse.

    In this way a fit that starts at 1 can move in both directions. If numbers above 1 were cut off to 1 instead, the
    slope there would be 0.
    """
    return value if value <= 1.0 else 1.0 / value


def _with_decode(profile: HardwareProfile, names: Sequence[str], values: Vector) -> HardwareProfile:
    moved: dict[str, Any] = dict(zip(names, map(float, values), strict=True))
    return replace(profile, decode=replace(profile.decode, **moved))


def minimise(residuals: Callable[[Vector], Vector], start: Sequence[float]) -> Vector:
    """Return the positive numbers, downhill from `start`, whose residuals have the least sum of squares.

    Levenberg and Marquardt's method in the numbers' logarithms. Of several local minima the start decides which is
    found; the same start gives the same answer.
    """
    point = np.log(np.asarray(start, dtype=np.float64))
    now = residuals(np.exp(point))
    damping = 1e-2
    for _ in range(MAX_ROUNDS):
        slopes = np.stack(
            [(residuals(np.exp(point + move)) - now) / SLOPE_STEP for move in SLOPE_STEP * np.eye(len(point))], axis=1
        )
        curvature, gradient = slopes.T @ slopes, slopes.T @ now
        scale = np.diag(np.diag(curvature) + 1e-9)
        gain = 0.0
        while damping < MAX_DAMPING:
            move = np.clip(np.linalg.solve(curvature + damping * scale, -gradient), -MAX_MOVE, MAX_MOVE)
            after = residuals(np.exp(point + move))
            gain = float(now @ now - after @ after)
            if gain > 0.0:
                point, now, damping = point + move, after, damping / 3.0
                break
            damping *= 4.0
        if gain <= LEAST_GAIN * float(now @ now):
            break
    return np.exp(point)
