"""Gateway that `ringserve up` runs as a process: its start, its heartbeats, its successor, its end.

The local cluster calls `GatewayKeeper`, which owns the gateway's process and its spare.
"""

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
from contextlib import suppress
from dataclasses import replace

from ringserve.cp_core.errors import ConfigError
from ringserve.orchestration.tasks import IDLE_NICENESS
from ringserve.services.cluster.capacity import FAILED_SPARE_WAIT, SpareSchedule
from ringserve.services.cluster.ray_guard import without_ray_token
from ringserve.services.gateway.settings import GatewaySettings

log = logging.getLogger(__name__)

STOP_SECONDS = 30.0
"""Maximum seconds for the gateway to end. It needs up to 2 s for its turns, 3 s for its calls to the rings and 2 s for
its last responses; on a busy machine twice as long."""
RESTART_WAITS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds between attempts to restart a gateway: a connection of another program may hold its port for a while."""
MAX_TICK_SECONDS = 1.0
"""Maximum silence counted between two calls of `look`: this process itself may have hung."""
SPARE_SECONDS = 5.0
"""Seconds within which a loaded spare must begin to serve."""
ENDED = b""
"""Line of a process that has ended."""
SIGN = b"\n"
"""Line of a process that lives, or of a spare that has loaded."""


def gateway_command(settings: GatewaySettings) -> Sequence[str]:
    """Return the command of a gateway with these settings."""
    return (sys.executable, "-P", "-m", "ringserve.services.gateway", "--settings", settings.to_json())


class _Process:
    """Process of a gateway with the lines that it prints."""

    def __init__(self, command: Sequence[str]) -> None:
        """Start it.

        It has a process group of its own: Ctrl-C reaches only the starter, which then ends the gateway in order. It
        stays in the starter's session: Linux first shares processors among sessions, and a nice value counts only
        within one. The ranks run at nice 15; in another session than theirs a gateway would get only half of a core.
        """
        self._popen = popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
            env=without_ray_token(os.environ),
        )
        self.pid = popen.pid
        self.lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="ringserve-gateway", daemon=True).start()

    def _read(self) -> None:
        assert self._popen.stdout is not None, "it is a pipe"
        with self._popen.stdout:
            for line in self._popen.stdout:
                self.lines.put(line)
        self.lines.put(ENDED)

    @property
    def exit_status(self) -> int | None:
        """Exit status; None while the process runs."""
        return self._popen.poll()

    def next_line(self, seconds: float) -> bytes:
        """Return its next line; ENDED if it has ended, or if no line comes within `seconds`."""
        try:
            return self.lines.get(timeout=seconds)
        except queue.Empty:
            return ENDED

    def let_serve(self, settings: GatewaySettings) -> None:
        """Tell a spare to serve with these settings. Do nothing if it has ended."""
        assert self._popen.stdin is not None, "it is a pipe"
        with suppress(OSError):
            self._popen.stdin.write(settings.to_json().encode() + b"\n")
            self._popen.stdin.flush()

    def kill(self) -> None:
        self._popen.kill()

    def terminate(self) -> None:
        self._popen.terminate()

    def end(self) -> None:
        """End it, and wait for that."""
        self._popen.terminate()
        try:
            self._popen.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        assert self._popen.stdin is not None, "it is a pipe"
        with suppress(OSError):  # the pipe may hold settings that it has not read
            self._popen.stdin.close()


class GatewayKeeper:
    """Keeper of one running gateway.

    Its calls in order: `load` (optional), `start`, `await_serving`, `look` repeatedly, and `end`. The gateway's first
    line has its addresses, which its successors take. Each later line is a heartbeat; a gateway without any for
    `silent_seconds` is killed. The successor of a dead gateway is its spare, which has loaded everything and only
    starts its servers. If no spare has loaded, a new process is started.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        start_seconds: float,
        silent_seconds: float,
        spares: SpareSchedule | None = None,
        command: Callable[[GatewaySettings], Sequence[str]] = gateway_command,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self._start_seconds = start_seconds
        self._silent_seconds = silent_seconds
        self._command = command
        self._clock = clock
        self._process: _Process | None = None
        self._spare: _Process | None = None
        self._spares = spares or SpareSchedule()
        self._looked_at = self._silence = 0.0

    @property
    def pid(self) -> int:
        """Process id of the gateway."""
        assert self._process is not None, "the gateway was started"
        return self._process.pid

    def load(self, niceness: int = 0) -> None:
        """Let a process load everything before `start`: the rest of the settings may not be known yet."""
        self._spare = _Process(self._command(replace(self.settings, is_spare=True, niceness=niceness)))

    def start(self, router: str = "") -> None:
        """Let the loaded process serve, or start one. If `router` is given, it replaces the settings' router."""
        self.settings = replace(self.settings, router=router or self.settings.router)
        if self._spare is None:
            self._process = _Process(self._command(self.settings))
        else:
            self._process, self._spare = self._spare, None
            self._process.let_serve(self.settings)

    def await_serving(self) -> None:
        """Wait until the gateway serves. Raises ConfigError if it does not."""
        self._await_serving(self._start_seconds)

    def _await_serving(self, seconds: float) -> None:
        assert self._process is not None, "the gateway was started"
        while (line := self._process.next_line(seconds)) == SIGN:
            pass
        if line is ENDED:
            raise ConfigError("the gateway did not start; its reason is above")
        addresses = json.loads(line)
        self.settings = replace(
            self.settings, listen=addresses["gateway"], http=addresses["http"], metrics=addresses["metrics"]
        )
        self._looked_at, self._silence = self._clock(), 0.0
        self._spares.wait(self._looked_at)

    def look(self, stopped: threading.Event) -> None:
        """Let a successor serve if the gateway has died or stands still. Raises ConfigError if none can."""
        process, now = self._process, self._clock()
        assert process is not None, "the gateway was started"
        self._silence += min(now - self._looked_at, MAX_TICK_SECONDS)
        self._looked_at = now
        while not process.lines.empty():
            process.lines.get()
            self._silence = 0.0
        if process.exit_status is not None:
            log.warning("the gateway died (exit %s); another takes its place", process.exit_status)
        elif self._silence > self._silent_seconds:
            log.warning(
                "the gateway sent no heartbeat for %.0f s; it is killed, another takes its place", self._silence
            )
            process.kill()
        else:
            return self._keep_spare(now)
        self._end_process()
        if not self._take_spare():
            self._start_again(stopped)

    def _start_again(self, stopped: threading.Event) -> None:
        for seconds in (*RESTART_WAITS, None):
            self.start()
            try:
                return self.await_serving()
            except ConfigError:
                self._end_process()
                if seconds is None or stopped.wait(seconds):
                    raise

    def _keep_spare(self, now: float) -> None:
        if self._spare is not None and self._spare.exit_status is not None:
            log.warning("the spare gateway died (exit %s)", self._spare.exit_status)
            self._end_spare()
            self._spares.wait(now, FAILED_SPARE_WAIT)
        if self._spare is None and self._spares.is_due(now):
            self.load(IDLE_NICENESS)  # it loads for two seconds, and streams and prompts come first

    def _take_spare(self) -> bool:
        """Let the spare serve. Return False if there is none that has loaded, or it does not serve."""
        if self._spare is None:
            return False
        if self._spare.lines.empty():  # it still loads, at low priority: a new one serves sooner
            self._end_spare()
            return False
        self.start()
        try:
            self._await_serving(SPARE_SECONDS)
        except ConfigError:
            assert self._process is not None, "the spare has been started"
            self._process.kill()
            self._end_process()
            return False
        return True

    def terminate(self) -> None:
        """Tell the gateway to end as soon as its turns have ended."""
        self._end_spare()
        if self._process is not None:
            self._process.terminate()

    def end(self) -> None:
        """End the processes, and wait for that. Idempotent."""
        self._end_spare()
        self._end_process()

    def _end_process(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            process.end()

    def _end_spare(self) -> None:
        if self._spare is not None:
            spare, self._spare = self._spare, None
            spare.kill()  # it serves nothing, so it need not end in order
            spare.end()
