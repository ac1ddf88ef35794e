"""Alerting and recording rules, by Prometheus' own tool."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import yaml

from tests.helm.charts import CHART
from tests.helm.prometheus import tool

RULES = CHART / "files" / "rules.yaml"


def promtool(*arguments: str, directory: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [tool("promtool"), *arguments], cwd=directory, capture_output=True, text=True, timeout=60, check=False
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
    alerts = {
        rule["alert"]
        for group in yaml.safe_load(RULES.read_text())["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }
    fired = set(re.findall(r"alertname: (\w+)\n\s+exp_alerts:\n", tests.read_text()))
    assert alerts == fired, "each alert is seen firing in a test"


def test_a_wrong_expectation_is_found(tmp_path: Path) -> None:
    shutil.copy(RULES, tmp_path)
    broken = Path(__file__).with_name("rules_test.yaml").read_text().replace("value: 0.97", "value: 0.5")
    (tmp_path / "rules_test.yaml").write_text(broken)
    assert promtool("test", "rules", "rules_test.yaml", directory=tmp_path).returncode != 0


def test_every_alert_says_how_bad_it_is_and_what_it_means() -> None:
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            if "alert" in rule:
                assert rule["labels"]["severity"] in ("critical", "warning", "info")
                assert set(rule["annotations"]) == {"summary", "description"}
