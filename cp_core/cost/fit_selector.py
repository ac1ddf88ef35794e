"""Fits the empirical selector (arXiv 2411.01783, appendix D) to prefills measured with both algorithms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from cp_core.errors import ConfigError
from cp_core.selector import EmpiricalFit, Turn

# One measurement that is far off says which algorithm is better, not by how much.
MAX_DIFFERENCE = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A turn and the seconds that each algorithm took for it."""

    turn: Turn
    pass_kv_seconds: float
    pass_q_seconds: float

    @property
    def advantage(self) -> float:
        """Of pass-KV, relative: above 0 where it was faster."""
        return math.log(self.pass_q_seconds / self.pass_kv_seconds)


def fit_empirical(comparisons: Sequence[Comparison]) -> EmpiricalFit:
    """alpha and beta follow the advantage of pass-KV; gamma is then moved to where wrong choices lose least time.

    Raises ConfigError for fewer than two comparisons.
    """
    if len(comparisons) < 2:
        raise ConfigError(f"{len(comparisons)} comparisons cannot fit the empirical selector; allowed are 2 or more")
    features = np.array([[math.log(each.turn.new_tokens), math.log(each.turn.miss_rate), 1.0] for each in comparisons])
    advantages = np.array([each.advantage for each in comparisons])
    # Where T + P never changes the two logarithms are one: the solution of least norm shares it between them.
    alpha, beta, _ = np.linalg.lstsq(features, np.clip(advantages, -MAX_DIFFERENCE, MAX_DIFFERENCE), rcond=None)[0]
    heights = features[:, :2] @ np.array([alpha, beta])
    ordered = sorted(set(heights.tolist()))
    # pass-KV where height > border: borders lie half way between neighbours, and outside of all.
    borders = [ordered[0] - 1.0, *((low + high) / 2 for low, high in pairwise(ordered)), ordered[-1] + 1.0]
    border = min(borders, key=lambda each: _lost(comparisons, heights.tolist(), each))
    return EmpiricalFit(alpha=float(alpha), beta=float(beta), gamma=-border)


def _lost(comparisons: Sequence[Comparison], heights: Sequence[float], border: float) -> float:
    """Seconds that the choices made with this border take beyond the best ones."""
    taken = (
        each.pass_kv_seconds if height > border else each.pass_q_seconds
        for each, height in zip(comparisons, heights, strict=True)
    )
    best = (min(each.pass_kv_seconds, each.pass_q_seconds) for each in comparisons)
    return sum(taken) - sum(best)
