"""The rule that chooses how a decode batch is served."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cp_core.cost.decode_variant import (
    GATHER,
    VARIANTS,
    DecodeLoad,
    DecodeRates,
    choose_variant,
    predict_step,
)
from cp_core.cost.model import PASS_Q, ModelShape, Rates
from cp_core.errors import ConfigError

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
    ring=Rates(
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


@given(loads, st.sampled_from(VARIANTS))
def test_what_is_configured_is_used(work: DecodeLoad, variant: str) -> None:
    assert choose_variant(variant, work, SHAPE, RATES) == variant
    assert choose_variant(variant, work, SHAPE, None) == variant


@given(loads)
def test_auto_takes_pass_q_only_where_it_is_predicted_to_be_clearly_better(work: DecodeLoad) -> None:
    gather, pass_q = (predict_step(variant, work, SHAPE, RATES) for variant in VARIANTS)
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
    slow_memory = dataclasses.replace(RATES, weight_bytes_per_second=1e8, lone_weight_bytes_per_second=1e8)
    assert choose_variant("auto", load(32), SHAPE, slow_memory) == GATHER


def test_where_ranks_share_a_slow_memory_a_lone_row_is_computed_by_one_of_them() -> None:
    shared = dataclasses.replace(RATES, weight_bytes_per_second=5e9)
    assert choose_variant("auto", load(1), SHAPE, shared) == PASS_Q
    assert choose_variant("auto", load(2), SHAPE, shared) == GATHER, "both ranks read all weights either way"
    near = dataclasses.replace(
        shared, busy_message_seconds=1e-5, ring=dataclasses.replace(RATES.ring, link_latency_seconds=0.0)
    )
    assert choose_variant("auto", load(2, num_ranks=8), SHAPE, near) == PASS_Q
    assert [shared.weight_rate(reading, 3) for reading in (1, 2, 3)] == [1e10, 7.5e9, 5e9]
    assert shared.weight_rate(1, 1) == 5e9


def test_slow_messages_keep_the_variant_with_fewer_of_them() -> None:
    far = dataclasses.replace(RATES, busy_message_seconds=0.05)
    assert choose_variant("auto", load(64), SHAPE, far) == GATHER


def test_longer_contexts_hide_more_of_the_queries() -> None:
    """8 rows on 2 ranks, link at full overlap: beyond some context only the returning parts are exposed."""
    hidden = dataclasses.replace(RATES, ring=dataclasses.replace(RATES.ring, overlap=1.0))
    extra = [
        predict_step(PASS_Q, load(8, context=context), SHAPE, hidden)
        - predict_step(GATHER, load(8, context=context), SHAPE, hidden)
        for context in (1, 1000, 100_000)
    ]
    assert extra[0] > extra[1] >= extra[2]


def test_one_rank_costs_the_same_either_way() -> None:
    gather, pass_q = (predict_step(variant, load(8, num_ranks=1), SHAPE, RATES) for variant in VARIANTS)
    assert gather == pass_q


def test_wrong_values_are_refused_with_what_is_allowed() -> None:
    with pytest.raises(ConfigError, match="decode variant is 'ring'; allowed are auto, gather, pass_q"):
        choose_variant("ring", load(2), SHAPE, RATES)
    with pytest.raises(ConfigError, match=r"weight_bytes_per_second is 0\.0; allowed is any rate above 0"):
        dataclasses.replace(RATES, weight_bytes_per_second=0.0)
    with pytest.raises(ConfigError, match=r"busy_message_seconds is -1; allowed is 0 or more"):
        dataclasses.replace(RATES, busy_message_seconds=-1)
