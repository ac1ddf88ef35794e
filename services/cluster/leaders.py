"""Leaders of a cluster's rings: restarted after a failure, and after a drain when their ring is wanted again.

runs ──fails──> started again                  runs ──ring has drained──> away ──wanted──> started again

The local cluster calls `RingKeeper.look` again and again, on its one thread.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import ray
from ray.exceptions import RayTaskError

from ringserve.orchestration.protocol.rings import RingEvent
from ringserve.orchestration.ring.actors import free_places
from ringserve.orchestration.ring.actors import host as host_actor
from ringserve.services.cluster.hosts import LeaderHost

log = logging.getLogger(__name__)

RESTART_SECONDS = 1.0
"""Seconds between two starts of one leader at least: a leader that cannot start must not occupy the machine."""
STOP_SECONDS = 10.0
START_STAGES = 5
"""Stages of a ring's start, each within the start timeout: place ranks, load models, join, measure rates, measure
steps."""
NODE_SECONDS = 300.0
"""Seconds for a leaving node to go before its rings start elsewhere."""


class Leader(Protocol):
    """Leader process."""

    host: LeaderHost
    started_at: float

    def has_left(self) -> bool:
        """Return whether the ring has drained."""

    def is_starting(self) -> bool:
        """Return whether the ring has not served yet, nor failed to."""

    def failure(self) -> str:
        """Return why the leader has to be started again, or nothing."""

    def end(self) -> None:
        """End the ring and the process, in order if possible."""

    def kill(self) -> None: ...


class RayLeader:
    """`Leader` that is a Ray actor called `name`. `serves` resolves when the ring serves, or cannot start."""

    def __init__(self, host: LeaderHost, name: str) -> None:
        self.host = host
        self.actor = host_actor(name, f"{host.name} leader", host)
        self.serves = self.actor.start.remote()
        self.started_at = time.monotonic()
        # Futures, which can be looked at without a call of Ray.
        self._served = self.serves.future()
        self._pid = self.actor.pid.remote().future()
        self._leaves = self.actor.wait_event.remote().future()  # done when the ring has drained, or with an error

    def has_left(self) -> bool:
        return self._leaves.done() and self._leaves.exception() is None

    def failure(self) -> str:
        if self._leaves.done() and not self.has_left():
            return "died"
        error = None if self.is_starting() else self._served.exception()
        if isinstance(error, RayTaskError):
            return f"could not start its ring: {error.cause}"
        return "died" if error is not None else ""

    def is_starting(self) -> bool:
        return not self._served.done()

    def end(self) -> None:
        if not ray.wait([self.actor.stop.remote()], timeout=STOP_SECONDS)[0]:
            log.warning("the leader of ring %s did not stop in time and is ended", self.host.name)
        self.kill()
        free_places(self.host.name)

    def kill(self) -> None:
        """End the process, even if it stands still and Ray cannot reach it. Its ranks wait for another leader."""
        kill_process(self._pid)
        ray.kill(self.actor)


L = TypeVar("L", bound=Leader)


@dataclass(slots=True)
class _Away:
    """Ring that has drained, and since when. `wanted`: it is to be started again."""

    host: LeaderHost
    since: float
    wanted: RingEvent | None = None


class RingKeeper(Generic[L]):
    """Leaders by ring. `look` supervises them and is called again and again.

    `start` makes a leader, `is_node_there` tells whether a node of the cluster lives, `clock` returns seconds.
    """

    def __init__(
        self,
        start: Callable[[LeaderHost, str], L],
        is_node_there: Callable[[str], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start = start
        self._is_node_there = is_node_there
        self._clock = clock
        self._leaders: dict[str, L] = {}
        self._away: dict[str, _Away] = {}
        self._wanted: dict[str, RingEvent] = {}  # events for rings that have not left yet
        self._parked: set[str] = set()
        self._num_made = 0

    @property
    def leaders(self) -> Sequence[L]:
        return list(self._leaders.values())

    def make(self, host: LeaderHost) -> None:
        """Start the leader of a ring."""
        # Ray may free the name of a dead actor late, so the successor gets another.
        self._num_made += 1
        self._away.pop(host.name, None)
        self._wanted.pop(host.name, None)
        self._parked.discard(host.name)
        self._leaders[host.name] = self._start(host, f"{host.name}-{self._num_made}")

    def _make_again(self, host: LeaderHost) -> None:
        # The ring measures itself at its start, since nobody asks it to later.
        self.make(replace(host, measures_at_start=True))

    def want(self, event: RingEvent) -> None:
        """Handle the router's event: replace a silent leader, note a parked ring, or start a ring that has left."""
        if event.silent_seconds:
            self._replace_silent(event)
            return
        if event.parked is not None:
            (self._parked.add if event.parked else self._parked.discard)(event.ring)
            return
        away = self._away.get(event.ring)
        if away is not None:
            away.wanted = event
        elif event.ring in self._leaders:
            self._wanted[event.ring] = event

    def want_parked(self) -> None:
        """Have all rings started again that a router has parked and cannot bring back any more."""
        for ring in sorted(self._parked):
            self.want(RingEvent(ring=ring))
        self._parked.clear()

    def _replace_silent(self, event: RingEvent) -> None:
        """Kill a leader that stands still, and start another.

        A leader that is still starting has not announced its ring and is left alone. So is one that started within the
        silent time: its predecessor was silent.
        """
        leader = self._leaders.get(event.ring)
        if leader is None or leader.is_starting():
            return
        if leader.started_at < self._clock() - event.silent_seconds:
            log.warning("the leader of ring %s sends no heartbeat; it is killed and started again", event.ring)
            leader.kill()
            self._make_again(leader.host)

    def look(self) -> None:
        """Stop the leaders of rings that have drained; restart leaders that failed and rings that are wanted."""
        for leader in self.leaders:
            if leader.has_left():
                self._retire(leader)
            elif (reason := self._failure_of(leader)) and self._clock() - leader.started_at > RESTART_SECONDS:
                log.warning("the leader of ring %s %s; it is started again", leader.host.name, reason)
                leader.kill()
                self._make_again(leader.host)
        for away in list(self._away.values()):
            if away.wanted is not None and self._may_return(away, away.wanted):
                log.info("ring %s is started again", away.host.name)
                self._make_again(away.host)

    def _failure_of(self, leader: L) -> str:
        limit = START_STAGES * leader.host.config.timeouts.start
        if leader.is_starting() and self._clock() - leader.started_at > limit:
            return f"has not started its ring in {limit:.0f} s"
        return leader.failure()

    def _retire(self, leader: L) -> None:
        """Stop the leader of a drained ring, which stays away until it is wanted again."""
        leader.end()
        name = leader.host.name
        del self._leaders[name]
        self._away[name] = _Away(leader.host, self._clock(), self._wanted.pop(name, None))

    def _may_return(self, away: _Away, wanted: RingEvent) -> bool:
        """Return whether a ring may start again: while a leaving node is there, ranks would be placed on it."""
        staying = [node for node in wanted.leaving_nodes if self._is_node_there(node)]
        if not staying:
            return True
        if self._clock() - away.since < NODE_SECONDS:
            return False
        log.warning("node %s was to go and is still there; ring %s is started again", staying[0], away.host.name)
        return True


def kill_process(pid: Future[int]) -> None:
    """End the process of an actor of this node (see `host_actor`), if it has told its id."""
    if pid.done() and pid.exception() is None:
        with suppress(ProcessLookupError):
            os.kill(pid.result(), signal.SIGKILL)


def is_node_alive(address: str) -> bool:
    """Return whether Ray takes a node at that address for alive."""
    return any(node["Alive"] and node["NodeManagerAddress"] == address for node in ray.nodes())
