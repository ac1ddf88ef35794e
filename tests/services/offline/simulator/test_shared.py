"""Simulated prompts that begin alike share KV, by the router's index and the rings' own pool of blocks."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from ringserve.cp_core.errors import ConfigError
from ringserve.services.offline.simulator.rings import BlockKv
from ringserve.services.offline.simulator.shared import ideal_share
from ringserve.services.offline.simulator.simulation import Simulation
from ringserve.services.offline.simulator.trace import (
    BLOCK_TOKENS,
    TracedConversation,
    TracedTurn,
    format_trace,
    read_trace,
)
from tests.services.offline.simulator.test_simulation import CLUSTER

TRACE = Path(__file__).parents[4] / "examples" / "traces" / "conversation_trace.jsonl.gz"


def request(start: float, *block_ids: int) -> TracedConversation:
    turn = TracedTurn(new_tokens=len(block_ids) * BLOCK_TOKENS, output_tokens=10, think_seconds=0.0)
    return TracedConversation(start_seconds=start, turns=(turn,), block_ids=block_ids)


DOCUMENT = tuple(range(10))


def test_a_prompt_that_begins_as_an_earlier_one_computes_the_rest() -> None:
    trace = [request(0.0, *DOCUMENT), request(1000.0, *DOCUMENT, 20, 21), request(2000.0, *DOCUMENT, 20, 30)]
    result = Simulation(replace(CLUSTER, kv_tokens=1 << 20), trace, "router").run()
    assert result.prompt_tokens == 34 * BLOCK_TOKENS
    assert result.computed_tokens == (10 + 2 + 1) * BLOCK_TOKENS
    assert result.cached_share == pytest.approx(ideal_share(trace))
    assert result.cached_share == pytest.approx(21 / 34)


def test_a_ring_without_room_for_all_evicts_the_least_recently_used() -> None:
    others = [request(10.0 + number, *(100 * (number + 1) + block for block in range(1, 11))) for number in range(8)]
    trace = [request(0.0, *DOCUMENT), *others, request(1000.0, *DOCUMENT, 20)]
    small = replace(CLUSTER, kv_tokens=CLUSTER.prefill.num_rings * 12 * BLOCK_TOKENS)
    assert Simulation(small, trace, "router").run().cached_share == 0.0
    assert ideal_share(trace, 12 * BLOCK_TOKENS) == 0.0
    whole = Simulation(replace(CLUSTER, kv_tokens=1 << 20), trace, "router").run()
    assert whole.cached_share == pytest.approx(10 / 101)


def test_blocks_that_sequences_share_count_once() -> None:
    kv = BlockKv(10 * BLOCK_TOKENS)
    assert kv.try_pin("one", 6 * BLOCK_TOKENS)
    kv.unpin("one", 6 * BLOCK_TOKENS)
    assert kv.try_pin("two", 8 * BLOCK_TOKENS, shares="one", shared_tokens=6 * BLOCK_TOKENS)
    kv.unpin("two", 8 * BLOCK_TOKENS)
    assert [kv.held(name) // BLOCK_TOKENS for name in ("one", "two")] == [6, 8]
    assert kv.try_pin("three", 2 * BLOCK_TOKENS), "2 of 10 are free"
    assert not kv.try_pin("four", 9 * BLOCK_TOKENS), "2 are pinned"
    kv.check_integrity()


def test_the_routers_placement_finds_nearly_all_of_a_production_trace_that_one_cache_would() -> None:
    trace = read_trace(TRACE)[:400]
    pools = {role: replace(getattr(CLUSTER, role), num_rings=8) for role in ("prefill", "decode")}
    cluster = replace(CLUSTER, **pools, kv_tokens=40_000_000, max_batch=64)
    shares = {name: Simulation(cluster, trace, name).run().cached_share for name in ("router", "round_robin")}
    assert shares["router"] >= 0.9 * ideal_share(trace) > shares["round_robin"]


def test_requests_written_are_the_same_when_they_are_read(tmp_path: Path) -> None:
    trace = read_trace(TRACE)[:50]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(format_trace(trace)))
    assert read_trace(path) == trace


def test_a_request_with_too_few_blocks_is_refused_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    line = {"timestamp": 0, "input_length": 1025, "output_length": 3, "hash_ids": [1, 2]}
    path.write_bytes(gzip.compress(json.dumps(line).encode()))
    with pytest.raises(ConfigError, match=r"line 1 has 2 hash_ids for 1025 tokens; allowed is one for each 512"):
        read_trace(path)
