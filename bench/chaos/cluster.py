"""Cluster of a chaos run: `ringserve up` in a process of its own, so that its supervisor works as it does for users.

`up` starts a Ray of its own, or joins the Ray of two given nodes. The commands chaos, bad-days and soak start it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench.chaos.faults import Kind, Processes
from bench.chaos.nodes import Nodes, WorkerNode
from ringserve.cp_core.errors import Unavailable

COMMAND = (sys.executable, "-P", "-m", "ringserve.services.cli.main")
START_SECONDS = 400.0
STOP_SECONDS = 60.0
POLL_SECONDS = 0.2


class OwnCluster:
    """Cluster of one `ringserve up`: `start`, then `stop`, which leaves nothing running. Its log is `log`."""

    def __init__(
        self,
        settings: Sequence[str],
        directory: Path,
        number: int,
        nodes: Nodes | None = None,
        *,
        prefix: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Take the options of `up`, a directory for its files that no other cluster has, and the nodes to join.

        `prefix` is put before the command of `up`, and `variables` are added to its environment.
        """
        self._settings = settings
        self._prefix = prefix
        self._variables = variables or {}
        self._ready = directory / f"ready-{number}.json"
        self.log = directory / f"up-{number}.log"
        self.state = directory / f"state-{number}"
        self._nodes = nodes
        self._up: subprocess.Popen[bytes] | None = None
        self.processes = Processes()
        self.gateway = self.http = ""

    @property
    def worker(self) -> WorkerNode | None:
        """Worker node of the cluster, if it has one."""
        return self._nodes.worker if self._nodes else None

    async def start(self, progress: Callable[[str], None]) -> None:
        """Start the cluster and return when it serves. Raises Unavailable."""
        self._ready.unlink(missing_ok=True)
        command = [*self._prefix, *COMMAND, "up", "--name", "chaos", "--ready-file", str(self._ready), *self._settings]
        environment = self._environment
        if self._nodes is not None:
            progress("starting two nodes of a Ray cluster")
            await asyncio.to_thread(self._nodes.start, self.processes)
            command += ["--ray-address", self._nodes.ray_address]
            environment |= self._nodes.environment
        # A session of its own: Ctrl-C reaches this process alone, which then ends the cluster in order.
        with self.log.open("wb") as log:
            self._up = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
            )
        self.processes.add(self._up.pid)
        progress("starting a cluster")
        deadline = time.monotonic() + START_SECONDS
        while not self._ready.exists():
            if self.has_ended or time.monotonic() > deadline:
                raise Unavailable(f"the cluster did not start: {self.last_line()}")
            await asyncio.sleep(POLL_SECONDS)
        ready = json.loads(self._ready.read_text())
        self.gateway, self.http = ready["gateway"], ready["http"]
        for kind in (Kind.GATEWAY, Kind.ROUTER):
            self.processes.ports[kind] = int(ready[kind].rpartition(":")[2])
        await asyncio.to_thread(self.processes.look)

    @property
    def has_ended(self) -> bool:
        """True if `ringserve up` has ended by itself."""
        return self._up is not None and self._up.poll() is not None

    @property
    def _environment(self) -> dict[str, str]:
        return {**os.environ, "RINGSERVE_STATE": str(self.state), **self._variables}

    async def run_command(self, *words: str) -> None:
        """Run another command of `ringserve` on the cluster, and wait for it."""
        process = await asyncio.create_subprocess_exec(*COMMAND, *words, env=self._environment)
        await asyncio.wait_for(process.wait(), STOP_SECONDS)

    def text(self) -> str:
        """Return the log."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def last_line(self) -> str:
        """Return the last line of the log."""
        lines = self.text().strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def stop(self) -> None:
        """End the cluster in order if possible, and every process of it in any case. Idempotent."""
        self.processes.look()
        self.processes.resume()
        if self._up is not None and not self.has_ended:
            self._up.send_signal(signal.SIGTERM)
            try:
                self._up.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._up.kill()
        if self._nodes is not None:
            self._nodes.stop()
        self.processes.kill_all()
        if self._up is not None:
            self._up.wait(STOP_SECONDS)
            self._up = None
