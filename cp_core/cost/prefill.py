"""Seconds to the last layer's end of one turn's prefill on a ring of cp x tp processes, chunk by chunk.

T new tokens, P cached ones, N = cp ranks of the ring, each of tp processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from cp_core.cost.profile import HardwareProfile
from cp_core.cost.share import process_share, sum_seconds
from cp_core.cost_model import ModelShape, PrefillCost, predict_prefill


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnCost:
    """Predicted seconds over all chunks and layers. `hidden_seconds` of messages pass behind attention, besides."""

    num_chunks: int
    linear_seconds: float
    sum_seconds: float
    attention_seconds: float
    exposed_seconds: float
    hidden_seconds: float
    all_to_all_seconds: float
    overhead_seconds: float

    @property
    def total_seconds(self) -> float:
        return (
            self.linear_seconds
            + self.sum_seconds
            + self.attention_seconds
            + self.exposed_seconds
            + self.all_to_all_seconds
            + self.overhead_seconds
        )


def predict_turn(
    model: ModelShape,
    profile: HardwareProfile,
    *,
    cp: int,
    tp: int,
    algorithm: str,
    new_tokens: int,
    cached_tokens: int = 0,
    chunk_tokens: int | None = None,
) -> TurnCost:
    """The cost of T new tokens after P cached ones, cut every `chunk_tokens`; None computes them in one step.

    Raises ConfigError if `algorithm` is neither "pass_kv" nor "pass_q".
    """
    end = cached_tokens + new_tokens
    bounds = [*range(cached_tokens, end, chunk_tokens or new_tokens), end]
    share = process_share(model, tp)
    chunks: list[PrefillCost] = []
    sums = 0.0
    for start, stop in pairwise(bounds):
        rates = profile.prefill.rates(cp, is_cached=start > 0)
        chunks.append(predict_prefill(share, rates, cp, algorithm, stop - start, start))
        sums += sum_seconds(model, profile, tp, -(-(stop - start) // cp))
    return _total(chunks, sums)


def _total(chunks: Sequence[PrefillCost], sums: float) -> TurnCost:
    return TurnCost(
        num_chunks=len(chunks),
        linear_seconds=sum(chunk.linear_seconds for chunk in chunks),
        sum_seconds=sums,
        attention_seconds=sum(chunk.attention_seconds for chunk in chunks),
        exposed_seconds=sum(chunk.exposed_seconds for chunk in chunks),
        hidden_seconds=sum(chunk.hidden_seconds for chunk in chunks),
        all_to_all_seconds=sum(chunk.all_to_all_seconds for chunk in chunks),
        overhead_seconds=sum(chunk.overhead_seconds for chunk in chunks),
    )
