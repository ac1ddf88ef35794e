"""Prometheus' own programs, which Debian packages as `prometheus`."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.programs import require
from tests.waiting import WAIT_SECONDS


@dataclass(frozen=True)
class Prometheus:
    """Running Prometheus server."""

    address: str

    def get(self, path: str, **query: str) -> Any:
        """Return the `data` of an API answer."""
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=WAIT_SECONDS) as answer:
            body = json.load(answer)
        assert body["status"] == "success", body
        return body["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the present value of an expression."""
        result: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return result


@contextmanager
def running_prometheus(directory: Path, configuration: str, port: int) -> Iterator[Prometheus]:
    """Start a server on loopback, stop it at the end; its data goes with the directory."""
    program = require("prometheus")
    config = directory / "prometheus.yml"
    config.write_text(configuration)
    log = (directory / "prometheus.log").open("wb")
    process = subprocess.Popen(
        [
            program,
            f"--config.file={config}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--enable-feature=exemplar-storage",
        ],
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    try:
        _wait_ready(process, f"http://127.0.0.1:{port}/-/ready", directory / "prometheus.log")
        yield Prometheus(f"127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait(WAIT_SECONDS)
        log.close()


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(url, timeout=WAIT_SECONDS):
                return
        except OSError:
            try:
                process.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
    raise AssertionError(f"Prometheus was not ready in {WAIT_SECONDS:g} s: {log.read_text()}")
