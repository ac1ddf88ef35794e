"""Fit of a hardware profile: the rings' own rates first, then the constants that real prefills imply.

`ringserve calibrate` and the benchmarks of selection call these functions, which have no state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from ringserve.client import ModelInfo, RingInfo
from ringserve.cp_core.cost.fit import (
    CHAIN_CONSTANTS,
    PrefillRatio,
    StepSample,
    fit_decode,
    fit_prefill,
    predicted_prefill,
    predicted_step,
    with_chain_cuts,
)
from ringserve.cp_core.cost.memory import WeightBytes, weight_bytes
from ringserve.cp_core.cost.model import CHAIN, PASS_KV, PASS_Q, ModelShape
from ringserve.cp_core.cost.profile import DecodeConstants, HardwareProfile, PrefillConstants
from ringserve.cp_core.cost.selector import least
from ringserve.cp_core.errors import ConfigError, Unavailable
from ringserve.services.offline.calibration.measurement import Cell, Measurement
from ringserve.services.offline.reports import paired_ratio
from ringserve.views import RingRates
from ringserve.workers.model.info import ELEMENT_BYTES

LEAST_SECONDS = 1e-6
"""Least start value of a fitted constant, in seconds; the fit would leave a 0 unchanged."""


def shape_of(model: ModelInfo) -> ModelShape:
    """Return the shape of a served model. Raises Unavailable if the service is too old to state it."""
    if not model.intermediate_size or model.dtype not in ELEMENT_BYTES:
        raise Unavailable("the service does not state its model's sizes; it is older than this ringserve")
    return ModelShape(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        vocab_size=model.vocab_size,
        element_bytes=ELEMENT_BYTES[model.dtype],
        kv_element_bytes=model.kv_bytes_per_token // (2 * model.num_layers * model.num_kv_heads * model.head_dim),
    )


def profile_from_rings(model: ModelInfo, rings: Sequence[RingInfo], name: str) -> HardwareProfile:
    """Return the profile that follows from the rates that prefill rings measured at their start.

    Decode constants are guesses from the prefill rates, until a fit of decode steps replaces some of them. Raises
    Unavailable if no ring states its rates.
    """
    rings = [ring for ring in rings if ring.role == "prefill" and ring.rates is not None]
    rates = [ring.rates for ring in rings if ring.rates is not None]
    if not rates:
        raise Unavailable("no prefill ring states its rates; is one ready, and as new as this ringserve?")
    # A ring of one rank has no links to measure.
    linked = [ring.rates for ring in rings if ring.rates is not None and ring.num_ranks > 1] or rates
    element_bytes = ELEMENT_BYTES[model.dtype]
    weights = model.num_parameters * element_bytes
    return profile_from_rates(
        RingRates(
            gemm_flops=median(each.gemm_flops for each in rates),
            attention_flops=median(each.attention_flops for each in rates),
            link_bytes_per_second=median(each.link_bytes_per_second for each in linked),
            link_latency_seconds=median(each.link_latency_seconds for each in linked),
            overlap=median(each.overlap for each in linked),
            lone_speed=median(each.lone_speed for each in linked),
        ),
        name=name,
        element_bytes=element_bytes,
        processes_per_host=max(ring.tp or 1 for ring in rings),
        memory_bytes=min(
            (weights + ring.capacity_tokens / ring.num_ranks * model.kv_bytes_per_token) / (ring.tp or 1)
            for ring in rings
        ),
    )


def profile_from_rates(
    rates: RingRates, *, name: str, element_bytes: int, processes_per_host: int, memory_bytes: float
) -> HardwareProfile:
    """Convert the rates that a rank measured of itself and its link to a profile.

    `element_bytes` is the size of a number of the model's dtype.
    """
    gemm, link = rates.gemm_flops, rates.link_bytes_per_second
    latency = max(LEAST_SECONDS, rates.link_latency_seconds)
    return HardwareProfile(
        name=name,
        source="",
        processes_per_host=processes_per_host,
        memory_bytes=memory_bytes,
        kv_link_bytes_per_second=link,
        prefill=PrefillConstants(
            gemm_flops=gemm,
            attention_flops=rates.attention_flops,
            link_bytes_per_second=link,
            link_latency_seconds=latency,
            all_to_all_bytes_per_second=link,
            all_to_all_latency_seconds=latency,
            host_sum_bytes_per_second=link,
            sum_bytes_per_second=link,
            overlap=rates.overlap,
            lone_speed=max(1.0, rates.lone_speed),
            layer_overhead_seconds=LEAST_SECONDS,
            cached_overhead_seconds=LEAST_SECONDS,
        ),
        decode=DecodeConstants(
            # Two operations per element of a weight, at the rate of products of many rows. Products of one row are
            # slower, so weights are read in this time or more.
            weight_bytes_per_second=gemm / 2 * element_bytes,
            kv_bytes_per_second=gemm / 2 * element_bytes,
            attention_seconds=latency,
            free_rows=1,
            row_seconds=0.0,
            hop_seconds=latency,
            all_to_all_seconds=latency,
            ring_seconds=0.0,
            sum_seconds=latency,
            host_seconds=0.0,
        ),
    )


TRUST = 0.05
"""Relative error of a sample that costs the fit as much as a constant a factor of e off the ring's own rate."""
# Constants that are fitted: always, for several ranks, for cached tokens or steps, for several processes of a rank.
OF_EVERY_RING = ("layer_overhead_seconds", "gemm_flops", "attention_flops")
OF_RANKS = (
    "link_latency_seconds",
    "link_bytes_per_second",
    "all_to_all_latency_seconds",
    "all_to_all_bytes_per_second",
    "overlap",
)
OF_CACHED = ("cached_overhead_seconds",)
OF_SHARED_HEADS = ("host_sum_bytes_per_second",)
DECODE_CONSTANTS = ("attention_seconds", "kv_bytes_per_second")
LEAST_OVERLAP = 0.05
"""Least start value of a fitted overlap; the fit would leave a 0 unchanged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Errors:
    """Relative errors of predictions, rms and worst."""

    rms: float
    worst: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Measurement beside its predictions, in seconds.

    `by_rates` follows from the rings' own rates, `fitted` from all measurements, `held_out` from the half without this
    one (None if half are too few).
    """

    measurement: Measurement
    by_rates: float
    fitted: float
    held_out: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Fitted profile with its errors.

    `losses` are the shares of time by which all cells together take longer by each way to select than by the fastest
    algorithm of each cell; they are empty if no ring has several ranks. `steps` are decode samples with their predicted
    seconds.
    """

    profile: HardwareProfile
    rows: tuple[Row, ...]
    fitted: Errors
    held_out: Errors | None
    losses: tuple[tuple[str, float], ...]
    steps: tuple[tuple[StepSample, float], ...]


def calibrate(
    model: ModelShape, before: HardwareProfile, measurements: Sequence[Measurement], steps: Sequence[StepSample]
) -> Calibration:
    """Fit `before` to the measurements, and judge the fit on held-out ones.

    Raises ConfigError for too few measurements.
    """
    if (count := len(_without_chain(measurements))) < len(OF_EVERY_RING):
        raise ConfigError(
            f"{count} prefills cannot fit a profile; allowed are {len(OF_EVERY_RING)} or more: "
            f"give more of --tokens and --cached"
        )
    # In a chain, the ranks cut the new tokens by the rates that they measured, not by the fitted ones.
    measurements = [replace(each, sample=with_chain_cuts(model, before, each.sample)) for each in measurements]
    fitted = _fitted(model, before, measurements)
    held_out = _held_out(model, before, measurements)
    rows = tuple(
        Row(
            measurement=each,
            by_rates=predicted_prefill(model, before, each.sample),
            fitted=predicted_prefill(model, fitted, each.sample),
            held_out=None if held_out is None else held_out[place],
        )
        for place, each in enumerate(measurements)
    )
    weights = weight_bytes(model)
    profile = _with_decode(model, weights, fitted, steps)
    return Calibration(
        profile=profile,
        rows=rows,
        fitted=_errors([(row.fitted, row.measurement) for row in rows]),
        held_out=(
            None
            if held_out is None
            else _errors([(seconds, each) for seconds, each in zip(held_out, measurements, strict=True)])
        ),
        losses=_losses(_cells(rows)),
        steps=tuple((each, predicted_step(model, weights, profile, each)) for each in steps),
    )


def _without_chain(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Return the measurements by all other algorithms, which must suffice to fit the rates of a ring."""
    return [each for each in measurements if each.sample.algorithm != CHAIN]


def _fitted(model: ModelShape, before: HardwareProfile, measurements: Sequence[Measurement]) -> HardwareProfile:
    """Fit all algorithms together: on slow links chains alone tell how fast ranks compute."""
    samples = [each.sample for each in measurements]
    of_ring = [each.sample for each in _without_chain(measurements)]
    names: tuple[str, ...] = OF_EVERY_RING
    if any(sample.cp > 1 for sample in samples):
        names += OF_RANKS
    if any(sample.cached_tokens or sample.cuts for sample in samples):
        names += OF_CACHED
    if any(sample.tp > 1 for sample in samples):
        names += OF_SHARED_HEADS
    names = names[: len(of_ring)]
    # The shortest prefill is mostly overhead: a good start value.
    overhead = min(sample.seconds / (1 + len(sample.cuts)) for sample in of_ring) / model.num_layers / 2
    overlap = max(LEAST_OVERLAP, before.prefill.overlap)
    start = replace(before.prefill, layer_overhead_seconds=overhead, overlap=overlap)
    if len(samples) - len(of_ring) >= len(CHAIN_CONSTANTS):
        start, names = replace(start, chain_overlap=overlap), names + CHAIN_CONSTANTS
    ratios = [ratio for name in (PASS_Q, CHAIN) for ratio in _ratios(measurements, name)]
    return fit_prefill(model, replace(before, prefill=start), samples, names, TRUST, ratios, is_robust=True)


def _ratios(measurements: Sequence[Measurement], name: str) -> list[PrefillRatio]:
    """Return the ratios of an algorithm's seconds to those of pass-KV, in cells measured with the same cuts."""
    places = {
        (each.ring, each.sample.cuts, each.cell, each.sample.algorithm): at for at, each in enumerate(measurements)
    }
    found = []
    for (ring, cuts, cell, algorithm), above in places.items():
        below = places.get((ring, cuts, cell, PASS_KV))
        if algorithm == name and below is not None:
            own, kv = measurements[above].seconds, measurements[below].seconds
            # Without equally many rounds there are no pairs.
            value = paired_ratio(own, kv) if len(own) == len(kv) else median(own) / median(kv)
            found.append(PrefillRatio(above=above, below=below, value=value))
    return found


def _held_out(model: ModelShape, before: HardwareProfile, measurements: Sequence[Measurement]) -> list[float] | None:
    """Predict each measurement by a fit to the other half of the cells; None for too few cells."""
    cells = sorted({each.cell for each in measurements})
    half_of: dict[Cell, int] = {cell: place % 2 for place, cell in enumerate(cells)}
    halves = [[each for each in measurements if half_of[each.cell] == half] for half in (0, 1)]
    if min(len(_without_chain(half)) for half in halves) < len(OF_EVERY_RING):
        return None
    profiles = [_fitted(model, before, half) for half in halves]
    return [predicted_prefill(model, profiles[1 - half_of[each.cell]], each.sample) for each in measurements]


def _with_decode(
    model: ModelShape, weights: WeightBytes, profile: HardwareProfile, steps: Sequence[StepSample]
) -> HardwareProfile:
    """Fit the decode constants; return the profile unchanged for too few steps."""
    if len(steps) < len(DECODE_CONSTANTS):
        return profile
    quickest = min(step.seconds for step in steps) / model.num_layers
    start = replace(profile, decode=replace(profile.decode, attention_seconds=quickest))
    return fit_decode(model, weights, start, steps, DECODE_CONSTANTS)


_Cell = Mapping[str, Row]
"""Rows of one cell on one ring, by algorithm."""


def _cells(rows: Sequence[Row]) -> list[_Cell]:
    """Return the cells that one ring measured by several algorithms."""
    by_place: dict[tuple[str, Cell], dict[str, Row]] = {}
    for row in rows:
        place = (row.measurement.ring, row.measurement.cell)
        by_place.setdefault(place, {})[row.measurement.sample.algorithm] = row
    return [cell for cell in by_place.values() if len(cell) > 1]


def _losses(cells: Sequence[_Cell]) -> tuple[tuple[str, float], ...]:
    if not cells:
        return ()

    def auto(predicted: Callable[[Row], float]) -> list[str]:
        return [least({name: predicted(row) for name, row in cell.items()}, _num_tokens(cell)) for cell in cells]

    chosen = {
        "auto, calibrated": auto(lambda row: row.fitted),
        "auto, by the rings' own rates": auto(lambda row: row.by_rates),
    }
    for name in dict.fromkeys(name for cell in cells for name in cell):
        if all(name in cell for cell in cells):
            chosen[f"always {name}"] = [name] * len(cells)
    if all(row.held_out is not None for cell in cells for row in cell.values()):
        chosen["auto, calibrated on other cells"] = auto(lambda row: row.held_out or 0.0)
    best = sum(min(row.measurement.sample.seconds for row in cell.values()) for cell in cells)

    def loss(names: Sequence[str]) -> float:
        taken = (cell[name].measurement.sample.seconds for cell, name in zip(cells, names, strict=True))
        return max(0.0, sum(taken) / best - 1.0)

    return tuple((name, loss(names)) for name, names in chosen.items())


def _num_tokens(cell: _Cell) -> int:
    sample = cell[PASS_KV].measurement.sample
    return sample.new_tokens + sample.cached_tokens


def _errors(predictions: Sequence[tuple[float, Measurement]]) -> Errors:
    wrong = [abs(seconds / each.sample.seconds - 1.0) for seconds, each in predictions]
    return Errors(rms=math.sqrt(sum(error**2 for error in wrong) / len(wrong)), worst=max(wrong))
