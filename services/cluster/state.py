"""Which clusters run on this machine: one small file each, so that `down` and `status` find them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from cp_core.errors import ConfigError, NotFound

START_TOLERANCE_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class ClusterState:
    """A running `ringserve up`. `pid` and `started` (seconds after boot) together name the process for good.

    Told to end, it gives its turns `drain_seconds`.
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
        return find_process(self.pid, self.started) is not None


def started_after_boot(pid: int) -> float:
    """When the process began, in seconds after the machine did: time of day moves when somebody sets the clock."""
    return psutil.Process(pid).create_time() - psutil.boot_time()


def find_process(pid: int, started: float) -> psutil.Process | None:
    """The process, unless it is gone or its number now belongs to another."""
    try:
        process = psutil.Process(pid)
        same = abs(started_after_boot(pid) - started) < START_TOLERANCE_SECONDS
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


def state_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """$RINGSERVE_STATE, or ringserve/ in $XDG_STATE_HOME, or in ~/.local/state."""
    if chosen := environment.get("RINGSERVE_STATE"):
        return Path(chosen)
    base = environment.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "ringserve"


def _path(name: str) -> Path:
    if not name.replace("-", "").replace("_", "").isalnum():
        raise ConfigError(f"--name: {name!r} is not allowed; use letters, digits, '-' and '_'")
    return state_directory() / f"{name}.json"


def write_state(state: ClusterState) -> None:
    path = _path(state.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{state.pid}.tmp")
    draft.write_text(json.dumps(asdict(state)), encoding="utf-8")
    draft.replace(path)


def read_state(name: str) -> ClusterState | None:
    """The cluster of that name if it runs; a file left by one that was killed is removed."""
    try:
        state = ClusterState(**json.loads(_path(name).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    if not state.is_running:
        remove_state(name)
        return None
    return state


def require_state(name: str) -> ClusterState:
    """Raises NotFound."""
    state = read_state(name)
    if state is None:
        raise NotFound(f"no cluster named {name!r} runs here; start one with 'ringserve up' or give --target HOST:PORT")
    return state


def remove_state(name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        _path(name).unlink()
