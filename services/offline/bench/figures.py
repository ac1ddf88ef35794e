"""What repeated measurements come to. Seconds throughout."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# The yardstick of every run, by this name in every report.
GEMM = "GEMM"


@dataclass(frozen=True, slots=True)
class Figures:
    """Median, least and most of `count` values."""

    median: float
    least: float
    most: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Figures:
        return cls(statistics.median(values), min(values), max(values), len(values))


def paired_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Median of above[i] / below[i]. Both of a pair were measured in the same round: what slowed one slowed both."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


@dataclass(frozen=True, slots=True)
class Target:
    """Something to be reached: `value` at least `limit`, or at most."""

    text: str
    value: float
    limit: float
    is_at_least: bool

    @property
    def is_met(self) -> bool:
        return self.value >= self.limit if self.is_at_least else self.value <= self.limit

    def __str__(self) -> str:
        bound = "at least" if self.is_at_least else "at most"
        return f"{self.text}: {self.value:.3f}, {bound} {self.limit:g}: {'met' if self.is_met else 'MISSED'}"
