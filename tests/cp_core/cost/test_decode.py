"""Decode steps by hand, by a profile and by measured rates, and the rule that chooses the variant."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.papers.published import published_model
from ringserve.cp_core.cost.decode import (
    GATHER,
    HELIX,
    MAX_DRAFTS,
    START_BATCHES,
    START_TOKENS,
    STEP_VARIANTS,
    VARIANTS,
    DecodeLoad,
    DecodeRates,
    StepCost,
    choose_at_start,
    choose_variant,
    fastest_drafted_step,
    fastest_step,
    predict_profiled_step,
    predict_step,
)
from ringserve.cp_core.cost.memory import weight_bytes
from ringserve.cp_core.cost.model import PASS_Q, ModelShape
from ringserve.cp_core.cost.profile import read_profile
from ringserve.cp_core.errors import ConfigError
from ringserve.views import RingRates
from tests.cp_core.cost.hardware import ROUND, TINY

WEIGHTS = weight_bytes(TINY)


SHAPE = ModelShape(
    num_layers=4,
    hidden_size=512,
    intermediate_size=1024,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=1000,
    element_bytes=4,
)
RATES = DecodeRates(
    ring=RingRates(
        gemm_flops=5e10, attention_flops=3e10, link_bytes_per_second=1e9, link_latency_seconds=3e-4, overlap=0.5
    ),
    weight_bytes_per_second=1e10,
    lone_weight_bytes_per_second=1e10,
    kv_bytes_per_second=1e10,
    busy_message_seconds=3e-4,
)

loads = st.builds(
    DecodeLoad, batch=st.integers(1, 256), stored_tokens=st.integers(256, 1 << 24), num_ranks=st.integers(2, 16)
)


def load(batch: int, num_ranks: int = 2, context: int = 1000) -> DecodeLoad:
    return DecodeLoad(batch=batch, stored_tokens=batch * context, num_ranks=num_ranks)


def step(*, cp: int, batch: int, variant: str, tp: int = 1, context: float = 100.0) -> StepCost:
    return predict_profiled_step(
        TINY, WEIGHTS, ROUND, cp=cp, tp=tp, batch=batch, context_tokens=context, variant=variant
    )


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
    """Every rank computes all 5 rows, 3 of which cost extra, over its half of the tokens, and sends no query."""
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
        variant: predict_profiled_step(
            model.shape, model.weights, profile, cp=cp, tp=8, batch=batch, context_tokens=context, variant=variant
        ).total_seconds
        for variant in ("gather", "pass_q")
    }
    taken = fastest_step(model.shape, model.weights, profile, cp=cp, tp=8, batch=batch, context_tokens=context)
    assert taken.total_seconds == min(times.values())


@given(accepted=st.floats(0.0, 0.95), batch=st.integers(1, 64), cp=st.integers(1, 4))
def test_drafts_are_planned_as_far_as_they_pay(accepted: float, batch: int, cp: int) -> None:
    """A step with k drafts has k + 1 rows of each sequence and reads its KV once."""
    model, profile = published_model(), read_profile("gtt")
    found = fastest_drafted_step(
        model.shape, model.weights, profile, cp=cp, tp=8, batch=batch, context_tokens=9_000, accepted_share=accepted
    )
    ways = {}
    for drafts in range(MAX_DRAFTS + 1):
        rows = fastest_step(
            model.shape, model.weights, profile, cp=cp, tp=8, batch=batch, context_tokens=9_000, num_drafts=drafts
        )
        ways[drafts] = rows.total_seconds / sum(accepted**place for place in range(drafts + 1))
    assert found.ttit_seconds == pytest.approx(min(ways.values()))
    assert found.ttit_seconds == pytest.approx(ways[found.num_drafts])
    if not accepted:
        assert (found.num_drafts, found.tokens) == (0, 1.0)


def test_drafts_read_weights_and_kv_once() -> None:
    plain, drafted = (
        predict_profiled_step(
            TINY, WEIGHTS, ROUND, cp=1, tp=1, batch=1, context_tokens=10, variant="gather", num_drafts=drafts
        )
        for drafts in (0, 3)
    )
    rows = step(cp=1, batch=4, variant="gather")
    assert drafted.linear_seconds == rows.linear_seconds
    assert plain.call_seconds <= drafted.call_seconds < rows.call_seconds


def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(ConfigError, match="decode variant is 'auto'; allowed are gather, pass_q"):
        step(cp=1, batch=1, variant="auto")


def test_parts_in_half_the_bytes_return_faster() -> None:
    narrow = replace(TINY, partial_bytes=2)
    wide, half = (
        predict_profiled_step(model, WEIGHTS, ROUND, cp=4, tp=1, batch=4, context_tokens=10) for model in (TINY, narrow)
    )
    assert wide.layer_collective_seconds - 0.05 == pytest.approx(2 * (half.layer_collective_seconds - 0.05))


@given(loads, st.sampled_from(STEP_VARIANTS))
def test_what_is_configured_is_used(work: DecodeLoad, variant: str) -> None:
    assert choose_variant(variant, work, SHAPE, RATES) == variant
    assert choose_variant(variant, work, SHAPE, None) == variant


@given(loads)
def test_auto_takes_pass_q_only_where_it_is_predicted_to_be_clearly_better(work: DecodeLoad) -> None:
    gather, pass_q = (predict_step(variant, work, SHAPE, RATES).total_seconds for variant in STEP_VARIANTS)
    wanted = PASS_Q if pass_q < 0.95 * gather else GATHER
    assert choose_variant("auto", work, SHAPE, RATES) == wanted


@given(loads)
def test_auto_gathers_without_measured_rates(work: DecodeLoad) -> None:
    assert choose_variant("auto", work, SHAPE, None) == GATHER


def test_small_batches_gather_and_large_ones_split_their_rows() -> None:
    assert choose_variant("auto", load(1), SHAPE, RATES) == GATHER
    assert choose_variant("auto", load(2), SHAPE, RATES) == GATHER
    assert choose_variant("auto", load(256), SHAPE, RATES) == PASS_Q
    assert choose_variant("auto", load(256, num_ranks=1), SHAPE, RATES) == GATHER


def test_where_reading_the_weights_rules_splitting_the_rows_gains_nothing() -> None:
    slow_memory = replace(RATES, weight_bytes_per_second=1e8, lone_weight_bytes_per_second=1e8)
    assert choose_variant("auto", load(32), SHAPE, slow_memory) == GATHER


def test_where_ranks_share_a_slow_memory_a_lone_row_is_computed_by_one_of_them() -> None:
    shared = replace(RATES, weight_bytes_per_second=5e9)
    assert choose_variant("auto", load(1), SHAPE, shared) == PASS_Q
    assert choose_variant("auto", load(2), SHAPE, shared) == GATHER, "both ranks read all weights either way"
    near = replace(shared, busy_message_seconds=1e-5, ring=replace(RATES.ring, link_latency_seconds=0.0))
    assert choose_variant("auto", load(2, num_ranks=8), SHAPE, near) == PASS_Q
    assert [shared.weight_rate(reading, 3) for reading in (1, 2, 3)] == [1e10, 7.5e9, 5e9]
    assert shared.weight_rate(1, 1) == 5e9


def test_slow_messages_keep_the_variant_with_fewer_of_them() -> None:
    far = replace(RATES, busy_message_seconds=0.05)
    assert choose_variant("auto", load(64), SHAPE, far) == GATHER


def test_longer_contexts_hide_more_of_the_queries() -> None:
    """8 rows on 2 ranks, link at full overlap: beyond some context only the returning parts are exposed."""
    hidden = replace(RATES, ring=replace(RATES.ring, overlap=1.0))
    extra = [
        predict_step(PASS_Q, load(8, context=context), SHAPE, hidden).total_seconds
        - predict_step(GATHER, load(8, context=context), SHAPE, hidden).total_seconds
        for context in (1, 1000, 100_000)
    ]
    assert extra[0] > extra[1] >= extra[2]


def test_one_rank_costs_the_same_either_way() -> None:
    gather, pass_q = (
        predict_step(variant, load(8, num_ranks=1), SHAPE, RATES).total_seconds for variant in STEP_VARIANTS
    )
    assert gather == pass_q


def test_helix_by_hand() -> None:
    """B=3 on N=2: all rows over 50 tokens each, half of every part's columns, and two sums of hidden states."""
    work = load(3, context=100)
    cost = predict_step(HELIX, work, SHAPE, RATES)
    gather = predict_step(GATHER, work, SHAPE, RATES)
    assert cost.layer_attention_seconds == gather.layer_attention_seconds
    columns, hidden = 3 * 8 * 65 * 4 / 2, 3 * 512 * 4
    assert cost.layer_collective_seconds == pytest.approx(3 * 3e-4 + (columns + 2 * hidden) / 1e9)
    # q, k and v whole: 512 x 12 heads x 64; of the output projection, the MLP and the head one half.
    weights = 4 * (512 * 12 * 64 + (512 * 512 + 3 * 512 * 1024) / 2) + 512 * 1000 / 2
    assert cost.linear_seconds == pytest.approx(4 * weights / 1e10)
    assert cost.token_seconds == pytest.approx(3e-4 + 3 * 8 / 1e9)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_ring_starts_with_helix_where_reading_the_weights_rules(num_ranks: int) -> None:
    slow_memory = replace(RATES, weight_bytes_per_second=2e8, lone_weight_bytes_per_second=2e8)
    choice = choose_at_start(SHAPE, slow_memory, num_ranks)
    assert choice.is_helix == (num_ranks > 1)
    far = replace(slow_memory, busy_message_seconds=0.05)
    assert not choose_at_start(SHAPE, far, num_ranks).is_helix


def test_the_reason_of_a_start_names_the_steps_and_their_predictions() -> None:
    words = choose_at_start(SHAPE, RATES, 2).reason
    for batch in START_BATCHES:
        work = load(batch, context=START_TOKENS)
        seconds = {variant: predict_step(variant, work, SHAPE, RATES).total_seconds for variant in VARIANTS}
        assert f"{seconds[HELIX] * 1e3:.3g}" in words
        assert f"{min(seconds[GATHER], seconds[PASS_Q]) * 1e3:.3g}" in words


def test_wrong_values_are_refused_with_what_is_allowed() -> None:
    with pytest.raises(ConfigError, match="decode variant is 'ring'; allowed are auto, gather, pass_q"):
        choose_variant("ring", load(2), SHAPE, RATES)
    with pytest.raises(ConfigError, match=r"weight_bytes_per_second is 0\.0; allowed is any rate above 0"):
        replace(RATES, weight_bytes_per_second=0.0)
    with pytest.raises(ConfigError, match=r"busy_message_seconds is -1; allowed is 0 or more"):
        replace(RATES, busy_message_seconds=-1)
