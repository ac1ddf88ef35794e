"""Cost of a turn on a platform: overheads, sums over processes, chunks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.papers.published import published_model
from ringserve.cp_core.cost.prefill import predict_turn, sum_seconds
from ringserve.cp_core.cost.profile import read_profile
from ringserve.cp_core.cost.steps import StepPredictor
from ringserve.cp_core.errors import ConfigError
from tests.cp_core.cost.hardware import ROUND, TINY


def test_a_turn_on_one_process_is_the_prefill_and_its_overhead() -> None:
    cost = predict_turn(TINY, ROUND, cp=1, tp=1, algorithm="pass_kv", new_tokens=8)
    plain = StepPredictor(TINY, ROUND.prefill.rates(1, is_cached=False), 1).cost("pass_kv", 8, 0)
    assert cost.total_seconds == pytest.approx(plain.total_seconds)
    assert cost.overhead_seconds == pytest.approx(2 * 0.1)
    assert cost.sum_seconds == 0.0


def test_every_chunk_attends_over_those_before_it() -> None:
    """10 tokens after 4 cached ones in chunks of 4: 4 + 4 + 2, each with its own overhead, every one of them cached."""
    cost = predict_turn(TINY, ROUND, cp=2, tp=1, algorithm="pass_q", new_tokens=10, cached_tokens=4, chunk_tokens=4)
    rates = ROUND.prefill.rates(2, is_cached=True)
    parts = [StepPredictor(TINY, rates, 2).cost("pass_q", new, cached) for new, cached in ((4, 4), (4, 8), (2, 12))]
    assert cost.total_seconds == pytest.approx(sum(part.total_seconds for part in parts))
    assert cost.hidden_seconds == pytest.approx(sum(part.hidden_seconds for part in parts))
    assert cost.overhead_seconds == pytest.approx(3 * parts[0].overhead_seconds)


def test_only_chunks_after_the_first_of_a_new_prompt_count_as_cached() -> None:
    cost = predict_turn(TINY, ROUND, cp=1, tp=1, algorithm="pass_kv", new_tokens=8, chunk_tokens=4)
    assert cost.overhead_seconds == pytest.approx(2 * (0.1 + 0.101))


def test_sums_inside_a_host_are_those_of_its_own_links() -> None:
    """5 sums (2 a layer, 1 of the embedding) of 3 rows x 8 x 2 bytes; 2 (tp - 1) / tp of them pass."""
    summed = 5 * 3 * 8 * 2
    assert sum_seconds(TINY, ROUND, 1, 3) == 0.0
    assert sum_seconds(TINY, ROUND, 2, 3) == pytest.approx(summed * 1.0 / 1e6)
    assert sum_seconds(TINY, ROUND, 4, 3) == pytest.approx(summed * 1.5 / 1e4)
    assert [ROUND.num_hosts(tp) for tp in (1, 2, 3, 4, 5)] == [1, 1, 2, 2, 3]


def test_more_processes_than_kv_heads_hold_each_head_several_times() -> None:
    assert TINY.share(2).num_kv_heads == 1
    assert TINY.share(4).num_kv_heads == 1
    assert TINY.share(4).num_heads == 1


def test_an_all_to_all_has_a_rate_and_a_start_of_its_own() -> None:
    """T=8, N=2: 4 rows of 4 heads of (2 + 1) fp32 to one peer, twice; half of what the link would take, and 5 ms."""
    cost = predict_turn(TINY, ROUND, cp=2, tp=1, algorithm="pass_q", new_tokens=8)
    assert cost.all_to_all_seconds == pytest.approx(2 * (5e-3 + 4 * 4 * 3 * 4 / 2e5))


def test_a_slow_network_scales_as_well_up_to_four_hosts() -> None:
    """ArXiv 2411.01783, 4.2.1: with 3 GB/s a rank 128K tokens still pass behind attention."""
    model = published_model().shape

    def seconds(name: str, cp: int) -> float:
        profile = read_profile(name)
        return predict_turn(model, profile, cp=cp, tp=8, algorithm="pass_kv", new_tokens=128_000).total_seconds

    for cp in (1, 2, 4):
        assert seconds("gti", cp) == pytest.approx(seconds("gtt", cp), rel=0.02)


@given(
    new_tokens=st.integers(1, 50_000),
    cached_tokens=st.integers(0, 50_000),
    cp=st.sampled_from([1, 2, 4, 8]),
    tp=st.sampled_from([1, 2, 8]),
    algorithm=st.sampled_from(["pass_kv", "pass_q"]),
)
def test_more_tokens_or_slower_hardware_never_take_less_time(
    new_tokens: int, cached_tokens: int, cp: int, tp: int, algorithm: str
) -> None:
    model, fast = published_model().shape, read_profile("gtt")
    slow = replace(
        fast, prefill=replace(fast.prefill, gemm_flops=fast.prefill.gemm_flops / 2, host_sum_bytes_per_second=1e11)
    )

    def seconds(new: int, cached: int, *, is_slow: bool = False) -> float:
        profile = slow if is_slow else fast
        return predict_turn(
            model, profile, cp=cp, tp=tp, algorithm=algorithm, new_tokens=new, cached_tokens=cached
        ).total_seconds

    base = seconds(new_tokens, cached_tokens)
    assert seconds(new_tokens + 500, cached_tokens) > base
    assert seconds(new_tokens, cached_tokens + 500) > base
    assert seconds(new_tokens, cached_tokens, is_slow=True) > base


def test_an_unknown_algorithm_is_refused() -> None:
    with pytest.raises(ConfigError, match="algorithm is 'ring'; allowed are pass_kv, pass_q"):
        predict_turn(TINY, ROUND, cp=2, tp=1, algorithm="ring", new_tokens=8)
