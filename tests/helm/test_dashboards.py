"""Form of the dashboards. Tests in tests/services/e2e evaluate their expressions in a real Prometheus."""

from __future__ import annotations

import re

import yaml

from tests.helm.charts import CHART
from tests.helm.dashboards import load_annotations, load_dashboards, load_queries, panels_of

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
        for panel in [*panels_of(dashboard), *dashboard["annotations"]["list"]]:
            assert panel["datasource"]["uid"] == "${datasource}"
            for target in panel.get("targets", ()):
                assert target["datasource"]["uid"] == "${datasource}"
                assert target["legendFormat"]
                used = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"}
                assert used <= variables


def test_the_first_row_says_whether_the_service_works_and_each_panel_lies_in_a_row() -> None:
    for dashboard in load_dashboards().values():
        assert dashboard["panels"][0]["type"] == "row"
    service = load_dashboards()["service"]["panels"]
    second_row = next(number for number, panel in enumerate(service) if number and panel["type"] == "row")
    first = [panel["title"] for panel in service[1:second_row]]
    assert first[:5] == [
        "Rings that serve",
        "Failed requests",
        "First token against its limit",
        "Turns that wait",
        "Fullest ring",
    ]


def test_drains_rebuilds_and_failovers_are_marked_on_every_dashboard() -> None:
    marked = {(each.dashboard, each.panel) for each in load_annotations()}
    names = ("Drains", "Rebuilds", "Failovers")
    assert marked == {(dashboard, name) for dashboard in load_dashboards() for name in names}


def test_every_limit_of_the_alerts_is_drawn() -> None:
    groups = yaml.safe_load((CHART / "files/rules.yaml").read_text())["groups"]
    limits = {rule["labels"]["of"] for rule in groups[0]["rules"]}
    drawn = {
        name for query in load_queries() for name in re.findall(r'ringserve:limit\{[^}]*of="(\w+)"', query.expression)
    }
    assert drawn == limits


def test_recorded_series_that_panels_read_are_recorded() -> None:
    groups = yaml.safe_load((CHART / "files/rules.yaml").read_text())["groups"]
    recorded = {rule["record"] for group in groups for rule in group["rules"] if "record" in rule}
    read = {name for query in load_queries() for name in re.findall(r"ringserve:[\w:]+", query.expression)}
    assert read
    assert read <= recorded
