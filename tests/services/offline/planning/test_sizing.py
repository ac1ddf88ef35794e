"""Forecasts of rings, refusals of what does not fit, and proposals for a traffic mix."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringserve.cp_core.cost.model import PREFILL_ALGORITHMS
from ringserve.cp_core.cost.profile import read_profile
from ringserve.cp_core.errors import ConfigError, InvalidRequest
from ringserve.services.offline.planning.explanation import explain_turn
from ringserve.services.offline.planning.models import planned_model
from ringserve.services.offline.planning.proposal import Traffic, mean_wait_seconds, propose
from ringserve.services.offline.planning.sizing import (
    RingForecast,
    RingShape,
    Workload,
    first_that_fits,
    forecast_ring,
    require_tp,
)
from ringserve.services.offline.units import parse_contexts

MODEL, PROFILE = planned_model("llama3-405b-fp8"), read_profile("gtt")


def forecasts(workload: Workload, sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32), tp: int = 8) -> list[RingForecast]:
    return [forecast_ring(MODEL, PROFILE, RingShape(cp=cp, tp=tp), workload) for cp in sizes]


def workload(text: str, cached: float = 0.0, chunk: int | None = None) -> Workload:
    return Workload(contexts=parse_contexts("--context", text), cached_share=cached, chunk_tokens=chunk)


def test_twice_the_ranks_hold_twice_the_kv_and_halve_the_time_of_a_long_prompt() -> None:
    two, four = (forecast.contexts[0] for forecast in forecasts(workload("128k"), (2, 4)))
    assert four.kv_bytes == two.kv_bytes / 2
    assert four.ttft_seconds == pytest.approx(two.ttft_seconds / 2, rel=0.03)
    assert four.max_contexts > 2 * two.max_contexts, "what a step needs shrinks too"


def test_a_follow_up_with_little_that_is_new_takes_pass_q() -> None:
    (forecast,) = forecasts(workload("128k", cached=0.99), (4,))
    assert forecast.contexts[0].algorithm == "pass_q"
    assert forecast.contexts[0].new_tokens == 1280
    (forecast,) = forecasts(workload("128k"), (4,))
    assert forecast.contexts[0].algorithm == "pass_kv"


def test_at_least_one_token_of_a_prompt_is_new() -> None:
    assert workload("10", cached=0.99).cached_tokens(10) == 9
    assert workload("1", cached=0.99).cached_tokens(1) == 0


def test_chunks_need_less_memory_and_more_time() -> None:
    (whole,) = forecasts(workload("128k"), (2,))
    (cut,) = forecasts(workload("128k", chunk=16_000), (2,))
    assert cut.memory.step_bytes < whole.memory.step_bytes
    assert cut.contexts[0].ttft_seconds > whole.contexts[0].ttft_seconds


def test_weights_and_contexts_that_do_not_fit_are_refused_with_what_is_missing() -> None:
    (small,) = forecasts(workload("8k"), (1,), tp=2)
    assert small.refusal == (
        "llama3-405b-fp8 on cp 1 x tp 2 does not fit: a process holds 241.0 GB of weights, and gtt has 91.2 GB for "
        "them; allowed are larger tp"
    )
    (long,) = forecasts(workload("1m", chunk=8000), (1,))
    assert "does not fit: 1m tokens are 64.5 GB of KV a process, and" in long.refusal
    assert "allowed are larger cp or tp, or shorter chunks" in long.refusal


def test_the_smallest_ring_that_fits_is_found_and_none_is_a_sentence() -> None:
    assert first_that_fits(forecasts(workload("1m"))).shape.cp == 8
    with pytest.raises(ConfigError, match="llama3-405b-fp8 on cp 4 x tp 8 does not fit"):
        first_that_fits(forecasts(workload("1m"), (1, 2, 4)))


def test_tp_must_divide_the_kv_heads() -> None:
    require_tp(MODEL, 4)
    with pytest.raises(
        ConfigError, match="--tp: 3 does not divide the 8 KV heads of llama3-405b-fp8; allowed are 1, 2, 4, 8"
    ):
        require_tp(MODEL, 3)


def test_the_wait_is_that_of_a_simulated_queue() -> None:
    """Simulate a queue of 200,000 turns with random arrivals at 0.08/s and 4 s or 12 s of service."""
    draw = random.Random(7)
    clock = free_at = waited = 0.0
    for _ in range(200_000):
        clock += draw.expovariate(0.08)
        start = max(clock, free_at)
        waited += start - clock
        free_at = start + (4.0 if draw.random() < 0.75 else 12.0)
    assert mean_wait_seconds(0.08, [4.0, 12.0], [0.75, 0.25]) == pytest.approx(waited / 200_000, rel=0.03)
    assert mean_wait_seconds(0.25, [4.0, 12.0], [0.75, 0.25]) == math.inf


@settings(max_examples=40, deadline=None)
@given(
    rate=st.floats(1e-4, 20.0),
    output=st.integers(1, 4000),
    max_ttft=st.one_of(st.none(), st.floats(50.0, 500.0)),
    max_ttit=st.one_of(st.none(), st.floats(0.065, 0.5)),
)
def test_a_proposal_keeps_every_limit_and_one_ring_less_would_not(
    rate: float, output: int, max_ttft: float | None, max_ttit: float | None
) -> None:
    load = workload("32k:3,128k:1")
    traffic = Traffic(
        turns_per_second=rate, output_tokens=output, max_ttft_seconds=max_ttft, max_ttit_seconds=max_ttit, max_batch=16
    )
    candidates = forecasts(load, (1, 2, 4, 8))
    found = propose(MODEL, PROFILE, load, traffic, candidates)
    assert found.prefill.busy <= 0.8 + 1e-9
    assert max(found.prefill.ttft_seconds) <= (max_ttft or math.inf) + 1e-6
    assert found.decode.ttit_seconds <= (max_ttit or math.inf)
    assert found.decode.batch <= 16
    assert rate * output <= found.decode.num_rings * found.decode.tokens_per_second
    if found.prefill.num_rings > 1:
        (service,) = [each.contexts for each in candidates if each.shape == found.prefill.shape]
        fewer = rate / (found.prefill.num_rings - 1)
        seconds = [context.ttft_seconds for context in service]
        shares = [context.share for context in load.contexts]
        busy = fewer * sum(a * b for a, b in zip(seconds, shares, strict=True))
        wait = mean_wait_seconds(fewer, seconds, shares)
        assert busy > 0.8 or max(found.prefill.ttft_seconds) - found.prefill.wait_seconds + wait > (
            max_ttft or math.inf
        )


def test_more_traffic_never_needs_fewer_processes() -> None:
    load = workload("128k")
    candidates = forecasts(load)
    needed = [
        propose(MODEL, PROFILE, load, Traffic(turns_per_second=rate, output_tokens=256), candidates).num_processes
        for rate in (0.01, 0.1, 1.0, 10.0)
    ]
    assert needed == sorted(needed)
    assert needed[-1] > 50 * needed[0]


def test_limits_that_no_ring_keeps_are_refused_with_the_best_that_can_be_had() -> None:
    load = workload("1m")
    candidates = forecasts(load, (16, 32))
    quick = Traffic(turns_per_second=0.1, output_tokens=16, max_ttft_seconds=10.0)
    with pytest.raises(ConfigError, match=r"--ttft: 10 s cannot be met; the fastest ring takes 39\.\d s"):
        propose(MODEL, PROFILE, load, quick, candidates)
    with pytest.raises(ConfigError, match=r"--ttit: 20 ms cannot be met; the fastest ring takes 5\d(\.\d)? ms"):
        propose(MODEL, PROFILE, load, replace(quick, max_ttft_seconds=None, max_ttit_seconds=0.02), candidates)
    long = Traffic(turns_per_second=0.1, output_tokens=900_000_000)
    for too_long in (long, replace(long, max_ttit_seconds=0.02)):
        with pytest.raises(ConfigError, match="--output: 900000000 tokens after 1m fit no ring"):
            propose(MODEL, PROFILE, load, too_long, candidates)
    with pytest.raises(ConfigError, match=r"--rate: the traffic needs .* rings; allowed are 100000 or fewer"):
        propose(MODEL, PROFILE, load, Traffic(turns_per_second=1e6, output_tokens=16), candidates)


def test_an_explanation_names_what_is_chosen_and_what_everything_else_would_cost() -> None:
    shape = RingShape(cp=4, tp=8)
    explained = explain_turn(MODEL, PROFILE, shape, policy="auto", new_tokens=1280, cached_tokens=126_720)
    totals = {each.name: each.cost.total_seconds for each in explained.alternatives}
    assert explained.chosen.algorithm == "pass_q", "gather_kv is faster by less than a tie"
    assert min(totals, key=totals.__getitem__) == "gather_kv"
    assert totals["gather_kv"] > 0.98 * totals["pass_q"]
    assert [each.name for each in explained.alternatives if each.is_chosen] == ["pass_q"]
    assert "everything computed again, pass_kv" in totals
    assert totals["everything computed again, pass_kv"] > 5 * totals["pass_q"]
    assert explained.unforced is None


def test_a_forced_algorithm_is_taken_and_auto_says_what_it_would_have_done() -> None:
    explained = explain_turn(
        MODEL, PROFILE, RingShape(cp=4, tp=8), policy="pass_kv", new_tokens=1280, cached_tokens=126_720
    )
    assert explained.chosen.algorithm == "pass_kv"
    assert explained.unforced is not None
    assert explained.unforced.algorithm == "pass_q"


def test_a_first_turn_on_one_rank_has_no_other_way_than_both_algorithms() -> None:
    explained = explain_turn(MODEL, PROFILE, RingShape(cp=1, tp=8), policy="auto", new_tokens=1280, cached_tokens=0)
    assert [each.name for each in explained.alternatives] == [*PREFILL_ALGORITHMS]


def test_a_turn_without_new_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="new_tokens is 0"):
        explain_turn(MODEL, PROFILE, RingShape(cp=4, tp=8), policy="auto", new_tokens=0, cached_tokens=5)
    with pytest.raises(ConfigError, match="--selector: 'empirical' is unknown; allowed are auto, pass_kv"):
        explain_turn(MODEL, PROFILE, RingShape(cp=4, tp=8), policy="empirical", new_tokens=5, cached_tokens=5)
