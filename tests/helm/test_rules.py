"""Alerting and recording rules, by Prometheus' own tool."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import yaml

from tests.helm.charts import CHART, ROOT, Object, only, render
from tests.programs import require
from tests.waiting import WAIT_SECONDS

RULES = CHART / "files" / "rules.yaml"


def alerts() -> list[Object]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


def promtool(*arguments: str, directory: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [require("promtool"), *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
    )


def test_rules_are_well_formed() -> None:
    finished = promtool("check", "rules", str(RULES))
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_every_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    tests = Path(__file__).with_name("rules_test.yaml")
    shutil.copy(RULES, tmp_path)
    shutil.copy(tests, tmp_path)
    finished = promtool("test", "rules", tests.name, directory=tmp_path)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    names = {rule["alert"] for rule in alerts()}
    fired = set(re.findall(r"alertname: (\w+)\n\s+exp_alerts:\n", tests.read_text()))
    silent = set(re.findall(r"alertname: (\w+), exp_alerts: \[\]", tests.read_text()))
    assert names == fired == silent, "each alert is seen firing in a test, and not firing"


def test_a_wrong_expectation_is_found(tmp_path: Path) -> None:
    shutil.copy(RULES, tmp_path)
    broken = Path(__file__).with_name("rules_test.yaml").read_text().replace("value: 0.97", "value: 0.5")
    (tmp_path / "rules_test.yaml").write_text(broken)
    assert promtool("test", "rules", "rules_test.yaml", directory=tmp_path).returncode != 0


def test_every_alert_says_how_bad_it_is_and_what_it_means() -> None:
    for rule in alerts():
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    runbooks = re.findall(r"^## (\w+)$", (ROOT / "docs/runbooks.md").read_text(), re.MULTILINE)
    assert sorted(runbooks) == sorted(rule["alert"] for rule in alerts())
    for rule in alerts():
        # A page's headings are its anchors, in lower case.
        assert rule["annotations"]["runbook_url"] == f"docs/runbooks.md#{rule['alert'].lower()}"


def test_a_release_has_the_limits_and_links_of_its_values() -> None:
    limits = {"timeToFirstTokenSeconds": 2.5, "interTokenSeconds": 0, "waitingTurns": 40, "failedRatio": 0.01}
    rule = {"enabled": True, "limits": limits, "runbookUrl": "https://example.org/ringserve/"}
    objects = render({"metrics": {"prometheusRule": rule}})
    rules = [each for group in only(objects, "PrometheusRule")["spec"]["groups"] for each in group["rules"]]
    found = {each["labels"]["of"]: each["expr"] for each in rules if each.get("record") == "ringserve:limit"}
    own = 'ringserve_build_info{ringserve_cluster="test-ringserve", }'
    assert found == {
        name: f"{limit} + 0 * max by (ringserve_cluster) ({own})"
        for name, limit in (
            ("time_to_first_token_seconds", 2.5),
            ("inter_token_seconds", 0),
            ("waiting_turns", 40),
            ("failed_ratio", 0.01),
        )
    }
    queue = next(each for each in rules if each.get("alert") == "RingserveQueue")
    assert queue["annotations"]["runbook_url"] == "https://example.org/ringserve/docs/runbooks.md#ringservequeue"
