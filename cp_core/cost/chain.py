"""Time of chain prefill, which predictions, the choice of cuts and fits use. Pure Python, no torch.

Position i of a chain of N ranks computes the new tokens from cut c_i to c_{i+1} and gets the KV of all before them from
position i-1 (KV-Runahead, arXiv 2405.05329). In each layer it first sends its own new KV and attends its own tokens.
Then it waits for the KV of all earlier tokens, sends it on, and attends it. Rank i has T_i tokens and speed s_i, and
ends the layer at f_i; P tokens are cached; ChainRates has qkv, lin, pair, kv, BW, o and a as projection_seconds,
token_seconds, pair_seconds, kv_bytes, link_bytes_per_second, layer_seconds and message_seconds:

    ready  = f_i + T_i qkv / s_i                    own  = ready + (T_i^2 / 2) pair / s_i
    sent   = max(link_i, ready) + T_i kv / BW       link_i = max(sent, own, arrived_i) + c_i kv / BW
    f_i    = max(own, arrived_i) + (T_i (P + c_i) pair + T_i (lin - qkv)) / s_i + o          arrived_{i+1} = link_i + a

A chain pays the latency of a message once per hop, a ring once per hop in every layer. A chain can hide a message
behind a whole layer, a ring only behind attention.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from ringserve.cp_core.cost.model import ModelShape, PrefillRates
from ringserve.cp_core.errors import ConfigError
from ringserve.views import RingRates

LAYERS_AHEAD = 2
"""After the new KV of layer l, a rank sends its cached KV of layer l + LAYERS_AHEAD. Ranks of a chain are at different
layers at one time, and each needs the cached KV of all others. If a rank sent its cached KV of a layer only when it
came to that layer itself, the ranks that are ahead would wait."""

MAX_TRIED = 8
"""Maximum size of the coarse grid in `quick_cuts`: about how many numbers of ranks without tokens are tried first."""
MAX_STEPS = 24
TOLERANCE = 0.25
"""Tokens by which cuts may miss a prompt's end before they are rounded."""
MAX_ENTRIES = 1 << 12
"""Entries of a predictor's table; there are some 1,000 for all lengths up to 4 million."""

Cuts = tuple[int, ...]
"""Bounds of a chain's positions: 0 = c_0 <= ... <= c_N = T, relative to the first new token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainRates:
    """Rates of a chain; times in seconds. `speeds` and `lateness` are by position, in the chain's order.

    `token_seconds` is the time of all matrix products of one token in one layer, `projection_seconds` the part of it
    for q, k and v, `pair_seconds` the time of one query with one key in one layer, `layer_seconds` all other time of a
    layer. `kv_bytes` are K and V of one token in one layer. A rank of speed 2 computes twice as fast; one with a
    lateness begins that many seconds after the others. If ranks share cores, a GPU or its memory, a rank computes
    `lone_speed` times as fast while the others wait; the other rates are for ranks that compute together. During
    `overhead_seconds` of a layer no message is hidden; `overlap` is the share of messages hidden behind the rest of the
    layer. Predictions and the choice of cuts use both, `chain_seconds` neither. `links` are the shares of
    `link_bytes_per_second` that the positions' links have, by default 1.

    Two options imitate KV-Runahead for comparison. With `is_masked` a rank computes all pairs among its own tokens, not
    half. With `is_one_message` it waits for the earlier KV and sends it together with its own.
    """

    token_seconds: float
    projection_seconds: float
    pair_seconds: float
    layer_seconds: float
    num_layers: int
    head_seconds: float
    kv_bytes: float
    link_bytes_per_second: float
    message_seconds: float
    speeds: tuple[float, ...]
    lateness: tuple[float, ...] = ()
    links: tuple[float, ...] = ()
    lone_speed: float = 1.0
    overhead_seconds: float = 0.0
    overlap: float = 1.0
    is_masked: bool = False
    is_one_message: bool = False

    def __post_init__(self) -> None:
        if not self.speeds or not all(0.0 < speed < math.inf for speed in self.speeds):
            raise ConfigError(f"speeds of a chain are {self.speeds}; allowed is a number above 0 for each rank")
        if not self.lateness:
            object.__setattr__(self, "lateness", (0.0,) * len(self.speeds))
        if len(self.lateness) != len(self.speeds) or min(self.lateness) < 0.0:
            raise ConfigError(
                f"lateness of a chain of {len(self.speeds)} is {self.lateness}; allowed are 0 or more seconds for each"
            )
        if not self.links:
            object.__setattr__(self, "links", (1.0,) * len(self.speeds))
        if len(self.links) != len(self.speeds) or not all(0.0 < share < math.inf for share in self.links):
            raise ConfigError(
                f"links of a chain of {len(self.speeds)} are {self.links}; allowed is a share above 0 for each"
            )
        if not 1.0 <= self.lone_speed < math.inf:
            raise ConfigError(f"lone_speed of a chain is {self.lone_speed}; allowed is 1 or more")
        if not self.link_bytes_per_second > 0.0:
            raise ConfigError(f"link_bytes_per_second is {self.link_bytes_per_second}; allowed is any rate above 0")

    @classmethod
    def of(
        cls,
        model: ModelShape,
        rates: PrefillRates,
        speeds: Sequence[float],
        lateness: Sequence[float] = (),
    ) -> ChainRates:
        """Return the rates of a chain of `len(speeds)` ranks that a ring's rates describe."""
        ring = rates.ring
        projections = 2 * model.hidden_size * (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        return cls(
            token_seconds=model.linear_flops_per_token / model.num_layers / ring.gemm_flops,
            projection_seconds=projections / ring.gemm_flops,
            pair_seconds=model.attention_flops(1, 0) / ring.attention_flops,
            layer_seconds=rates.layer_overhead_seconds,
            num_layers=model.num_layers,
            head_seconds=model.head_flops / ring.gemm_flops,
            kv_bytes=2 * model.num_kv_heads * model.head_dim * model.attention_bytes,
            link_bytes_per_second=ring.link_bytes_per_second,
            message_seconds=ring.link_latency_seconds,
            speeds=tuple(speeds),
            lateness=tuple(lateness),
            # N ranks that share one core are N times as fast alone as together, and none is faster. A measured speed of
            # 0 means not measured, and counts as 1.
            lone_speed=min(max(1.0, ring.lone_speed), float(len(speeds))),
        )

    @property
    def num_ranks(self) -> int:
        return len(self.speeds)

    def busy_share(self, cuts: Sequence[int]) -> float:
        """Return the factor of a layer's overhead: less than 1 if ranks without tokens leave their cores to others."""
        num_busy = sum(1 for start, stop in pairwise(cuts) if stop > start)
        return max(1.0 / self.lone_speed, num_busy / self.num_ranks) if self.lone_speed > 1.0 else 1.0

    def shared(self, work: Sequence[float]) -> list[float]:
        """Return the seconds of a layer's `work` on each position if all ranks compute together.

        On shared processors a rank with more work than the mean takes only the mean time, since ranks that end earlier
        leave it their share, but at least its work / `lone_speed`.
        """
        if self.lone_speed == 1.0:
            return list(work)
        mean = math.fsum(work) / self.num_ranks
        return [max(each / self.lone_speed, min(each, mean)) for each in work]

    def stage(self, work: float, link: float) -> float:
        """Return the seconds of a layer on a position that computes for `work` and sends for `link` seconds."""
        if self.overlap == 1.0:
            return max(work, link)
        return max(work, link) + (1.0 - self.overlap) * min(work, link)

    def overhead(self, cuts: Sequence[int]) -> float:
        """Return the seconds in which no message is hidden, in all layers together."""
        return self.num_layers * self.overhead_seconds * self.busy_share(cuts)

    def byte_seconds(self, place: int) -> float:
        """Return the seconds that the link of a position takes for K and V of one token."""
        return self.kv_bytes / self.link_bytes_per_second / self.links[place]

    def square(self, num_tokens: float) -> float:
        """Return the number of (query, key) pairs among a rank's own tokens."""
        return num_tokens * num_tokens * (1.0 if self.is_masked else 0.5)


def chain_seconds(cuts: Sequence[int], cached: int, rates: ChainRates) -> float:
    """Return the seconds of a step of c_N tokens after `cached` ones that lie evenly over the ranks.

    Cached KV goes straight to the ranks with new tokens, LAYERS_AHEAD layers ahead. `lone_speed` counts
    as 1. Raises ConfigError if the cuts do not ascend from 0 or are not one more than the ranks.
    """
    stages = _stages(cuts, cached, rates)
    ends, links = list(rates.lateness), list(rates.lateness)
    coming = deque([_send_cached(links, stages, rates.message_seconds)])
    steps: list[float] = []
    for layer in range(rates.num_layers):
        before = [*ends, *links]
        _pass_layer(ends, links, coming.popleft(), stages, rates)
        while len(coming) < LAYERS_AHEAD:
            coming.append(_send_cached(links, stages, rates.message_seconds))
        earlier, steps = steps, [now - then for now, then in zip([*ends, *links], before, strict=True)]
        if not cached and _is_steady(earlier, steps, len(stages)):
            # Every further layer adds the same to each rank.
            left = rates.num_layers - 1 - layer
            ends = [end + left * step for end, step in zip(ends, steps, strict=False)]
            break
    # Ranks without tokens at either end of the chain delay nothing.
    return max(ends[_first(cuts) : _last(cuts) + 1]) + rates.head_seconds


class _Stage(NamedTuple):
    """Seconds of one position in a layer: of its processor, then of its link.

    The last position with tokens and those after it send no new KV. It is a tuple, since a router makes hundreds for a
    length that it meets for the first time.
    """

    projection: float
    square: float
    rest: float
    own_link: float
    past_link: float
    cached_link: float
    has_past: bool
    is_sending: bool


def _stages(cuts: Sequence[int], cached: int, rates: ChainRates) -> list[_Stage]:
    num_ranks = rates.num_ranks
    if len(cuts) != num_ranks + 1 or cuts[0] != 0 or any(stop < start for start, stop in pairwise(cuts)):
        raise ConfigError(f"cuts of a chain of {num_ranks} are {tuple(cuts)}; {num_ranks + 1} are needed, from 0 up")
    num_readers = sum(1 for start, stop in pairwise(cuts) if stop > start)
    stages = []
    for place, (start, stop) in enumerate(pairwise(cuts)):
        # Nothing goes to ranks after the last tokens.
        count, speed, is_last = stop - start, rates.speeds[place], place == num_ranks - 1 or stop == cuts[-1]
        byte_seconds = rates.byte_seconds(place)
        products = count * (rates.token_seconds - rates.projection_seconds)
        # An N-th of the cached KV lies on each rank, and goes to all others with new tokens.
        shares = num_readers - (count > 0)
        stages.append(
            _Stage(
                projection=count * rates.projection_seconds / speed,
                square=rates.square(count) * rates.pair_seconds / speed,
                rest=(count * (cached + start) * rates.pair_seconds + products) / speed + rates.layer_seconds,
                own_link=0.0 if is_last else count * byte_seconds,
                past_link=0.0 if is_last else start * byte_seconds,
                cached_link=cached * shares / num_ranks * byte_seconds,
                has_past=start > 0,
                is_sending=stop > 0 and not is_last,
            )
        )
    return stages


def _first(cuts: Sequence[int]) -> int:
    """Return the first position with tokens, the last one if there are none."""
    return next((place for place, stop in enumerate(cuts[1:]) if stop), len(cuts) - 2)


def _last(cuts: Sequence[int]) -> int:
    """Return the last position with tokens, the last one of all if there are none."""
    return next((place for place, stop in enumerate(cuts[1:]) if stop == cuts[-1] > 0), len(cuts) - 2)


def _pass_layer(
    ends: list[float],
    links: list[float],
    cached_at: float,
    stages: Sequence[_Stage],
    rates: ChainRates,
) -> None:
    arrived = 0.0
    for place, stage in enumerate(stages):
        ready = ends[place] + stage.projection
        own = ready + stage.square
        link = links[place]
        if rates.is_one_message:
            link = max(link, ready, arrived) + stage.own_link + stage.past_link
        else:
            link = max(link, ready) + stage.own_link
            if stage.has_past:
                link = max(link, own, arrived) + stage.past_link
        ends[place] = max(own, arrived, cached_at) + stage.rest
        if stage.is_sending:
            links[place] = link
            arrived = link + rates.message_seconds
        else:
            arrived = 0.0


def _send_cached(links: list[float], stages: Sequence[_Stage], message_seconds: float) -> float:
    """Add the sending of a later layer's cached KV to the links' times.

    Returns the time at which every position has the others' cached KV.
    """
    if not any(stage.cached_link for stage in stages):
        return 0.0
    for place, stage in enumerate(stages):
        links[place] += stage.cached_link
    return max(links) + message_seconds


def _is_steady(earlier: Sequence[float], steps: Sequence[float], num_ranks: int) -> bool:
    """Return whether this layer added the same time to every rank and link as the layer before.

    No rank or link may have got less than the one upstream of it. Each max() in `_pass_layer` then keeps choosing the
    same argument: arrivals from upstream do not grow faster than the rank's own times.
    """
    if not earlier or not math.isclose(math.fsum(earlier), math.fsum(steps), rel_tol=1e-12):
        return False
    if not all(math.isclose(one, other, rel_tol=1e-9) for one, other in zip(earlier, steps, strict=True)):
        return False
    ends, links = steps[:num_ranks], steps[num_ranks:]
    # A link that sends nothing does not move, and holds back nothing.
    flow = [each for end, link in zip(ends, links, strict=True) for each in ((end, link) if link else (end,))]
    first = next((place for place, link in enumerate(links) if link), num_ranks - 1)
    flow = flow[first:]
    return all(down >= up * (1.0 - 1e-9) for up, down in pairwise(flow))


def chain_closed_form(cuts: Sequence[int], cached: int, rates: ChainRates) -> float:
    """Return `chain_seconds` approximately.

    It is the slowest stage's time in all layers but one, and the time in which one layer's KV passes down the chain. A
    stage includes the part of its messages that does not overlap: a processor that moves them computes less. Without
    cached tokens the result is 3% below to 0.3% above `chain_seconds`; with them, 5% below to 10% above, and up to 30%
    above for short steps of many ranks, in which latencies count.
    """
    stages = _stages(cuts, cached, rates)
    num_ranks, lone_speed = rates.num_ranks, rates.lone_speed
    work = [each.projection + each.square + each.rest for each in stages]
    links = [each.own_link + each.past_link + each.cached_link for each in stages]
    first, last, busiest = (
        _first(cuts),
        _last(cuts),
        [rates.stage(*each) for each in zip(rates.shared(work), links, strict=True)],
    )
    if cached and num_ranks > 1:
        # The path from the first rank's new KV until the last rank has the cached KV of a later layer takes `way`. It
        # is taken once in LAYERS_AHEAD layers, so each layer bears that fraction of it.
        way = _way(cuts, first, rates) if first < last else 0.0
        way += (num_ranks - first) * rates.message_seconds + max(each.cached_link for each in stages)
        busiest[last] = max(busiest[last], (way + stages[first].projection / lone_speed) / LAYERS_AHEAD)

    # In the first layer, cached KV leaves before the new KV.
    first_cached = max(each.cached_link for each in stages)

    def through(place: int) -> float:
        """Return the seconds until the last position has attended the KV that the one at `place` sends in one layer."""
        own = (
            rates.lateness[place]
            + max(stages[place].projection / lone_speed, first_cached)
            + (rates.num_layers - 1) * max(busiest[place if place > first else 0 :])
        )
        if place == last:
            return own + (work[last] - stages[last].projection) / lone_speed
        way = _way(cuts, place, rates) + (last - place) * rates.message_seconds
        return own + way + (work[last] - stages[last].projection - stages[last].square) / lone_speed

    # The last position ends no earlier than it would alone.
    late = [place for place in range(first + 1, last + 1) if rates.lateness[place] or place == last]
    seconds = max(through(place) for place in (first, *late))
    if lone_speed > 1.0:
        # Shared processors do all of the work.
        seconds = max(seconds, rates.num_layers * math.fsum(work) / num_ranks)
    return seconds + rates.head_seconds


def _way(cuts: Sequence[int], place: int, rates: ChainRates) -> float:
    """Return the seconds in which links carry one layer's KV of the position at `place` and of earlier ones."""
    onward = sum(cuts[hop] * rates.byte_seconds(hop) for hop in range(place + 1, _last(cuts)))
    return cuts[place + 1] * rates.byte_seconds(place) + onward


# --- a chain as a service uses it: its order, cuts without a search, fast predictions ------------------------------


def chain_order(rates: RingRates, held: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the ranks along a chain: late and slow ones last, because nothing waits for them there.

    Among equal ranks, those that hold the fewest tokens come last: if not all ranks take part, the last ones do.
    `held[r]` is compared as a tuple, so it may hold further counts for ties.
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
    """Return each rank's sort key: (seconds late, negative speed). Unmeasured ranks have equal keys."""
    lateness = rates.lateness if len(rates.lateness) == num_ranks else (0.0,) * num_ranks
    speeds = rates.speeds if len(rates.speeds) == num_ranks else (1.0,) * num_ranks
    return [(late, -speed) for late, speed in zip(lateness, speeds, strict=True)]


def step_seconds(cuts: Cuts, cached: int, rates: ChainRates) -> float:
    """Return the predicted seconds of a step by given cuts, with its overhead."""
    return chain_closed_form(cuts, cached, rates) + rates.overhead(cuts)


def quick_cuts(num_tokens: int, cached: int, rates: ChainRates) -> Cuts:
    """Return cuts by which the busiest processor or link of a layer is least busy, with hardly a search.

    For each tried number of ranks, the cuts give all of them equal computing time, unless a link cannot send so much in
    that time. The cuts with the least predicted time are returned. Up to MAX_TRIED ranks all numbers are tried. With
    more ranks, a coarse grid of numbers is tried first, then a finer one around the best. A search for the best cuts
    (`bench/systems/chain_cuts.py`) takes a hundred times as long and gains up to 4%
    (`tests/cp_core/cost/test_chain_steps.py`).
    """
    num_ranks, speeds, hops = rates.num_ranks, rates.speeds, rates.num_layers - 1
    work = num_tokens * rates.token_seconds + num_tokens * (num_tokens / 2 + cached) * rates.pair_seconds
    # The ranks that take part share the work of all.
    shares = [min(rates.lone_speed, num_ranks / (num_ranks - empty)) for empty in range(num_ranks)]
    evens = [work / sum(speeds[empty:]) / shares[empty] for empty in range(num_ranks)]
    # Each rank's cached KV goes to all ranks that take part: if that takes longer than the work, few ranks are best.
    links = [cached * rates.byte_seconds(0) * (num_ranks - empty - 1) / num_ranks for empty in range(num_ranks)]
    likely = min(range(num_ranks), key=lambda empty: max(evens[empty], links[empty]))
    known: dict[Cuts, float] = {}

    def try_empty(empty: int) -> float:
        """Return the seconds of cuts with so many empty positions; infinity if others are known to be faster."""
        # The slowest stage takes at least as long as all do on average.
        if hops * evens[empty] + rates.head_seconds >= min(known.values(), default=math.inf):
            return math.inf
        seconds = math.inf
        # If ranks wait for links, fewer compute at a time, each faster.
        for faster in dict.fromkeys((shares[empty], rates.lone_speed)):
            sped = replace(rates, speeds=tuple(faster * each for each in speeds)) if faster > 1.0 else rates
            cuts = _balanced(num_tokens, cached, sped, empty, evens[empty] * shares[empty] / faster)
            if cuts not in known:
                known[cuts] = step_seconds(cuts, cached, rates)
            seconds = min(seconds, known[cuts])
        return seconds

    stride = 1
    while num_ranks > MAX_TRIED * stride:
        stride *= 2
    first = dict.fromkeys((likely, *range(0, num_ranks, stride), num_ranks - 1))
    tried = {empty: try_empty(empty) for empty in first}
    while stride > 1:
        stride //= 2
        best = min(tried, key=tried.__getitem__)
        beside = {best - stride, best + stride} - tried.keys()
        tried |= {empty: try_empty(empty) for empty in sorted(beside) if 0 <= empty < num_ranks}
    return min(known, key=known.__getitem__)


def _balanced(num_tokens: int, cached: int, rates: ChainRates, empty: int, even: float) -> Cuts:
    """Return cuts of which the first `empty` positions have no tokens, and the others work equally long in each layer.

    Each works `even` seconds in a layer if no link holds it up and no rank is late, and longer otherwise.
    """
    num_ranks = rates.num_ranks
    pairs = rates.square(num_tokens) + num_tokens * cached
    work = num_tokens * rates.token_seconds + pairs * rates.pair_seconds
    # The links take this long in a layer for cached KV alone. If the last rank can compute everything in that time, it
    # does; else no split takes less.
    cached_alone = rates.byte_seconds(0) * cached * (num_ranks - empty - 1) / num_ranks
    low, high = even, max(rates.lateness) / rates.num_layers + work / min(rates.speeds) + cached_alone
    if cached_alone > low:
        if work / rates.speeds[-1] + rates.lateness[-1] / rates.num_layers <= cached_alone:
            return (*(0,) * num_ranks, num_tokens)
        low = cached_alone
    cuts = _filled(low, cached, rates, empty)
    under = num_tokens - cuts[-1]
    if under > TOLERANCE:
        # False position that halves the value at an end that stays (Illinois): a handful of steps instead of dozens.
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
    sqrt = math.sqrt
    for place in range(empty, num_ranks):
        speed = speeds[place]
        # The last one sends no new KV.
        hop, sent = (byte_seconds * speed, cut + shares) if place < num_ranks - 1 else (0.0, shares)
        sent *= byte_seconds * speed
        work = before + pair_seconds * cut
        # t >= 0 is the root of a t^2 + b t = c, in the form without cancellation; there is no bound for b = 0.
        computed = carried = 0.0
        if (c := (seconds - lateness[place] / num_layers) * speed - exposed * sent) > 0.0:
            b = work + exposed * hop
            computed = 2 * c / (b + sqrt(b * b + 4 * half * c)) if b else math.inf
        if (c := seconds * speed - sent) > 0.0:
            b = exposed * work + hop
            carried = 2 * c / (b + sqrt(b * b + 4 * exposed * half * c)) if b else math.inf
        cut += computed if computed < carried else carried
        cuts.append(cut)
    return cuts


_Entry = tuple[float, float]
"""A step's predicted seconds divided by the seconds in which one rank alone computes it; factor of its overhead
(`busy_share`)."""


class ChainPredictor:
    """Predictions of a model's chain steps on rings of one size and speed.

    The closed form is computed for T = 2^(i/2) and 1 + P / T = 2^(j/2), as a multiple of what the matrix products and
    the attention take on one rank. Between these the multiple is linear: a router asks for many steps while it places
    one turn. Each layer's overhead is added, which includes the latencies of pass-KV's N - 1 hops. A profile's
    latencies contain waits for late ranks: without them a chain would seem faster only because it has fewer hops. A
    calibration measures overlap and overhead of chains; else they are those of the ring. The closed form counts late
    ranks already, so the seconds of a ring's step must not count them again.
    """

    __slots__ = ("_entries", "_model", "_num_ranks", "_prefill_rates", "_rates", "_step_seconds")

    def __init__(self, model: ModelShape, rates: PrefillRates, num_ranks: int) -> None:
        self._model = model
        self._prefill_rates = rates
        self._num_ranks = num_ranks
        ring = rates.ring
        self._step_seconds = max(0.0, ring.step_seconds - max(ring.lateness, default=0.0))
        self._rates: ChainRates | None = None  # made when needed: most of a fit's predictors predict no chain
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
