"""Faults of a chaos run: which process is hit, in which phase of a turn, and how."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

import psutil

from services.cluster.state import GONE

GATEWAY_MODULE = "services.gateway.process"
TITLE = re.compile(r"ray::(router|\S+ leader|\S+ rank \d+)(?:\.\w+)?")
"""Title of a process of ours as Ray sets it: its name, and the method that it runs."""


class Kind(StrEnum):
    """Kinds of processes."""

    GATEWAY = "gateway"
    ROUTER = "router"
    PREFILL_LEADER = "prefill-leader"
    PREFILL_RANK = "prefill-rank"
    DECODE_LEADER = "decode-leader"
    DECODE_RANK = "decode-rank"
    RAYLET = "raylet"


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
    """Signals: SIGKILL and SIGSTOP."""

    KILL = "kill"
    STOP = "stop"


SIGNALS = {How.KILL: signal.SIGKILL, How.STOP: signal.SIGSTOP}
ROLES = {
    Kind.PREFILL_LEADER: "prefill",
    Kind.PREFILL_RANK: "prefill",
    Kind.DECODE_LEADER: "decode",
    Kind.DECODE_RANK: "decode",
}
HIT_RANK = 1
"""Number of the rank that is hit, or 0 where the ring has one."""


@dataclass(frozen=True)
class Cell:
    """Cell of the matrix."""

    kind: Kind
    phase: Phase
    how: How

    def __str__(self) -> str:
        return f"{self.kind}/{self.phase}/{self.how}"

    def matches(self, pattern: str) -> bool:
        """Return True if PROCESS/PHASE/HOW matches a pattern with `*`; parts at its end may be missing."""
        return fnmatchcase(str(self), pattern) or fnmatchcase(str(self), pattern + "/*")

    @property
    def role(self) -> str:
        """Role of the ring that is hit; empty where the process belongs to none."""
        return ROLES.get(self.kind, "")


def matrix() -> list[Cell]:
    """Return all cells, the phases of one process beside each other."""
    return [Cell(kind, phase, how) for kind in Kind for how in How for phase in Phase]


def choose(patterns: Iterable[str]) -> list[Cell]:
    """Return the cells that match one of the patterns; all without patterns."""
    given = list(patterns)
    return [cell for cell in matrix() if not given or any(cell.matches(pattern) for pattern in given)]


class Processes:
    """Processes below one process, by what they show in `ps`. Every process that was ever seen is remembered."""

    def __init__(self, root: int) -> None:
        self._root = psutil.Process(root)
        self._seen: set[psutil.Process] = {self._root}
        self._stopped: list[psutil.Process] = []
        self._pids: dict[str, int] = {}

    def look(self) -> dict[str, int]:
        """Return the ids of the processes that run now, by name: "gateway", "router", "prefill-0 rank 1"."""
        found: dict[str, int] = {}
        with contextlib.suppress(*GONE):
            for process in self._root.children(recursive=True):
                self._seen.add(process)
                with contextlib.suppress(*GONE):
                    if process.status() != psutil.STATUS_ZOMBIE and (name := _name(process.cmdline())):
                        found[name] = process.pid
        self._pids = found
        return found

    def pid_of(self, name: str) -> int:
        """Return the id of the process of a name at the last look; 0 where none ran."""
        return self._pids.get(name, 0)

    def name_of(self, kind: Kind, ring: str) -> str:
        """Return the name of the process of a kind, of this ring where it belongs to one; empty where none was seen."""
        pids = self._pids
        if kind in (Kind.PREFILL_RANK, Kind.DECODE_RANK):
            names = [f"{ring} rank {HIT_RANK}", f"{ring} rank 0"]
        elif kind in (Kind.PREFILL_LEADER, Kind.DECODE_LEADER):
            names = [f"{ring} leader"]
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

    def kill_all(self) -> None:
        """End every process that was ever seen and still runs."""
        self.look()
        self.resume()
        for process in self._alive():
            with contextlib.suppress(*GONE):
                process.kill()

    def _alive(self) -> Iterator[psutil.Process]:
        for process in self._seen:
            with contextlib.suppress(*GONE):
                if process.pid != os.getpid() and process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    yield process


def _name(command: list[str]) -> str:
    if GATEWAY_MODULE in command:
        return Kind.GATEWAY
    matched = TITLE.fullmatch(command[0].strip()) if command else None
    return matched[1] if matched else ""
