"""Chain prefill against the fp64 oracle and pass-KV, its bytes by formula, its time, and the KV that ranks store."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.systems.delayed import DelayedTransport, VirtualClock
from ringserve.cp_core.attention.partial import Partial
from ringserve.cp_core.attention.reference import ReferenceAttention
from ringserve.cp_core.attention.torch_cpu import TorchCpuFlash
from ringserve.cp_core.cost.chain import ChainRates, chain_seconds, quick_cuts
from ringserve.cp_core.errors import InvalidRequest, Unavailable
from ringserve.cp_core.layout.shards import (
    PrefillLayout,
    TokenRange,
    balanced_layout,
    cut_layout,
    stored_on_chain,
    whole_layout,
)
from ringserve.cp_core.layout.step_plans import KvRun, PrefillPlan, SequencePlan
from ringserve.cp_core.ring.prefill import RingPrefill, ring_prefill
from ringserve.cp_core.transport.inprocess import InProcessRing
from ringserve.cp_core.transport.interface import RingTransport
from tests.cp_core.rings import PlacedSequence, PoisoningTransport, on_every_rank, prefill_on_threads
from tests.oracles import fp32_bound, largest, oracle_causal, random_tokens

SCALE = 0.125
SIZES = [1, 2, 3, 4, 8]
KV_BYTES = 2 * 2 * 64 * 4
"""Bytes of K and V of one token of `random_tokens`."""


@st.composite
def chains(draw: st.DrawFn) -> tuple[int, tuple[int, ...], list[PlacedSequence]]:
    """Draw a ring, an order, and sequences with cuts of their own: uneven, empty, some whole on one rank."""
    size = draw(st.sampled_from(SIZES))
    order = tuple(draw(st.permutations(range(size))))
    num_kv_heads, group = draw(st.sampled_from([(2, 2), (1, 7), (3, 1), (5, 3)]))
    sequences = []
    for _ in range(draw(st.integers(0, 3))):
        new = draw(st.integers(0, 60))
        owner = draw(st.lists(st.integers(0, size - 1), max_size=30))
        inner = sorted(draw(st.lists(st.integers(0, new), min_size=size - 1, max_size=size - 1)))
        layout = cut_layout(len(owner), (0, *inner, new), order)
        if not owner and draw(st.booleans()):
            layout = whole_layout(0, new, draw(st.integers(0, size - 1)), size)
        tokens = random_tokens(
            len(owner) + new,
            num_heads=num_kv_heads * group,
            num_kv_heads=num_kv_heads,
            head_dim=16,
            seed=draw(st.integers(0, 99)),
        )
        sequences.append(PlacedSequence(tokens, layout, tuple(owner), draw(st.sampled_from([3, 1 << 30]))))
    return size, order, sequences


@given(chains(), st.just(0) | st.integers(1, 50))
@settings(max_examples=100, deadline=None)
def test_any_chain_matches_the_oracle_and_has_the_bits_of_pass_kv(
    chain: tuple[int, tuple[int, ...], list[PlacedSequence]], window: int
) -> None:
    size, order, sequences = chain
    outs, by_pass_kv = (
        prefill_on_threads(sequences, size, name, SCALE, order=order, window=window).outs
        for name in ("chain", "pass_kv")
    )
    for sequence, out, other in zip(sequences, outs, by_pass_kv, strict=True):
        right = oracle_causal(sequence.tokens, SCALE, window=window)[sequence.layout.start :]
        assert largest(out.double() - right) <= fp32_bound(sequence.tokens, SCALE, window=window)
        is_one_run = max(len(sequence.cached_runs(rank)) for rank in range(size)) <= 1
        assert largest(out - other) <= (0 if is_one_run else 4e-7 * largest(sequence.tokens.v))


@pytest.mark.parametrize("size", SIZES)
def test_fewer_tokens_than_ranks_and_ranks_without_any(size: int) -> None:
    order = tuple(range(size))[::-1]
    for new in {1, 2, size - 1, 33}:
        for cuts in (
            (0,) * size + (new,),
            (0,) + (new,) * size,
            (0, *(min(new, place + 1) for place in range(size - 1)), new),
        ):
            for owner in ((), (size - 1,) * 9):
                tokens = random_tokens(len(owner) + new, seed=new)
                sequence = PlacedSequence(tokens, cut_layout(len(owner), cuts, order), owner)
                out = prefill_on_threads([sequence], size, "chain", SCALE, order=order).outs[0]
                assert largest(out.double() - oracle_causal(tokens, SCALE)[len(owner) :]) <= fp32_bound(tokens, SCALE)


@pytest.mark.parametrize("cuts", [(0, 4, 7, 9), (0, 40, 40, 64), (0, 0, 50, 50), (0, 10, 20, 30)])
@pytest.mark.parametrize("cached", [0, 21])
def test_bytes_are_those_of_the_formula(cuts: tuple[int, ...], cached: int) -> None:
    """Position i sends c_(i+1) KV, none where no tokens come behind it, and its cached KV to all that attend it."""
    order, counts = (2, 0, 1), [stop - start for start, stop in pairwise(cuts)]
    owner = tuple(place % 3 for place in range(cached))
    sequence = PlacedSequence(random_tokens(cached + cuts[-1]), cut_layout(cached, cuts, order), owner)
    stats = prefill_on_threads([sequence], 3, "chain", SCALE, order=order).stats
    for place, rank in enumerate(order):
        new = cuts[place + 1] if any(counts[place + 1 :]) else 0
        readers = sum(1 for other, count in enumerate(counts) if count and other != place)
        assert stats[rank].bytes_sent == (new + readers * owner.count(rank)) * KV_BYTES
        assert stats[rank].all_to_alls == bool(cached)
    if all(counts):
        passed = sum(count * (2 - place) for place, count in enumerate(counts))
        assert sum(each.bytes_sent for each in stats) == (passed + 2 * cached) * KV_BYTES


def test_sequences_that_lie_whole_on_one_rank_send_nothing() -> None:
    whole = [PlacedSequence(random_tokens(20, seed=rank), whole_layout(0, 20, rank, 3), ()) for rank in range(3)]
    assert [each.bytes_sent for each in prefill_on_threads(whole, 3, "chain", SCALE).stats] == [0, 0, 0]


def test_a_layout_that_is_no_chain_is_refused() -> None:
    transport = InProcessRing(2).transports[0]
    rows = torch.zeros(4, 2, 64)
    for layout in (balanced_layout(0, 8, (0, 0)), cut_layout(0, (0, 4, 8), (1, 0))):
        plan = PrefillPlan((SequencePlan(layout, (0, 0)),))
        with pytest.raises(InvalidRequest, match="allowed is one range per rank, in this order"):
            ring_prefill(rows, rows, rows, [[]], plan, transport, TorchCpuFlash(), SCALE, "chain")


# --- many layers, and the KV that stays -----------------------------------------------------------------------------


@st.composite
def cuts_and_counts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    size, new = draw(st.sampled_from([2, 3, 5])), draw(st.integers(1, 60))
    inner = sorted(draw(st.lists(st.integers(0, new), min_size=size - 1, max_size=size - 1)))
    layout = balanced_layout(0, new, draw(st.lists(st.integers(0, 9), min_size=size, max_size=size)))
    counts = tuple(layout.tokens_on(rank) for rank in range(size))
    return (0, *inner, new), counts, tuple(draw(st.permutations(range(size))))


@given(cuts_and_counts())
def test_what_ranks_store_is_each_token_once_and_as_level_as_the_cuts_allow(
    drawn: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]],
) -> None:
    cuts, counts, order = drawn
    stored = stored_on_chain(5, cuts, counts, order)
    stored.check(TokenRange(5, 5 + cuts[-1]))
    level = 0
    for rank, cut in zip(order, cuts[1:], strict=True):
        level += counts[rank]
        assert all(each.stop <= 5 + cut for each in stored.ranks[rank]), "a rank stores what it does not get"
        if cut < level:
            return
    assert stored.held == counts


@pytest.mark.parametrize("period", [0, 2])
@pytest.mark.parametrize(
    ("cuts", "counts"),
    [((0, 30, 50, 60), (20, 20, 20)), ((0, 30, 60, 60), (20, 21, 19)), ((0, 0, 10, 60), (20, 20, 20))],
)
def test_layers_follow_each_other_and_ranks_store_their_level_share(
    cuts: tuple[int, ...], counts: tuple[int, ...], period: int
) -> None:
    """Six layers with cached tokens. If all ranks come together between layers, no message is mistaken."""
    order, num_layers, owner = (1, 2, 0), 6, (0, 0, 1, 2, 2, 2, 1)
    start, new = len(owner), cuts[-1]
    layers = [
        PlacedSequence(random_tokens(start + new, seed=layer), cut_layout(start, cuts, order), owner, 2)
        for layer in range(num_layers)
    ]
    stored = stored_on_chain(start, cuts, counts, order)
    plan = PrefillPlan((SequencePlan(layers[0].layout, layers[0].plan.cached, stored),), order)

    def act(transport: RingTransport) -> list[tuple[torch.Tensor, KvRun]]:
        rank, done = transport.rank, []
        positions = layers[0].new_positions(rank)
        ring = RingPrefill(plan, PoisoningTransport(transport), TorchCpuFlash(), "chain", num_layers, period)
        for layer, each in enumerate(layers):
            if period and layer % period == 0:
                told = torch.empty(3, 1)
                transport.gather_all(torch.full((1,), float(rank)), list(told)).wait()
                assert told[:, 0].tolist() == [0.0, 1.0, 2.0]
            q, k, v = (tensor[positions] for tensor in (each.tokens.q, each.tokens.k, each.tokens.v))
            out = ring.attend(layer, q, k, v, lambda layer: [layers[layer].cached_runs(rank)], SCALE)
            kept = ring.stored(0)
            done.append((out, KvRun(kept.k.clone(), kept.v.clone())))
        ring.finish()
        return done

    by_rank = on_every_rank(InProcessRing(3).transports, act)
    for layer, each in enumerate(layers):
        right = oracle_causal(each.tokens, SCALE)
        for rank in range(3):
            out, kept = by_rank[rank][layer]
            assert largest(out.double() - right[each.new_positions(rank)]) <= fp32_bound(each.tokens, SCALE)
            here = [p for span in stored.ranks[rank] for p in range(span.start, span.stop)]
            assert torch.equal(kept.k, each.tokens.k[here])
            assert torch.equal(kept.v, each.tokens.v[here])


def test_a_lost_rank_ends_the_waits_of_all_others() -> None:
    order = (0, 1, 2)
    sequence = PlacedSequence(random_tokens(30), cut_layout(0, (0, 10, 20, 30), order), ())
    ring = InProcessRing(3)

    class Lost(TorchCpuFlash):
        def partial_attention(self, *_: object, **__: object):  # type: ignore[no-untyped-def]
            ring.transports[1].close()
            raise Unavailable("rank 1 is lost")

    def act(transport: RingTransport) -> str:
        positions, tokens = sequence.new_positions(transport.rank), sequence.tokens
        q, k, v = (tensor[positions] for tensor in (tokens.q, tokens.k, tokens.v))
        backend = Lost() if transport.rank == 1 else TorchCpuFlash()
        chain = RingPrefill(PrefillPlan((sequence.plan,), order), transport, backend, "chain", 3)
        try:
            for layer in range(3):
                chain.attend(layer, q, k, v, lambda _: [[]], SCALE)
            chain.finish()
        except Unavailable as error:
            return str(error)
        return ""

    told = on_every_rank(ring.transports, act)
    assert told[1] == "rank 1 is lost"
    assert "rank 1 left the ring" in told[2]


# --- time -----------------------------------------------------------------------------------------------------------


class TimedAttention(ReferenceAttention):
    """Attention in which each pair of a query and a key takes so many seconds of the rank's time."""

    def __init__(self, clock: VirtualClock, pair_seconds: float) -> None:
        super().__init__()
        self._clock = clock
        self._pair_seconds = pair_seconds

    def partial_attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
    ) -> Partial:
        pairs = q.shape[0] * k.shape[0] / (2 if causal else 1)
        self._clock.wait_until(self._clock.now() + pairs * self._pair_seconds)
        return super().partial_attention(q, k, v, causal=causal, scale=scale)


def virtual_seconds(layout: PrefillLayout, cached: int, algorithm: str, rates: ChainRates) -> float:
    """Return the seconds of a step on delayed messages, its projections and matrix products included."""
    size = rates.num_ranks
    tokens = random_tokens(cached + layout.num_tokens, num_heads=1, num_kv_heads=1, head_dim=16)
    sequence = PlacedSequence(tokens, layout, tuple(place % size for place in range(cached)))

    def act(inner: RingTransport) -> float:
        rank, clock = inner.rank, VirtualClock()
        clock.wait_until(rates.lateness[rank])
        transport = DelayedTransport(inner, rates.message_seconds, rates.link_bytes_per_second, clock=clock)
        backend = TimedAttention(clock, rates.pair_seconds / rates.speeds[rank])
        ring = RingPrefill(PrefillPlan((sequence.plan,)), transport, backend, algorithm, rates.num_layers)
        positions, runs = sequence.new_positions(rank), sequence.cached_runs(rank)
        q, k, v = (tensor[positions] for tensor in (tokens.q, tokens.k, tokens.v))
        token_seconds = [
            len(positions) * each / rates.speeds[rank]
            for each in (rates.projection_seconds, rates.token_seconds - rates.projection_seconds)
        ]
        for layer in range(rates.num_layers):
            clock.wait_until(clock.now() + token_seconds[0])
            ring.attend(layer, q, k, v, lambda _: [runs], SCALE)
            clock.wait_until(clock.now() + token_seconds[1] + rates.layer_seconds)
        ring.finish()
        return clock.now() if positions else 0.0

    return max(on_every_rank(InProcessRing(size).transports, act)) + rates.head_seconds


def rates_of(size: int, link_seconds: float, **changes: Any) -> ChainRates:
    """Return rates in milliseconds, by which a token's KV takes `link_seconds` on a link and its layer 1 of them."""
    rates = ChainRates(
        token_seconds=1e-3,
        projection_seconds=2.5e-4,
        pair_seconds=2e-5,
        layer_seconds=1e-3,
        num_layers=6,
        head_seconds=5e-3,
        kv_bytes=2 * 16 * 4,
        link_bytes_per_second=2 * 16 * 4 / link_seconds,
        message_seconds=2e-3,
        speeds=(1.0,) * size,
    )
    return replace(rates, **changes)


@pytest.mark.parametrize(
    ("size", "link_seconds", "changes"),
    [
        (2, 2e-4, {}),
        (2, 3e-3, {}),
        (3, 1e-3, {"speeds": (1.0, 1.0, 0.5)}),
        (4, 5e-4, {"lateness": (0.0, 0.0, 0.0, 0.05)}),
        (4, 1e-3, {}),
    ],
)
def test_delayed_messages_take_what_the_recurrence_says(
    size: int, link_seconds: float, changes: dict[str, Any]
) -> None:
    rates = rates_of(size, link_seconds, **changes)
    cuts = quick_cuts(120, 0, rates)
    seconds = virtual_seconds(cut_layout(0, cuts, range(size)), 0, "chain", rates)
    assert seconds == pytest.approx(chain_seconds(cuts, 0, rates), rel=0.01)
    by_pass_kv = virtual_seconds(balanced_layout(0, 120, (0,) * size), 0, "pass_kv", rates)
    assert seconds < 1.02 * by_pass_kv, "where all messages hide a chain gains nothing"


def test_cached_kv_that_leaves_ahead_costs_a_chain_little() -> None:
    """With 60 cached tokens the recurrence is near: it counts all cached keys as attended last."""
    rates = rates_of(3, 2e-4)
    cuts = quick_cuts(120, 60, rates)
    seconds = virtual_seconds(cut_layout(60, cuts, range(3)), 60, "chain", rates)
    assert seconds == pytest.approx(chain_seconds(cuts, 60, rates), rel=0.1)
