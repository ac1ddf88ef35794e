"""Time of chain prefill. Pure Python, no torch.

Position i of a chain of N ranks computes the new tokens from cut c_i to c_{i+1} and gets the KV of all before them from
position i-1 (KV-Runahead, arXiv 2405.05329). Per layer it sends its own KV at once, attends its own tokens, then waits
for the KV before them, sends it on and attends it. T_i tokens, s_i the speed of the rank, f_i the end of the layer:

    ready  = f_i + T_i qkv / s_i                    own  = ready + T_i^2 / 2 pair / s_i
    sent   = max(link_i, ready) + T_i kv / BW       link_i = max(sent, own, arrived_i) + c_i kv / BW
    f_i    = max(own, arrived_i) + (T_i (P + c_i) pair + T_i (lin - qkv)) / s_i + o          arrived_{i+1} = link_i + a

A message costs a chain its start once a hop, a ring once a layer; the chain hides it behind a whole layer, the ring
behind attention alone.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from ringserve.cp_core.errors import ConfigError

if TYPE_CHECKING:
    from ringserve.cp_core.cost.model import ModelShape, PrefillRates

LAYERS_AHEAD = 2
"""Layers between the one whose new KV a rank has just sent on and the one whose cached KV it sends then. The ranks of a
chain are at different layers, and each needs the cached KV of all: the later ones would hold back the earlier ones."""

Cuts = tuple[int, ...]
"""Bounds of a chain's positions: 0 = c_0 <= ... <= c_N = T, relative to the first new token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainRates:
    """Rates of a chain; times in seconds. `speeds` and `lateness` are those of its positions, in the chain's order.

    `token_seconds` are all matrix products of one token in one layer, `projection_seconds` those of its q, k and v
    among them, `pair_seconds` one query with one key in one layer, `layer_seconds` what else a layer takes. `kv_bytes`
    are K and V of one token in one layer. A rank of speed 2 computes twice as fast; one that is late begins so many
    seconds after the others. Where ranks share cores, a GPU or its memory, a rank computes `lone_speed` times as fast
    while the others wait; the other rates are those of ranks that compute together. `overhead_seconds` are the part of
    a layer behind which nothing hides, `overlap` is the share of messages that hides behind the rest: predictions and
    choices of cuts count both, `chain_seconds` neither. `links` are shares of `link_bytes_per_second` that the links of
    its positions have; none given: all of it.

    Two options compare with KV-Runahead: `is_masked` computes a rank's square of pairs whole, `is_one_message` sends a
    rank's KV with what it received, when both are there.
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
            # Ranks that share one core are N times as fast alone as together, and none is faster. 0: not measured.
            lone_speed=min(max(1.0, ring.lone_speed), float(len(speeds))),
        )

    @property
    def num_ranks(self) -> int:
        return len(self.speeds)

    def busy_share(self, cuts: Sequence[int]) -> float:
        """Return the share of a layer's time with all ranks that its fixed parts take with those that have tokens."""
        num_busy = sum(1 for start, stop in pairwise(cuts) if stop > start)
        return max(1.0 / self.lone_speed, num_busy / self.num_ranks) if self.lone_speed > 1.0 else 1.0

    def shared(self, work: Sequence[float]) -> list[float]:
        """Return the seconds of a layer's `work` on each position, that of ranks which all compute together.

        What the ranks share can do as much as all of them together, and one rank at most `lone_speed` times its part.
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
        """Return the seconds of all layers behind which nothing hides."""
        return self.num_layers * self.overhead_seconds * self.busy_share(cuts)

    def byte_seconds(self, place: int) -> float:
        """Return the seconds that the link of a position takes for K and V of one token."""
        return self.kv_bytes / self.link_bytes_per_second / self.links[place]

    def square(self, num_tokens: float) -> float:
        """Return the pairs of tokens among themselves."""
        return num_tokens * num_tokens * (1.0 if self.is_masked else 0.5)


def chain_seconds(cuts: Sequence[int], cached: int, rates: ChainRates) -> float:
    """Return the seconds of a step of c_N tokens after `cached` ones that lie evenly over the ranks.

    Cached KV goes straight to the ranks with new tokens, LAYERS_AHEAD layers ahead. `lone_speed` counts
    as 1. Raises ConfigError where the cuts do not ascend from 0 or are not one more than the ranks.
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
    # Empty ranks before the first tokens and behind the last ones hold back nothing.
    return max(ends[_first(cuts) : _last(cuts) + 1]) + rates.head_seconds


class _Stage(NamedTuple):
    """Seconds of one position in a layer: of its processor, then of its link. A last position sends no new KV.

    It is a tuple, since a router makes hundreds for a length that it meets for the first time.
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
        # Nothing goes to ranks behind the last tokens.
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
    """Send the cached KV of a later layer; return when each position has that of all others."""
    if not any(stage.cached_link for stage in stages):
        return 0.0
    for place, stage in enumerate(stages):
        links[place] += stage.cached_link
    return max(links) + message_seconds


def _is_steady(earlier: Sequence[float], steps: Sequence[float], num_ranks: int) -> bool:
    """Return whether layers add the same as before to every rank and link, and no less downstream.

    A maximum then keeps its side for ever: what arrives from upstream does not grow faster than what it competes with.
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
    """Return about the seconds of `chain_seconds`: the slowest stage in all layers but one, and the way of one message.

    A stage also has what the overlap leaves of its messages: a processor that moves them computes less meanwhile.
    Within -3% and +0.3% without cached tokens. With them within -5% and +10%, and up to 30% high for short steps of
    many ranks, where starts of messages count.
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
        # From the first rank's KV to the last one's cached KV for a later layer.
        way = _way(cuts, first, rates) if first < last else 0.0
        way += (num_ranks - first) * rates.message_seconds + max(each.cached_link for each in stages)
        busiest[last] = max(busiest[last], (way + stages[first].projection / lone_speed) / LAYERS_AHEAD)

    # In the first layer, cached KV leaves before the new KV.
    first_cached = max(each.cached_link for each in stages)

    def through(place: int) -> float:
        """Return the seconds of what the position at `place` sends in one layer, until the last one has attended it."""
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
        # What the ranks share has all of the work to do.
        seconds = max(seconds, rates.num_layers * math.fsum(work) / num_ranks)
    return seconds + rates.head_seconds


def _way(cuts: Sequence[int], place: int, rates: ChainRates) -> float:
    """Return the seconds that links carry what the position at `place` and those before it send in one layer."""
    onward = sum(cuts[hop] * rates.byte_seconds(hop) for hop in range(place + 1, _last(cuts)))
    return cuts[place + 1] * rates.byte_seconds(place) + onward
