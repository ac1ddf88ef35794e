"""Cuts that make a chain prefill short: equal work, and a hierarchical grid around it. Pure Python.

The systems bench, benches of chains and tests call these pure functions. The search is that of KV-Runahead, arXiv
2405.05329, 4.2 and appendix D. A position that would save less time than its messages take ends without tokens, so no
rule says how many ranks of a chain take part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ringserve.cp_core.cost.chain import ChainRates, Cuts, chain_seconds

LEAST_STRIDE = 32
FINEST_SHARE = 512
"""Strides of the search end at LEAST_STRIDE tokens, or at T / FINEST_SHARE if that is more."""
BISECTIONS = 60


def equal_work_cuts(num_tokens: int, cached: int, rates: ChainRates) -> Cuts:
    """Return the cuts by which all positions compute equally long, or less by their lateness; messages do not count."""
    late = [seconds / rates.num_layers for seconds in rates.lateness]
    low, high = 0.0, max(late) + _work(num_tokens, cached, rates) / min(rates.speeds)
    cuts = _filled(high, late, cached, rates)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        cuts = _filled(middle, late, cached, rates)
        low, high = (middle, high) if cuts[-1] < num_tokens else (low, middle)
    inner = (min(num_tokens, round(cut)) for cut in cuts[1:-1])
    return (0, *inner, num_tokens)


def _work(num_tokens: int, cached: int, rates: ChainRates) -> float:
    pairs = rates.square(num_tokens) + num_tokens * cached
    return num_tokens * rates.token_seconds + pairs * rates.pair_seconds


def _filled(seconds: float, late: Sequence[float], cached: int, rates: ChainRates) -> list[float]:
    """Return the cuts of positions that compute for `seconds` in each layer, less their lateness."""
    cuts, half = [0.0], rates.square(1.0) * rates.pair_seconds
    for speed, behind in zip(rates.speeds, late, strict=True):
        # Solve half t^2 + b t = c by the form of the root that does not cancel.
        c = max(0.0, seconds - behind) * speed
        b = rates.token_seconds + rates.pair_seconds * (cached + cuts[-1])
        root = math.sqrt(b * b + 4 * half * c)
        cuts.append(cuts[-1] + (2 * c / (b + root) if root else 0.0))
    return cuts


def best_cuts(num_tokens: int, cached: int, rates: ChainRates, strides: Sequence[int] = ()) -> Cuts:
    """Return cuts of least `chain_seconds`, by a hierarchical grid around equal work (KV-Runahead, 4.2 and appendix D).

    At each of `strides` every inner cut moves by one or two strides, and all together by one, until nothing is better.
    Positions that would save less time than their messages take end without tokens.
    """
    strides = strides or _strides(num_tokens)
    starts = {_snapped(cuts, strides[-1]) for cuts in _starts(num_tokens, cached, rates)}
    known = {cuts: chain_seconds(cuts, cached, rates) for cuts in sorted(starts)}
    best = min(known, key=known.__getitem__)
    for stride in strides:
        is_better = True
        while is_better:
            is_better = False
            for cuts in _neighbours(best, stride):
                if cuts not in known:
                    known[cuts] = chain_seconds(cuts, cached, rates)
                if known[cuts] < known[best]:
                    best, is_better = cuts, True
    return best


def _strides(num_tokens: int) -> list[int]:
    """Return strides of the grid, powers of two from an eighth of the tokens down."""
    finest = LEAST_STRIDE
    while finest * 2 <= num_tokens / FINEST_SHARE:
        finest *= 2
    strides = [finest]
    while strides[0] * 2 <= num_tokens / 8:
        strides.insert(0, strides[0] * 2)
    return strides


def _starts(num_tokens: int, cached: int, rates: ChainRates) -> Iterator[Cuts]:
    """Return cuts of equal work over the last ranks of the chain, for each number of them."""
    for empty in range(rates.num_ranks):
        used = replace(rates, speeds=rates.speeds[empty:], lateness=rates.lateness[empty:], links=rates.links[empty:])
        yield (0,) * empty + equal_work_cuts(num_tokens, cached, used)


def _snapped(cuts: Cuts, stride: int) -> Cuts:
    return (0, *(min(cuts[-1], round(cut / stride) * stride) for cut in cuts[1:-1]), cuts[-1])


def _neighbours(cuts: Cuts, stride: int) -> Iterator[Cuts]:
    for place in range(1, len(cuts) - 1):
        for steps in (-2, -1, 1, 2):
            moved = min(cuts[place + 1], max(cuts[place - 1], cuts[place] + steps * stride))
            yield (*cuts[:place], moved, *cuts[place + 1 :])
    for step in (-stride, stride):
        yield (0, *(min(cuts[-1], max(0, cut + step)) for cut in cuts[1:-1]), cuts[-1])
