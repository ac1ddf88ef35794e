"""A real Prometheus scrapes a running cluster: every panel and every rule finds what it asks for."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
import yaml

from tests.helm.charts import CHART
from tests.helm.dashboards import load_annotations, load_queries
from tests.helm.prometheus import Prometheus, running_prometheus
from tests.programs import require
from tests.services.e2e.cluster import Cluster, Inference, ids, wait_until
from tests.services.e2e.ports import free_port
from tests.waiting import WAIT_SECONDS
from tests.workers.models import random_tokens

CONFIGURATION = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [{rules}]
scrape_configs:
  - job_name: ringserve
    http_sd_configs: [{{url: "http://{metrics}/targets", refresh_interval: 1s}}]
"""
METRIC = re.compile(r"\bringserve_\w+")
LOAD_TURNS = 6


def load(cluster: Cluster) -> None:
    """Send turns of two lengths, follow-ups and a refusal, so that every counter has counted."""
    inference = Inference(cluster.gateway)
    try:
        for number in range(LOAD_TURNS):
            name = f"prometheus-{number}"
            inference.answer(ids(random_tokens(40 + 60 * (number % 2), seed=number), max_tokens=4, conversation=name))
            inference.answer(ids([1, 2, 3], max_tokens=4, conversation=name))
            inference.delete(name)
        with pytest.raises(grpc.RpcError):
            inference.answer(ids([300]))
    finally:
        inference.channel.close()


@pytest.fixture(scope="module")
def prometheus(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Start a Prometheus that scrapes the cluster before, under and after a load."""
    configuration = CONFIGURATION.format(rules=CHART / "files" / "rules.yaml", metrics=cluster.metrics)
    with running_prometheus(tmp_path_factory.mktemp("prometheus"), configuration, free_port()) as server:

        def scraped(number: int) -> bool:
            counts = server.query('min(count_over_time(up{job="ringserve"}[5m]))')
            return bool(counts) and float(counts[0]["value"][1]) >= number and len(server.query("up == 1")) == 4

        wait_until(lambda: scraped(2), "Prometheus does not find the four processes by /targets")
        before = int(server.query('max(count_over_time(up{job="ringserve"}[5m]))')[0]["value"][1])
        with ThreadPoolExecutor(1) as pool:
            pool.submit(load, cluster).result(WAIT_SECONDS)
        # Rates need samples on both sides of the load, and rules one evaluation after the last of them.
        wait_until(lambda: scraped(before + 4), "Prometheus does not go on scraping")
        evaluated = "count_over_time(ringserve:requests_failed:ratio_rate5m[5m])"
        wait_until(lambda: bool(server.query(evaluated)), "the rules give nothing")
        yield server


def test_every_process_is_found_and_scraped(prometheus: Prometheus) -> None:
    targets = prometheus.get("targets")["activeTargets"]
    assert {target["labels"]["ringserve_role"] for target in targets} == {"gateway", "router", "prefill", "decode"}
    assert {target["health"] for target in targets} == {"up"}, [target["lastError"] for target in targets]


def test_every_expression_of_every_panel_has_data(prometheus: Prometheus) -> None:
    queries = [*load_queries(), *load_annotations()]
    empty = [str(query) for query in queries if not has_data(prometheus, query.resolved)]
    # Callers of this service are no tenants, and its ranks have no GPUs.
    lacking = {name: [query for query in empty if name in query] for name in ("ringserve_tenant_", "_gpu_", "DCGM_")}
    assert {name: len(queries) for name, queries in lacking.items()} == {
        "ringserve_tenant_": 3,
        "_gpu_": 2,
        "DCGM_": 1,
    }
    assert sorted(empty) == sorted(query for queries in lacking.values() for query in queries)
    assert len(queries) > 50


def test_no_two_lines_of_a_panel_have_one_name(prometheus: Prometheus) -> None:
    alike = []
    panels: dict[tuple[str, str], list[str]] = {}
    for query in load_queries():
        names = panels.setdefault((query.dashboard, query.panel), [])
        names.extend(named(query.legend, series["metric"]) for series in prometheus.query(query.resolved))
    for panel, names in panels.items():
        alike += [(panel, name) for name, times in Counter(names).items() if times > 1]
    assert alike == []


def named(legend: str, labels: Mapping[str, str]) -> str:
    """Return the name of a line, as Grafana makes it of a legend."""

    def value(found: re.Match[str]) -> str:
        return labels.get(found[1], "")

    return re.sub(r"{{\s*(\w+)\s*}}", value, legend)


def has_data(prometheus: Prometheus, expression: str) -> bool:
    """Return whether the expression has a number; 0 / 0, which is NaN, is none."""
    return any(sample["value"][1] != "NaN" for sample in prometheus.query(expression))


def test_every_rule_is_evaluated_and_every_recorded_series_exists(prometheus: Prometheus) -> None:
    rules: list[dict[str, Any]] = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    declared = yaml.safe_load((CHART / "files/rules.yaml").read_text())["groups"]
    assert len(rules) == sum(len(group["rules"]) for group in declared)
    assert [(rule["name"], rule.get("lastError")) for rule in rules if rule["health"] != "ok"] == []
    recorded = [rule["name"] for rule in rules if rule["type"] == "recording"]
    assert [name for name in recorded if not has_data(prometheus, name)] == []


def test_every_metric_that_an_alert_reads_exists_and_none_fires_on_a_healthy_service(prometheus: Prometheus) -> None:
    rules = [
        rule for group in prometheus.get("rules")["groups"] for rule in group["rules"] if rule["type"] == "alerting"
    ]
    labels = {"ringserve_cluster", "ringserve_role"}
    names = {name for rule in rules for name in METRIC.findall(rule["query"])} - labels
    assert names
    assert [name for name in names if not prometheus.query(name)] == []
    assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []


def test_metrics_of_every_process_are_as_prometheus_likes_them(cluster: Cluster) -> None:
    with urllib.request.urlopen(f"http://{cluster.metrics}/targets", timeout=WAIT_SECONDS) as answer:
        addresses = [target["targets"][0] for target in json.load(answer)]
    assert len(addresses) == 4
    for address in addresses:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=WAIT_SECONDS) as answer:
            text = answer.read()
        checked = subprocess.run(
            [require("promtool"), "check", "metrics"],
            input=text,
            capture_output=True,
            timeout=WAIT_SECONDS,
            check=False,
        )
        assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b""), address
