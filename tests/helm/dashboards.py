"""Dashboards as data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tests.helm.charts import CHART


@dataclass(frozen=True)
class Query:
    """One expression of one panel."""

    dashboard: str
    panel: str
    expression: str
    legend: str = ""

    def __str__(self) -> str:
        return f"{self.dashboard} / {self.panel}: {self.expression}"

    @property
    def resolved(self) -> str:
        """Expression with the defaults of Grafana's variables."""
        return self.expression.replace("$__rate_interval", "1m").replace("$ring", ".*").replace("$cluster", ".*")


def load_dashboards() -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in sorted((CHART / "files/dashboards").glob("*.json"))}


def panels_of(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the panels of a dashboard that draw something: its rows are none."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def load_queries() -> list[Query]:
    return [
        Query(name, panel["title"], target["expr"], target.get("legendFormat", ""))
        for name, dashboard in load_dashboards().items()
        for panel in panels_of(dashboard)
        for target in panel["targets"]
    ]


def load_annotations() -> list[Query]:
    """Return the expressions of events, without the comparison that leaves out the times when nothing happens."""
    found = []
    for name, dashboard in load_dashboards().items():
        for each in dashboard["annotations"]["list"]:
            assert each["expr"].endswith(" > 0"), each
            found.append(Query(name, each["name"], each["expr"].removesuffix(" > 0")))
    return found
