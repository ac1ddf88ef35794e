"""Counts and measurements of a gateway."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.openmetrics import exposition as openmetrics

from ringserve.services.telemetry.metrics.gateway import NUM_SLICES, SLICE_SECONDS, GatewayMetrics, RecentLoad
from ringserve.services.telemetry.metrics.registry import GATEWAY_NAMES, WithVllmNames
from ringserve.v1 import inference_pb2


def value(metrics: GatewayMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def complete(tokens: int, **plan: float) -> inference_pb2.GenerateComplete:
    return inference_pb2.GenerateComplete(
        usage=inference_pb2.Usage(completion_tokens=tokens),
        ttft_seconds=0.03,
        ttit_seconds=0.012 if tokens > 1 else 0.0,
        plan=inference_pb2.Plan(algorithm=inference_pb2.ALGORITHM_PASS_Q, **plan),  # type: ignore[arg-type]
    )


def test_requests_are_counted_by_outcome_and_refusals_by_reason() -> None:
    metrics = GatewayMetrics()
    for _ in range(3):
        metrics.began()
    metrics.ended("stop", 1.0)
    metrics.ended("resource_exhausted", 0.001)
    assert value(metrics, "ringserve_requests_in_progress") == 1
    assert value(metrics, "ringserve_requests_total", outcome="stop") == 1
    assert value(metrics, "ringserve_requests_total", outcome="resource_exhausted") == 1
    assert value(metrics, "ringserve_requests_refused_total", reason="resource_exhausted") == 1
    assert value(metrics, "ringserve_requests_refused_total", reason="invalid_argument") == 0
    assert value(metrics, "ringserve_e2e_request_latency_seconds_sum") == pytest.approx(1.001)


def test_plans_and_cached_tokens_are_counted_by_kind() -> None:
    metrics = GatewayMetrics()
    metrics.planned("pass_q", 100, {"kept_on_prefill": 60, "pulled_from_decode": 30})
    metrics.planned("pass_kv", 10, {})
    assert value(metrics, "ringserve_plans_total", algorithm="pass_q") == 1
    assert value(metrics, "ringserve_prompt_tokens_total") == 110
    assert value(metrics, "ringserve_cached_prompt_tokens_total", source="kept_on_prefill") == 60
    assert value(metrics, "ringserve_cached_prompt_tokens_total", source="pulled_from_decode") == 30
    assert value(metrics, "ringserve_request_prompt_tokens_bucket", le="10.0") == 1


def test_a_label_never_takes_a_value_that_is_on_no_list() -> None:
    metrics = GatewayMetrics()
    for number in range(100):
        metrics.planned(f"invented-{number}", 1, {f"nowhere-{number}": 1})
        metrics.began()
        metrics.ended(f"strange-{number}", 0.1)
    assert value(metrics, "ringserve_plans_total", algorithm="other") == 100
    assert value(metrics, "ringserve_cached_prompt_tokens_total", source="other") == 100
    assert value(metrics, "ringserve_requests_total", outcome="other") == 100


def test_a_finished_turn_is_measured_from_queue_to_last_token() -> None:
    metrics = GatewayMetrics()
    times = {"queue_seconds": 0.5, "prefill_seconds": 2.0, "predicted_prefill_seconds": 3.0, "migration_seconds": 0.25}
    moved = {"migrated_bytes": 1000, "pulled_bytes": 10}
    metrics.completed(complete(5, **times, **moved, pull_seconds=0.25, handoff_seconds=0.125))
    for part, seconds in (
        ("queue", 0.5),
        ("pull", 0.25),
        ("prefill", 2.0),
        ("migration", 0.25),
        ("handoff", 0.125),
        ("decode", 0.048),
    ):
        assert value(metrics, f"ringserve_request_{part}_time_seconds_sum") == pytest.approx(seconds), part
    assert value(metrics, "ringserve_prefill_predicted_ratio_sum", algorithm="pass_q") == 1.5
    assert value(metrics, "ringserve_migrated_bytes_total", direction="to_decode") == 1000
    assert value(metrics, "ringserve_migrated_bytes_total", direction="to_prefill") == 10


def test_an_observation_of_a_traced_turn_points_to_its_trace() -> None:
    metrics, trace_id = GatewayMetrics(), "ab" * 16
    metrics.completed(complete(5))
    metrics.completed(complete(5), trace_id=trace_id)
    metrics.began()
    metrics.ended("length", 0.3, trace_id=trace_id)
    page = openmetrics.generate_latest(metrics.registry).decode()
    of = [line.split("_bucket")[0] for line in page.splitlines() if f'# {{trace_id="{trace_id}"}}' in line]
    assert of == ["ringserve_time_to_first_token_seconds", "ringserve_e2e_request_latency_seconds"]


def test_latencies_fall_into_the_buckets_of_vllm() -> None:
    metrics = GatewayMetrics()
    metrics.completed(complete(5))
    metrics.completed(complete(1))
    ttft, ttit = "ringserve_time_to_first_token_seconds", "ringserve_request_time_per_output_token_seconds"
    assert [value(metrics, f"{ttft}_bucket", le=le) for le in ("0.02", "0.04", "640.0", "+Inf")] == [0, 2, 2, 2]
    assert value(metrics, f"{ttit}_count") == 1, "a single token has no time between tokens"
    assert value(metrics, f"{ttit}_sum") == pytest.approx(0.012)
    assert value(metrics, "ringserve_generation_tokens_total") == 6


def test_answers_are_counted_by_the_reason_of_their_end_and_by_length() -> None:
    metrics = GatewayMetrics()
    stop, length = inference_pb2.FINISH_REASON_STOP, inference_pb2.FINISH_REASON_LENGTH
    for reason, tokens in ((stop, 5), (length, 7), (length, 1)):
        metrics.completed(
            inference_pb2.GenerateComplete(finish_reason=reason, usage=inference_pb2.Usage(completion_tokens=tokens))
        )
    assert value(metrics, "ringserve_request_success_total", finished_reason="stop") == 1
    assert value(metrics, "ringserve_request_success_total", finished_reason="length") == 2
    assert value(metrics, "ringserve_request_generation_tokens_sum") == 13


def test_tenants_are_told_apart_up_to_a_number_and_the_rest_is_shown_together() -> None:
    metrics = GatewayMetrics(max_tenants=2)
    metrics.add_tenants(["acme", "beta", "gamma"])
    assert value(metrics, "ringserve_tenant_requests_total", tenant="beta", outcome="busy") == 0
    for tenant, outcome in (("acme", "stop"), ("acme", "resource_exhausted"), ("gamma", "internal"), ("new", "stop")):
        metrics.began(tenant)
        metrics.planned("pass_q", 100, {"kept_on_prefill": 60}, tenant)
        metrics.ended(outcome, 1.0, tenant)
    metrics.began("new")
    metrics.completed(complete(5), "acme")
    counted = {
        (sample.labels["tenant"], sample.labels["outcome"]): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "ringserve_tenant_requests_total" and sample.value
    }
    assert counted == {("acme", "answered"): 1, ("acme", "busy"): 1, ("other", "failed"): 1, ("other", "answered"): 1}
    assert value(metrics, "ringserve_tenant_requests_in_progress", tenant="other") == 1
    tokens = [
        value(metrics, "ringserve_tenant_tokens_total", tenant="acme", kind=kind)
        for kind in ("prompt", "cached", "generated")
    ]
    assert tokens == [200, 120, 5]
    assert value(metrics, "ringserve_requests_total", outcome="stop") == 2, "all tenants together are counted as before"


@pytest.mark.parametrize(("most", "tenant"), [(0, "acme"), (5, "")])
def test_without_tenants_and_where_it_is_switched_off_no_series_names_one(most: int, tenant: str) -> None:
    metrics = GatewayMetrics(most)
    metrics.began(tenant)
    metrics.planned("pass_q", 1, {}, tenant)
    metrics.ended("stop", 1.0, tenant)
    assert not [
        sample for family in metrics.registry.collect() for sample in family.samples if "tenant" in sample.labels
    ]


def test_what_vllm_looks_up_in_its_prefix_cache_are_all_tokens_of_prompts() -> None:
    metrics = GatewayMetrics()
    metrics.planned("pass_q", 100, {"kept_on_prefill": 60, "pulled_from_decode": 30})
    found: dict[str, float] = {}
    for family in WithVllmNames(metrics.registry.collect, GATEWAY_NAMES, "m").collect():
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    assert (found["vllm:prefix_cache_queries_total"], found["vllm:prompt_tokens_total"]) == (100, 100)
    assert found["vllm:prefix_cache_hits_total"] == 90
    series = {name for names in GATEWAY_NAMES.values() for name in names}
    families = {name.removesuffix("_total").removesuffix("_count") for name in found}
    assert series <= families


def test_the_time_before_each_token_is_seen_so_that_no_stall_hides_in_a_mean() -> None:
    metrics = GatewayMetrics()
    for num_tokens, gap in ((1, None), (1, 0.02), (3, 4.0)):  # the last three come together after a stall
        metrics.sent_tokens(num_tokens, gap)
    name = "ringserve_inter_token_latency_seconds"
    assert value(metrics, f"{name}_count") == 4, "five tokens have four gaps"
    assert value(metrics, f"{name}_sum") == pytest.approx(4.02)
    assert [value(metrics, f"{name}_bucket", le=le) for le in ("0.001", "0.025", "2.5", "5.0")] == [2, 3, 3, 4]


def test_nothing_is_told_twice_and_no_series_says_when_it_was_made() -> None:
    names = {sample.name for metric in GatewayMetrics().registry.collect() for sample in metric.samples}
    assert not [name for name in names if name.endswith("_created")]
    assert "ringserve_build_info" in names
    assert "process_resident_memory_bytes" in names


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_recent_load_is_that_of_ten_seconds_of_ten_minutes_and_of_each_slice() -> None:
    clock = Clock()
    metrics = GatewayMetrics()
    metrics.recent = RecentLoad(clock)
    assert metrics.recent.view()["now"]["requests_per_second"] == 0.0  # type: ignore[index]
    for second in range(60):
        clock.now = 100.0 + second
        metrics.planned("pass_kv", 100, {"kept_on_prefill": 25})
        metrics.sent_tokens(1, None)
        metrics.sent_tokens(2, 0.2)
        metrics.completed(complete(3))
        metrics.ended("unavailable" if second == 30 else "aborted" if second == 31 else "stop", 0.5)
    view: Any = metrics.recent.view()
    assert view["slice_seconds"] == SLICE_SECONDS
    assert len(view["slices"]) == 11, "eleven whole ones; the twelfth goes on"
    assert view["slices"][3]["requests_per_second"] == 1.0
    for part, requests in ((view["now"], 15), (view["ten_minutes"], 60)):
        assert part["requests"] == requests
        assert part["generated_tokens_per_second"] == pytest.approx(3.0, rel=0.1)
        assert part["prompt_tokens_per_second"] == pytest.approx(100.0, rel=0.1)
        assert part["cached_share"] == 0.25
        assert part["ttft_seconds_p50"] == pytest.approx(0.03, rel=0.05)
        assert part["inter_token_seconds_p95"] == pytest.approx(0.1, rel=0.05), "two tokens came together"
    assert (view["ten_minutes"]["failed"], view["ten_minutes"]["refused"]) == (1, 1)
    assert view["now"]["failed"] == 0

    clock.now += 2000.0
    view = metrics.recent.view()
    assert len(view["slices"]) == NUM_SLICES
    assert view["ten_minutes"]["requests"] == 0
    assert view["ten_minutes"]["cached_share"] is view["ten_minutes"]["ttft_seconds_p95"] is None


def test_quantiles_of_the_recent_load_are_those_of_its_times_within_five_percent() -> None:
    clock = Clock()
    metrics = GatewayMetrics()
    metrics.recent = RecentLoad(clock)
    times = [0.001 * 1.07**number for number in range(100)]
    for seconds in times:
        metrics.completed(inference_pb2.GenerateComplete(ttft_seconds=seconds))
    now: Any = metrics.recent.view()["now"]
    assert now["ttft_seconds_p50"] == pytest.approx(times[49], rel=0.05)
    assert now["ttft_seconds_p95"] == pytest.approx(times[94], rel=0.05)
