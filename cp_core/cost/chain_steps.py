"""Chain prefill as a service uses it: its order, cuts that need no search, and fast predictions. Pure Python.

T new tokens, P cached ones, N ranks, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from cp_core.cost.chain import ChainRates, Cuts, chain_closed_form

if TYPE_CHECKING:
    from cp_core.cost.model import ModelShape, PrefillRates, RingRates

MAX_STEPS = 24
TOLERANCE = 0.25
"""Tokens by which cuts may miss a prompt's end before they are rounded."""
MAX_ENTRIES = 1 << 12
"""Entries of a predictor's table; there are some 1,000 for all lengths up to 4 million."""


def chain_order(rates: RingRates, held: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the ranks along a chain: late ones and slow ones last, where nothing waits for them.

    Of ranks that are alike, those that hold least are last: where not all ranks take part they do. `held[r]` is
    compared as a tuple, so it may hold further counts for ties.
    """
    places = _places(rates, len(held))
    fullest_first = sorted(range(len(held)), key=lambda rank: (tuple(-each for each in held[rank]), rank))
    return tuple(sorted(fullest_first, key=places.__getitem__))


def chain_rates(model: ModelShape, rates: PrefillRates, num_ranks: int) -> ChainRates:
    """Return the rates of a ring's ranks in the order of `chain_order`, without the overhead of layers.

    No message hides behind that overhead.
    """
    places = sorted(_places(rates.ring, num_ranks))
    lateness = tuple(late for late, _ in places)
    return replace(ChainRates.of(model, rates, [-slow for _, slow in places], lateness), layer_seconds=0.0)


def _places(rates: RingRates, num_ranks: int) -> list[tuple[float, float]]:
    """Return (seconds late, speed below 0) of each rank, by which they are ordered. Ranks without any are alike."""
    lateness = rates.lateness if len(rates.lateness) == num_ranks else (0.0,) * num_ranks
    speeds = rates.speeds if len(rates.speeds) == num_ranks else (1.0,) * num_ranks
    return [(late, -speed) for late, speed in zip(lateness, speeds, strict=True)]


def quick_cuts(num_tokens: int, cached: int, rates: ChainRates) -> Cuts:
    """Return cuts by which the busiest processor or link of a layer is least busy, with hardly a search.

    For each number of ranks that take part, all compute equally long, but none sends more than its link carries
    meanwhile; of these the closed form chooses. The seconds are within 4% of those of `best_cuts` over the grid of
    `tests/cp_core/cost/test_chain_steps.py`, in less than a hundredth of its time.
    """
    return _quickest(num_tokens, cached, rates)[0]


def _quickest(num_tokens: int, cached: int, rates: ChainRates) -> tuple[Cuts, float]:
    """Return the quick cuts with the seconds of their closed form."""
    num_ranks, speeds, hops = rates.num_ranks, rates.speeds, rates.num_layers - 1
    work = num_tokens * rates.token_seconds + num_tokens * (num_tokens / 2 + cached) * rates.pair_seconds
    evens = [work / sum(speeds[empty:]) for empty in range(num_ranks)]
    # Cached KV of a rank goes to all that take part: where that takes longer than the work, few ranks are best.
    links = [cached * rates.byte_seconds(0) * (num_ranks - empty - 1) / num_ranks for empty in range(num_ranks)]
    likely = min(range(num_ranks), key=lambda empty: max(evens[empty], links[empty]))
    known: dict[Cuts, float] = {}
    least = math.inf
    for empty in (likely, *range(likely), *range(likely + 1, num_ranks)):
        # The slowest stage takes at least as long as all do on average, which grows with the ranks that are left out.
        if hops * evens[empty] + rates.head_seconds >= least:
            if empty > likely:
                break
            continue
        cuts = _balanced(num_tokens, cached, rates, empty, evens[empty])
        if cuts not in known:
            known[cuts] = chain_closed_form(cuts, cached, rates)
            least = min(least, known[cuts])
    chosen = min(known, key=known.__getitem__)
    return chosen, least


def _balanced(num_tokens: int, cached: int, rates: ChainRates, empty: int, even: float) -> Cuts:
    """Return cuts of which the first `empty` positions have no tokens, and the others work equally long in each layer.

    That is `even` seconds where no link holds them up and none is late, and otherwise more.
    """
    num_ranks = rates.num_ranks
    pairs = rates.square(num_tokens) + num_tokens * cached
    work = num_tokens * rates.token_seconds + pairs * rates.pair_seconds
    low, high = even, max(rates.lateness) / rates.num_layers + work / min(rates.speeds)
    # In less than this, links carry cached KV alone: then the last rank computes all, or it takes longer.
    cached_alone = rates.byte_seconds(0) * cached * (num_ranks - empty - 1) / num_ranks
    if cached_alone > low:
        if work / rates.speeds[-1] + rates.lateness[-1] / rates.num_layers <= cached_alone:
            return (*(0,) * num_ranks, num_tokens)
        low = cached_alone
    cuts = _filled(low, cached, rates, empty)
    under = num_tokens - cuts[-1]
    if under > TOLERANCE:
        # A false position, of which one end that stays counts half (Illinois): a handful of steps instead of dozens.
        over, side = _filled(high, cached, rates, empty)[-1] - num_tokens, 0
        for _ in range(MAX_STEPS):
            middle = (low * over + high * under) / (under + over)
            cuts = _filled(middle, cached, rates, empty)
            missing = num_tokens - cuts[-1]
            if abs(missing) <= TOLERANCE:
                break
            if missing > 0.0:
                low, under, over, side = middle, missing, over / 2 if side > 0 else over, 1
            else:
                high, over, under, side = middle, -missing, under / 2 if side < 0 else under, -1
    inner = (min(num_tokens, round(cut)) for cut in cuts[1:-1])
    return (0, *inner, num_tokens)


def _filled(seconds: float, cached: int, rates: ChainRates, empty: int) -> list[float]:
    """Return the cuts of positions whose processor and link work for at most `seconds` of each layer."""
    num_ranks, byte_seconds = rates.num_ranks, rates.kv_bytes / rates.link_bytes_per_second
    # Its share of the cached KV goes to all other ranks with new tokens.
    most = max(0.0, seconds / byte_seconds - cached * (num_ranks - empty - 1) / num_ranks)
    speeds, lateness, num_layers = rates.speeds, rates.lateness, rates.num_layers
    pair_seconds, half, cut = rates.pair_seconds, rates.square(1.0) * rates.pair_seconds, 0.0
    before = rates.token_seconds + pair_seconds * cached
    cuts = [0.0] * (empty + 1)
    for place in range(empty, num_ranks):
        # half t^2 + b t = c, in the form of its root that does not cancel.
        c = (seconds - lateness[place] / num_layers) * speeds[place]
        if c > 0.0:
            b = before + pair_seconds * cut
            longer = cut + 2 * c / (b + math.sqrt(b * b + 4 * half * c))
            cut = longer if place == num_ranks - 1 or longer < most else max(cut, most)
        cuts.append(cut)
    return cuts


class ChainPredictor:
    """Predictions of a model's chain steps on rings of one size and speed.

    The closed form is computed for T = 2^(i/2) and 1 + P / T = 2^(j/2), as a multiple of what the matrix products and
    the attention take on one rank. Between these the multiple is linear: a router asks for many steps while it places
    one turn. Of messages that hide behind a layer, the share that the overlap leaves is added. So are the starts of the
    hops of pass-KV in each layer: a profile's hold what a rank waits for late ones, and a gain that rests on starts
    alone is not to be claimed. A calibration measures overlap and starts of chains; else they are those of the ring.
    Late ranks are in the closed form, and not once more in the seconds that every step takes.
    """

    __slots__ = ("_entries", "_model", "_num_ranks", "_overhead", "_overlap", "_prefill_rates", "_rates")

    def __init__(self, model: ModelShape, rates: PrefillRates, num_ranks: int) -> None:
        self._model = model
        self._prefill_rates = rates
        self._num_ranks = num_ranks
        ring = rates.ring
        self._overlap = ring.overlap if rates.chain_overlap is None else rates.chain_overlap
        start = ring.link_latency_seconds if rates.chain_start_seconds is None else rates.chain_start_seconds
        self._overhead = model.num_layers * (rates.layer_overhead_seconds + (num_ranks - 1) * start)
        self._overhead += max(0.0, ring.step_seconds - max(ring.lateness, default=0.0))
        self._rates: ChainRates | None = None  # made when first needed: a fit makes a million predictors for others
        self._entries: dict[tuple[int, int], float] = {}

    @property
    def rates(self) -> ChainRates:
        """Rates of the chain's positions."""
        if self._rates is None:
            self._rates = chain_rates(self._model, self._prefill_rates, self._num_ranks)
        return self._rates

    def seconds(self, new_tokens: int, cached_tokens: int) -> float:
        """Return the seconds of a step of T >= 1 new tokens after P cached ones that lie evenly over the ranks."""
        along, across = 2 * math.log2(new_tokens), 2 * math.log2(1 + cached_tokens / new_tokens)
        i, j = int(along), int(across)
        right, below = along - i, across - j
        multiple = (1 - right) * self._between(i, j, below) + (right and right * self._between(i + 1, j, below))
        return multiple * self._alone(new_tokens, cached_tokens) + self._overhead

    def _between(self, i: int, j: int, below: float) -> float:
        entry = self._entry(i, j)
        return entry + below * (self._entry(i, j + 1) - entry) if below else entry

    def _entry(self, i: int, j: int) -> float:
        multiple = self._entries.get((i, j))
        if multiple is None:
            new_tokens = round(2 ** (i / 2))
            cached = round(new_tokens * (2 ** (j / 2) - 1))
            if len(self._entries) >= MAX_ENTRIES:
                self._entries.clear()
            multiple = self._computed(new_tokens, cached) / self._alone(new_tokens, cached)
            self._entries[i, j] = multiple
        return multiple

    def _computed(self, new_tokens: int, cached: int) -> float:
        seconds, hidden = _closed_form(new_tokens, cached, self.rates)
        return seconds + (1.0 - self._overlap) * hidden

    def _alone(self, new_tokens: int, cached_tokens: int) -> float:
        rates = self.rates
        pairs = new_tokens * cached_tokens + new_tokens * (new_tokens + 1) / 2
        layer = new_tokens * rates.token_seconds + pairs * rates.pair_seconds
        return rates.num_layers * layer + rates.head_seconds


@lru_cache(MAX_ENTRIES)
def _closed_form(new_tokens: int, cached: int, rates: ChainRates) -> tuple[float, float]:
    """Return the closed form of the quick cuts and its hidden seconds; a fit of overlap and starts asks for few."""
    cuts, seconds = _quickest(new_tokens, cached, rates)
    return seconds, hidden_seconds(cuts, cached, rates)


def hidden_seconds(cuts: Cuts, cached: int, rates: ChainRates) -> float:
    """Return the seconds in which the busiest link works while its processor does, over all layers but one."""
    num_ranks, hidden = rates.num_ranks, 0.0
    for place, speed in enumerate(rates.speeds[:-1]):
        start, stop = cuts[place], cuts[place + 1]
        pairs = (stop - start) * (cached + start) + rates.square(stop - start)
        work = ((stop - start) * rates.token_seconds + pairs * rates.pair_seconds) / speed
        num_bytes = (stop + cached * (num_ranks - 1) / num_ranks) * rates.kv_bytes
        hidden = max(hidden, min(work, num_bytes / rates.link_bytes_per_second))
    return (rates.num_layers - 1) * hidden
