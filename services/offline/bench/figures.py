"""What repeated measurements come to. Seconds throughout."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from workers.protocol.ranks import ModelInfo

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


# A square product of this size keeps one core at its full rate, and takes it a fifth of a second.
GEMM_SIZE = 2048


def gemm_flops() -> float:
    """One product of two square matrices of GEMM_SIZE."""
    return 2.0 * GEMM_SIZE**3


def attention_flops(num_tokens: int, num_heads: int, head_dim: int, cached_tokens: int = 0) -> float:
    """Causal attention of one layer: only the pairs that are seen count."""
    pairs = num_tokens * cached_tokens + num_tokens * (num_tokens + 1) / 2
    return 4.0 * num_heads * head_dim * pairs


def prefill_flops(info: ModelInfo, num_tokens: int) -> float:
    """A whole model over `num_tokens` new tokens, logits of the last one only."""
    projections = info.hidden_size * info.head_dim * (2 * info.num_heads + 2 * info.num_kv_heads)
    layer = 2.0 * num_tokens * (projections + 3 * info.hidden_size * info.intermediate_size)
    attention = attention_flops(num_tokens, info.num_heads, info.head_dim)
    return info.num_layers * (layer + attention) + 2.0 * info.hidden_size * info.vocab_size
