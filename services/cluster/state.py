"""State files of the clusters that run on this machine, one for each, and the end of such a cluster's processes."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from cp_core.errors import ConfigError, NotFound, Unavailable

START_TOLERANCE_SECONDS = 2.0
KILL_SECONDS = 10.0
"""Seconds for killed processes to disappear."""
GONE = (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError)
"""Errors about a process that has ended. psutil passes on the last two where it ends between two of its reads."""


@dataclass(frozen=True, kw_only=True)
class ClusterState:
    """A running `ringserve up`. `pid` and `started` (seconds after boot) together identify the process.

    A cluster that is told to end lets its turns go on for `drain_seconds`.
    """

    name: str
    pid: int
    started: float
    gateway: str
    metrics: str
    router: str
    log: str = ""
    http: str = ""
    drain_seconds: float = 0.0

    @property
    def is_running(self) -> bool:
        """True while the process of `ringserve up` lives."""
        return find_process(self.pid, self.started) is not None


def started_after_boot(pid: int) -> float:
    """Return when a process began, in seconds after the machine did: the time of day changes when a clock is set."""
    return psutil.Process(pid).create_time() - psutil.boot_time()


def find_process(pid: int, started: float) -> psutil.Process | None:
    """Return the process, or None where it has ended or its number belongs to another process now."""
    try:
        process = psutil.Process(pid)
        same = abs(started_after_boot(pid) - started) < START_TOLERANCE_SECONDS
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except GONE:
        return None


def end_cluster(state: ClusterState, seconds: float) -> bool:
    """End the processes of a cluster; return True where they had to be killed after `seconds`.

    A process that ends by itself meanwhile is an ended process. Raises Unavailable for processes that do not end.
    """
    process = find_process(state.pid, state.started)
    if process is None:
        return False
    try:
        family = [process]
        _unless_gone(lambda: family.extend(process.children(recursive=True)))
        _unless_gone(process.terminate)
        _, alive = psutil.wait_procs([process], timeout=seconds)
        for member in family if alive else ():
            _unless_gone(member.kill)
        _, left = psutil.wait_procs(family, timeout=KILL_SECONDS)
    except psutil.AccessDenied as error:
        raise Unavailable(f"cluster {state.name!r}: process {error.pid} belongs to another user") from error
    if left:
        raise Unavailable(f"{len(left)} processes of cluster {state.name!r} could not be ended")
    return bool(alive)


def _unless_gone(act: Callable[[], object]) -> None:
    """Act on a process that may have ended."""
    with contextlib.suppress(*GONE):
        act()


def state_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Return $RINGSERVE_STATE, or ringserve/ in $XDG_STATE_HOME or else in ~/.local/state."""
    if chosen := environment.get("RINGSERVE_STATE"):
        return Path(chosen)
    base = environment.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "ringserve"


def _path(name: str) -> Path:
    if not name.replace("-", "").replace("_", "").isalnum():
        raise ConfigError(f"--name: {name!r} is not allowed; use letters, digits, '-' and '_'")
    return state_directory() / f"{name}.json"


def write_state(state: ClusterState) -> None:
    """Write the state file of a cluster. Raises ConfigError where that is impossible."""
    path = _path(state.name)
    draft = path.with_suffix(f".{state.pid}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(asdict(state)), encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"RINGSERVE_STATE: {path} cannot be written: {error.strerror}") from error


def read_state(name: str) -> ClusterState | None:
    """Return the running cluster of that name, and remove the file of a cluster that was killed.

    Raises ConfigError for a file that cannot be read; a file that vanishes meanwhile is no cluster.
    """
    path = _path(name)
    try:
        state = ClusterState(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"RINGSERVE_STATE: {path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError):
        return None
    if not state.is_running:
        remove_state(name)
        return None
    return state


def require_state(name: str) -> ClusterState:
    """Return the running cluster of that name. Raises NotFound."""
    state = read_state(name)
    if state is None:
        raise NotFound(f"no cluster named {name!r} runs here; start one with 'ringserve up' or give --target HOST:PORT")
    return state


def remove_state(name: str) -> None:
    """Remove the state file of a cluster, if it is still there. Raises ConfigError where that is impossible."""
    path = _path(name)
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"RINGSERVE_STATE: {path} cannot be removed: {error.strerror}") from error
