"""Forecast of one ring of cp x tp processes: memory, TTFT, TTIT and throughput, per context.

`ringserve plan`, `explain` and `simulate` use it. Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ringserve.cp_core.cost.decode import fastest_drafted_step
from ringserve.cp_core.cost.memory import ProcessMemory, process_memory
from ringserve.cp_core.cost.model import PREFILL_ALGORITHMS
from ringserve.cp_core.cost.prefill import predict_turn
from ringserve.cp_core.cost.profile import HardwareProfile
from ringserve.cp_core.cost.selector import least
from ringserve.cp_core.cost.steps import PrefillCost
from ringserve.cp_core.errors import ConfigError
from ringserve.services.offline.planning.models import PlannedModel
from ringserve.services.offline.units import ContextShare, format_tokens

GIGABYTE = 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class RingShape:
    """Ring of cp ranks of tp processes each."""

    cp: int
    tp: int

    @property
    def num_processes(self) -> int:
        return self.cp * self.tp

    def __str__(self) -> str:
        return f"cp {self.cp} x tp {self.tp}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextForecast:
    """Forecast of one context on an otherwise idle ring. Seconds; bytes of one process.

    `ttft_seconds` contains neither queue nor migration; `ttit_seconds` is for a batch of one, whose steps check
    `num_drafts` drafts and give `tokens_per_step`. The ring has room for the KV of `max_contexts` contexts of this
    length; what the buffers of a step of this context take is already subtracted.
    """

    tokens: int
    new_tokens: int
    algorithm: str
    ttft_seconds: float
    prompt_tokens_per_second: float
    ttit_seconds: float
    decode_variant: str
    num_drafts: int
    tokens_per_step: float
    kv_bytes: float
    max_contexts: int

    @property
    def fits(self) -> bool:
        """True if the ring holds one context of this length."""
        return self.max_contexts > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RingForecast:
    """Ring forecast. `memory` is for a ring that computes every context of the mix.

    `refusal` names the part that does not fit, and is empty if the whole mix fits.
    """

    shape: RingShape
    memory: ProcessMemory
    contexts: tuple[ContextForecast, ...]
    refusal: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Turns with contexts of the lengths in `contexts`.

    The share `cached_share` (0 to below 1) of each is cached from earlier turns. New tokens are cut into chunks of
    `chunk_tokens`; None computes each turn in one step. If `accepted_share` is above 0, decode steps may check drafts,
    each of which is right with this probability.
    """

    contexts: tuple[ContextShare, ...]
    cached_share: float = 0.0
    chunk_tokens: int | None = None
    accepted_share: float = 0.0

    @property
    def longest(self) -> int:
        return max(context.tokens for context in self.contexts)

    def cached_tokens(self, tokens: int) -> int:
        """Return the cached tokens of a context of `tokens`; at least one token is new."""
        return min(tokens - 1, int(tokens * self.cached_share))

    @property
    def step_tokens(self) -> int:
        """Most tokens that one step computes."""
        return max(self.step_tokens_of(context.tokens) for context in self.contexts)

    def step_tokens_of(self, tokens: int) -> int:
        """Return the most tokens that one step of a context of `tokens` computes."""
        new = tokens - self.cached_tokens(tokens)
        return min(new, self.chunk_tokens or new)


def require_tp(model: PlannedModel, tp: int) -> None:
    """Raise ConfigError unless tp processes get equally many whole KV heads."""
    heads = model.shape.num_kv_heads
    if heads % tp:
        allowed = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
        raise ConfigError(f"--tp: {tp} does not divide the {heads} KV heads of {model.name}; allowed are {allowed}")


def forecast_ring(model: PlannedModel, profile: HardwareProfile, shape: RingShape, workload: Workload) -> RingForecast:
    """Forecast one ring; times are predicted even if the memory does not suffice."""

    def memory_for(step_tokens: int, tokens: int) -> ProcessMemory:
        return process_memory(
            model.shape,
            model.weights,
            profile,
            cp=shape.cp,
            tp=shape.tp,
            step_tokens=step_tokens,
            context_tokens=tokens,
        )

    memory = memory_for(workload.step_tokens, workload.longest)
    contexts = tuple(
        _forecast(model, profile, shape, workload, memory_for(workload.step_tokens_of(tokens), tokens), tokens)
        for tokens in (each.tokens for each in workload.contexts)
    )
    return RingForecast(
        shape=shape, memory=memory, contexts=contexts, refusal=_refusal(model, profile, shape, memory, workload.longest)
    )


def fastest_turn(
    model: PlannedModel, profile: HardwareProfile, shape: RingShape, workload: Workload, tokens: int
) -> tuple[str, PrefillCost]:
    """Return the algorithm that `auto` selects for a whole turn, and its cost; ties within 2% go to pass-KV."""
    cached = workload.cached_tokens(tokens)
    costs = {
        algorithm: predict_turn(
            model.shape,
            profile,
            cp=shape.cp,
            tp=shape.tp,
            algorithm=algorithm,
            new_tokens=tokens - cached,
            cached_tokens=cached,
            chunk_tokens=workload.chunk_tokens,
        )
        for algorithm in PREFILL_ALGORITHMS
    }
    taken = least({algorithm: cost.total_seconds for algorithm, cost in costs.items()}, tokens)
    return taken, costs[taken]


def first_that_fits(forecasts: Sequence[RingForecast]) -> RingForecast:
    """Return the forecast of the smallest ring that fits the mix. Raises ConfigError with the largest's refusal."""
    fitting = [forecast for forecast in forecasts if not forecast.refusal]
    if not fitting:
        largest = max(forecasts, key=lambda forecast: forecast.shape.num_processes)
        raise ConfigError(largest.refusal)
    return min(fitting, key=lambda forecast: forecast.shape.num_processes)


def _forecast(
    model: PlannedModel,
    profile: HardwareProfile,
    shape: RingShape,
    workload: Workload,
    memory: ProcessMemory,
    tokens: int,
) -> ContextForecast:
    algorithm, turn = fastest_turn(model, profile, shape, workload, tokens)
    step = fastest_drafted_step(
        model.shape,
        model.weights,
        profile,
        cp=shape.cp,
        tp=shape.tp,
        batch=1,
        context_tokens=tokens,
        accepted_share=workload.accepted_share,
    )
    new = tokens - workload.cached_tokens(tokens)
    return ContextForecast(
        tokens=tokens,
        new_tokens=new,
        algorithm=algorithm,
        ttft_seconds=turn.total_seconds,
        prompt_tokens_per_second=new / turn.total_seconds,
        ttit_seconds=step.ttit_seconds,
        decode_variant=step.cost.variant,
        num_drafts=step.num_drafts,
        tokens_per_step=step.tokens,
        kv_bytes=-(-tokens // shape.cp) * memory.kv_bytes_per_token,
        max_contexts=memory.max_tokens(shape.cp) // tokens,
    )


def _refusal(
    model: PlannedModel, profile: HardwareProfile, shape: RingShape, memory: ProcessMemory, longest: int
) -> str:
    where = f"{model.name} on cp {shape.cp} x tp {shape.tp}"
    usable = profile.memory_bytes - memory.reserved_bytes
    if memory.weights_bytes > usable:
        return (
            f"{where} does not fit: a process holds {_gigabytes(memory.weights_bytes)} of weights, and {profile.name} "
            f"has {_gigabytes(usable)} for them; allowed are larger tp"
        )
    if memory.max_tokens(shape.cp) < longest:
        needed = -(-longest // shape.cp) * memory.kv_bytes_per_token
        return (
            f"{where} does not fit: {format_tokens(longest)} tokens are {_gigabytes(needed)} of KV a process, and "
            f"{_gigabytes(max(0.0, memory.kv_bytes))} remain beside {_gigabytes(memory.weights_bytes)} of weights and "
            f"{_gigabytes(memory.step_bytes)} for a step; allowed are larger cp or tp, or shorter chunks"
        )
    return ""


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / GIGABYTE:.1f} GB"
