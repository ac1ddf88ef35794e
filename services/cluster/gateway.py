"""Gateway that `ringserve up` runs as a process: its start, its heartbeats, its restart in place, its end."""

from __future__ import annotations

import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from ringserve.cp_core.errors import ConfigError
from ringserve.services.cluster.ray_guard import without_ray_token
from ringserve.services.gateway.settings import GatewaySettings

log = logging.getLogger(__name__)

STOP_SECONDS = 30.0
"""Seconds for the gateway to end: its turns have 2 s, the rings 3, its last responses 2, twice that on a busy machine.
"""
RESTART_WAITS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds between attempts to restart a gateway: a connection of another program may hold its port for a while."""
MAX_TICK_SECONDS = 1.0
"""Silence that one look counts at most: this process may have stood still itself."""
ENDED = b""
"""Line of a process that has ended."""


def gateway_command(settings: GatewaySettings) -> Sequence[str]:
    """Return the command of a gateway with these settings."""
    return (sys.executable, "-P", "-m", "ringserve.services.gateway.process", "--settings", settings.to_json())


class GatewayKeeper:
    """Keeper of one gateway: `start`, `await_serving`, then `look` again and again, and `end`.

    The first line that the gateway prints has its addresses, at which it is started again. Each later line is a sign of
    life. One that has given none for `silent_seconds` is killed and started again, as one that has died.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        start_seconds: float,
        silent_seconds: float,
        command: Callable[[GatewaySettings], Sequence[str]] = gateway_command,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self._start_seconds = start_seconds
        self._silent_seconds = silent_seconds
        self._command = command
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._looked_at = self._silence = 0.0

    @property
    def pid(self) -> int:
        """Process id of the gateway."""
        assert self._process is not None, "the gateway was started"
        return self._process.pid

    def start(self) -> None:
        """Start the process."""
        # A process group of its own: Ctrl-C reaches this process alone, which then ends the gateway in order. Not a
        # session: Linux shares processors out among sessions first, and a nice value counts within one alone. Beside
        # ranks of another session, which all have 15, a gateway would get half of a core.
        self._process = process = subprocess.Popen(
            self._command(self.settings),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
            env=without_ray_token(os.environ),
        )
        lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._lines = lines

        def read() -> None:
            assert process.stdout is not None, "it is a pipe"
            with process.stdout:
                for line in process.stdout:
                    lines.put(line)
            lines.put(ENDED)

        threading.Thread(target=read, name="ringserve-gateway", daemon=True).start()

    def await_serving(self) -> None:
        """Wait until the gateway serves. Raises ConfigError if it does not."""
        try:
            line = self._lines.get(timeout=self._start_seconds)
        except queue.Empty:
            line = ENDED
        if line is ENDED:
            raise ConfigError("the gateway did not start; its reason is above")
        addresses = json.loads(line)
        self.settings = replace(
            self.settings, listen=addresses["gateway"], http=addresses["http"], metrics=addresses["metrics"]
        )
        self._looked_at, self._silence = self._clock(), 0.0

    def look(self, stopped: threading.Event) -> None:
        """Start the gateway again where it has died or stands still. Raises ConfigError if it fails every time."""
        process, now = self._process, self._clock()
        assert process is not None, "the gateway was started"
        self._silence += min(now - self._looked_at, MAX_TICK_SECONDS)
        self._looked_at = now
        while not self._lines.empty():
            self._lines.get()
            self._silence = 0.0
        if process.poll() is not None:
            log.warning("the gateway died (exit %s) and is started again", process.returncode)
        elif self._silence > self._silent_seconds:
            log.warning("the gateway sent no heartbeat for %.0f s; it is killed and started again", self._silence)
            process.kill()
        else:
            return
        self.end()
        for seconds in (*RESTART_WAITS, None):
            self.start()
            try:
                return self.await_serving()
            except ConfigError:
                self.end()
                if seconds is None or stopped.wait(seconds):
                    raise

    def terminate(self) -> None:
        """Tell the gateway to end when its turns have."""
        if self._process is not None:
            self._process.terminate()

    def end(self) -> None:
        """End the process, and wait for that. Idempotent."""
        if self._process is None:
            return
        process, self._process = self._process, None
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdin is not None, "it is a pipe"
        process.stdin.close()
