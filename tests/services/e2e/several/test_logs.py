"""Logs of a whole cluster as JSON."""

from __future__ import annotations

import json

from tests.services.e2e.cluster import Cluster, Ringserve


def test_every_line_is_json_and_the_one_that_says_ready_too(ringserve: Ringserve, several: Cluster) -> None:
    log = ringserve.directory / "state" / f"{several.name}.log"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert all({"ts", "process", "message"} <= line.keys() for line in lines)
    ready = [line for line in lines if line["message"].startswith("ringserve: ready, gateway at ")]
    assert [line["process"] for line in ready] == ["up"]
