"""Fits of selectors to prefills that were measured with both algorithms.

They are the empirical selector (arXiv 2411.01783, appendix D) and the C / BW of Algorithms 1 and 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from cp_core.cost.model import PASS_KV, ModelShape
from cp_core.cost.selector import EmpiricalFit, Selection, Turn
from cp_core.errors import ConfigError

# A measurement that is far off tells which algorithm is better, but no reliable difference.
MAX_DIFFERENCE = 0.1
# Values of C / BW that are tried: 1% apart, from links as fast as memory to links that hardly carry anything.
RATIOS = tuple(1e2 * 1.01**step for step in range(1400))


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Turn and the seconds that each algorithm took for it."""

    turn: Turn
    pass_kv_seconds: float
    pass_q_seconds: float

    @property
    def advantage(self) -> float:
        """Relative advantage of pass-KV: above 0 where it was faster."""
        return math.log(self.pass_q_seconds / self.pass_kv_seconds)


def fit_empirical(comparisons: Sequence[Comparison]) -> EmpiricalFit:
    """Fit alpha and beta to the advantage of pass-KV, then move gamma to where wrong choices lose least time.

    Raises ConfigError for fewer than two comparisons.
    """
    if len(comparisons) < 2:
        raise ConfigError(f"{len(comparisons)} comparisons cannot fit the empirical selector; allowed are 2 or more")
    features = np.array([[math.log(each.turn.new_tokens), math.log(each.turn.miss_rate), 1.0] for each in comparisons])
    advantages = np.array([each.advantage for each in comparisons])
    # If T + P never changes, the two logarithms are one: the solution of least norm divides it between them.
    alpha, beta, _ = np.linalg.lstsq(features, np.clip(advantages, -MAX_DIFFERENCE, MAX_DIFFERENCE), rcond=None)[0]
    heights = features[:, :2] @ np.array([alpha, beta])
    ordered = sorted(set(heights.tolist()))
    # Pass-KV where height > border: borders lie half way between neighbours, and outside of all.
    borders = [ordered[0] - 1.0, *((low + high) / 2 for low, high in pairwise(ordered)), ordered[-1] + 1.0]
    border = min(borders, key=lambda each: beyond_best(comparisons, [height > each for height in heights]))
    return EmpiricalFit(alpha=float(alpha), beta=float(beta), gamma=-border)


def fit_compute_per_byte(
    rule: Callable[[Turn, ModelShape, float, float], Selection], model: ModelShape, comparisons: Sequence[Comparison]
) -> float:
    """Return the C / BW, in FLOP a byte, at which Algorithm 1 or 5 (`rule`) loses least time.

    It is the middle of the widest range of such values. Both algorithms depend on C and BW through this ratio alone.
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
