"""Least squares for a handful of positive numbers (Levenberg and Marquardt), in their logarithms."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]

STEP = 1e-5
# A constant changes by less than this factor's logarithm in one round.
MAX_MOVE = 0.5
MAX_ROUNDS = 200
LEAST_GAIN = 1e-12
MAX_DAMPING = 1e12


def minimise(residuals: Callable[[Vector], Vector], start: Sequence[float]) -> Vector:
    """The positive numbers nearest to `start`, downhill, whose residuals have the least sum of squares.

    A local minimum: where there are several, the start decides. The same start gives the same answer.
    """
    point = np.log(np.asarray(start, dtype=np.float64))
    now = residuals(np.exp(point))
    damping = 1e-2
    for _ in range(MAX_ROUNDS):
        slopes = np.stack(
            [(residuals(np.exp(point + move)) - now) / STEP for move in STEP * np.eye(len(point))], axis=1
        )
        curvature, gradient = slopes.T @ slopes, slopes.T @ now
        scale = np.diag(np.diag(curvature) + 1e-9)
        gain = 0.0
        while damping < MAX_DAMPING:
            move = np.clip(np.linalg.solve(curvature + damping * scale, -gradient), -MAX_MOVE, MAX_MOVE)
            after = residuals(np.exp(point + move))
            gain = float(now @ now - after @ after)
            if gain > 0.0:
                point, now, damping = point + move, after, damping / 3.0
                break
            damping *= 4.0
        if gain <= LEAST_GAIN * float(now @ now):
            break
    return np.exp(point)
