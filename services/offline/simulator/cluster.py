"""Rings of a simulated cluster, their registrations, and the duration of their steps.

It also finds how many conversations keep the rings busy for a given share of the time. Used by
`simulation.Simulation`, the placements and `ringserve simulate`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate

from ringserve.cp_core.cost.decode import fastest_step
from ringserve.cp_core.cost.memory import WeightBytes, process_memory
from ringserve.cp_core.cost.prefill import predict_migration
from ringserve.cp_core.cost.profile import HardwareProfile
from ringserve.cp_core.cost.steps import StepLimits, WorkModel, cut
from ringserve.cp_core.errors import ConfigError
from ringserve.cp_core.layout.shards import TokenRange
from ringserve.orchestration.placement.costs import RingCosts
from ringserve.orchestration.placement.registry import RegisteredRing, RingRegistry
from ringserve.orchestration.prefill.scheduler import PrefillScheduler, ScheduledStep
from ringserve.orchestration.protocol.rings import PrefillScheduling
from ringserve.orchestration.protocol.turns import RingRegistration
from ringserve.services.offline.simulator.rings import (
    BlockKv,
    Clock,
    RetainedKv,
    SimulatedDecodeRing,
    SimulatedPrefillRing,
)
from ringserve.services.offline.simulator.trace import SyntheticTrace, TracedConversation, TraceShape
from ringserve.workers.protocol.ranks import ModelInfo

# Tokens to which the mean context of a decode batch is rounded; the effect on a step is negligible.
CONTEXT_GRAIN = 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolShape:
    """Pool of `num_rings` rings of cp ranks of tp processes."""

    num_rings: int
    cp: int
    tp: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterShape:
    """Hardware, model and limits of a simulated cluster.

    The rings of each role have room for `kv_tokens` together; 0: for as many as their memory takes.
    """

    model: ModelInfo
    weights: WeightBytes
    profile: HardwareProfile
    prefill: PoolShape
    decode: PoolShape
    chunk_tokens: int = 65_536
    max_batch: int = 32
    kv_tokens: int = 0
    scheduling: PrefillScheduling = field(default_factory=PrefillScheduling)


class StepTimes:
    """Durations of prefill steps on the rings of a cluster, by its hardware profile. Seconds."""

    def __init__(self, shape: ClusterShape) -> None:
        scheduling = shape.scheduling
        self.work = WorkModel.of_shape(shape.model.shape)
        self.limits = StepLimits.of(
            self.work,
            step_budget=scheduling.step_budget,
            chunk_tokens=shape.chunk_tokens,
            min_chunk_tokens=scheduling.min_chunk_tokens,
        )
        self._costs = RingCosts(shape.model, profile=shape.profile)
        self._ring = registration_of(shape, "prefill", capacity_tokens=0)
        rates = shape.profile.prefill
        # [without cached tokens, with cached tokens]
        self._overheads = [
            shape.model.num_layers * rates.rates(shape.prefill.cp, is_cached=is_cached).layer_overhead_seconds
            for is_cached in (False, True)
        ]

    def of(self, step: ScheduledStep) -> float:
        """Return the seconds of a step; its pieces share the largest of their overheads."""
        seconds = largest = 0.0
        for piece in step.pieces:
            start = piece.tokens.start
            overhead = self._overheads[start > 0]
            seconds += self._costs.seconds(self._ring, len(piece.tokens), start).total(step.algorithm) - overhead
            largest = max(largest, overhead)
        return seconds + largest

    def alone(self, tokens: TokenRange) -> float:
        """Return the seconds of a prompt on an idle ring, each step by the faster algorithm."""
        steps = cut(self.work, self.limits, tokens)
        costs = (self._costs.seconds(self._ring, len(step), step.start) for step in steps)
        return sum(cost.total(cost.fastest) for cost in costs)


class Cluster:
    """Rings of a simulated cluster and the router's `registry` of them. `has_blocks`: sequences share blocks of KV.

    Raises ConfigError if a ring cannot hold the `longest` conversation.
    """

    def __init__(self, shape: ClusterShape, clock: Clock, longest: int, *, has_blocks: bool = False) -> None:
        self.registry = RingRegistry(lambda: clock.now)
        self._shape = shape
        self._model = shape.model.shape
        self._clock = clock
        self._kv = BlockKv if has_blocks else RetainedKv
        step_tokens = min(longest, shape.chunk_tokens)
        self.prefill = {
            ring.entry.name: ring
            for ring in self._prefill_rings(self._registration("prefill", shape.prefill, step_tokens, longest))
        }
        self.decode = {
            ring.entry.name: ring
            for ring in self._decode_rings(self._registration("decode", shape.decode, shape.max_batch, 0))
        }
        for entry in (next(iter(self.prefill.values())).entry, next(iter(self.decode.values())).entry):
            if longest > entry.registration.capacity_tokens:
                ring = entry.registration
                raise ConfigError(
                    f"trace: a conversation comes to {longest} tokens, and a {ring.role} ring of cp {ring.num_ranks} "
                    f"x tp {ring.tp} holds {ring.capacity_tokens}; allowed are larger rings"
                )

    def forget_kv(self, ring: SimulatedPrefillRing | SimulatedDecodeRing) -> None:
        """Forget the KV that a ring without turns retains."""
        ring.kv = self._kv(ring.kv.capacity)
        ring.entry.free_tokens = ring.kv.capacity

    def pull_seconds(self, tokens: int) -> float:
        """Return the seconds to fetch KV from a decode ring; computation hides none of them."""
        return self._migration_seconds(tokens, 0.0) if tokens else 0.0

    def exposed_seconds(self, tokens: int, prefill_seconds: float) -> float:
        """Return the seconds from the end of a prefill until the decode ring has all missing KV."""
        return self._migration_seconds(tokens, prefill_seconds)

    def check_integrity(self) -> None:
        """Assert that no token of KV is counted twice or lost."""
        for kv in (*(ring.kv for ring in self.prefill.values()), *(ring.kv for ring in self.decode.values())):
            kv.check_integrity()

    def _migration_seconds(self, tokens: int, prefill_seconds: float) -> float:
        pools = (self._shape.prefill, self._shape.decode)
        sizes = [pool.cp * pool.tp for pool in pools]
        return predict_migration(
            self._model,
            self._shape.profile,
            from_processes=sizes[0],
            to_processes=sizes[1],
            tokens=tokens,
            prefill_seconds=prefill_seconds,
        ).exposed_seconds

    def _prefill_rings(self, registration: RingRegistration) -> list[SimulatedPrefillRing]:
        times, pool = StepTimes(self._shape), self._shape.prefill
        # The scheduler's first estimate of its rate counts matrix products only, as a real leader's does.
        rate = pool.cp * pool.tp * registration.rates.gemm_flops / times.work.flops_per_unit
        rings = []
        for number in range(pool.num_rings):
            ring = self._announced(registration, number)
            scheduler = PrefillScheduler(ring.name, times.work, times.limits, self._shape.scheduling, rate=rate)
            kv = self._kv(ring.registration.capacity_tokens)
            rings.append(SimulatedPrefillRing(ring, kv, self._clock, scheduler, times.of))
        return rings

    def _decode_rings(self, registration: RingRegistration) -> list[SimulatedDecodeRing]:
        step_seconds = self._decode_step_seconds()
        rings = (self._announced(registration, number) for number in range(self._shape.decode.num_rings))
        return [
            SimulatedDecodeRing(
                ring, self._kv(ring.registration.capacity_tokens), self._clock, self._shape.max_batch, step_seconds
            )
            for ring in rings
        ]

    def _decode_step_seconds(self) -> Callable[[int, float], float]:
        shape = self._shape

        @cache
        def rounded(batch: int, thousands: int) -> float:
            return fastest_step(
                shape.model.shape,
                shape.weights,
                shape.profile,
                cp=shape.decode.cp,
                tp=shape.decode.tp,
                batch=batch,
                context_tokens=thousands * CONTEXT_GRAIN,
            ).total_seconds

        return lambda batch, context: rounded(batch, round(context / CONTEXT_GRAIN))

    def _announced(self, registration: RingRegistration, number: int) -> RegisteredRing:
        """Register ring `number` of a pool and return its entry in the router's registry."""
        name = f"{registration.role}-{number}"
        self.registry.register(replace(registration, name=name, endpoint=f"{name}:1"))
        ring = self.registry.named(registration.role, name)
        assert ring is not None, "it was registered just now"
        return ring

    def _registration(self, role: str, pool: PoolShape, step_tokens: int, context_tokens: int) -> RingRegistration:
        shape = self._shape
        memory = process_memory(
            shape.model.shape,
            shape.weights,
            shape.profile,
            cp=pool.cp,
            tp=pool.tp,
            step_tokens=step_tokens,
            context_tokens=context_tokens,
        )
        capacity = shape.kv_tokens // pool.num_rings or memory.max_tokens(pool.cp)
        return registration_of(shape, role, capacity_tokens=capacity)


def registration_of(shape: ClusterShape, role: str, *, capacity_tokens: int) -> RingRegistration:
    """Return the registration that a ring of one of the pools would announce."""
    pool = shape.prefill if role == "prefill" else shape.decode
    return RingRegistration(
        role=role,
        name=role,
        endpoint="",
        incarnation="1",
        num_ranks=pool.cp,
        tp=pool.tp,
        rates=shape.profile.prefill.rates(pool.cp, is_cached=False).ring,
        capacity_tokens=capacity_tokens,
        max_batch=shape.max_batch if role == "decode" else 0,
        chunk_tokens=shape.chunk_tokens,
        step_budget=shape.scheduling.step_budget,
        min_chunk_tokens=shape.scheduling.min_chunk_tokens,
    )


SAMPLE = 10_000
"""Conversations drawn to estimate the mean prefill time of one. A few are very long, so means of smaller samples vary
by more than 5%."""


def conversations_for(busy_share: float, cluster: ClusterShape, shape: TraceShape, seed: int) -> int:
    """Return the number of conversations, at least one, that keeps the prefill rings busy for a share of their time.

    No token is assumed to be computed twice. `shape.num_conversations` is ignored.
    """
    times = StepTimes(cluster)
    sample = SyntheticTrace(replace(shape, num_conversations=SAMPLE), seed)
    mean = sum(prefill_seconds(times, conversation) for conversation in sample) / SAMPLE
    return max(1, round(busy_share * cluster.prefill.num_rings * shape.seconds / mean))


def prefill_seconds(times: StepTimes, conversation: TracedConversation) -> float:
    """Return the prefill seconds of all turns, each after the turns before it, on an idle ring."""
    turns = conversation.turns
    starts = accumulate((turn.new_tokens + turn.output_tokens for turn in turns), initial=0)
    return sum(
        times.alone(TokenRange(start, start + turn.new_tokens)) for start, turn in zip(starts, turns, strict=False)
    )
