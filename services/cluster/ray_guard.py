"""Start and end of our own Ray, guarded by a token: Ray's calls are pickles, so what reaches it can run code in it.

The local cluster uses it. It changes the environment of this process, and methods of Ray. Ray's control listens on the
machine's own address, even for a node at 127.0.0.1.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import psutil
import ray
from ray import _raylet
from ray._private import node, ray_logging, services
from ray._private import worker as ray_worker
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc
from ray.job_config import JobConfig

from ringserve.cp_core.errors import ConfigError, Unavailable
from ringserve.services.auth.tls import SECRET_VARIABLE
from ringserve.services.cluster import fork_server
from ringserve.services.cluster.fork_server import OUTPUT_VARIABLE, SOCKET_VARIABLE, ForkServer
from ringserve.services.cluster.stopping import keeping_handlers

OBJECT_STORE_BYTES = 80 * 1024 * 1024
"""Bytes of Ray's object store, the least allowed: no tensor passes through it."""
PROBE_SECONDS = 10.0
END_SECONDS = 8.0
AUTH_PREFIX = "RAY_AUTH_"
RAY_DEFAULTS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Each step of a rank is a task of Ray. Its control keeps records of 100,000 of them, 200 MB, that nobody reads.
    "RAY_task_events_report_interval_ms": "0",
    "RAY_enable_metrics_collection": "false",
    # Counts and times of Ray's own events: some 8 % of a service's processor time at rest, for files that nobody reads.
    "RAY_event_stats": "false",
    # Ray would start all workers at 15, and a router would wait for ranks that compute. Ranks raise their own to 15.
    "RAY_worker_niceness": "0",
    "RAY_ROTATION_MAX_BYTES": str(16 << 20),
    "RAY_ROTATION_BACKUP_COUNT": "1",
}
"""Variables of our own Ray, unless the user has set them. With one backup, a process's logs take up to twice the
bytes."""
UNUSED = ("start_monitor", "start_api_server")
"""Methods of Ray's node that start its autoscaler and its dashboard."""
LOG_MONITOR = "start_log_monitor"
"""Method that starts the log monitor, which forwards actors' output from files."""
RAYLET = "start_raylet"
"""Method that starts the raylet, which starts actors."""
RAYLET_SECONDS, RAYLET_LOOK_SECONDS = 25.0, 0.02
"""Maximum seconds to wait for the raylet (Ray waits for it itself afterwards), and seconds between two looks."""
AGENT_OPTIONS = ("--dashboard_agent_command=", "--runtime_env_agent_command=")
"""Options of the raylet with the commands of its agents."""
AGENT_PORTS = ("METRICS_AGENT", "METRICS_EXPORT", "DASHBOARD_AGENT_LISTEN", "RUNTIME_ENV_AGENT")
"""Names of Ray for the files in which the agents tell the raylet their ports."""
NO_PORT = -1
"""Port that Ray's agents report for a service that they do not have."""
NO_AGENT = "sh -c 'trap : INT; while kill -0 $PPID; do sleep 5; done 2>&-'"
"""Command in place of an agent. It ignores Ctrl-C and runs as long as the raylet, which ends if one of its agents
ends."""
VITAL = ("raylet", "gcs_server")
"""Processes of Ray without which no actor lives."""
OWN_SOURCES = ("raylet", "autoscaler")
"""Origins of the lines that Ray itself tells its driver."""

log = logging.getLogger(__name__)


class InstalledCode(JobConfig):
    """Job whose processes import only installed packages.

    Ray puts the current folder of the command first on its workers' import path. A file such as `psutil.py` there would
    take the place of a library.
    """

    def _runtime_env_has_working_dir(self) -> bool:
        return True  # then Ray leaves that folder out; it calls this for nothing else


def start_own_ray(
    num_cpus: int, namespace: str, directory: Path, forks: ForkServer | None = None, *, is_forwarding: bool = True
) -> list[psutil.Process]:
    """Start a Ray for this process and its children alone; return its processes that this one has to end.

    The children inherit the secret of `make_secret`. With `forks` that server forks the workers. If `is_forwarding`,
    workers write to files, which Ray forwards to this process's standard streams; else they write to its standard
    error. Raises Unavailable, and leaves nothing behind then.
    """
    _make_token()
    make_secret()
    tame_output()
    for name, value in RAY_DEFAULTS.items():
        os.environ.setdefault(name, value)
    others = set(psutil.Process().children())
    try:
        with keeping_handlers(), _starting_little(forks, is_forwarding=is_forwarding):
            ray.init(
                address="local",
                namespace=namespace,
                job_config=InstalledCode(),
                num_cpus=num_cpus,
                include_dashboard=False,
                log_to_driver=is_forwarding,
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=str(directory),
                _node_ip_address="127.0.0.1",
                logging_level=logging.WARNING,
            )
    except Exception as error:  # Ray raises nothing narrower if its processes do not start in time
        end_left_behind(families(set(psutil.Process().children()) - others))
        raise Unavailable(f"Ray did not start: {reason_of(error)}") from error
    return list(set(psutil.Process().children()) - others)


@contextlib.contextmanager
def _starting_little(forks: ForkServer | None, *, is_forwarding: bool) -> Iterator[None]:
    """Let Ray start no autoscaler, dashboard or agents: `ray.init` has no option, so methods are replaced.

    An own Ray has no use for them: no runtime environment is made, and no metrics of Ray are read. Each is a process of
    50 MB that imports Ray, and `ray.init` waits for the agents. The log monitor is another, which starts last, and only
    if Ray `is_forwarding`. `ray.init` looks for the raylet only once a second, so the replaced `start_raylet` returns
    when the raylet is there. With `forks` the raylet asks that server for its workers.
    """
    before = {name: vars(node.Node)[name] for name in (*UNUSED, LOG_MONITOR, RAYLET) if name in vars(node.Node)}
    start_process = services.start_ray_process
    needs_agents = True

    def start_raylet(started: Any, *arguments: Any, **options: Any) -> None:
        nonlocal needs_agents
        needs_agents = not _told_no_ports(started)  # may raise, so it comes before the environment is changed
        if forks is not None and hasattr(started, "_ray_params"):
            started._ray_params.setup_worker_path = fork_server.__file__
            # Both are for the raylet alone.
            os.environ[SOCKET_VARIABLE] = str(forks.path)
            if not is_forwarding:
                os.environ[OUTPUT_VARIABLE] = f"/proc/{os.getpid()}/fd/2"
        try:
            before[RAYLET](started, *arguments, **options)
        finally:
            os.environ.pop(SOCKET_VARIABLE, None)
            os.environ.pop(OUTPUT_VARIABLE, None)
        deadline = time.monotonic() + RAYLET_SECONDS
        while not started.get_gcs_client().get_all_node_info(RAYLET_SECONDS) and time.monotonic() < deadline:
            time.sleep(RAYLET_LOOK_SECONDS)

    def start_alone(command: list[str], *arguments: Any, **options: Any) -> Any:
        for option in () if needs_agents else AGENT_OPTIONS:
            command = [option + NO_AGENT if each.startswith(option) else each for each in command]
        return start_process(command, *arguments, **options)

    for name in before:
        setattr(node.Node, name, start_raylet if name == RAYLET else lambda *_, **__: None)
    services.start_ray_process = start_alone
    try:
        yield
    finally:
        services.start_ray_process = start_process
        for name, start in before.items():
            setattr(node.Node, name, start)
    if LOG_MONITOR in before and is_forwarding:
        before[LOG_MONITOR](ray_worker.global_worker.node)


def _told_no_ports(started: Any) -> bool:
    """Tell the raylet of a node that starts that its agents have no ports. Return False if this Ray cannot be told.

    Another version of Ray may lack these functions; it then starts its agents.
    """
    library: Any = _raylet
    try:
        for name in AGENT_PORTS:
            file = getattr(library, f"{name}_PORT_NAME")
            library.persist_port(started.get_session_dir_path(), started._node_id, file, NO_PORT)
    except AttributeError:
        return False
    return True


def find_ended(processes: Iterable[psutil.Process]) -> str:
    """Return the name of a process of an own Ray that has ended, though no actor lives without it; empty if none has.

    Example: the raylet ends itself if one of its agents is killed, perhaps by the system, which is short of memory.
    """
    for process in processes:
        name = ""
        try:
            name = process.name()
            has_ended = process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess as error:  # somebody has waited for it; psutil remembers the name that it read
            name, has_ended = name or error.name or "", True
        if has_ended and name in VITAL:
            return name
    return ""


def families(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return these processes and all their descendants; ended processes have none."""
    members = list(processes)
    for process in list(members):
        with contextlib.suppress(psutil.NoSuchProcess):
            members.extend(process.children(recursive=True))
    return members


def end_left_behind(processes: Iterable[psutil.Process]) -> None:
    """End processes of a Ray that has ended: its agents sometimes hang on their way out."""
    _, alive = psutil.wait_procs(processes, timeout=END_SECONDS)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def reason_of(error: BaseException) -> str:
    """Return Ray's reason for an error, in one line."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def make_secret() -> None:
    """Make the secret by which this process and its children know each other if there is no TLS. Idempotent."""
    os.environ.setdefault(SECRET_VARIABLE, secrets.token_hex(32))


def _make_token() -> None:
    """Make a token that only the children of this process know. Ray's own would be in a file and stay the same."""
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    # Ray has read both at its import. Its stubs lack these names.
    raylet: Any = _raylet
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


def without_ray_token(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without Ray's token, for processes that clients reach."""
    return {name: value for name, value in environment.items() if not name.startswith(AUTH_PREFIX)}


def check_guarded(address: str, *, is_insecure: bool) -> None:
    """Check that a Ray that was joined, with its control (GCS) at `address`, wants a token. Raises ConfigError."""
    if not is_insecure and not asks_for_token(address):
        raise ConfigError(
            f"ray.address: the Ray at {address} asks for no token, so any process that reaches it can run code; "
            f"start it with RAY_AUTH_MODE=token, or say internal_tls.insecure: true"
        )


def asks_for_token(address: str, token: str = "") -> bool:
    """Return whether Ray's control refuses this token, or a call without one.

    A control that only speaks TLS refuses too.
    """
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    messages: Any = gcs_service_pb2
    with grpc.insecure_channel(address) as channel:
        stub = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
        try:
            stub.CheckAlive(messages.CheckAliveRequest(), timeout=PROBE_SECONDS, metadata=metadata)
        except grpc.RpcError:
            return True
    return False


def tame_output() -> None:
    """Let Ray forward every line of our processes, and nothing of its own to the terminal.

    Else Ray folds lines that differ only in numbers, such as lines of two rings, and writes colour codes into files.
    Its own lines (raylet, autoscaler) become debug lines of our log. Idempotent.
    """
    vars(ray_logging)["RAY_DEDUP_LOGS"] = False
    if not sys.stderr.isatty():
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    vars(ray_worker)["print_worker_logs"] = _forward


_print_worker_logs = ray_worker.print_worker_logs


def _forward(data: dict[str, Any], *arguments: Any, **options: Any) -> None:
    if data.get("pid") in OWN_SOURCES:
        for line in data.get("lines", []):
            log.debug("Ray: %s", line)
    else:
        _print_worker_logs(data, *arguments, **options)
