"""Router of a cluster: another serves in its place, at the same port, when it dies or stands still.

starts ──serves──> runs ──dies, or is silent: killed──> starts      at most len(RESTART_WAITS) failed starts in a row

If the journal's disk is full, starts repeat without limit until there is space. Beside a router that runs, a spare has
its modules loaded, so that it only has to start the server. `LocalCluster` runs the keeper.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import ray
from ray.exceptions import RayError

from ringserve.cp_core.errors import DiskFull, Unavailable
from ringserve.orchestration.protocol.rings import RingEvent
from ringserve.orchestration.ring.actors import host as host_actor
from ringserve.services.cluster.capacity import FAILED_SPARE_WAIT, SpareSchedule
from ringserve.services.cluster.hosts import RouterHost
from ringserve.services.cluster.leaders import kill_process

log = logging.getLogger(__name__)

ROUTER_NAME = "router"
RESTART_WAITS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds before each attempt to start a router again, after a router that served."""
DISK_WAIT_SECONDS = 5.0
"""Seconds between two starts while the journal's disk is full."""
PROBE_SECONDS = 0.5
"""Seconds between two probes of the router."""
MAX_TICK_SECONDS = 1.0
"""Most silence that one probe adds, in seconds: in a longer gap between probes this process stood still itself."""


class RouterProcess(Protocol):
    """Router process. It loads its modules at once, and serves after `begin`."""

    def begin(self) -> None:
        """Let it serve."""

    def endpoint(self) -> str | None:
        """Return its address HOST:PORT, or None while it starts.

        Raises DiskFull if the journal's disk is full, and Unavailable if the router cannot start for another reason.
        """

    def event(self) -> RingEvent | None:
        """Return the next thing to do for a ring, if there is one. Raises Unavailable if the process has died."""

    def answers(self) -> bool:
        """Return whether the previous probe was answered; if so, send the next one."""

    def kill(self) -> None: ...


class RayRouter:
    """`RouterProcess` that runs as a Ray actor called `name`."""

    def __init__(self, host: RouterHost, name: str) -> None:
        self.actor = host_actor(name, ROUTER_NAME, host)
        # Futures, which can be looked at without a call of Ray.
        self._pid = self.actor.pid.remote().future()
        self._event = self.actor.wait_event.remote().future()

    def begin(self) -> None:
        self.serves = self.actor.start.remote()
        self._served = self._answer = self.serves.future()

    def endpoint(self) -> str | None:
        if not self._served.done():
            return None
        try:
            endpoint: str = self._served.result()
        except RayError as error:
            if isinstance(cause := getattr(error, "cause", None), DiskFull):
                raise cause from None
            raise Unavailable(f"the router could not start: {getattr(error, 'cause', None) or error}") from error
        return endpoint

    def event(self) -> RingEvent | None:
        if not self._event.done():
            return None
        try:
            event: RingEvent = self._event.result()
        except RayError as error:
            raise Unavailable("the router died") from error
        self._event = self.actor.wait_event.remote().future()
        return event

    def answers(self) -> bool:
        if not self._answer.done():
            return False
        self._answer = self.actor.measure.remote().future()
        return True

    def kill(self) -> None:
        """End the process, even if it stands still and Ray cannot reach it."""
        kill_process(self._pid)
        ray.kill(self.actor)


class RouterKeeper:
    """Keeper of a cluster's only router. The cluster calls `look` again and again, and `end_spare` at its end.

    `make` starts a process under a name of its own, `clock` returns seconds. A router has `start_seconds` to serve. One
    that has not answered for `silent_seconds` counts as standing still, and is replaced.
    """

    def __init__(
        self,
        host: RouterHost,
        make: Callable[[RouterHost, str], RouterProcess],
        *,
        start_seconds: float,
        silent_seconds: float,
        spares: SpareSchedule | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host = host
        self._make = make
        self._start_seconds = start_seconds
        self._silent_seconds = silent_seconds
        self._spares = spares or SpareSchedule()
        self._clock = clock
        self._num_made = 0
        self._num_failed = 0
        self._serves = False
        self._probed_at = self._start_at = self._begun_at = clock()
        self._spare: RouterProcess | None = None
        self._silence = 0.0
        self.trouble = ""
        """Why the router cannot serve until somebody acts, such as a full disk; empty otherwise."""
        self.process: RouterProcess | None = None
        self._start()

    def _start(self) -> None:
        self.process, self._spare = self._spare or self._new(), None
        self._serves, self._begun_at = False, self._clock()
        self.process.begin()

    def _new(self) -> RouterProcess:
        # Ray frees the name of a dead actor when it likes: the successor gets another.
        self._num_made += 1
        return self._make(self._host, f"{ROUTER_NAME}-{self._num_made}")

    def serves_at(self, endpoint: str) -> None:
        """Note where the router serves; it is started again with that port."""
        config, port = self._host.config, endpoint.rpartition(":")[2]
        listen = f"{config.router.listen.rpartition(':')[0]}:{port}"
        self._host = replace(self._host, config=replace(config, router=replace(config.router, listen=listen)))
        self._note_serving()

    def _note_serving(self) -> None:
        self._serves, self._silence, self._probed_at = True, 0.0, self._clock()
        self._spares.wait(self._probed_at)

    def look(self) -> RingEvent | None:
        """Let another serve if the router cannot. Return the router's next order for a ring, if any.

        Raises Unavailable if it cannot be started.
        """
        now = self._clock()
        if self.process is None:
            if now >= self._start_at:
                self._start()
            return None
        try:
            if not self._serves:
                if self.process.endpoint() is not None:
                    log.warning("the router serves again")
                    self.trouble = ""
                    self._note_serving()
                elif now - self._begun_at > self._start_seconds:
                    raise Unavailable(f"the router has not started within {self._start_seconds:.0f} s")
                return None
            self._keep_spare(now)
            self._probe(now)
            return self.process.event()
        except DiskFull as error:
            self._await_space(str(error), now)
        except Unavailable as error:
            self._end(str(error), now)
        return None

    def _keep_spare(self, now: float) -> None:
        if self._spare is None:
            if self._spares.is_due(now):
                self._spare = self._new()
            return
        try:
            self._spare.event()  # a spare has no events, but this raises Unavailable if it has died
        except Unavailable as error:
            log.warning("the spare of the router is lost: %s", error)
            self.end_spare()
            self._spares.wait(now, FAILED_SPARE_WAIT)

    def end_spare(self) -> None:
        """End the spare, if there is one."""
        if self._spare is not None:
            self._spare.kill()
            self._spare = None

    def _probe(self, now: float) -> None:
        """Ask the router for a heartbeat. Raises Unavailable if none has come for too long."""
        if now - self._probed_at < PROBE_SECONDS:
            return
        self._silence += min(now - self._probed_at, MAX_TICK_SECONDS)
        self._probed_at = now
        if self.process is not None and self.process.answers():
            self._silence, self._num_failed = 0.0, 0
        # The latest answer may have come up to PROBE_SECONDS before the probe that saw it.
        elif self._silence > self._silent_seconds - PROBE_SECONDS:
            raise Unavailable(f"the router has not answered for {self._silence:.0f} s")

    def _await_space(self, why: str, now: float) -> None:
        if self.process is not None:
            self.process.kill()
        self.process, self._start_at = None, now + DISK_WAIT_SECONDS
        if not self.trouble:
            self.trouble = f"{why}; the router starts again once there is space"
            log.error("%s", self.trouble)

    def _end(self, why: str, now: float) -> None:
        """End the process and have another started after a while. Raises Unavailable after too many failures."""
        if self.process is not None:
            self.process.kill()
        self.process = None
        if self._num_failed == len(RESTART_WAITS):
            raise Unavailable(f"{why}; it could not be started again, so the cluster ends")
        forgets = "" if self._host.journal else ", and without router.journal its conversations are forgotten"
        log.warning("%s; another takes its place%s", why, forgets)
        self._start_at = now + RESTART_WAITS[self._num_failed]
        self._num_failed += 1
