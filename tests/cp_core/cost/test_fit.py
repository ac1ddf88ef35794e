"""Fits: they find the constants that made the samples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bench.papers.published import published_model
from ringserve.cp_core.cost.fit import (
    DECODE_CONSTANTS,
    PREFILL_CONSTANTS,
    PrefillRatio,
    PrefillSample,
    StepPart,
    StepSample,
    Vector,
    fit_decode,
    fit_prefill,
    minimise,
    predicted_prefill,
    predicted_step,
)
from ringserve.cp_core.cost.profile import HardwareProfile, read_profile
from ringserve.cp_core.errors import ConfigError

MODEL = published_model()


def moved(profile: HardwareProfile, factor: float) -> HardwareProfile:
    """Return the profile with every fitted constant `factor` times as large."""
    prefill = {name: factor * getattr(profile.prefill, name) for name in PREFILL_CONSTANTS}
    decode = {name: factor * getattr(profile.decode, name) for name in DECODE_CONSTANTS}
    return replace(profile, prefill=replace(profile.prefill, **prefill), decode=replace(profile.decode, **decode))


def prefills(profile: HardwareProfile) -> list[PrefillSample]:
    """Predict samples by the profile itself: rings, shares of cached tokens, tensor parallelism over hosts."""
    shapes = [
        *((cp, 8, algorithm, new, cached) for cp in (1, 2, 4, 8) for algorithm in ("pass_kv", "pass_q")
          for new, cached in ((2000, 0), (2000, 100_000), (64_000, 0), (64_000, 64_000))),
        (1, 16, "pass_kv", 64_000, 0),
        (1, 32, "pass_kv", 64_000, 0),
    ]  # fmt: skip
    samples = [
        PrefillSample(cp=cp, tp=tp, algorithm=algorithm, new_tokens=new, cached_tokens=cached, seconds=1.0)
        for cp, tp, algorithm, new, cached in shapes
    ]
    return [replace(each, seconds=predicted_prefill(MODEL.shape, profile, each)) for each in samples]


def steps(profile: HardwareProfile) -> list[StepSample]:
    samples = [
        StepSample(cp=cp, tp=tp, batch=batch, context_tokens=context, part=part, seconds=1.0)
        for cp, tp in ((1, 8), (2, 8), (4, 8), (1, 16))
        for batch in (1, 4, 12)
        for context in (8000, 128_000)
        for part in (StepPart.STEP, StepPart.WHOLE)
    ]
    return [replace(each, seconds=predicted_step(MODEL.shape, MODEL.weights, profile, each)) for each in samples]


def test_prefill_constants_are_found_again_from_what_they_predict() -> None:
    truth = read_profile("gtt")
    found = fit_prefill(MODEL.shape, moved(truth, 1.3), prefills(truth))
    for name in PREFILL_CONSTANTS:
        assert getattr(found.prefill, name) == pytest.approx(getattr(truth.prefill, name), rel=1e-3), name


def pairs(profile: HardwareProfile, slowed: float) -> tuple[list[PrefillSample], list[PrefillRatio]]:
    """Cells by both algorithms, every second one on a machine that was `slowed` for both, and their ratios."""
    samples = [
        PrefillSample(cp=4, tp=8, algorithm=algorithm, new_tokens=new, cached_tokens=cached, seconds=1.0)
        for new in (500, 2000, 8000, 32_000)
        for cached in (0, 30_000, 100_000)
        for algorithm in ("pass_kv", "pass_q")
    ]
    times = [predicted_prefill(MODEL.shape, profile, each) for each in samples]
    ratios = [PrefillRatio(above=at + 1, below=at, value=times[at + 1] / times[at]) for at in range(0, len(samples), 2)]
    drifts = [slowed if at // 2 % 2 else 1.0 for at in range(len(samples))]
    return [
        replace(each, seconds=seconds * drift) for each, seconds, drift in zip(samples, times, drifts, strict=True)
    ], ratios


def test_what_is_compared_side_by_side_is_found_though_the_machine_was_slow_in_between() -> None:
    """Ratios are what a choice between the algorithms needs."""
    names = ("attention_flops", "link_latency_seconds", "link_bytes_per_second", "overlap")
    truth = read_profile("gtt")
    truth = replace(truth, prefill=replace(truth.prefill, link_bytes_per_second=4e9, overlap=0.7))
    start = replace(truth, prefill=replace(truth.prefill, link_bytes_per_second=8e9, overlap=0.9))
    samples, ratios = pairs(truth, slowed=1.4)

    def worst_ratio(found: HardwareProfile) -> float:
        seconds = [predicted_prefill(MODEL.shape, found, each) for each in samples]
        return max(abs(seconds[each.above] / seconds[each.below] / each.value - 1.0) for each in ratios)

    without = worst_ratio(fit_prefill(MODEL.shape, start, samples, names, trust=0.05))
    beside = worst_ratio(fit_prefill(MODEL.shape, start, samples, names, trust=0.05, ratios=ratios))
    assert beside < 0.04
    assert without > 2 * beside


def test_overlap_is_found_and_is_never_more_than_all() -> None:
    gtt = read_profile("gtt")
    # Messages take about as long as the attention that they can hide behind.
    prefill = replace(gtt.prefill, link_bytes_per_second=1e9)
    for overlap, begin in ((0.4, 0.7), (1.0, 0.7), (0.4, 1.0), (1.0, 1.0)):
        samples, _ = pairs(replace(gtt, prefill=replace(prefill, overlap=overlap)), slowed=1.0)
        start = replace(gtt, prefill=replace(prefill, overlap=begin))
        found = fit_prefill(MODEL.shape, start, samples, ("overlap", "gemm_flops")).prefill
        assert found.overlap == pytest.approx(overlap, abs=1e-3)
        assert found.overlap <= 1.0


def test_decode_constants_are_found_again_from_what_they_predict() -> None:
    truth = read_profile("gtt")
    found = fit_decode(MODEL.shape, MODEL.weights, moved(truth, 0.8), steps(truth))
    for name in DECODE_CONSTANTS:
        assert getattr(found.decode, name) == pytest.approx(getattr(truth.decode, name), rel=1e-3), name


def test_only_the_constants_that_are_named_are_moved() -> None:
    truth = read_profile("gtt")
    found = fit_prefill(MODEL.shape, moved(truth, 1.3), prefills(truth), ["gemm_flops"])
    assert found.prefill.attention_flops == 1.3 * truth.prefill.attention_flops
    assert found.prefill.gemm_flops != 1.3 * truth.prefill.gemm_flops


def test_fewer_samples_than_constants_are_refused() -> None:
    truth = read_profile("gtt")
    with pytest.raises(ConfigError, match="2 samples cannot fit 6 constants"):
        fit_prefill(MODEL.shape, truth, prefills(truth)[:2])


def test_a_step_that_took_no_time_is_refused() -> None:
    truth = read_profile("gtt")
    samples = [replace(each, seconds=0.0) for each in steps(truth)]
    with pytest.raises(ConfigError, match="took 0 s"):
        fit_decode(MODEL.shape, MODEL.weights, truth, samples)


def test_least_squares_of_a_line_are_those_of_the_normal_equations() -> None:
    x = np.array([1.0, 2.0, 3.0, 4.0])
    y = np.array([3.1, 4.9, 7.2, 8.8])

    def residuals(values: Vector) -> Vector:
        return np.asarray(values[0] * x + values[1] - y)

    slope, offset = np.polyfit(x, y, 1)
    assert minimise(residuals, [1.0, 0.1]) == pytest.approx([slope, offset], rel=1e-5)


def test_a_minimum_is_left_where_it_is() -> None:
    def residuals(values: Vector) -> Vector:
        return np.asarray(np.log(values / np.array([2.0, 3.0])))

    assert minimise(residuals, [2.0, 3.0]).tolist() == pytest.approx([2.0, 3.0])


def test_constants_that_samples_do_not_tell_stay_where_they_are_trusted() -> None:
    truth = read_profile("gtt")
    alone = [each for each in prefills(truth) if each.cp == 1]
    found = fit_prefill(MODEL.shape, moved(truth, 1.3), alone, trust=0.05)
    assert found.prefill.link_latency_seconds == pytest.approx(1.3 * truth.prefill.link_latency_seconds)
    assert found.prefill.gemm_flops == pytest.approx(truth.prefill.gemm_flops, rel=0.05)


def test_a_prefill_of_several_steps_takes_the_sum_of_them() -> None:
    truth = read_profile("gtt")
    whole = PrefillSample(
        cp=4, tp=8, algorithm="pass_q", new_tokens=3000, cached_tokens=500, seconds=1.0, cuts=(1500, 2000)
    )
    steps_of_it = [
        replace(whole, new_tokens=new, cached_tokens=cached, cuts=())
        for new, cached in ((1000, 500), (500, 1500), (1500, 2000))
    ]
    assert predicted_prefill(MODEL.shape, truth, whole) == pytest.approx(
        sum(predicted_prefill(MODEL.shape, truth, each) for each in steps_of_it)
    )
