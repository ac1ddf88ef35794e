"""Claims that real rings show by messages on delayed links, in virtual time: the same on every machine.

The systems bench calls `message_claims`. Every rank is a thread with a clock of its own, which only its computation and
its waits advance. Its attention computes nothing, but lets the time of its pairs pass. Messages really pass between the
ranks, by the code that a service runs. One token here stands for SCALE tokens of the model, so that tensors stay small,
and the links are slower by as much as a token's KV is smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import ClassVar

import torch

from bench.systems.chain_cuts import best_cuts
from bench.systems.claims import Claim, Figure, Source
from bench.systems.delayed import ChangingRate, Clock, DelayedTransport, VirtualClock
from bench.systems.model import GROUPED, THIRD, K, chain_of
from ringserve.cp_core.attention.partial import Partial
from ringserve.cp_core.cost.chain import ChainRates, Cuts, chain_seconds
from ringserve.cp_core.cost.model import CHAIN, PASS_KV
from ringserve.cp_core.layout.shards import PrefillLayout, balanced_layout, cut_layout
from ringserve.cp_core.layout.sparsity import Sparsity
from ringserve.cp_core.layout.step_plans import PrefillPlan, SequencePlan
from ringserve.cp_core.ring.prefill import RingPrefill
from ringserve.cp_core.transport.collectives import all_reduce
from ringserve.cp_core.transport.inprocess import InProcessRing
from ringserve.cp_core.transport.interface import RingTransport

SCALE = 32
LAYERS = 8
KV_BYTES = 2 * 4
"""Bytes of a token's K and V here: each is one head of one float32 number."""
WAIT_SECONDS = 60.0
TIMEOUT_SECONDS = 1e6
"""Deadline of a message in virtual time, which never passes."""


class TimedAttention:
    """Attention that only lets `pair_seconds` pass for each pair of a query and a key that it sees; counts pairs."""

    name: ClassVar[str] = "timed"

    def __init__(self, clock: Clock, pair_seconds: float) -> None:
        self.num_pairs = 0.0
        self._clock = clock
        self._pair_seconds = pair_seconds

    def partial_attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
    ) -> Partial:
        """See AttentionBackend: zeros."""
        pairs = q.shape[0] * k.shape[0] * (0.5 if causal else 1.0)
        self.num_pairs += pairs
        self._clock.wait_until(self._clock.now() + pairs * self._pair_seconds)
        return Partial(torch.zeros(q.shape), torch.zeros(q.shape[:2]))


def scaled(rates: ChainRates) -> ChainRates:
    """Return the rates of LAYERS layers for tokens that stand for SCALE tokens each and have KV_BYTES."""
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


@dataclass(frozen=True, slots=True)
class Spent:
    """Virtual seconds of a rank's step, bytes that it sent, and pairs that it attended; each the most of all ranks."""

    seconds: float
    num_bytes: int
    num_pairs: float


def step_by_messages(
    algorithm: str, layout: PrefillLayout, rates: ChainRates, sparsity: Sparsity | None = None
) -> Spent:
    """Return what a step takes on ranks of these rates; a chain takes them in the order of their numbers."""
    num_ranks = rates.num_ranks
    sequence = SequencePlan(layout, (0,) * num_ranks, sparsity=sparsity)
    plan = PrefillPlan((sequence,), tuple(range(num_ranks)) if algorithm == CHAIN else ())
    return _on_ranks(num_ranks, partial(_rank_step, algorithm, plan, rates))


def _on_ranks(num_ranks: int, act: Callable[[RingTransport], Spent]) -> Spent:
    """Run `act` on every rank of a ring."""
    ring = InProcessRing(num_ranks)
    with ThreadPoolExecutor(num_ranks) as threads:
        running = [threads.submit(act, transport) for transport in ring.transports]
        try:
            ranks = [each.result(WAIT_SECONDS) for each in running]
        finally:
            for transport in ring.transports:
                transport.close()
    return Spent(*map(max, zip(*map(astuple, ranks), strict=True)))


def _delayed(inner: RingTransport, rates: ChainRates, clock: Clock) -> DelayedTransport:
    rate = ChangingRate(((0.0, rates.link_bytes_per_second * rates.links[inner.rank]),))
    return DelayedTransport(inner, rates.message_seconds, rate, TIMEOUT_SECONDS, clock)


def _rank_step(algorithm: str, plan: PrefillPlan, rates: ChainRates, inner: RingTransport) -> Spent:
    rank, clock = inner.rank, VirtualClock()
    speed, count = rates.speeds[rank], plan.new_on(rank)
    transport = _delayed(inner, rates, clock)
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
    # A rank without tokens does not delay the end of the step.
    return Spent(clock.now() if count else 0.0, transport.stats.bytes_sent, backend.num_pairs)


def chain_by_messages(cuts: Cuts, rates: ChainRates) -> float:
    return step_by_messages(CHAIN, cut_layout(0, cuts, range(rates.num_ranks)), rates).seconds


def ring_by_messages(num_tokens: int, rates: ChainRates) -> float:
    """Return the virtual seconds of pass-KV, whose ranks have equal work."""
    return step_by_messages(PASS_KV, _even(num_tokens, rates), rates).seconds


def _even(num_tokens: int, rates: ChainRates) -> PrefillLayout:
    return balanced_layout(0, num_tokens, (0,) * rates.num_ranks)


def tensor_by_messages(num_tokens: int, width: int, rates: ChainRates) -> Spent:
    """Return what a step takes if each rank has all tokens and a share of the weights and heads.

    Each layer has two sums over the ranks, of `width` float32 numbers a token (arXiv 2411.01783, 4.2.2).
    """
    return _on_ranks(rates.num_ranks, partial(_rank_with_share, num_tokens, width, rates))


def _rank_with_share(num_tokens: int, width: int, rates: ChainRates, inner: RingTransport) -> Spent:
    clock, states = VirtualClock(), torch.zeros(num_tokens, width)
    transport = _delayed(inner, rates, clock)
    pairs = rates.square(num_tokens) / rates.num_ranks
    attention = pairs * rates.pair_seconds + num_tokens * rates.projection_seconds / rates.num_ranks
    rest = num_tokens * (rates.token_seconds - rates.projection_seconds) / rates.num_ranks + rates.layer_seconds
    for _ in range(rates.num_layers):
        for seconds in (attention, rest):
            clock.wait_until(clock.now() + seconds)
            all_reduce(states, transport)
    return Spent(clock.now(), transport.stats.bytes_sent, rates.num_layers * pairs)


def message_claims() -> list[Claim]:
    """Return all claims of this source; takes a few seconds."""
    return [_recurrence(), _gains(), _noise(), _unlike(), _tensor_parallel(), _sparse()]


def _step(link: float, num_ranks: int, num_tokens: int) -> tuple[ChainRates, Cuts]:
    """Return the scaled rates and the best cuts of a step of `num_tokens` tokens of the model."""
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
    """Compare what a chain and pass-KV lose on average if one link has half its rate."""
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
    """Compare the losses by a late rank and by one at half speed; the chain knows which rank it is and cuts for it."""
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


LONG_TOKENS = 160 * K
"""Tokens so many that a sum exchanges parts in two rounds here, as one of the model's size does."""
STATE_NUMBERS = KV_BYTES * GROUPED.hidden_size // (2 * GROUPED.num_kv_heads * GROUPED.head_dim) // 4
"""float32 numbers of a token's states here, in the model's proportion to KV_BYTES."""


def _tensor_parallel() -> Claim:
    """Compare weights cut over ranks with tokens cut over them: by the bytes of a rank, and by time."""
    figures = []
    for link, num_ranks in ((40e9, 2), (40e9, 4), (300e9, 4)):
        rates = scaled(chain_of(link, num_ranks))
        ours = step_by_messages(PASS_KV, _even(LONG_TOKENS // SCALE, rates), rates)
        theirs = tensor_by_messages(LONG_TOKENS // SCALE, STATE_NUMBERS, rates)
        where, heads = f"{num_ranks} ranks, {link / 1e9:.0f} GB/s", GROUPED.num_heads / GROUPED.num_kv_heads
        figures.append(Figure.at_least(f"seconds, {where}", theirs.seconds / ours.seconds, 1.0))
        figures.append(Figure.near(f"bytes, {where}", theirs.num_bytes / ours.num_bytes, 2 * heads, 1e-6))
    return Claim(
        source=Source.MESSAGES,
        name="CP 4.2.2: TP over pass-KV, 160K, s and bytes",
        published="TP slower; bytes 2H/K",
        accepted="1 or more; exact",
        figures=tuple(figures),
    )


DROPPED = 0.22
SPARSE_RANKS, SPARSE_TOKENS, SPARSE_LAYERS = 8, 32 * K, 32


def _sparse() -> Claim:
    """Compare bytes and pairs of a step that drops as many keys as CSPS with those of an exact one."""
    rates = scaled(chain_of(40e9, SPARSE_RANKS))

    def spent(keep: float, num_layers: int) -> Spent:
        layered = replace(rates, num_layers=num_layers)
        return step_by_messages(PASS_KV, _even(SPARSE_TOKENS, rates), layered, Sparsity(keep=keep))

    # All layers of an exact step are alike.
    exact, sparse = spent(1.0, 1), spent(1.0 - DROPPED, SPARSE_LAYERS)
    saved = 1.0 - sparse.num_bytes / (SPARSE_LAYERS * exact.num_bytes)
    attended = 1.0 - sparse.num_pairs / (SPARSE_LAYERS * exact.num_pairs)
    return Claim(
        source=Source.MESSAGES,
        name="CSPS 5.3: 22% dropped, bytes and pairs saved",
        published="19%, 28%",
        accepted="as much",
        figures=(
            Figure.at_least("bytes", saved, 0.19, is_share=True),
            Figure.at_least("pairs", attended, 0.28, is_share=True),
        ),
        why="CSPS drops queries with the keys. Here all queries and a rank's own keys stay, so pairs fall only with "
        f"the dropped share: a keep of {1.0 - DROPPED * 0.28 / attended:.2f} saves 28% of them, for 0.002 nats "
        "(decision 0032).",
    )
