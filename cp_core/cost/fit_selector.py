"""Fits of selectors to prefills that were measured with both algorithms, pass-KV and pass-Q.

Two things are fitted: the constants of the empirical selector (arXiv 2411.01783, appendix D), and the ratio C / BW of
Algorithms 1 and 5. Calibration, planning and the bench of selection use them; no serving process does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from ringserve.cp_core.cost.model import PASS_KV, ModelShape
from ringserve.cp_core.cost.selector import EmpiricalFit, Selection, Turn
from ringserve.cp_core.errors import ConfigError

MAX_ADVANTAGE = 0.1
"""Largest advantage that enters a fit: a larger one tells the better algorithm, but no reliable difference."""
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
        """Advantage of pass-KV: ln(seconds of pass-Q / seconds of pass-KV), above 0 where pass-KV was faster."""
        return math.log(self.pass_q_seconds / self.pass_kv_seconds)


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

    Where several values lose as little, it is the geometric mean of the ends of their widest range. Both algorithms
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


def best_seconds(comparisons: Sequence[Comparison]) -> float:
    """Return the seconds of the better algorithm of each comparison, summed."""
    return sum(min(each.pass_kv_seconds, each.pass_q_seconds) for each in comparisons)


def beyond_best(comparisons: Sequence[Comparison], takes_pass_kv: Sequence[bool]) -> float:
    """Return the seconds that these choices take beyond the best ones."""
    return sum(
        (each.pass_kv_seconds if is_kv else each.pass_q_seconds) - min(each.pass_kv_seconds, each.pass_q_seconds)
        for each, is_kv in zip(comparisons, takes_pass_kv, strict=True)
    )
