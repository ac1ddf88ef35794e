"""Claims that messages of real rings show on delayed links, in virtual time: the same on every machine.

Every rank is a thread with a clock of its own, which only its computation and its waits advance. Its attention computes
nothing: it takes the time of its pairs. Messages have the sizes of the model and really pass between the ranks, by the
code that a service runs. One token here stands for SCALE tokens of the model, so that tensors stay small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch

from cp_core.attention.partial import Partial
from cp_core.cost.chain import ChainRates, Cuts, chain_seconds
from cp_core.cost.chain_cuts import best_cuts
from cp_core.cost.model import CHAIN, PASS_KV
from cp_core.layout.shards import PrefillLayout, balanced_layout, cut_layout
from cp_core.layout.step_plans import PrefillPlan, SequencePlan
from cp_core.ring.prefill import RingPrefill
from cp_core.transport.delayed import ChangingRate, Clock, DelayedTransport, VirtualClock
from cp_core.transport.inprocess import InProcessRing
from cp_core.transport.interface import RingTransport
from services.offline.bench.systems.claims import Claim, Figure, Source
from services.offline.bench.systems.model import THIRD, K, chain_of

SCALE = 32
LAYERS = 8
KV_BYTES = 2 * 4
"""Bytes of K and V of one token here: one head of one float32 number."""
WAIT_SECONDS = 60.0
TIMEOUT_SECONDS = 1e6
"""Deadline of a message, in virtual time: none."""


class TimedAttention:
    """Attention that only takes its time, `pair_seconds` for each query with each key that it sees."""

    name: ClassVar[str] = "timed"

    def __init__(self, clock: Clock, pair_seconds: float) -> None:
        self._clock = clock
        self._pair_seconds = pair_seconds

    def partial_attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
    ) -> Partial:
        """See AttentionBackend: zeros."""
        pairs = q.shape[0] * k.shape[0] * (0.5 if causal else 1.0)
        self._clock.wait_until(self._clock.now() + pairs * self._pair_seconds)
        return Partial(torch.zeros(q.shape), torch.zeros(q.shape[:2]))


def scaled(rates: ChainRates) -> ChainRates:
    """Return the rates of LAYERS layers whose tokens stand for SCALE tokens each and have the bytes of those here."""
    return replace(
        rates,
        token_seconds=rates.token_seconds * SCALE,
        projection_seconds=rates.projection_seconds * SCALE,
        pair_seconds=rates.pair_seconds * SCALE**2,
        link_bytes_per_second=rates.link_bytes_per_second * KV_BYTES / (rates.kv_bytes * SCALE),
        kv_bytes=KV_BYTES,
        num_layers=LAYERS,
        head_seconds=0.0,
    )


def messages_seconds(algorithm: str, layout: PrefillLayout, rates: ChainRates) -> float:
    """Return the virtual seconds of a step of LAYERS layers on ranks of these rates, in the order of their numbers."""
    num_ranks = rates.num_ranks
    sequence = SequencePlan(layout, (0,) * num_ranks)
    plan = PrefillPlan((sequence,), tuple(range(num_ranks)) if algorithm == CHAIN else ())
    ring = InProcessRing(num_ranks)
    with ThreadPoolExecutor(num_ranks) as threads:
        act = partial(_rank_seconds, algorithm, plan, rates)
        running = [threads.submit(act, transport) for transport in ring.transports]
        try:
            return max(each.result(WAIT_SECONDS) for each in running)
        finally:
            for transport in ring.transports:
                transport.close()


def _rank_seconds(algorithm: str, plan: PrefillPlan, rates: ChainRates, inner: RingTransport) -> float:
    rank, clock = inner.rank, VirtualClock()
    speed, count = rates.speeds[rank], plan.new_on(rank)
    rate = ChangingRate(((0.0, rates.link_bytes_per_second * rates.links[rank]),))
    transport = DelayedTransport(inner, rates.message_seconds, rate, TIMEOUT_SECONDS, clock)
    backend = TimedAttention(clock, rates.pair_seconds / speed)
    rows = torch.zeros(count, 1, 1)
    clock.wait_until(rates.lateness[rank])

    def compute(seconds: float) -> None:
        clock.wait_until(clock.now() + seconds)

    exchange = RingPrefill(plan, transport, backend, algorithm, rates.num_layers)
    for layer in range(rates.num_layers):
        compute(count * rates.projection_seconds / speed)
        exchange.attend(layer, rows, rows, rows, lambda _: [[]], 1.0)
        compute(count * (rates.token_seconds - rates.projection_seconds) / speed + rates.layer_seconds)
    exchange.finish()
    # A rank without tokens has nothing to end.
    return clock.now() if count else 0.0


def chain_by_messages(cuts: Cuts, rates: ChainRates) -> float:
    return messages_seconds(CHAIN, cut_layout(0, cuts, range(rates.num_ranks)), rates)


def ring_by_messages(num_tokens: int, rates: ChainRates) -> float:
    """Return the virtual seconds of pass-KV, whose ranks have equal work."""
    return messages_seconds(PASS_KV, balanced_layout(0, num_tokens, (0,) * rates.num_ranks), rates)


def message_claims() -> list[Claim]:
    """Return all claims of this source; takes a few seconds."""
    return [_recurrence(), _gains(), _noise(), _unlike()]


def _step(link: float, num_ranks: int, num_tokens: int) -> tuple[ChainRates, Cuts]:
    """Return the scaled rates and the best cuts of a step of the model's tokens."""
    rates = scaled(chain_of(link, num_ranks))
    return rates, best_cuts(num_tokens // SCALE, 0, rates, strides=(16, 8, 4, 2, 1))


STEPS = ((3e9, 2, 4 * K), (3e9, 4, 4 * K), (20e9, 4, 8 * K), (40e9, 8, 8 * K), (300e9, 4, 8 * K))


def _recurrence() -> Claim:
    figures = []
    for link, num_ranks, num_tokens in STEPS:
        rates, cuts = _step(link, num_ranks, num_tokens)
        name = f"{num_ranks} ranks, {link / 1e9:.0f} GB/s, {num_tokens // K}K"
        figures.append(Figure.near(name, chain_by_messages(cuts, rates), chain_seconds(cuts, 0, rates), 0.01))
    return Claim(
        source=Source.MESSAGES,
        name="chain's messages, s, by recurrence",
        published="-",
        accepted="1%",
        figures=tuple(figures),
    )


def _gains() -> Claim:
    figures = []
    for link, num_ranks, num_tokens in STEPS[:3]:
        rates, cuts = _step(link, num_ranks, num_tokens)
        gain = ring_by_messages(cuts[-1], rates) / chain_by_messages(cuts, rates)
        figures.append(Figure.at_least(f"{num_ranks} ranks, {link / 1e9:.0f} GB/s, {num_tokens // K}K", gain, 1.07))
    return Claim(
        source=Source.MESSAGES,
        name="pass-KV over chain, messages exposed",
        published="-",
        accepted="1.07 or more",
        figures=tuple(figures),
    )


def _noise() -> Claim:
    """Compare the mean losses by one link of the ring at half rate."""
    figures, num_ranks = [], 4
    for num_tokens in (8 * K, 16 * K):
        rates, cuts = _step(20e9, num_ranks, num_tokens)
        chain = _mean_loss(partial(chain_by_messages, cuts), rates)
        ring = _mean_loss(partial(ring_by_messages, cuts[-1]), rates)
        figures.append(Figure.at_most(f"{num_tokens // K}K tokens: {chain:.1%} / {ring:.1%}", chain / ring, THIRD))
    return Claim(
        source=Source.MESSAGES,
        name="link at half rate, loss over pass-KV's",
        published="-",
        accepted="a third",
        figures=tuple(figures),
    )


def _mean_loss(seconds: Callable[[ChainRates], float], rates: ChainRates) -> float:
    quiet, num_ranks = seconds(rates), rates.num_ranks
    noisy = [_with_slow_link(rates, slow) for slow in range(num_ranks)]
    return sum(map(seconds, noisy)) / num_ranks / quiet - 1.0


def _with_slow_link(rates: ChainRates, slow: int) -> ChainRates:
    return replace(rates, links=tuple(0.5 if place == slow else 1.0 for place in range(rates.num_ranks)))


def _unlike() -> Claim:
    """Compare the losses by a rank that is late, and by one at half speed; the chain knows which, and cuts for it."""
    rates, num_tokens = _step(40e9, 4, 16 * K)[0], 16 * K // SCALE
    late = replace(rates, lateness=(0.0, 0.0, 0.0, 0.01))
    slow = replace(rates, speeds=(1.0, 1.0, 1.0, 0.5))

    def losses(seconds: Callable[[ChainRates], float]) -> Sequence[float]:
        quiet = seconds(rates)
        return [seconds(each) / quiet - 1.0 for each in (late, slow)]

    def chain(each: ChainRates) -> float:
        return chain_by_messages(best_cuts(num_tokens, 0, each, strides=(16, 8, 4, 2, 1)), each)

    pairs = zip(("late", "half speed"), losses(chain), losses(partial(ring_by_messages, num_tokens)), strict=True)
    return Claim(
        source=Source.MESSAGES,
        name="rank late, half speed, loss over pass-KV's",
        published="-",
        accepted="a third",
        figures=tuple(
            Figure.at_most(f"{name}: {own:.1%} / {ring:.1%}", own / ring, THIRD) for name, own, ring in pairs
        ),
    )
