"""Bytes of weights, of KV, and of the remaining memory."""

from __future__ import annotations

import pytest

from bench.papers.published import published_model
from ringserve.cp_core.cost.memory import kv_bytes_per_token, process_memory, weight_bytes
from ringserve.cp_core.cost.prefill import predict_migration
from ringserve.cp_core.cost.profile import read_profile
from ringserve.services.offline.planning.models import planned_model
from tests.cp_core.cost.hardware import ROUND, TINY


def test_weights_by_hand() -> None:
    attention = 2 * 8 * 2 * (4 + 2)
    mlp = 3 * 8 * 16
    weights = weight_bytes(TINY)
    assert weights.layers == 2 * (attention + mlp) * 2
    assert weights.head == weights.embedding == 100 * 8 * 2
    assert weight_bytes(TINY, mlp_element_bytes=1).layers == 2 * (attention * 2 + mlp)
    assert weight_bytes(TINY, has_tied_embedding=True).total == weights.total - weights.embedding


def test_the_405b_model_has_405_billion_weights() -> None:
    assert planned_model("llama3-405b").weights.total / 2 == pytest.approx(405e9, rel=0.003)
    assert planned_model("llama3-8b").weights.total / 2 == pytest.approx(8.03e9, rel=0.003)
    assert planned_model("llama3-70b").weights.total / 2 == pytest.approx(70.6e9, rel=0.003)
    assert planned_model("qwen2.5-7b").weights.total / 2 == pytest.approx(7.6e9, rel=0.01)
    assert planned_model("qwen3-32b").weights.total / 2 == pytest.approx(32.8e9, rel=0.01)


def test_kv_of_a_token_is_shared_by_processes_until_each_has_one_head() -> None:
    assert [kv_bytes_per_token(TINY, tp) for tp in (1, 2, 4)] == [32, 16, 16]


def test_what_remains_is_for_kv_and_a_ring_holds_cp_times_as_much() -> None:
    memory = process_memory(TINY, weight_bytes(TINY), ROUND, cp=2, tp=1, step_tokens=10, context_tokens=100)
    assert memory.reserved_bytes == pytest.approx(0.05 * 1e6)
    left = 1e6 - memory.reserved_bytes - memory.weights_bytes - memory.step_bytes
    assert memory.kv_bytes == pytest.approx(left)
    assert memory.max_tokens(2) == 2 * int(left // 32)


def test_a_step_needs_its_rows_and_two_messages_where_there_is_a_ring() -> None:
    def step_bytes(cp: int, tokens: int) -> float:
        return process_memory(
            TINY, weight_bytes(TINY), ROUND, cp=cp, tp=1, step_tokens=tokens, context_tokens=100
        ).step_bytes

    row = (3 * 8 + 2 * 16 + 12 * 2) * 2 + 2 * 4 * 3 * 4
    assert step_bytes(1, 10) == 10 * row
    assert step_bytes(2, 10) == 5 * row + 2 * 50 * 16


def test_nothing_fits_where_the_weights_do_not() -> None:
    model = planned_model("llama3-405b")
    memory = process_memory(
        model.shape, model.weights, read_profile("gtt"), cp=4, tp=8, step_tokens=1, context_tokens=1
    )
    assert memory.kv_bytes < 0
    assert memory.max_tokens(4) == 0


def test_what_the_paper_ran_fits_the_papers_hosts() -> None:
    """128K on one host, and 1M on 8 and on 16 of them, each in one step."""
    model, profile = published_model(), read_profile("gtt")
    for cp, tokens in ((1, 128_000), (8, 1_000_000), (16, 1_000_000)):
        memory = process_memory(
            model.shape, model.weights, profile, cp=cp, tp=8, step_tokens=tokens, context_tokens=tokens
        )
        assert memory.max_tokens(cp) >= tokens


def test_migrating_kv_hides_behind_the_prefill_but_for_its_last_layer() -> None:
    """100 tokens x 32 bytes over the 2 links of the smaller ring at 1,000 bytes/s: 1.6 s, half of it a layer's."""
    slow = predict_migration(TINY, ROUND, from_processes=4, to_processes=2, tokens=100, prefill_seconds=100.0)
    assert slow.total_bytes == 3200
    assert slow.wire_seconds == pytest.approx(1.6)
    assert slow.exposed_seconds == pytest.approx(0.8)
    fast = predict_migration(TINY, ROUND, from_processes=4, to_processes=2, tokens=100, prefill_seconds=0.2)
    assert fast.exposed_seconds == pytest.approx(1.6 - 0.1)
