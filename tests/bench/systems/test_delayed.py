"""Delayed messages take their given time, and ring attention hides it behind its computation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import ClassVar

import pytest
import torch

from bench.systems.delayed import ChangingRate, Clock, DelayedTransport, VirtualClock, WallClock
from ringserve.cp_core.attention.partial import Partial
from ringserve.cp_core.attention.reference import ReferenceAttention
from ringserve.cp_core.errors import Unavailable
from ringserve.cp_core.layout.shards import balanced_layout
from ringserve.cp_core.layout.step_plans import PrefillPlan, SequencePlan
from ringserve.cp_core.ring.prefill import ring_prefill
from ringserve.cp_core.transport.inprocess import InProcessRing
from ringserve.cp_core.transport.interface import RingTransport
from tests.cp_core.rings import on_every_rank
from tests.oracles import random_tokens
from tests.waiting import WAIT_SECONDS

UNLIMITED = 1e30
NUM_TOKENS = 64


class TimedAttention:
    """Attention whose every call takes `seconds` of the rank's time: one call is one iteration of the ring."""

    name: ClassVar[str] = "timed"

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._inner = ReferenceAttention()

    def supports(self, device: torch.device, dtype: torch.dtype) -> bool:
        return self._inner.supports(device, dtype)

    def partial_attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
    ) -> Partial:
        started = self._clock.now()
        partial = self._inner.partial_attention(q, k, v, causal=causal, scale=scale)
        self._clock.wait_until(started + self._seconds)
        return partial


def prefill_seconds(
    size: int,
    algorithm: str,
    make_clock: Callable[[], Clock],
    iteration_seconds: float,
    latency_seconds: float,
    bytes_per_second: float = UNLIMITED,
) -> float:
    """Return the slowest rank's clock after a layer's attention of NUM_TOKENS new tokens."""
    tokens = random_tokens(NUM_TOKENS)
    held = (0,) * size
    plan = PrefillPlan((SequencePlan(balanced_layout(0, NUM_TOKENS, held), held),))
    transports = InProcessRing(size).transports
    start_together = threading.Barrier(size)

    def act(inner: RingTransport) -> float:
        clock = make_clock()
        transport = DelayedTransport(inner, latency_seconds, bytes_per_second, clock=clock)
        backend = TimedAttention(clock, iteration_seconds)
        layout = plan.sequences[0].layout
        mine = torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in layout.ranges[inner.rank]])
        start_together.wait(timeout=WAIT_SECONDS)
        started = clock.now()
        ring_prefill(tokens.q[mine], tokens.k[mine], tokens.v[mine], [[]], plan, transport, backend, 0.125, algorithm)
        return clock.now() - started

    return max(on_every_rank(transports, act))


@pytest.mark.parametrize("algorithm", ["pass_kv", "pass_q"])
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_a_message_that_takes_less_than_an_iteration_costs_nothing(size: int, algorithm: str) -> None:
    alone = prefill_seconds(size, algorithm, VirtualClock, 1.0, 0.0)
    delayed = prefill_seconds(size, algorithm, VirtualClock, 1.0, 0.9)
    assert alone == pytest.approx(size)
    # Pass-Q ends with an all-to-all that no computation hides.
    exposed = 0.9 if algorithm == "pass_q" else 0.0
    assert delayed == pytest.approx(alone + exposed)
    if algorithm == "pass_kv":
        assert delayed <= 1.10 * alone


def test_of_a_message_that_takes_longer_than_an_iteration_the_rest_shows() -> None:
    assert prefill_seconds(4, "pass_kv", VirtualClock, 1.0, 1.5) == pytest.approx(4 * 1.0 + 3 * 0.5)


def test_a_slow_link_shows_what_computing_does_not_hide() -> None:
    tokens = random_tokens(NUM_TOKENS)
    num_bytes = 2 * tokens.k[: NUM_TOKENS // 2].nbytes
    assert prefill_seconds(2, "pass_kv", VirtualClock, 1.0, 0.0, num_bytes / 0.9) == pytest.approx(2.0)
    assert prefill_seconds(2, "pass_kv", VirtualClock, 1.0, 0.0, num_bytes / 1.75) == pytest.approx(2.75)


def test_messages_and_computing_take_at_least_their_time_by_the_clock_on_the_wall() -> None:
    """The rest of a message that takes longer than an iteration shows, twice."""
    compute, hop = 0.08, 0.13
    assert prefill_seconds(3, "pass_kv", WallClock, compute, hop) >= 3 * compute + 2 * (hop - compute)


def test_messages_to_all_peers_share_one_outgoing_link() -> None:
    """Three ranks: the second message of an all-to-all leaves after the first, whoever receives it."""
    arrivals = []

    def act(inner: RingTransport) -> None:
        clock = VirtualClock()
        transport = DelayedTransport(inner, 0.5, 100.0, clock=clock)
        tensors = [torch.zeros(25) for _ in range(3)]
        transport.all_to_all(tensors, [torch.empty(25) for _ in range(3)]).wait()
        arrivals.append(clock.now())

    on_every_rank(InProcessRing(3).transports, act)
    assert arrivals == [pytest.approx(2 * 1.0 + 0.5)] * 3


def test_a_rate_may_change_while_a_message_is_under_way() -> None:
    rate = ChangingRate(((1.0, 100.0), (3.0, 0.0), (5.0, 10.0)))
    assert rate.end(0.0, 50.0) == pytest.approx(0.5)
    assert rate.end(2.0, 100.0) == pytest.approx(3.0)
    assert rate.end(2.0, 120.0) == pytest.approx(7.0), "100 bytes until 3, none until 5, 20 at a tenth of the rate"
    assert rate.end(4.0, 0.0) == 4.0
    assert rate.end(6.0, 30.0) == pytest.approx(9.0)
    left, right = (
        DelayedTransport(each, 0.25, ChangingRate(((0.0, 400.0), (1.0, 100.0))), clock=VirtualClock())
        for each in InProcessRing(2).transports
    )
    for _ in range(2):
        left.broadcast(torch.zeros(75), 0).wait()
    for moment in (0.75 + 0.25, 1.0 + 2.0 + 0.25):
        right.broadcast(torch.empty(75), 0).wait()
        assert right.now() == pytest.approx(moment)


def pair(latency_seconds: float, bytes_per_second: float = UNLIMITED) -> Sequence[DelayedTransport]:
    return [DelayedTransport(each, latency_seconds, bytes_per_second) for each in InProcessRing(2).transports]


def test_a_message_arrives_after_latency_and_bytes_over_rate() -> None:
    left, right = pair(0.05, bytes_per_second=500.0)
    received = [torch.empty(100) for _ in range(2)]
    works = [right.exchange(torch.empty(0), 0, each, 0) for each in received]
    started = time.monotonic()
    for value in (1.0, 2.0):
        left.exchange(torch.full((100,), value), 1, torch.empty(0), 1).wait()
    works[0].wait()
    assert time.monotonic() - started >= 0.05 + 0.8
    works[1].wait()
    # The second message had to wait for the link.
    assert time.monotonic() - started >= 0.05 + 1.6
    assert [float(each.sum()) for each in received] == [100.0, 200.0]
    assert (left.stats.exchanges, left.stats.bytes_sent) == (2, 800)


def test_a_wait_ends_at_its_deadline_though_the_message_is_under_way() -> None:
    left, right = pair(3600.0)
    left.broadcast(torch.zeros(1), 0).wait()  # who sends does not wait for the latency
    started = time.monotonic()
    with pytest.raises(Unavailable, match="rank 1 waited too long for a message that is still in flight"):
        right.broadcast(torch.empty(1), 0).wait(timeout_seconds=0.1)
    assert time.monotonic() - started >= 0.1
    with pytest.raises(Unavailable, match="rank 1 left the ring of 2"):
        left.broadcast(torch.zeros(1), 0)


def test_closing_ends_a_wait_for_a_message_under_way() -> None:
    left, right = pair(3600.0)
    left.broadcast(torch.zeros(1), 0).wait()
    work = right.broadcast(torch.empty(1), 0)
    closing = threading.Timer(0.1, right.close)
    closing.start()
    with pytest.raises(Unavailable, match="rank 1 left the ring of 2"):
        work.wait()
    closing.join(WAIT_SECONDS)
