"""State files of the clusters that run on this machine, one for each, and the end of such a cluster's processes.

`ringserve up` writes a file, other commands read it. This module owns the files and the directories of Ray instances.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path

import psutil

from ringserve.cp_core.errors import ConfigError, NotFound, Unavailable
from ringserve.services.cluster.fork_server import ForkServer
from ringserve.services.config import Config

log = logging.getLogger(__name__)

START_TOLERANCE_SECONDS = 2.0
GRACE_SECONDS = 2.0
"""Seconds for processes that outlive the one of `ringserve up` to end by themselves."""
KILL_SECONDS = 10.0
"""Seconds for killed processes to disappear."""
DIRECTORY_PREFIX = "ringserve-"
SHORT_DIRECTORY = Path("/tmp")
"""Folder for the directories of Ray instances if $TMPDIR is too long: systems limit the paths of sockets."""
MAX_SOCKET_PATH = 107 if sys.platform == "linux" else 103
SOCKET_NAME = f"/{DIRECTORY_PREFIX}12345678/r/session_2026-11-29_19-34-37_224090_4194304/sockets/plasma_store"
"""Longest path that Ray gives a socket, below the folder that holds the RayDirectory."""
OWNER_FILE = "owner"
"""File in a RayDirectory that the starter of that Ray locks."""
OR_TARGET = " or give --target HOST:PORT"
GONE = (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError)
"""Errors about a process that has ended. psutil lets the last two through if it ends between two reads."""


class ClusterStage(StrEnum):
    """Stage of a cluster that `ringserve up` runs.

    STARTING --the first request can be served--> READY --an error, or killed--> ENDED
        |                                           |
        +--told to end, or it cannot start----------+--told to end--> no state file
        |
        +--killed--> ENDED

    The file of a cluster that ended by itself stays for `status`, until `down` or the next `up` of that name.
    """

    STARTING = "starting"
    READY = "ready"
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True)
class ClusterState:
    """Cluster of a `ringserve up`. `pid` and `started` (seconds after boot) together identify the process.

    `rings_serving` of `num_rings` rings serve; `progress` are the lines that its start has told so far. `log` is the
    file of a detached cluster's output. `reason` says why a cluster ended by itself, or does not serve now. A cluster
    that is told to end gives its running turns `drain_seconds`. The file holds the `secret` of the cluster's processes,
    so only its owner may read it.
    """

    name: str
    pid: int
    started: float
    stage: ClusterStage = ClusterStage.STARTING
    num_rings: int = 0
    rings_serving: int = 0
    progress: tuple[str, ...] = ()
    gateway: str = ""
    metrics: str = ""
    router: str = ""
    log: str = ""
    http: str = ""
    reason: str = ""
    drain_seconds: float = 0.0
    secret: str = field(default="", repr=False)

    @property
    def is_running(self) -> bool:
        """True while the process of `ringserve up` lives."""
        return find_process(self.pid, self.started) is not None


def started_after_boot(pid: int) -> float:
    """Return when a process began, in seconds after the machine did: the time of day changes when a clock is set."""
    return psutil.Process(pid).create_time() - psutil.boot_time()


def find_process(pid: int, started: float) -> psutil.Process | None:
    """Return the process, or None if it has ended or its number belongs to another process now."""
    try:
        process = psutil.Process(pid)
        same = abs(started_after_boot(pid) - started) < START_TOLERANCE_SECONDS
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except GONE:
        return None


def end_cluster(state: ClusterState, seconds: float) -> bool:
    """End the processes of a cluster; return True if its own process had to be killed after `seconds`.

    A process may also end by itself meanwhile. Raises Unavailable for processes that do not end.
    """
    process = find_process(state.pid, state.started)
    if process is None:
        return False
    try:
        family = [process]
        _unless_gone(lambda: family.extend(process.children(recursive=True)))
        _unless_gone(process.terminate)
        _, alive = psutil.wait_procs([process], timeout=seconds)
        if not alive:  # it has ended its children too, except those of a Ray that was just starting
            _, family = psutil.wait_procs(family, timeout=GRACE_SECONDS)
        for member in family:
            _unless_gone(member.kill)
        _, left = psutil.wait_procs(family, timeout=KILL_SECONDS)
    except psutil.AccessDenied as error:
        raise Unavailable(f"cluster {state.name!r}: process {error.pid} belongs to another user") from error
    if left:
        raise Unavailable(f"{len(left)} processes of cluster {state.name!r} could not be ended")
    return bool(alive)


def can_fork(config: Config) -> bool:
    """Return whether the workers of a cluster's Ray may be forked: not on a Ray that others started, nor with CUDA.

    A process that has loaded CUDA but not initialized it may be forked, but an import may initialize it.
    """
    return config.model.device == "cpu" and not config.ray.address


class RayDirectory:
    """Directory at `path` for a Ray that this process starts. If nothing removes it, `clear_abandoned` does.

    Only this user may enter it. Ray makes the folder that it is given, and the sockets in it, accessible to everybody,
    so it gets a folder inside this one. The lock on OWNER_FILE shows that the starter lives, even to a container that
    shares the directory but cannot see the starter's process.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=DIRECTORY_PREFIX, dir=_parent_directory()))
        draft = self.path / f"{OWNER_FILE}.tmp"
        self._lock = os.open(draft, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        draft.rename(self.path / OWNER_FILE)
        self.forks: ForkServer | None = None

    def start_forks(self) -> None:
        """Start the server that forks Ray's workers, if there is none. It serves one start of Ray."""
        if self.forks is None:
            try:
                self.forks = ForkServer(self.path)
            except OSError as error:
                log.info("each of Ray's workers imports everything by itself: %s", error)

    def end_forks(self) -> None:
        """End that server. Idempotent."""
        if self.forks is not None:
            self.forks.close()
            self.forks = None

    def remove(self) -> None:
        """Remove the directory, and end the server. Idempotent."""
        self.end_forks()
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _parent_directory() -> Path:
    """Return the folder of RayDirectories: the system's for temporary files, or /tmp if its path is too long."""
    chosen = Path(tempfile.gettempdir())
    is_long = len(os.fsencode(chosen)) + len(SOCKET_NAME) > MAX_SOCKET_PATH
    return SHORT_DIRECTORY if is_long and os.access(SHORT_DIRECTORY, os.W_OK | os.X_OK) else chosen


def clear_abandoned() -> None:
    """End the remaining processes of Ray instances whose starter was killed, and remove their directories.

    Ray's processes end within seconds after their starter. One that does not is known by the logs in the directory that
    it has open for writing; a process that only reads there, such as `less`, goes on.
    """
    for owner in _parent_directory().glob(f"{DIRECTORY_PREFIX}*/{OWNER_FILE}"):
        try:
            with owner.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # the starter lives, it is another user's, or it is just being removed
            continue
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.AccessDenied, *GONE):
                if any(file.mode != "r" and file.path.startswith(f"{owner.parent}/") for file in process.open_files()):
                    process.kill()
        shutil.rmtree(owner.parent, ignore_errors=True)


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


def require_free_name(name: str, pid: int) -> None:
    """Check that no cluster of another process has the name. Raises ConfigError."""
    running = read_state(name)
    if running is not None and running.pid != pid:
        raise ConfigError(
            f"--name: a cluster named {name!r} runs already (pid {running.pid}, "
            f"{f'gateway {running.gateway}' if running.stage is ClusterStage.READY else running.stage}); "
            f"choose another name or 'ringserve down --name {name}'"
        )


def claim_name(state: ClusterState) -> None:
    """Write the first state file of a cluster. Of two that start at once under one name, the later is refused.

    Raises ConfigError.
    """
    require_free_name(state.name, state.pid)
    if read_state(state.name) is None:
        remove_state(state.name)
        if _try_create(state):
            return
        require_free_name(state.name, state.pid)
    write_state(state)


def _try_create(state: ClusterState) -> bool:
    """Create the state file, whole; return False if another process was first. Raises ConfigError."""
    path = _path(state.name)
    draft = _write_draft(state)
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    except OSError as error:
        raise _refusal(path, "written", error) from error
    finally:
        draft.unlink(missing_ok=True)
    return True


def write_state(state: ClusterState) -> None:
    """Replace the state file of a cluster. Raises ConfigError if impossible."""
    path = _path(state.name)
    try:
        draft = _write_draft(state)
    except ConfigError as error:
        if not (isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.ENOSPC, errno.EDQUOT)):
            raise
        _overwrite(path, state)
        return
    try:
        draft.replace(path)
    except OSError as error:
        raise _refusal(path, "written", error) from error


def _overwrite(path: Path, state: ClusterState) -> None:
    """Overwrite the file in place: a full disk has no room for another. Raises ConfigError."""
    try:
        with path.open("r+b") as file:
            file.write(json.dumps(asdict(state)).encode())
            file.truncate()
    except OSError as error:
        raise _refusal(path, "written", error) from error


def _write_draft(state: ClusterState) -> Path:
    path = _path(state.name)
    draft = path.with_suffix(f".{state.pid}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.touch(mode=0o600)
        draft.write_text(json.dumps(asdict(state)), encoding="utf-8")
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise _refusal(path, "written", error) from error
    return draft


def _refusal(path: Path, tried: str, error: OSError) -> ConfigError:
    return ConfigError(f"RINGSERVE_STATE: {path} cannot be {tried}: {error.strerror}")


def read_record(name: str) -> ClusterState | None:
    """Return the cluster of that name as its file tells; ENDED if its process has ended without a word.

    Raises ConfigError for a file that cannot be read; a file that vanishes meanwhile or was cut off is no cluster.
    """
    path = _path(name)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        values |= {"stage": ClusterStage(values["stage"]), "progress": tuple(values["progress"])}
        state = ClusterState(**values)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _refusal(path, "read", error) from error
    except (ValueError, TypeError, KeyError):
        return None
    if state.stage is ClusterStage.ENDED or state.is_running:
        return state
    while_starting = " while it was starting" if state.stage is ClusterStage.STARTING else ""
    return replace(state, stage=ClusterStage.ENDED, reason=f"its process was killed{while_starting}")


def read_state(name: str) -> ClusterState | None:
    """Return the cluster of that name that starts or serves, else None. Raises ConfigError."""
    state = read_record(name)
    return None if state is None or state.stage is ClusterStage.ENDED else state


def require_state(name: str, or_else: str = "") -> ClusterState:
    """Return the cluster of that name that starts or serves. Raises NotFound, which tells how one ended by itself.

    `or_else` is what a user can do instead of starting one.
    """
    state = read_record(name)
    if state is None:
        raise NotFound(f"no cluster named {name!r} runs here; start one with 'ringserve up'{or_else}")
    if state.stage is ClusterStage.ENDED:
        log = f" (log: {state.log})" if state.log else ""
        raise NotFound(
            f"the cluster {name!r} ended by itself: {state.reason}{log}; start it with 'ringserve up'{or_else}"
        )
    return state


def require_ready(name: str) -> ClusterState:
    """Return the serving cluster of that name. Raises NotFound, and Unavailable while it starts."""
    state = require_state(name, OR_TARGET)
    if state.stage is ClusterStage.STARTING:
        raise Unavailable(f"the cluster {starting_line(state)}; 'ringserve status' says when it serves")
    return state


def secret_of(router: str) -> str | None:
    """Return the secret of the cluster on this machine that has this router; None if no file of this user tells."""
    for path in state_directory().glob("*.json"):
        with contextlib.suppress(ConfigError):
            state = read_state(path.stem)
            if state is not None and state.router == router:
                return state.secret or None
    return None


def starting_line(state: ClusterState) -> str:
    """Return how far the start of a cluster is."""
    return f"{state.name!r} is starting, {state.rings_serving} of {state.num_rings} rings"


def remove_state(name: str) -> None:
    """Remove the state file of a cluster, if it is still there. Raises ConfigError if impossible."""
    path = _path(name)
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise _refusal(path, "removed", error) from error
