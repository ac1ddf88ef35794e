"""Choice of the ring algorithm of a prefill, with its reason. Pure functions, no torch.

T new tokens, P cached ones, N ranks, H query heads, K key/value heads, e bytes per element, C compute in FLOP/s,
BW link in byte/s. Sources: arXiv 2411.01783, equations 1 to 3, algorithms 1 and 5, appendix D.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ringserve.cp_core.cost.model import (
    CHAIN,
    GATHER_KV,
    PASS_KV,
    PASS_Q,
    PREFILL_ALGORITHMS,
    SP_NTP,
    ModelShape,
    PrefillRates,
    StepPredictor,
)
from ringserve.cp_core.errors import ConfigError, InvalidRequest

POLICIES = ("auto", "alg1", "alg5", "empirical", *PREFILL_ALGORITHMS)

# Predictions nearer to each other than this are no reason to leave an earlier one of PREFILL_ALGORITHMS.
TIE = 0.02
GATHERED_TOKENS = 1 << 17
"""Most tokens of a sequence whose KV all comes to a rank by choice: it holds a layer or more of them at a time."""
NAMES = {PASS_KV: "pass-KV", PASS_Q: "pass-Q", GATHER_KV: "gather-KV", CHAIN: "chain", SP_NTP: "SP-NTP"}


@dataclass(frozen=True, slots=True)
class Selection:
    """Chosen algorithm, one of PREFILL_ALGORITHMS, and the reason with its numbers."""

    algorithm: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """Prefill of T >= 1 new tokens after P >= 0 cached ones, on N ranks. Raises InvalidRequest."""

    new_tokens: int
    cached_tokens: int
    num_ranks: int

    def __post_init__(self) -> None:
        for name, least in (("new_tokens", 1), ("cached_tokens", 0), ("num_ranks", 1)):
            if getattr(self, name) < least:
                raise InvalidRequest(f"{name} is {getattr(self, name)}; allowed is {least} or more")

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence after the turn's prefill."""
        return self.new_tokens + self.cached_tokens

    @property
    def miss_rate(self) -> float:
        """Share of new tokens: T / (T + P)."""
        return self.new_tokens / (self.new_tokens + self.cached_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class EmpiricalFit:
    """Constants of h = alpha ln T + beta ln(T / (T + P)) + gamma, fitted on the cluster that uses it.

    The paper's printed constants (-1.059, 1.145, 12.112) do not reproduce its own table 4.
    """

    alpha: float
    beta: float
    gamma: float


def algorithm_1(turn: Turn, model: ModelShape, compute_flops: float, link_bytes_per_second: float) -> Selection:
    """Select pass-KV if its messages hide behind attention (equation 2) or KV is the smaller message (equation 1)."""
    miss_rate = 2 * model.num_kv_heads / model.num_heads
    return _by_threshold("Algorithm 1", turn, model, compute_flops, link_bytes_per_second, miss_rate)


def algorithm_5(turn: Turn, model: ModelShape, compute_flops: float, link_bytes_per_second: float) -> Selection:
    """Select as Algorithm 1 with the all-to-all of pass-Q counted: a lower miss rate suffices for pass-KV."""
    scale = turn.num_ranks * compute_flops * model.attention_bytes
    saved = 4 * turn.new_tokens * link_bytes_per_second / scale
    miss_rate = 2 * model.num_kv_heads / model.num_heads - saved
    return _by_threshold("Algorithm 5", turn, model, compute_flops, link_bytes_per_second, miss_rate)


def empirical(turn: Turn, fit: EmpiricalFit) -> Selection:
    """Select pass-KV where the fitted h is positive (appendix D)."""
    if turn.num_ranks == 1:
        return _alone()
    h = fit.alpha * math.log(turn.new_tokens) + fit.beta * math.log(turn.miss_rate) + fit.gamma
    sign = "> 0" if h > 0.0 else "<= 0"
    return Selection(PASS_KV if h > 0.0 else PASS_Q, f"Empirical: {_describe(turn)}, h = {h:.4g} {sign}")


def fastest(turn: Turn, model: ModelShape, rates: PrefillRates) -> Selection:
    """Select the least predicted time; a tie within 2% goes to the earlier one of PREFILL_ALGORITHMS."""
    return faster(turn, StepPredictor(model, rates, turn.num_ranks).seconds(turn.new_tokens, turn.cached_tokens))


def faster(turn: Turn, seconds: Mapping[str, float]) -> Selection:
    """Select as `fastest`, by times that are known already, in the order of PREFILL_ALGORITHMS."""
    if turn.num_ranks == 1:
        return _alone()
    chosen = least(seconds, turn.num_tokens)
    times = ", ".join(f"{NAMES[name]} {duration(each)}" for name, each in seconds.items())
    is_tie = any(
        name != chosen and not is_clearly_less(seconds[chosen], each) and _is_open(name, turn.num_tokens)
        for name, each in seconds.items()
    )
    verdict = f"a tie within 2% goes to {NAMES[chosen]}" if is_tie else f"{NAMES[chosen]} is fastest"
    return Selection(chosen, f"Auto: {_describe(turn)}, predicted {times}: {verdict}")


def least(seconds: Mapping[str, float], num_tokens: int) -> str:
    """Return the algorithm of least time for a sequence of so many tokens; of a tie the first."""
    best = min(each for name, each in seconds.items() if _is_open(name, num_tokens))
    return next(
        name for name, each in seconds.items() if not is_clearly_less(best, each) and _is_open(name, num_tokens)
    )


def _is_open(name: str, num_tokens: int) -> bool:
    return name not in (GATHER_KV, CHAIN) or num_tokens <= GATHERED_TOKENS


def is_clearly_less(seconds: float, other: float) -> bool:
    """Return whether `seconds` is less than `other` by more than a tie."""
    return seconds < (1.0 - TIE) * other


def forced(algorithm: str) -> Selection:
    """Select the algorithm that the configuration or the caller names. Raises ConfigError if it is no algorithm."""
    if algorithm not in PREFILL_ALGORITHMS:
        raise ConfigError(f"algorithm is {algorithm!r}; allowed are {', '.join(PREFILL_ALGORITHMS)}")
    return Selection(algorithm, f"Forced: {algorithm} is configured")


def select(
    policy: str, turn: Turn, model: ModelShape, rates: PrefillRates, fit: EmpiricalFit | None = None
) -> Selection:
    """Select by a policy, one of POLICIES. Algorithms 1 and 5 take C and BW from `rates`.

    Raises ConfigError for an unknown policy, and for "empirical" without `fit`.
    """
    if policy == "auto":
        return fastest(turn, model, rates)
    if policy == "alg1":
        return algorithm_1(turn, model, rates.ring.attention_flops, rates.ring.link_bytes_per_second)
    if policy == "alg5":
        return algorithm_5(turn, model, rates.ring.attention_flops, rates.ring.link_bytes_per_second)
    if policy == "empirical":
        if fit is None:
            raise ConfigError("selector is 'empirical', which needs alpha, beta and gamma fitted on this cluster")
        return empirical(turn, fit)
    if policy in PREFILL_ALGORITHMS:
        return forced(policy)
    raise ConfigError(f"selector is {policy!r}; allowed are {', '.join(POLICIES)}")


def hiding_length(turn: Turn, model: ModelShape, compute_flops: float, link_bytes_per_second: float) -> float:
    """Return the new tokens from which pass-KV messages hide behind attention: N C K e / (2 H BW), equation 2."""
    scale = turn.num_ranks * compute_flops * model.num_kv_heads * model.attention_bytes
    return scale / (2 * model.num_heads * link_bytes_per_second)


def _by_threshold(
    name: str, turn: Turn, model: ModelShape, compute_flops: float, link_bytes_per_second: float, miss_rate: float
) -> Selection:
    if turn.num_ranks == 1:
        return _alone()
    hidden_from = hiding_length(turn, model, compute_flops, link_bytes_per_second)
    if turn.new_tokens >= hidden_from:
        why = f"T >= {hidden_from:.0f}, so KV messages hide behind attention"
        return Selection(PASS_KV, f"{name}: {_describe(turn)}, {why}")
    short = f"T < {hidden_from:.0f}, so KV messages would not hide"
    if turn.miss_rate >= miss_rate:
        return Selection(PASS_KV, f"{name}: {_describe(turn)}, {short}, but miss rate >= {miss_rate:.4g}")
    return Selection(PASS_Q, f"{name}: {_describe(turn)}, {short}, and miss rate < {miss_rate:.4g}")


def _alone() -> Selection:
    return Selection(PASS_KV, "a ring of one rank sends nothing")


def _describe(turn: Turn) -> str:
    counts = f"T={turn.new_tokens} P={turn.cached_tokens} N={turn.num_ranks}"
    return f"{counts}, miss rate {turn.miss_rate:.4g}"


def duration(seconds: float) -> str:
    """Format seconds for a plan's reason: milliseconds below one second."""
    return f"{seconds:.3g} s" if seconds >= 0.9995 else f"{seconds * 1e3:.3g} ms"
