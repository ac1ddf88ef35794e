"""Seconds to the last layer's end of one turn's prefill on a ring of cp x tp processes, chunk by chunk.

T new tokens, P cached ones, N = cp ranks of the ring, each of tp processes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from itertools import pairwise, starmap
from operator import add

from cp_core.cost.model import ModelShape, PrefillCost, predict_prefill
from cp_core.cost.profile import HardwareProfile
from cp_core.cost.share import process_share, sum_seconds


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
) -> PrefillCost:
    """The cost of T new tokens after P cached ones, cut every `chunk_tokens`; None computes them in one step.

    Raises ConfigError if `algorithm` is neither "pass_kv" nor "pass_q".
    """
    end = cached_tokens + new_tokens
    bounds = [*range(cached_tokens, end, chunk_tokens or new_tokens), end]
    share = process_share(model, tp)

    def cost(start: int, stop: int) -> PrefillCost:
        rates = profile.prefill.rates(cp, is_cached=start > 0)
        step = predict_prefill(share, rates, cp, algorithm, stop - start, start)
        return replace(step, sum_seconds=sum_seconds(model, profile, tp, -(-(stop - start) // cp)))

    return reduce(add, starmap(cost, pairwise(bounds)))
