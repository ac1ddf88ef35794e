"""Cluster proposal: number and shape of the rings that serve a traffic mix with the fewest processes.

`ringserve plan` uses it. A prefill ring is a queue that serves one turn at a time in order of arrival. Arrivals are
random (Poisson), and every ring of a pool gets an equal part of them. If a prefill ring gets r turns a second, each of
S seconds, the mean wait is r E[S^2] / (2 (1 - r E[S])) (Pollaczek and Khinchine). If a decode ring gets r turns a
second, it holds r * output tokens * TTIT sequences at a time (Little).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ringserve.cp_core.cost.decode import fastest_drafted_step
from ringserve.cp_core.cost.memory import process_memory
from ringserve.cp_core.cost.prefill import predict_migration
from ringserve.cp_core.cost.profile import HardwareProfile
from ringserve.cp_core.errors import ConfigError
from ringserve.services.offline.planning.models import PlannedModel
from ringserve.services.offline.planning.sizing import RingForecast, RingShape, Workload
from ringserve.services.offline.units import format_seconds, format_tokens

# Above this share the mean wait grows steeply, and every burst lengthens it.
MAX_BUSY = 0.8
MAX_RINGS = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Traffic over the whole cluster, each turn writing `output_tokens`; limits apply to means, None is no limit."""

    turns_per_second: float
    output_tokens: int
    max_ttft_seconds: float | None = None
    max_ttit_seconds: float | None = None
    max_batch: int = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillPool:
    """Prefill rings of one shape.

    `busy` is the share of time that a ring computes. `ttft_seconds` has the mean TTFT of each context: the sum of wait,
    prefill, exposed migration and the first decode step.
    """

    shape: RingShape
    num_rings: int
    busy: float
    wait_seconds: float
    ttft_seconds: tuple[float, ...]

    @property
    def num_processes(self) -> int:
        return self.num_rings * self.shape.num_processes


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodePool:
    """Decode rings of one shape; `ttit_seconds` is for a full batch of `batch` sequences."""

    shape: RingShape
    num_rings: int
    batch: int
    ttit_seconds: float
    tokens_per_second: float

    @property
    def num_processes(self) -> int:
        return self.num_rings * self.shape.num_processes


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """Prefill and decode pool that serve the traffic."""

    prefill: PrefillPool
    decode: DecodePool

    @property
    def num_processes(self) -> int:
        return self.prefill.num_processes + self.decode.num_processes

    @property
    def ratio(self) -> str:
        """Ratio of prefill to decode processes, in lowest terms."""
        common = math.gcd(self.prefill.num_processes, self.decode.num_processes)
        return f"{self.prefill.num_processes // common}:{self.decode.num_processes // common}"


def propose(
    model: PlannedModel,
    profile: HardwareProfile,
    workload: Workload,
    traffic: Traffic,
    forecasts: Sequence[RingForecast],
) -> Proposal:
    """Find the pools with the fewest processes that meet the limits. Raises ConfigError if no ring does."""
    fitting = [forecast for forecast in forecasts if not forecast.refusal]
    decodes = [_decode_pool(model, profile, workload, traffic, forecast) for forecast in fitting]
    within_limit = [pool for pool in decodes if pool]
    if not within_limit:
        has_room = any(_spare_tokens(model, profile, workload, traffic, forecast.shape) >= 0.0 for forecast in fitting)
        raise ConfigError(_decode_refusal(workload, traffic, fitting, has_room=has_room))
    decode = min(within_limit, key=lambda pool: (pool.num_processes, pool.ttit_seconds))
    prefills = [_prefill_pool(model, profile, workload, traffic, forecast, decode) for forecast in fitting]
    quick = [pool for pool in prefills if pool]
    if not quick:
        best = min(max(context.ttft_seconds for context in forecast.contexts) for forecast in fitting)
        raise ConfigError(
            f"--ttft: {format_seconds(traffic.max_ttft_seconds or 0.0)} cannot be met; the fastest ring takes "
            f"{format_seconds(best)} for the slowest context without a queue, and then migrates its KV"
        )
    return Proposal(prefill=min(quick, key=lambda pool: (pool.num_processes, max(pool.ttft_seconds))), decode=decode)


def mean_wait_seconds(turns_per_second: float, service_seconds: Sequence[float], shares: Sequence[float]) -> float:
    """Return the mean wait in the queue of one ring; infinite if turns arrive faster than they are served."""
    mean = sum(share * seconds for share, seconds in zip(shares, service_seconds, strict=True))
    square = sum(share * seconds**2 for share, seconds in zip(shares, service_seconds, strict=True))
    busy = turns_per_second * mean
    return math.inf if busy >= 1.0 else turns_per_second * square / (2.0 * (1.0 - busy))


def _prefill_pool(
    model: PlannedModel,
    profile: HardwareProfile,
    workload: Workload,
    traffic: Traffic,
    forecast: RingForecast,
    decode: DecodePool,
) -> PrefillPool | None:
    """Return the fewest rings of one shape; None if a turn without any wait already exceeds the limit."""
    service = [context.ttft_seconds for context in forecast.contexts]
    shares = [context.share for context in workload.contexts]
    after = [
        decode.ttit_seconds
        + predict_migration(
            model.shape,
            profile,
            from_processes=forecast.shape.num_processes,
            to_processes=decode.shape.num_processes,
            tokens=context.new_tokens,
            prefill_seconds=context.ttft_seconds,
        ).exposed_seconds
        for context in forecast.contexts
    ]
    limit = traffic.max_ttft_seconds or math.inf
    slack = limit - max(seconds + rest for seconds, rest in zip(service, after, strict=True))
    if slack <= 0.0:
        return None
    mean = sum(share * seconds for share, seconds in zip(shares, service, strict=True))
    square = sum(share * seconds**2 for share, seconds in zip(shares, service, strict=True))
    # wait <= slack, solved for the rate of one ring
    per_ring = min(MAX_BUSY / mean, math.inf if slack == math.inf else 2.0 * slack / (square + 2.0 * slack * mean))
    rings = _at_least_one(traffic.turns_per_second / per_ring)
    rate = traffic.turns_per_second / rings
    wait = mean_wait_seconds(rate, service, shares)
    return PrefillPool(
        shape=forecast.shape,
        num_rings=rings,
        busy=rate * mean,
        wait_seconds=wait,
        ttft_seconds=tuple(wait + seconds + rest for seconds, rest in zip(service, after, strict=True)),
    )


def _decode_pool(
    model: PlannedModel, profile: HardwareProfile, workload: Workload, traffic: Traffic, forecast: RingForecast
) -> DecodePool | None:
    """Return the fewest rings of one shape; None if a batch of one does not fit or exceeds the limit."""
    shape = forecast.shape
    mean = sum(context.share * context.tokens for context in workload.contexts) + traffic.output_tokens
    # The longest context must always fit; the other sequences of the batch have the mean length.
    spare = _spare_tokens(model, profile, workload, traffic, shape)
    if spare < 0:
        return None
    most = min(traffic.max_batch, 1 + int(spare // mean))

    def seconds(batch: int) -> float:
        step = fastest_drafted_step(
            model.shape,
            model.weights,
            profile,
            cp=shape.cp,
            tp=shape.tp,
            batch=batch,
            context_tokens=mean,
            accepted_share=workload.accepted_share,
        )
        return step.ttit_seconds

    limit = traffic.max_ttit_seconds or math.inf
    batches = [batch for batch in range(1, most + 1) if seconds(batch) <= limit]
    if not batches:
        return None
    batch = max(batches)
    rings = _at_least_one(traffic.turns_per_second * traffic.output_tokens * seconds(batch) / (MAX_BUSY * batch))
    return DecodePool(
        shape=shape,
        num_rings=rings,
        batch=batch,
        ttit_seconds=seconds(batch),
        tokens_per_second=batch / seconds(batch),
    )


def _spare_tokens(
    model: PlannedModel, profile: HardwareProfile, workload: Workload, traffic: Traffic, shape: RingShape
) -> float:
    """Return for how many tokens a decode ring has room beside the longest context; below 0 if that does not fit."""
    memory = process_memory(
        model.shape,
        model.weights,
        profile,
        cp=shape.cp,
        tp=shape.tp,
        step_tokens=traffic.max_batch,
        context_tokens=0,
    )
    return memory.max_tokens(shape.cp) - (workload.longest + traffic.output_tokens)


def _decode_refusal(workload: Workload, traffic: Traffic, fitting: Sequence[RingForecast], *, has_room: bool) -> str:
    if traffic.max_ttit_seconds is None or not has_room:
        tokens = format_tokens(workload.longest)
        return f"--output: {traffic.output_tokens} tokens after {tokens} fit no ring; allowed are fewer"
    best = min(context.ttit_seconds for forecast in fitting for context in forecast.contexts)
    return (
        f"--ttit: {format_seconds(traffic.max_ttit_seconds)} cannot be met; the fastest ring takes "
        f"{format_seconds(best)} a token for a single sequence with the shortest context"
    )


def _at_least_one(rings: float) -> int:
    if rings > MAX_RINGS:
        raise ConfigError(f"--rate: the traffic needs {rings:.3g} rings; allowed are {MAX_RINGS} or fewer")
    return max(1, math.ceil(rings))
