"""Logs of all pods in the chart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.helm.charts import pod_templates, render
from tests.helm.test_render import configuration


def test_gateways_and_rings_log_alike() -> None:
    from ringserve.services.cli.main import parse

    logs = {
        "level": "warning",
        "levels": "ringserve.orchestration.router=debug ringserve.services.gateway=info",
        "format": "json",
    }
    either: list[Mapping[str, Any]] = [{"logs": logs}, {"config": {"logs": logs}}]
    for values in either:
        container = pod_templates(render(values))["gateway"]["spec"]["containers"][0]
        told = vars(parse([*container["command"][1:], *container["args"]]).options)
        assert {name: told[f"log_{name}"] for name in logs} == vars(configuration(values).logs) == logs
