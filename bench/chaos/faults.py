"""Faults of a chaos run: which process is hit, in which phase of a turn, and how.

`Processes` finds and signals the processes of a chaos cluster; the rest is pure. The other modules of chaos use both.
"""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

import psutil

from ringserve.services.cluster.state import GONE

GATEWAY_MODULE = "ringserve.services.gateway"
TITLE = re.compile(r"ray::(router|\S+ leader|\S+ rank \d+)(?:\.\w+)?")
"""Title of one of ringserve's processes as Ray sets it: the process's name, and the method that it runs."""

RAYLET_PROGRAM = "/raylet"
AT = "--node_ip_address="


class Kind(StrEnum):
    """Kinds of what is hit: a process, or a NODE, which is a worker node of Ray with all ranks on it.

    RAYLET is Ray's own process on that node.
    """

    GATEWAY = "gateway"
    ROUTER = "router"
    PREFILL_LEADER = "prefill-leader"
    PREFILL_RANK = "prefill-rank"
    DECODE_LEADER = "decode-leader"
    DECODE_RANK = "decode-rank"
    RAYLET = "raylet"
    NODE = "node"


class Phase(StrEnum):
    """Phases of a turn, each with what shows that a turn is in it.

    QUEUED: the stream has its plan and no token, and its prefill ring says that turns wait; of these streams it was the
    last to begin. PREFILL: the stream has its plan and no token, and its prefill ring says that it computes; of these
    streams it was the first. MIGRATING: the stream's first token has come, and not the second; KV of the last layers is
    on its way. DECODING: several tokens have come. IDLE: all streams have ended, and the next turn is about to begin.
    """

    QUEUED = "queued"
    PREFILL = "prefill"
    MIGRATING = "migrating"
    DECODING = "decoding"
    IDLE = "idle"


class How(StrEnum):
    """Ways to hit: SIGKILL or SIGSTOP to a process, or a cut of a node's link, while the node's processes live on."""

    KILL = "kill"
    STOP = "stop"
    CUT = "cut"


SIGNALS = {How.KILL: signal.SIGKILL, How.STOP: signal.SIGSTOP}
ROLES = {
    Kind.PREFILL_LEADER: "prefill",
    Kind.PREFILL_RANK: "prefill",
    Kind.DECODE_LEADER: "decode",
    Kind.DECODE_RANK: "decode",
}
ON_WORKER = (Kind.RAYLET, Kind.NODE)
HIT_RANK = 1
"""Number of the rank that is hit, or 0 if the ring has one."""


@dataclass(frozen=True)
class Cell:
    """Cell of the matrix."""

    kind: Kind
    phase: Phase
    how: How

    def __str__(self) -> str:
        return f"{self.kind}/{self.phase}/{self.how}"

    def matches(self, pattern: str) -> bool:
        """Return whether the cell's PROCESS/PHASE/HOW matches a pattern with `*`, whose last parts may be missing."""
        return fnmatchcase(str(self), pattern) or fnmatchcase(str(self), pattern + "/*")

    @property
    def role(self) -> str:
        """Role of the ring that is hit; empty if the process belongs to none."""
        return ROLES.get(self.kind, "")

    @property
    def needs_worker(self) -> bool:
        """True if the cluster must have a worker node beside its head."""
        return self.kind in ON_WORKER


def matrix() -> list[Cell]:
    """Return all cells, the phases of one process beside each other."""
    return [Cell(kind, phase, how) for kind in Kind for how in hows_of(kind) for phase in Phase]


def hows_of(kind: Kind) -> tuple[How, ...]:
    """Return the ways to hit a process or node of this kind."""
    return (How.CUT,) if kind is Kind.NODE else (How.KILL, How.STOP)


def choose(patterns: Iterable[str]) -> list[Cell]:
    """Return the cells that match one of the patterns; all without patterns."""
    given = list(patterns)
    return [cell for cell in matrix() if not given or any(cell.matches(pattern) for pattern in given)]


class Processes:
    """Processes below some roots, named by their command lines. Every process that was ever seen is remembered.

    If a name has a port in `ports`, it is the name of the process that listens there; others with its title are spares.
    """

    def __init__(self) -> None:
        self._seen: dict[psutil.Process, int] = {}  # process -> its root's id
        self._roots: list[psutil.Process] = []
        self._stopped: list[psutil.Process] = []
        self._pids: dict[str, int] = {}
        self.ports: dict[str, int] = {}

    def add(self, root: int) -> None:
        """Watch a process and those below it too."""
        process = psutil.Process(root)
        self._roots.append(process)
        self._seen[process] = root

    @property
    def roots(self) -> list[int]:
        """Ids of the roots, in the order in which they were added."""
        return [root.pid for root in self._roots]

    def look(self) -> dict[str, int]:
        """Return the ids of the processes that run now, by name: "router", "prefill-0 rank 1", "raylet ADDRESS"."""
        found: dict[str, int] = {}
        for root in self._roots:
            with contextlib.suppress(*GONE):
                for process in root.children(recursive=True):
                    self._seen.setdefault(process, root.pid)
                    with contextlib.suppress(*GONE):
                        if process.status() == psutil.STATUS_ZOMBIE or not (name := _name(process.cmdline())):
                            continue
                        if name not in self.ports or _listens(process, self.ports[name]):
                            found[name] = process.pid
        self._pids = found
        return found

    def pid_of(self, name: str) -> int:
        """Return the id of the process of a name at the last look; 0 if none ran."""
        return self._pids.get(name, 0)

    def name_of(self, kind: Kind, where: str) -> str:
        """Return the name of the process of a kind; empty if none was seen.

        `where` is the process's ring or its node's address, if it belongs to one.
        """
        pids = self._pids
        if kind in (Kind.PREFILL_RANK, Kind.DECODE_RANK):
            names = [f"{where} rank {HIT_RANK}", f"{where} rank 0"]
        elif kind in (Kind.PREFILL_LEADER, Kind.DECODE_LEADER):
            names = [f"{where} leader"]
        elif kind in ON_WORKER:
            names = [f"{Kind.RAYLET} {where}"]
        else:
            names = [kind.value]
        return next((name for name in names if name in pids), "")

    def hit(self, name: str, how: How) -> int:
        """Send the signal of a fault to the process of this name. Return its id."""
        process = psutil.Process(self._pids[name])
        if how is How.STOP:
            self._stopped.append(process)
        process.send_signal(SIGNALS[how])
        return process.pid

    def resume(self) -> list[int]:
        """Let stopped processes go on. Return the ids of those that lived."""
        resumed = []
        while self._stopped:
            process = self._stopped.pop()
            with contextlib.suppress(*GONE):
                process.send_signal(signal.SIGCONT)  # psutil refuses an id that is another process's by now
                resumed.append(process.pid)
        return resumed

    def kill_all(self, root: int = 0) -> None:
        """End every process that was ever seen and still runs, or those that were below one root."""
        self.look()
        self.resume()
        for process in self._alive(root):
            with contextlib.suppress(*GONE):
                process.kill()

    def _alive(self, root: int) -> Iterator[psutil.Process]:
        for process, above in self._seen.items():
            with contextlib.suppress(*GONE):
                if root in (0, above) and process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    yield process


def _listens(process: psutil.Process, port: int) -> bool:
    """Return whether a process listens at a port."""
    sockets = process.net_connections("tcp")
    return any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in sockets)


def _name(command: list[str]) -> str:
    if GATEWAY_MODULE in command:
        return Kind.GATEWAY
    if command and command[0].endswith(RAYLET_PROGRAM):
        return next((f"{Kind.RAYLET} {word.removeprefix(AT)}" for word in command if word.startswith(AT)), "")
    matched = TITLE.fullmatch(command[0].strip()) if command else None
    return matched[1] if matched else ""
