"""Form of the dashboards. Tests in tests/services/e2e evaluate their expressions in a real Prometheus."""

from __future__ import annotations

import re

import yaml

from tests.helm.charts import CHART
from tests.helm.dashboards import load_dashboards, load_queries

WIDTH = 24


def test_there_is_one_for_the_service_one_for_rings_and_one_for_kv() -> None:
    dashboards = load_dashboards()
    assert set(dashboards) == {"service", "rings", "kv"}
    assert len({dashboard["uid"] for dashboard in dashboards.values()}) == 3


def test_panels_fill_the_page_and_none_covers_another() -> None:
    for name, dashboard in load_dashboards().items():
        taken: set[tuple[int, int]] = set()
        for panel in dashboard["panels"]:
            place = panel["gridPos"]
            cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
            assert not cells & taken, f"{name}: {panel['title']} covers another"
            assert place["x"] + place["w"] <= WIDTH
            taken |= cells
        ids = [panel["id"] for panel in dashboard["panels"]]
        assert len(set(ids)) == len(ids)


def test_every_panel_asks_the_chosen_prometheus_and_names_its_lines() -> None:
    for dashboard in load_dashboards().values():
        variables = {variable["name"] for variable in dashboard["templating"]["list"]}
        for panel in dashboard["panels"]:
            assert panel["datasource"]["uid"] == "${datasource}"
            for target in panel["targets"]:
                assert target["datasource"]["uid"] == "${datasource}"
                assert target["legendFormat"]
                used = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"}
                assert used <= variables


def test_recorded_series_that_panels_read_are_recorded() -> None:
    groups = yaml.safe_load((CHART / "files/rules.yaml").read_text())["groups"]
    recorded = {rule["record"] for group in groups for rule in group["rules"] if "record" in rule}
    read = {name for query in load_queries() for name in re.findall(r"ringserve:[\w:]+", query.expression)}
    assert read
    assert read <= recorded
