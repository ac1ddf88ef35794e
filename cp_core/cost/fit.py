"""Fits constants of a hardware profile to times that were published or measured. Errors are relative ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any

import numpy as np

from cp_core.cost.decode import StepCost, predict_step
from cp_core.cost.least_squares import Vector, minimise
from cp_core.cost.memory import WeightBytes
from cp_core.cost.model import ModelShape
from cp_core.cost.prefill import predict_turn
from cp_core.cost.profile import HardwareProfile
from cp_core.errors import ConfigError

PREFILL_CONSTANTS = (
    "gemm_flops",
    "attention_flops",
    "link_latency_seconds",
    "rank_overhead_seconds",
    "cached_overhead_seconds",
    "sum_bytes_per_second",
)
RATIO_WEIGHT = 2.0
"""Of a ratio's residual, beside 1 of a sample's: machines that are disturbed spoil samples first."""
DISTURBED = 2.385
"""Residuals of so many of the others' scales count half, and those beyond next to nothing (Cauchy's weights, which cost
5% of what clean samples tell: Holland and Welsch, Communications in Statistics A6, 1977)."""
LEAST_SCALE = 0.05
"""Below it residuals are the model's own, and all count."""
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
    """A prefill and how long it took. `cuts` are the positions where one step of it ended and the next began."""

    cp: int
    tp: int
    algorithm: str
    new_tokens: int
    cached_tokens: int
    seconds: float
    cuts: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillRatio:
    """Seconds of one sample over those of another, which were measured side by side: what slowed one slowed both, so
    that this is known better than either. `above` and `below` are their places among the samples.
    """

    above: int
    below: int
    value: float


class StepPart(StrEnum):
    """Which time of a decode step was taken: the whole step, or something of one layer. Fields of `StepCost`."""

    STEP = "total_seconds"
    CALL = "call_seconds"
    ATTENTION = "layer_attention_seconds"
    HOPS = "layer_hops_seconds"
    COLLECTIVE = "layer_collective_seconds"
    WHOLE = "layer_whole_seconds"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSample:
    """A pass-Q decode step of B rows and how long `part` of it took. Its residual counts `weight` times."""

    cp: int
    tp: int
    batch: int
    context_tokens: int
    part: StepPart
    seconds: float
    weight: float = 1.0


def predicted_prefill(model: ModelShape, profile: HardwareProfile, sample: PrefillSample) -> float:
    """Seconds that the profile predicts for it, step by step."""
    bounds = (sample.cached_tokens, *sample.cuts, sample.cached_tokens + sample.new_tokens)
    return sum(
        predict_turn(
            model,
            profile,
            cp=sample.cp,
            tp=sample.tp,
            algorithm=sample.algorithm,
            new_tokens=stop - start,
            cached_tokens=start,
        ).total_seconds
        for start, stop in pairwise(bounds)
    )


def predicted_step(model: ModelShape, weights: WeightBytes, profile: HardwareProfile, sample: StepSample) -> float:
    """Seconds that the profile predicts for it."""
    cost: StepCost = predict_step(
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
    """`profile` with its constants `names` moved, from where they are, to those that fit the samples best.

    With `trust` above 0 a constant that moves by a factor of e costs as much as a sample that is wrong by the share
    `trust`: what the samples hardly tell stays where it is. A ratio that is wrong costs RATIO_WEIGHT times as much as
    a sample that is. `is_robust`: samples and ratios that are far off, beside the others, count for little. Raises
    ConfigError where there are fewer samples than constants.
    """
    _require(samples, names)
    start = np.array([float(getattr(profile.prefill, name)) for name in names])
    measured = np.log([each.seconds for each in samples])

    def wrong_by(values: Vector) -> tuple[Vector, Vector]:
        """Of each sample and each ratio."""
        moved = _with_prefill(profile, names, values)
        predicted = np.log([predicted_prefill(model, moved, each) for each in samples])
        compared = [predicted[each.above] - predicted[each.below] - np.log(each.value) for each in ratios]
        return predicted - measured, RATIO_WEIGHT * np.array(compared)

    def fitted(begin: Vector, weights: tuple[Vector, Vector]) -> Vector:
        def residuals(values: Vector) -> Vector:
            parts = [np.sqrt(weight) * wrong for weight, wrong in zip(weights, wrong_by(values), strict=True)]
            return np.concatenate([*parts, trust * np.log(values / start)])

        return minimise(residuals, begin.tolist())

    found = fitted(start, (np.ones(len(samples)), np.ones(len(ratios))))
    for _ in range(ROBUST_ROUNDS - 1 if is_robust else 0):
        of_samples, of_ratios = map(_cauchy_weights, wrong_by(found))
        found = fitted(found, (of_samples, of_ratios))
    return _with_prefill(profile, names, found)


def _cauchy_weights(wrong: Vector) -> Vector:
    """Between 0 and 1, by how far each is off beside the others."""
    if not len(wrong):
        return wrong
    # Of normal residuals, 1.4826 times the median of their magnitudes is the standard deviation.
    scale = max(LEAST_SCALE, 1.4826 * float(np.median(np.abs(wrong))))
    return 1.0 / (1.0 + (wrong / (DISTURBED * scale)) ** 2)


def fit_decode(
    model: ModelShape,
    weights: WeightBytes,
    profile: HardwareProfile,
    samples: Sequence[StepSample],
    names: Sequence[str] = DECODE_CONSTANTS,
) -> HardwareProfile:
    """As `fit_prefill`, of the decode constants. Samples whose time is 0 are refused with ConfigError."""
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
    if "overlap" in moved:
        # A share: nothing is gained beyond all, so that a fit does not go there.
        moved["overlap"] = min(1.0, moved["overlap"])
    return replace(profile, prefill=replace(profile.prefill, **moved))


def _with_decode(profile: HardwareProfile, names: Sequence[str], values: Vector) -> HardwareProfile:
    moved: dict[str, Any] = dict(zip(names, map(float, values), strict=True))
    return replace(profile, decode=replace(profile.decode, **moved))
