"""Chain prefill as a service uses it: its order, cuts that need no search, and fast predictions. Pure Python.

T new tokens, P cached ones, N ranks, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ringserve.cp_core.cost.chain import ChainRates, Cuts, chain_closed_form

if TYPE_CHECKING:
    from ringserve.cp_core.cost.model import ModelShape, PrefillRates
    from ringserve.views import RingRates

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
    """Return the rates of a ring's ranks in the order of `chain_order`. No message hides behind a layer's overhead."""
    places = sorted(_places(rates.ring, num_ranks))
    lateness = tuple(late for late, _ in places)
    overhead = rates.layer_overhead_seconds + (num_ranks - 1) * rates.ring.link_latency_seconds
    found = ChainRates.of(model, rates, [-slow for _, slow in places], lateness)
    return replace(
        found,
        layer_seconds=0.0,
        overhead_seconds=rates.chain_overhead * overhead,
        overlap=rates.ring.overlap if rates.chain_overlap is None else rates.chain_overlap,
    )


def _places(rates: RingRates, num_ranks: int) -> list[tuple[float, float]]:
    """Return (seconds late, speed below 0) of each rank, by which they are ordered. Ranks without any are alike."""
    lateness = rates.lateness if len(rates.lateness) == num_ranks else (0.0,) * num_ranks
    speeds = rates.speeds if len(rates.speeds) == num_ranks else (1.0,) * num_ranks
    return [(late, -speed) for late, speed in zip(lateness, speeds, strict=True)]


def step_seconds(cuts: Cuts, cached: int, rates: ChainRates) -> float:
    """Return the predicted seconds of a step by given cuts, with its overhead."""
    return chain_closed_form(cuts, cached, rates) + rates.overhead(cuts)


def quick_cuts(num_tokens: int, cached: int, rates: ChainRates) -> Cuts:
    """Return cuts by which the busiest processor or link of a layer is least busy, with hardly a search.

    For each number of ranks that take part, all compute equally long, but none sends more than its link carries
    meanwhile; of these the prediction chooses. The seconds are within 4% of those of `best_cuts` over the grid of
    `tests/cp_core/cost/test_chain_steps.py`, in less than a hundredth of its time.
    """
    num_ranks, speeds, hops = rates.num_ranks, rates.speeds, rates.num_layers - 1
    work = num_tokens * rates.token_seconds + num_tokens * (num_tokens / 2 + cached) * rates.pair_seconds
    # The ranks that take part share what all do.
    shares = [min(rates.lone_speed, num_ranks / (num_ranks - empty)) for empty in range(num_ranks)]
    evens = [work / sum(speeds[empty:]) / shares[empty] for empty in range(num_ranks)]
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
        # Where links hold them up, fewer compute at a time, each faster.
        for faster in dict.fromkeys((shares[empty], rates.lone_speed)):
            sped = replace(rates, speeds=tuple(faster * each for each in speeds)) if faster > 1.0 else rates
            cuts = _balanced(num_tokens, cached, sped, empty, evens[empty] * shares[empty] / faster)
            if cuts not in known:
                known[cuts] = step_seconds(cuts, cached, rates)
                least = min(least, known[cuts])
    return min(known, key=known.__getitem__)


def _balanced(num_tokens: int, cached: int, rates: ChainRates, empty: int, even: float) -> Cuts:
    """Return cuts of which the first `empty` positions have no tokens, and the others work equally long in each layer.

    That is `even` seconds where no link holds them up and none is late, and otherwise more.
    """
    num_ranks = rates.num_ranks
    pairs = rates.square(num_tokens) + num_tokens * cached
    work = num_tokens * rates.token_seconds + pairs * rates.pair_seconds
    # In less than this, links carry cached KV alone: then the last rank computes all, or it takes longer.
    cached_alone = rates.byte_seconds(0) * cached * (num_ranks - empty - 1) / num_ranks
    low, high = even, max(rates.lateness) / rates.num_layers + work / min(rates.speeds) + cached_alone
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
    """Return the cuts of positions whose processor and link work for at most `seconds` of each layer.

    Work w and messages l take max(w, l) + q min(w, l), which is the larger one of w + q l and l + q w: q is the share
    of messages that does not hide.
    """
    num_ranks, byte_seconds = rates.num_ranks, rates.kv_bytes / rates.link_bytes_per_second
    # Its share of the cached KV goes to all other ranks with new tokens.
    shares = cached * (num_ranks - empty - 1) / num_ranks
    speeds, lateness, num_layers = rates.speeds, rates.lateness, rates.num_layers
    pair_seconds, half, cut = rates.pair_seconds, rates.square(1.0) * rates.pair_seconds, 0.0
    before = rates.token_seconds + pair_seconds * cached
    exposed = 1.0 - rates.overlap
    cuts = [0.0] * (empty + 1)
    for place in range(empty, num_ranks):
        speed, is_last = speeds[place], place == num_ranks - 1
        left, work = (seconds - lateness[place] / num_layers) * speed, before + pair_seconds * cut
        # The last one sends no new KV.
        hop, sent = (0.0, shares) if is_last else (byte_seconds * speed, cut + shares)
        sent *= byte_seconds * speed
        cut += min(
            _root(half, work + exposed * hop, left - exposed * sent),
            _root(exposed * half, exposed * work + hop, seconds * speed - sent),
        )
        cuts.append(cut)
    return cuts


def _root(a: float, b: float, c: float) -> float:
    """Return the t >= 0 with a t^2 + b t = c, in the form that does not cancel; 0 for c < 0, no bound for b = 0."""
    if c <= 0.0:
        return 0.0
    return 2 * c / (b + math.sqrt(b * b + 4 * a * c)) if b else math.inf


_Entry = tuple[float, float]
"""Seconds of a length over those of its computation on one rank; share of the overhead of all ranks."""


class ChainPredictor:
    """Predictions of a model's chain steps on rings of one size and speed.

    The closed form is computed for T = 2^(i/2) and 1 + P / T = 2^(j/2), as a multiple of what the matrix products and
    the attention take on one rank. Between these the multiple is linear: a router asks for many steps while it places
    one turn. The overhead of a layer is added, and the starts of the hops of pass-KV in each: a profile's starts hold
    what a rank waits for late ones, and a gain that rests on starts alone is not to be claimed. A calibration measures
    overlap and overhead of chains; else they are those of the ring. Late ranks are in the closed form, and not once
    more in the seconds of every step.
    """

    __slots__ = ("_entries", "_model", "_num_ranks", "_prefill_rates", "_rates", "_step_seconds")

    def __init__(self, model: ModelShape, rates: PrefillRates, num_ranks: int) -> None:
        self._model = model
        self._prefill_rates = rates
        self._num_ranks = num_ranks
        ring = rates.ring
        self._step_seconds = max(0.0, ring.step_seconds - max(ring.lateness, default=0.0))
        self._rates: ChainRates | None = None  # made when first needed: a fit makes a million predictors for others
        self._entries: dict[tuple[int, int], _Entry] = {}

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
        (multiple, share), after = self._between(i, j, below), right and self._between(i + 1, j, below)
        if after:
            multiple += right * (after[0] - multiple)
            share += right * (after[1] - share)
        rates = self.rates
        overhead = rates.num_layers * rates.overhead_seconds * share
        return multiple * self._alone(new_tokens, cached_tokens) + overhead + self._step_seconds

    def of_cuts(self, cuts: Cuts, cached_tokens: int) -> float:
        """Return the seconds of a step by given cuts."""
        return step_seconds(cuts, cached_tokens, self.rates) + self._step_seconds

    def _between(self, i: int, j: int, below: float) -> _Entry:
        entry = self._entry(i, j)
        if not below:
            return entry
        after = self._entry(i, j + 1)
        return entry[0] + below * (after[0] - entry[0]), entry[1] + below * (after[1] - entry[1])

    def _entry(self, i: int, j: int) -> _Entry:
        entry = self._entries.get((i, j))
        if entry is None:
            new_tokens = round(2 ** (i / 2))
            cached = round(new_tokens * (2 ** (j / 2) - 1))
            if len(self._entries) >= MAX_ENTRIES:
                self._entries.clear()
            cuts = quick_cuts(new_tokens, cached, self.rates)
            multiple = chain_closed_form(cuts, cached, self.rates) / self._alone(new_tokens, cached)
            entry = self._entries[i, j] = multiple, self.rates.busy_share(cuts)
        return entry

    def _alone(self, new_tokens: int, cached_tokens: int) -> float:
        rates = self.rates
        pairs = new_tokens * cached_tokens + new_tokens * (new_tokens + 1) / 2
        layer = new_tokens * rates.token_seconds + pairs * rates.pair_seconds
        return rates.num_layers * layer + rates.head_seconds
