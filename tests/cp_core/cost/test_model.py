"""Predicted prefill time: by hand, against published times, and its general rules."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.papers.published import table_4
from ringserve.cp_core.cost.model import SP_NTP, ModelShape, PrefillRates
from ringserve.cp_core.cost.steps import StepPredictor
from ringserve.cp_core.errors import ConfigError
from ringserve.views import RingRates
from tests.cp_core.cost import hardware
from tests.cp_core.cost.test_selector import fitted_rates, llama_405b
from tests.waiting import WAIT_SECONDS

TINY = replace(hardware.TINY, element_bytes=4)
RING = RingRates(gemm_flops=1e6, attention_flops=1e5, link_bytes_per_second=1e5, link_latency_seconds=1e-3)
RATES = PrefillRates(ring=RING)


def test_pass_kv_by_hand() -> None:
    """T=8, P=8, N=2: 4 local tokens, 8 stored ones a message."""
    cost = StepPredictor(TINY, RATES, 2).cost("pass_kv", 8, 8)
    linear = 2 * 2 * (2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 16)
    assert cost.linear_seconds == pytest.approx((4 * linear + 2 * 8 * 100) / 1e6)
    pairs = 8 * 8 + 8 * 9 / 2
    iteration = 4 * 4 * 2 * pairs / 4 / 1e5
    assert cost.attention_seconds == pytest.approx(2 * 2 * iteration)
    message = 1e-3 + 2 * 8 * 2 * 2 * 4 / 1e5
    assert cost.exposed_seconds == pytest.approx(2 * max(0.0, message - iteration))
    assert cost.hidden_seconds + cost.exposed_seconds == pytest.approx(2 * message)
    assert cost.all_to_all_seconds == 0.0


def test_pass_q_by_hand() -> None:
    """T=8, P=800, N=4: 2 local queries a message, and fp32 (out, lse) of 2 queries from each of 3 peers."""
    cost = StepPredictor(TINY, RATES, 4).cost("pass_q", 8, 800)
    message = 1e-3 + 2 * 4 * 2 * 4 / 1e5
    assert cost.hidden_seconds + cost.exposed_seconds == pytest.approx(2 * 3 * message)
    assert cost.all_to_all_seconds == pytest.approx(2 * (1e-3 + 3 * 2 * 4 * 3 * 4 / 1e5))


def test_the_total_counts_everything_but_what_is_hidden() -> None:
    cost = StepPredictor(TINY, RATES, 4).cost("pass_q", 8, 800)
    assert cost.total_seconds == pytest.approx(
        cost.linear_seconds
        + cost.attention_seconds
        + cost.exposed_seconds
        + cost.all_to_all_seconds
        + cost.overhead_seconds
    )


def test_published_pass_kv_times_are_met_within_8_percent() -> None:
    """Table 4 of arXiv 2411.01783 with the rates fitted to tables 4 and 5; rms 4%."""
    errors = []
    for sample in (row.sample for row in table_4() if row.sample.algorithm == "pass_kv"):
        cost = StepPredictor(llama_405b(8), fitted_rates(), 4).cost("pass_kv", sample.new_tokens, sample.cached_tokens)
        errors.append(cost.total_seconds / sample.seconds - 1.0)
    assert max(abs(error) for error in errors) <= 0.08
    assert (sum(error**2 for error in errors) / len(errors)) ** 0.5 <= 0.04


@given(
    new_tokens=st.integers(1, 100_000),
    cached_tokens=st.integers(0, 100_000),
    num_ranks=st.integers(1, 16),
    algorithm=st.sampled_from(["pass_kv", "pass_q"]),
)
def test_more_work_or_a_slower_link_never_takes_less_time(
    new_tokens: int, cached_tokens: int, num_ranks: int, algorithm: str
) -> None:
    model = llama_405b(8)
    fast = fitted_rates()
    link_bytes, latency = fast.ring.link_bytes_per_second / 10, fast.ring.link_latency_seconds * 2
    slow = replace(fast, ring=replace(fast.ring, link_bytes_per_second=link_bytes, link_latency_seconds=latency))

    def seconds(rates: PrefillRates, new: int, cached: int) -> float:
        return StepPredictor(model, rates, num_ranks).cost(algorithm, new, cached).total_seconds

    base = seconds(fast, new_tokens, cached_tokens)
    assert seconds(fast, new_tokens + 1000, cached_tokens) > base
    assert seconds(fast, new_tokens, cached_tokens + 1000) > base
    assert seconds(slow, new_tokens, cached_tokens) >= base


def test_a_ring_of_one_communicates_nothing() -> None:
    for algorithm in ("pass_kv", "pass_q"):
        cost = StepPredictor(TINY, RATES, 1).cost(algorithm, 100, 100)
        assert cost.exposed_seconds == cost.hidden_seconds == cost.all_to_all_seconds == 0.0


@given(overlap=st.floats(0.0, 1.0), algorithm=st.sampled_from(["pass_kv", "pass_q"]))
def test_what_does_not_pass_behind_attention_is_exposed(overlap: float, algorithm: str) -> None:
    """TINY's message and iteration are of like length, so the hidden share is the missing share."""
    cost, none, full = (
        StepPredictor(TINY, PrefillRates(ring=replace(RING, overlap=share)), 4).cost(algorithm, 32, 32)
        for share in (overlap, 0.0, 1.0)
    )
    assert none.hidden_seconds == pytest.approx(0.0, abs=1e-12)
    assert cost.hidden_seconds == pytest.approx(overlap * full.hidden_seconds, abs=1e-12)
    assert cost.hidden_seconds + cost.exposed_seconds == pytest.approx(none.exposed_seconds)


def test_rates_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"overlap is 1\.5; allowed are 0 to 1"):
        PrefillRates(ring=replace(RING, overlap=1.5))
    with pytest.raises(ConfigError, match=r"link_bytes_per_second is 0\.0; allowed is any rate above 0"):
        PrefillRates(ring=replace(RING, link_bytes_per_second=0.0))
    with pytest.raises(ConfigError, match="link_latency_seconds is nan"):
        PrefillRates(ring=replace(RING, link_latency_seconds=float("nan")))
    with pytest.raises(ConfigError, match="algorithm is 'ring'"):
        StepPredictor(TINY, RATES, 2).cost("ring", 1, 0)


def test_the_modules_that_decide_load_without_torch() -> None:
    code = (
        "import sys, cp_core.cost.selector, cp_core.cost.model, cp_core.layout.shards; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=WAIT_SECONDS, check=False).returncode == 0


def test_segments_of_sp_ntp_hide_messages_behind_attention() -> None:
    """Section 8 of the sources' three-phase pipeline: from M = 1 to the best M, 7B with 32 KV heads over 8 ranks."""
    shape = ModelShape(
        num_layers=32,
        hidden_size=4096,
        intermediate_size=11008,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        vocab_size=32000,
        element_bytes=2,
    )
    ring = RingRates(gemm_flops=400e12, attention_flops=400e12, link_bytes_per_second=40e9, link_latency_seconds=2e-5)
    predictor = StepPredictor(shape, PrefillRates(ring=ring), 8)
    assert predictor.segments(65_536, 0) > 1
    assert predictor.segments(100, 0) == 1, "segments of fewer tokens than LEAST_SEGMENT do not pay"
    none = StepPredictor(shape, PrefillRates(ring=replace(ring, overlap=0.0)), 8)
    assert none.segments(65_536, 0) == 1
    by_one, by_best = (each.seconds(65_536, 0)[SP_NTP] for each in (none, predictor))
    assert (by_one, by_best) == pytest.approx((0.807, 0.648), rel=0.02)
