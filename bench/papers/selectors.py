"""Selectors between pass-KV and pass-Q that the paper proposes, and fits of their constants to prefills of both.

T new tokens, P cached ones, N ranks, H query heads, K key/value heads, e bytes per element, C compute in FLOP/s,
BW link in byte/s. Sources: arXiv 2411.01783, equations 1 to 3, algorithms 1 and 5, appendix D. A served ring selects
by the cost model instead (`cp_core/cost/selector.py`); the papers bench and the selection bench compare both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from ringserve.cp_core.cost.fit import PrefillSample
from ringserve.cp_core.cost.model import PASS_KV, PASS_Q, ModelShape
from ringserve.cp_core.cost.selector import Selection, Turn, alone
from ringserve.cp_core.errors import ConfigError


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
    """Select pass-KV if the fitted h is positive (appendix D)."""
    if turn.num_ranks == 1:
        return alone()
    h = fit.alpha * math.log(turn.new_tokens) + fit.beta * math.log(turn.miss_rate) + fit.gamma
    sign = "> 0" if h > 0.0 else "<= 0"
    return Selection(PASS_KV if h > 0.0 else PASS_Q, f"Empirical: {describe(turn)}, h = {h:.4g} {sign}")


def hiding_length(turn: Turn, model: ModelShape, compute_flops: float, link_bytes_per_second: float) -> float:
    """Return the new tokens from which pass-KV messages hide behind attention: N C K e / (2 H BW), equation 2."""
    scale = turn.num_ranks * compute_flops * model.num_kv_heads * model.attention_bytes
    return scale / (2 * model.num_heads * link_bytes_per_second)


def _by_threshold(
    name: str, turn: Turn, model: ModelShape, compute_flops: float, link_bytes_per_second: float, miss_rate: float
) -> Selection:
    if turn.num_ranks == 1:
        return alone()
    hidden_from = hiding_length(turn, model, compute_flops, link_bytes_per_second)
    if turn.new_tokens >= hidden_from:
        why = f"T >= {hidden_from:.0f}, so KV messages hide behind attention"
        return Selection(PASS_KV, f"{name}: {describe(turn)}, {why}")
    short = f"T < {hidden_from:.0f}, so KV messages would not hide"
    if turn.miss_rate >= miss_rate:
        return Selection(PASS_KV, f"{name}: {describe(turn)}, {short}, but miss rate >= {miss_rate:.4g}")
    return Selection(PASS_Q, f"{name}: {describe(turn)}, {short}, and miss rate < {miss_rate:.4g}")


MAX_ADVANTAGE = 0.1
"""Advantages are clipped to this in a fit: a larger one shows which algorithm is better, but not reliably by how
much."""
RATIOS = tuple(1e2 * 1.01**step for step in range(1400))
"""Values of C / BW that are tried, in FLOP a byte: 1% apart, from 1e2 (links as fast as memory) to about 1e8."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Prefill of a turn and the seconds that each algorithm took for it."""

    turn: Turn
    pass_kv_seconds: float
    pass_q_seconds: float

    @property
    def advantage(self) -> float:
        """Advantage of pass-KV: ln(seconds of pass-Q / seconds of pass-KV), above 0 if pass-KV was faster."""
        return math.log(self.pass_q_seconds / self.pass_kv_seconds)


def comparisons(samples: Sequence[PrefillSample]) -> list[Comparison]:
    """Return a comparison for each turn that both algorithms computed."""
    seconds: dict[Turn, dict[str, float]] = {}
    for each in samples:
        turn = Turn(new_tokens=each.new_tokens, cached_tokens=each.cached_tokens, num_ranks=each.cp)
        seconds.setdefault(turn, {})[each.algorithm] = each.seconds
    return [
        Comparison(turn=turn, pass_kv_seconds=by[PASS_KV], pass_q_seconds=by[PASS_Q])
        for turn, by in seconds.items()
        if PASS_KV in by and PASS_Q in by
    ]


def fit_empirical(comparisons: Sequence[Comparison]) -> EmpiricalFit:
    """Fit alpha and beta to the advantage of pass-KV, then move gamma to where wrong choices lose least time.

    Raises ConfigError for fewer than two comparisons.
    """
    if len(comparisons) < 2:
        raise ConfigError(f"{len(comparisons)} comparisons cannot fit the empirical selector; allowed are 2 or more")
    features = np.array([[math.log(each.turn.new_tokens), math.log(each.turn.miss_rate), 1.0] for each in comparisons])
    advantages = np.array([each.advantage for each in comparisons])
    # If T + P never changes, both logarithms carry the same information; lstsq then returns the solution of least norm.
    alpha, beta, _ = np.linalg.lstsq(features, np.clip(advantages, -MAX_ADVANTAGE, MAX_ADVANTAGE), rcond=None)[0]
    heights = features[:, :2] @ np.array([alpha, beta])
    ordered = sorted(set(heights.tolist()))
    # Pass-KV is chosen where height > threshold. Candidates lie half way between neighbours, below all and above all.
    thresholds = [ordered[0] - 1.0, *((low + high) / 2 for low, high in pairwise(ordered)), ordered[-1] + 1.0]
    best = min(thresholds, key=lambda each: beyond_best(comparisons, [height > each for height in heights]))
    return EmpiricalFit(alpha=float(alpha), beta=float(beta), gamma=-best)


def fit_compute_per_byte(
    rule: Callable[[Turn, ModelShape, float, float], Selection], model: ModelShape, comparisons: Sequence[Comparison]
) -> float:
    """Return the C / BW, in FLOP a byte, at which Algorithm 1 or 5 (`rule`) loses least time.

    If several values lose as little, it is the geometric mean of the ends of their widest range. Both algorithms
    depend on C and BW through this ratio alone.
    Raises ConfigError without comparisons.
    """
    if not comparisons:
        raise ConfigError("0 comparisons cannot fit C / BW; allowed is 1 or more")
    lost = [_lost_by(rule, model, comparisons, ratio) for ratio in RATIOS]
    least = min(lost)
    runs = [list(run) for is_best, run in groupby(range(len(lost)), key=lambda at: lost[at] == least) if is_best]
    widest = max(runs, key=len)
    return math.sqrt(RATIOS[widest[0]] * RATIOS[widest[-1]])


def _lost_by(
    rule: Callable[[Turn, ModelShape, float, float], Selection],
    model: ModelShape,
    comparisons: Sequence[Comparison],
    ratio: float,
) -> float:
    """Return the seconds that the rule's choices take beyond the best ones, at this C / BW."""
    chosen = [rule(each.turn, model, ratio, 1.0).algorithm for each in comparisons]
    return beyond_best(comparisons, [algorithm == PASS_KV for algorithm in chosen])


def beyond_best(comparisons: Sequence[Comparison], takes_pass_kv: Sequence[bool]) -> float:
    """Return the seconds that these choices take beyond the best ones."""
    return sum(
        (each.pass_kv_seconds if is_kv else each.pass_q_seconds) - min(each.pass_kv_seconds, each.pass_q_seconds)
        for each, is_kv in zip(comparisons, takes_pass_kv, strict=True)
    )


def describe(turn: Turn) -> str:
    """Format a turn for the reason of its selection."""
    counts = f"T={turn.new_tokens} P={turn.cached_tokens} N={turn.num_ranks}"
    return f"{counts}, miss rate {turn.miss_rate:.4g}"
