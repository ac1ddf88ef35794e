"""The HTTP server that Prometheus asks, and the list of targets that a gateway serves beside it."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringserve.cp_core.errors import ConfigError, Unavailable
from ringserve.services.telemetry.metrics.endpoint import (
    MetricsEndpoint,
    Reply,
    metrics_page,
    probe_pages,
    targets_page,
)
from ringserve.services.telemetry.metrics.gateway import GatewayMetrics
from ringserve.services.telemetry.metrics.registry import GATEWAY_NAMES, WithVllmNames, new_registry
from ringserve.v1 import inference_pb2
from ringserve.views import ServerInfo
from tests.helm.prometheus import running_prometheus
from tests.services.e2e.cluster import wait_until
from tests.services.e2e.ports import free_port
from tests.services.telemetry.metrics.test_ring import status
from tests.waiting import WAIT_SECONDS


def fetch(address: str, path: str, accept: str = "*/*") -> tuple[str, bytes]:
    request = urllib.request.Request(f"http://{address}{path}", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as answer:
        return answer.headers["Content-Type"], answer.read()


@pytest.fixture
def endpoint() -> Iterator[MetricsEndpoint]:
    endpoint = MetricsEndpoint("metrics.router", "127.0.0.1:0", {"/metrics": metrics_page(new_registry("test"))})
    yield endpoint
    endpoint.close()


def test_metrics_come_in_the_format_that_is_asked_for(endpoint: MetricsEndpoint) -> None:
    plain_type, plain = fetch(endpoint.address, "/metrics")
    open_type, opened = fetch(
        endpoint.address, "/metrics?x=1", "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8"
    )
    assert plain_type.startswith("text/plain")
    assert b"ringserve_build_info{" in plain
    assert open_type.startswith("application/openmetrics-text")
    assert opened.endswith(b"# EOF\n")


PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3 = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,text/plain;version=0.0.4;q=0.3"


@pytest.mark.parametrize("accept", [PROMETHEUS_2, PROMETHEUS_3, "text/plain", ""])
def test_every_scraper_gets_vllms_names_as_they_are(accept: str) -> None:
    metrics = GatewayMetrics()
    shown = WithVllmNames(metrics.registry.collect, GATEWAY_NAMES, "m")
    endpoint = MetricsEndpoint("gateway.metrics", "127.0.0.1:0", {"/metrics": metrics_page(shown)})
    request = urllib.request.Request(f"http://{endpoint.address}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as answer:
        text = answer.read().decode()
    endpoint.close()
    assert "\nvllm:time_to_first_token_seconds_count{" in text
    assert "vllm_" not in text


EXEMPLARS = """
global: {{scrape_interval: 1s}}
scrape_configs: [{{job_name: gateway, static_configs: [{{targets: ["{address}"]}}]}}]
"""


def test_a_real_prometheus_keeps_the_traces_of_turns_as_exemplars_and_vllms_names(tmp_path: Path) -> None:
    metrics, trace_id = GatewayMetrics(), "ab" * 16
    metrics.completed(inference_pb2.GenerateComplete(ttft_seconds=0.03), trace_id=trace_id)
    shown = WithVllmNames(metrics.registry.collect, GATEWAY_NAMES, "m")
    endpoint = MetricsEndpoint("gateway.metrics", "127.0.0.1:0", {"/metrics": metrics_page(shown)})
    try:
        with running_prometheus(tmp_path, EXEMPLARS.format(address=endpoint.address), free_port()) as server:
            wait_until(lambda: bool(server.query("vllm:time_to_first_token_seconds_count")), "it has scraped")
            for name in ("ringserve_time_to_first_token_seconds", "vllm:time_to_first_token_seconds"):
                found = server.get("query_exemplars", query=f"{name}_bucket", start="0", end="9999999999")
                assert [each["labels"] for series in found for each in series["exemplars"]] == [{"trace_id": trace_id}]
    finally:
        endpoint.close()


def test_another_page_is_not_found_by_a_sentence(endpoint: MetricsEndpoint) -> None:
    with pytest.raises(urllib.error.HTTPError) as failure:
        fetch(endpoint.address, "/secret")
    assert failure.value.code == 404
    assert failure.value.read() == b"pages are /metrics\n"


def test_a_page_that_fails_shows_no_trace_of_it() -> None:
    def broken(accept: str) -> Reply:
        raise Unavailable("the reason is for the log")

    endpoint = MetricsEndpoint("metrics.router", "127.0.0.1:0", {"/metrics": broken})
    try:
        with pytest.raises(urllib.error.HTTPError) as failure:
            fetch(endpoint.address, "/metrics")
        assert failure.value.code == 500
        assert b"reason" not in failure.value.read()
    finally:
        endpoint.close()


def test_a_port_in_use_is_refused_by_the_key_that_names_it(endpoint: MetricsEndpoint) -> None:
    with pytest.raises(ConfigError, match=f"metrics.decode: cannot listen on {endpoint.address}"):
        MetricsEndpoint("metrics.decode", endpoint.address, {})


async def test_targets_name_every_process_that_serves_metrics() -> None:
    ring = status()
    served = ServerInfo(selector="auto", rings=(ring,), conversations=0, running_turns=0, router_metrics_endpoint="r:1")

    async def get_server_info() -> ServerInfo:
        return served

    page = targets_page(get_server_info, lambda: "g:2", asyncio.get_running_loop())
    reply = await asyncio.to_thread(page, "")
    assert reply.content_type == "application/json"
    assert json.loads(reply.body) == [
        {"targets": ["g:2"], "labels": {"ringserve_role": "gateway"}},
        {"targets": ["r:1"], "labels": {"ringserve_role": "router"}},
    ], "a ring without a metrics port is no target"


async def test_probes_are_told_what_health_checks_are() -> None:
    fault = "no decode ring takes turns"
    pages = probe_pages(lambda: fault, asyncio.get_running_loop())
    endpoint = MetricsEndpoint("gateway.metrics", "127.0.0.1:0", pages)
    try:
        with pytest.raises(urllib.error.HTTPError) as failure:
            await asyncio.to_thread(fetch, endpoint.address, "/ready")
        assert failure.value.code == 503
        assert failure.value.read() == b"not ready: no decode ring takes turns\n"
        assert (await asyncio.to_thread(fetch, endpoint.address, "/live"))[1] == b"live\n"
        fault = ""
        assert (await asyncio.to_thread(fetch, endpoint.address, "/ready"))[1] == b"ready\n"
    finally:
        await asyncio.to_thread(endpoint.close)


def test_what_no_longer_turns_its_loop_is_not_live() -> None:
    loop = asyncio.new_event_loop()
    pages = probe_pages(str, loop)
    loop.close()
    endpoint = MetricsEndpoint("gateway.metrics", "127.0.0.1:0", pages)
    try:
        with pytest.raises(urllib.error.HTTPError) as failure:
            fetch(endpoint.address, "/live")
        assert failure.value.code == 500
        assert failure.value.read() == b"internal error; the process's log has the details\n"
    finally:
        endpoint.close()
