"""Cluster of a chaos run: `ringserve up` in a process of its own, so that its supervisor works as it does for users."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from cp_core.errors import Unavailable
from services.offline.chaos.faults import Processes

START_SECONDS = 400.0
STOP_SECONDS = 60.0
POLL_SECONDS = 0.2


class OwnCluster:
    """Cluster of one `ringserve up`: `start`, then `stop`, which leaves nothing running. Its log is `log`."""

    def __init__(self, settings: Sequence[str], directory: Path, number: int) -> None:
        """Take the options of `up`, and a directory for its files that no other cluster has."""
        self._settings = settings
        self._ready = directory / f"ready-{number}.json"
        self.log = directory / f"up-{number}.log"
        self._state = directory / f"state-{number}"
        self._up: subprocess.Popen[bytes] | None = None
        self.processes: Processes | None = None
        self.gateway = ""

    async def start(self, progress: Callable[[str], None]) -> None:
        """Start the cluster and return when it serves. Raises Unavailable."""
        command = [sys.executable, "-P", "-m", "services.cli.main", "up", "--name", "chaos"]
        command += ["--ready-file", str(self._ready)]
        # A session of its own: Ctrl-C reaches this process alone, which then ends the cluster in order.
        with self.log.open("wb") as log:
            self._up = subprocess.Popen(
                [*command, *self._settings],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {"RINGSERVE_STATE": str(self._state)},
            )
        self.processes = Processes(self._up.pid)
        progress("starting a cluster")
        deadline = time.monotonic() + START_SECONDS
        while not self._ready.exists():
            if self.has_ended or time.monotonic() > deadline:
                raise Unavailable(f"the cluster did not start: {self.last_line()}")
            await asyncio.sleep(POLL_SECONDS)
        self.gateway = json.loads(self._ready.read_text())["gateway"]
        await asyncio.to_thread(self.processes.look)

    @property
    def has_ended(self) -> bool:
        """True if `ringserve up` has ended by itself."""
        return self._up is not None and self._up.poll() is not None

    def last_line(self) -> str:
        """Return the last line of the log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def stop(self) -> None:
        """End the cluster in order where that is possible, and every process of it in any case. Idempotent."""
        if self._up is None or self.processes is None:
            return
        self.processes.look()
        self.processes.resume()
        if not self.has_ended:
            self._up.send_signal(signal.SIGTERM)
            try:
                self._up.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._up.kill()
        self.processes.kill_all()
        self._up.wait(STOP_SECONDS)
        self._up = None
