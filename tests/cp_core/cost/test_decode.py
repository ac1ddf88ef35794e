"""A decode step by hand, and which variant is faster."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cp_core.cost.decode import StepCost, fastest_step, predict_step
from cp_core.cost.memory import weight_bytes
from cp_core.cost.profile import read_profile
from cp_core.errors import ConfigError
from services.offline.planning.published import published_model
from tests.cp_core.cost.hardware import ROUND, TINY

WEIGHTS = weight_bytes(TINY)


def step(*, cp: int, batch: int, variant: str, tp: int = 1, context: float = 100.0) -> StepCost:
    return predict_step(TINY, WEIGHTS, ROUND, cp=cp, tp=tp, batch=batch, context_tokens=context, variant=variant)


def test_pass_q_by_hand() -> None:
    """B=3 on N=2: 2 rows a rank, each over 50 tokens of 2 x 2 heads x 2 x 2 bytes; both calls, one hop, one return."""
    cost = step(cp=2, batch=3, variant="pass_q")
    call = 0.02 + 2 * 50 * 16 / 1e4
    assert cost.call_seconds == pytest.approx(call)
    assert cost.layer_attention_seconds == pytest.approx(2 * call)
    assert cost.layer_hops_seconds == pytest.approx(0.01 + 2 * 4 * 2 * 2 / 1e5)
    assert cost.layer_collective_seconds == pytest.approx(0.05 + 2 * 4 * 3 * 4 / 2e5)
    layer = cost.layer_attention_seconds + cost.layer_hops_seconds + cost.layer_collective_seconds + 0.004
    assert cost.total_seconds == pytest.approx(cost.linear_seconds + 2 * layer)


def test_gathered_parts_by_hand() -> None:
    """Every rank computes all 5 rows, 3 of which cost extra, over its half of the tokens, and sends nothing before."""
    cost = step(cp=2, batch=5, variant="gather")
    assert cost.call_seconds == pytest.approx(0.02 + 5 * 50 * 16 / 1e4 + 3 * 0.003)
    assert cost.layer_attention_seconds == cost.call_seconds
    assert cost.layer_hops_seconds == 0.0


def test_weights_are_read_once_or_multiplied_by_every_row() -> None:
    read = (WEIGHTS.layers + WEIGHTS.head) / 1e5
    one = step(cp=1, batch=1, variant="gather")
    assert one.linear_seconds == pytest.approx(read)
    many = step(cp=1, batch=100, variant="gather")
    assert many.linear_seconds == pytest.approx(100 * (TINY.linear_flops_per_token + TINY.head_flops) / 1e6)


def test_a_ring_of_one_exchanges_nothing() -> None:
    for variant in ("gather", "pass_q"):
        cost = step(cp=1, batch=2, variant=variant)
        assert cost.layer_hops_seconds == cost.layer_collective_seconds == cost.layer_ring_seconds == 0.0


def test_two_sums_a_layer_take_longer_over_more_hosts() -> None:
    assert step(cp=1, batch=1, variant="gather").sum_seconds == 0.0
    assert step(cp=1, batch=1, variant="gather", tp=2).sum_seconds == pytest.approx(4 * 0.007)
    assert step(cp=1, batch=1, variant="gather", tp=4).sum_seconds == pytest.approx(4 * 0.009)


@given(batch=st.integers(1, 64), cp=st.integers(1, 16), context=st.integers(0, 2_000_000))
def test_the_faster_variant_is_taken(batch: int, cp: int, context: int) -> None:
    model, profile = published_model(), read_profile("gtt")
    times = {
        variant: predict_step(
            model.shape, model.weights, profile, cp=cp, tp=8, batch=batch, context_tokens=context, variant=variant
        ).total_seconds
        for variant in ("gather", "pass_q")
    }
    taken = fastest_step(model.shape, model.weights, profile, cp=cp, tp=8, batch=batch, context_tokens=context)
    assert taken.total_seconds == min(times.values())


def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(ConfigError, match="decode variant is 'auto'; allowed are gather, pass_q"):
        step(cp=1, batch=1, variant="auto")


def test_parts_in_half_the_bytes_return_faster() -> None:
    narrow = replace(TINY, partial_bytes=2)
    wide, half = (
        predict_step(model, WEIGHTS, ROUND, cp=4, tp=1, batch=4, context_tokens=10) for model in (TINY, narrow)
    )
    assert wide.layer_collective_seconds - 0.05 == pytest.approx(2 * (half.layer_collective_seconds - 0.05))
