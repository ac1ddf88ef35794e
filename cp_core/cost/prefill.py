"""Seconds of a whole turn's prefill on hardware of a profile, with tensor parallel sums, and of its KV's migration.

The router's planner and offline planning use it.

T new tokens, P cached ones, N = cp ranks of the ring, each of tp processes. Pure Python, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from itertools import pairwise, starmap
from operator import add

from ringserve.cp_core.cost.memory import kv_bytes_per_token
from ringserve.cp_core.cost.model import ModelShape
from ringserve.cp_core.cost.profile import HardwareProfile, PrefillConstants
from ringserve.cp_core.cost.steps import PrefillCost, StepPredictor


def predict_turn(
    model: ModelShape,
    profile: HardwareProfile,
    *,
    cp: int,
    tp: int,
    algorithm: str,
    new_tokens: int,
    cached_tokens: int = 0,
    chunk_tokens: int | None = None,
    speeds: tuple[float, ...] = (),
    lateness: tuple[float, ...] = (),
) -> PrefillCost:
    """Return the cost of T new tokens after P cached ones, cut every `chunk_tokens`; None computes them in one step.

    `speeds` and `lateness` are by rank, as in RingRates. Raises ConfigError if `algorithm` is none of
    PREFILL_ALGORITHMS.
    """
    end = cached_tokens + new_tokens
    bounds = [*range(cached_tokens, end, chunk_tokens or new_tokens), end]

    def cost(start: int, stop: int) -> PrefillCost:
        predictor = step_predictor(model, profile.prefill, cp, tp, start > 0, speeds, lateness)
        step = predictor.cost(algorithm, stop - start, start)
        return replace(step, sum_seconds=sum_seconds(model, profile, tp, -(-(stop - start) // cp)))

    return reduce(add, starmap(cost, pairwise(bounds)))


@lru_cache(maxsize=256)
def step_predictor(
    model: ModelShape,
    constants: PrefillConstants,
    cp: int,
    tp: int,
    is_cached: bool,
    speeds: tuple[float, ...] = (),
    lateness: tuple[float, ...] = (),
) -> StepPredictor:
    """Return the predictor of steps by a profile's constants. A fit asks for the same one for most of its samples.

    `is_cached` is True for a turn with cached tokens. For other parameters see `predict_turn`.
    """
    rates = constants.rates(cp, is_cached=is_cached)
    if speeds or lateness:
        rates = replace(rates, ring=replace(rates.ring, speeds=speeds, lateness=lateness))
    return StepPredictor(model.share(tp), rates, cp)


def sum_seconds(model: ModelShape, profile: HardwareProfile, tp: int, rows: int) -> float:
    """Return the time of all sums over `tp` processes for `rows` tokens, two a layer and one for the embedding.

    Each is a ring all-reduce that sends and receives 2 (tp - 1) / tp of the summed bytes.
    """
    if tp == 1:
        return 0.0
    constants = profile.prefill
    is_inside = profile.num_hosts(tp) == 1
    rate = constants.host_sum_bytes_per_second if is_inside else constants.sum_bytes_per_second
    summed = rows * model.hidden_size * model.element_bytes
    return (1 + 2 * model.num_layers) * 2 * (tp - 1) / tp * summed / rate


@dataclass(frozen=True, kw_only=True, slots=True)
class MigrationCost:
    """Cost of sending a turn's KV: `wire_seconds` in all, of which `exposed_seconds` remain after the prefill."""

    total_bytes: float
    wire_seconds: float
    exposed_seconds: float


def predict_migration(
    model: ModelShape,
    profile: HardwareProfile,
    *,
    from_processes: int,
    to_processes: int,
    tokens: int,
    prefill_seconds: float,
) -> MigrationCost:
    """Return the cost of moving the KV of `tokens` between rings of so many processes (cp x tp) each.

    Layers are sent as they are computed, and the smaller ring's links limit the rate. The last layer's KV is ready when
    the prefill ends, so at least its share is exposed.
    """
    total = float(tokens * kv_bytes_per_token(model))
    wire = total / (min(from_processes, to_processes) * profile.kv_link_bytes_per_second)
    last_layer = wire / model.num_layers
    return MigrationCost(
        total_bytes=total,
        wire_seconds=wire,
        exposed_seconds=max(last_layer, wire - prefill_seconds * (1.0 - 1.0 / model.num_layers)),
    )
