"""Cuts that make a chain prefill short: equal work, a hierarchical grid around it, and a table. Pure Python.

KV-Runahead, arXiv 2405.05329, 4.2 and appendix D. Positions whose work does not pay its messages end without tokens, so
no rule says how many ranks of a chain take part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from cp_core.cost.chain import ChainRates, Cuts, chain_closed_form, chain_seconds

LEAST_STRIDE = 32
FINEST_SHARE = 512
"""Strides of the search end at LEAST_STRIDE tokens, or at T / FINEST_SHARE where that is more."""
BISECTIONS = 60


def equal_work_cuts(num_tokens: int, cached: int, rates: ChainRates) -> Cuts:
    """Return the cuts by which all positions compute equally long, late ones so much less, whatever messages take."""
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
    """Return the cuts of positions that compute for `seconds` of each layer."""
    cuts, half = [0.0], rates.square(1.0) * rates.pair_seconds
    for speed, behind in zip(rates.speeds, late, strict=True):
        # half t^2 + b t = c, in the form of its root that does not cancel.
        c = max(0.0, seconds - behind) * speed
        b = rates.token_seconds + rates.pair_seconds * (cached + cuts[-1])
        root = math.sqrt(b * b + 4 * half * c)
        cuts.append(cuts[-1] + (2 * c / (b + root) if root else 0.0))
    return cuts


def best_cuts(num_tokens: int, cached: int, rates: ChainRates, strides: Sequence[int] = ()) -> Cuts:
    """Return cuts of least `chain_seconds`, by a hierarchical grid around equal work (KV-Runahead, 4.2 and appendix D).

    At each of `strides` every inner cut moves by one or two, and all together by one, until nothing is better.
    Positions whose work does not pay its messages end without tokens.
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
        used = replace(rates, speeds=rates.speeds[empty:], lateness=rates.lateness[empty:])
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


LEAST_EXPONENT, MOST_EXPONENT = 2 * 6, 2 * 22
"""Entries of a table are at T = 2^(k/2) for k between these."""
CACHED_RATIOS = (0.0, 0.5, 1.0, 2.0, 4.0)
"""Entries of a table are at these P / T; further on the shares stay, since they become those of equal tokens."""


@dataclass(slots=True)
class CutTable:
    """Table of best cuts as shares of T, for one kind of ring, linear between its entries.

    An entry is searched when first needed, in up to 0.1 s for eight ranks; `fill` does so ahead of need.
    """

    rates: ChainRates
    _entries: dict[tuple[int, int], tuple[float, ...]] = field(default_factory=dict)

    def fill(self, most_tokens: int) -> None:
        """Search the entries of all T up to the first one that is not below `most_tokens`."""
        for exponent in range(LEAST_EXPONENT, math.ceil(_exponent(most_tokens)) + 1):
            for place in range(len(CACHED_RATIOS)):
                self._entry(exponent, place)

    def cuts(self, num_tokens: int, cached: int) -> Cuts:
        """Return the cuts of T >= 1 tokens after P cached ones."""
        along, ratio = _exponent(num_tokens), min(cached / num_tokens, CACHED_RATIOS[-1])
        exponent = min(math.floor(along), MOST_EXPONENT - 1)
        place = max(at for at, each in enumerate(CACHED_RATIOS[:-1]) if each <= ratio)
        across = (ratio - CACHED_RATIOS[place]) / (CACHED_RATIOS[place + 1] - CACHED_RATIOS[place])
        corners = [
            (weight * other, self._entry(exponent + step, place + aside))
            for step, weight in ((0, 1.0 - (along - exponent)), (1, along - exponent))
            for aside, other in ((0, 1.0 - across), (1, across))
            if weight * other
        ]
        middle = tuple(
            math.fsum(weight * entry[at] for weight, entry in corners) for at in range(self.rates.num_ranks + 1)
        )
        choices = [_scaled(middle, num_tokens)]
        if len({entry.count(0.0) for _, entry in corners}) > 1:
            # Between entries of more and of fewer empty ranks a line would give some rank a few tokens, for which all
            # KV has to come there.
            choices += [_scaled(entry, num_tokens) for _, entry in corners]
        return min(choices, key=lambda cuts: chain_closed_form(cuts, cached, self.rates)) if choices[1:] else choices[0]

    def _entry(self, exponent: int, place: int) -> tuple[float, ...]:
        key = exponent, place
        if key not in self._entries:
            num_tokens = round(2 ** (exponent / 2))
            cuts = best_cuts(num_tokens, round(num_tokens * CACHED_RATIOS[place]), self.rates)
            self._entries[key] = tuple(cut / num_tokens for cut in cuts)
        return self._entries[key]


def _scaled(shares: Sequence[float], num_tokens: int) -> Cuts:
    return (0, *(round(share * num_tokens) for share in shares[1:-1]), num_tokens)


def _exponent(num_tokens: int) -> float:
    return min(MOST_EXPONENT, max(LEAST_EXPONENT, 2 * math.log2(num_tokens)))
