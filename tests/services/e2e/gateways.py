"""Gateways in addition to that of `ringserve up`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.services.e2e.cluster import Ringserve, wait_until
from tests.waiting import START_SECONDS, WAIT_SECONDS


@dataclass(frozen=True)
class Gateway:
    """A process of its own, and where it listens."""

    process: subprocess.Popen[bytes]
    address: str
    http: str


@contextmanager
def started_gateway(ringserve: Ringserve, router: str, model_path: Path, log: Path, *options: str) -> Iterator[Gateway]:
    """Start a gateway on ports of the system's choice; it is ended at the end."""
    listen = ("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0")
    named = ("--router", router, "--model", str(model_path))
    process = ringserve.start("gateway", *listen, *named, *options, output=log)

    def told() -> Mapping[str, str]:
        assert process.poll() is None, log.read_text()
        lines = [line for line in log.read_text().splitlines() if line.startswith("{")]
        return json.loads(lines[0]) if lines else {}

    try:
        wait_until(lambda: bool(told()), "the gateway's addresses", START_SECONDS)
        yield Gateway(process, told()["gateway"], told()["http"])
    finally:
        process.terminate()
        try:
            process.wait(WAIT_SECONDS)
        finally:
            process.kill()
