"""What a gateway counts, under the names that dashboards ask for."""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from services.metrics import GatewayMetrics


def value(metrics: GatewayMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_running_requests_go_up_and_down_and_end_with_an_outcome() -> None:
    metrics = GatewayMetrics()
    metrics.began()
    metrics.began()
    metrics.ended("stop")
    assert value(metrics, "ringserve_num_requests_running", role="gateway") == 1
    assert value(metrics, "ringserve_requests_total", outcome="stop") == 1


def test_a_plan_counts_its_tokens_by_where_they_came_from() -> None:
    metrics = GatewayMetrics()
    metrics.planned("pass_q", 100, {"kept_on_prefill": 60, "pulled_from_decode": 30})
    metrics.planned("pass_kv", 10, {})
    assert value(metrics, "ringserve_plans_total", algorithm="pass_q") == 1
    assert value(metrics, "ringserve_prompt_tokens_total") == 110
    assert value(metrics, "ringserve_cached_prompt_tokens_total", source="kept_on_prefill") == 60
    assert value(metrics, "ringserve_cached_prompt_tokens_total", source="pulled_from_decode") == 30


def test_times_go_into_the_bucket_they_belong_to() -> None:
    metrics = GatewayMetrics()
    metrics.generated(5, ttft_seconds=0.03, ttit_seconds=0.012)
    metrics.generated(1, ttft_seconds=1000.0, ttit_seconds=0.0)
    ttft, ttit = "ringserve_time_to_first_token_seconds", "ringserve_inter_token_latency_seconds"
    assert [value(metrics, f"{ttft}_bucket", le=le) for le in ("0.02", "0.04", "640.0", "+Inf")] == [0, 1, 1, 2]
    assert value(metrics, f"{ttit}_count") == 1, "a single token has no time between tokens"
    assert value(metrics, f"{ttit}_sum") == pytest.approx(0.012)
    assert value(metrics, "ringserve_generation_tokens_total") == 6


def test_every_series_is_ours_and_two_gateways_share_nothing() -> None:
    first, second = GatewayMetrics(), GatewayMetrics()
    first.began()
    assert value(second, "ringserve_num_requests_running", role="gateway") == 0
    families = list(text_string_to_metric_families(generate_latest(first.registry).decode()))
    assert families
    assert all(family.name.startswith("ringserve_") and family.documentation for family in families)
