"""Nodes of a chaos run on a Ray cluster: a head, and a worker that is lost and comes back, as machines do.

If network namespaces are permitted, this process and all else but the worker are in one, the hub. The worker is in
another, at the end of a cable that can be cut. Otherwise both nodes have loopback addresses. A cluster of a chaos run
starts and stops its nodes.
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from bench.chaos.faults import Processes
from bench.namespaces import (
    Command,
    address_commands,
    address_of,
    cable_commands,
    cut_commands,
    hub_commands,
    run_all,
)
from ringserve.cp_core.errors import Unavailable
from ringserve.services.auth.tls import SECRET_VARIABLE
from ringserve.services.config import Config

NETWORK, HEAD, WORKER = 1, 0, 1
"""Numbers of the network between the nodes, and of its two members."""
LOOPBACK_ADDRESSES = ("127.0.0.2", "127.0.0.3")
NEAR, FAR = "near", "far"
"""Resources of Ray that place one ring of each role on the head, and one on the worker."""
HEALTH = {
    "RAY_health_check_period_ms": "400",
    "RAY_health_check_timeout_ms": "800",
    "RAY_health_check_failure_threshold": "3",
}
"""Settings of the head, as in the Helm chart: Ray takes a silent node for dead after 3.6 s instead of a minute."""
START = (sys.executable, "-P", "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats")
STARTED = "Ray runtime started"
"""Text that `ray start` prints once all processes of a node run."""
OBJECT_STORE_BYTES = 100_000_000
ENTER_SECONDS = 10.0
HEAD_SECONDS = 60.0
STOP_SECONDS = 20.0
POLL_SECONDS = 0.05


def make_hub() -> None:
    """Move this process to a new network namespace, the hub. Raises Unavailable."""
    run_all(hub_commands(NETWORK))


def settings_of(config: Config) -> list[str]:
    """Return values of the configuration that place one ring of each role on each node, sized as those of `config`."""
    values: dict[str, object] = {"internal_tls.insecure": "true"}
    for role in ("prefill", "decode"):
        first = config.pools_of(role)[0]
        values |= {f"{role}.rings": 1, f"ray.{role}_resource": NEAR}
        far = {"rings": 1, "cp": first.cp, "tp": first.tp, "threads_per_rank": first.threads_per_rank, "resource": FAR}
        values |= {f"{role}.pools.{FAR}.{key}": value for key, value in far.items()}
    return [f"{key}={value}" for key, value in values.items()]


class WorkerNode:
    """Worker node. After `start`, call `keep` again and again: it restarts a node that has ended."""

    def __init__(self, address: str, command: Command, environment: Mapping[str, str], log: Path, *, has_link: bool):
        """Take the command of its processes, and whether it is to have a namespace and a link of its own."""
        self.address = address
        self._command = _in_namespace(command) if has_link else command
        self._environment = environment
        self._log = log
        self._has_link = has_link
        self._is_cut = False
        self._processes = Processes()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, processes: Processes) -> None:
        """Start the node and add its processes to `processes`. Raises Unavailable."""
        self._processes = processes
        with self._log.open("ab") as log:
            started = self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=self._environment,
            )
        processes.add(started.pid)
        assert started.stdin is not None, "it has a pipe"
        with started.stdin as pipe:
            if self._has_link:
                _await_namespace(started)
                run_all(cable_commands(NETWORK, started.pid))
                pipe.write(b"\n")
        self._is_cut = False

    def cut(self) -> None:
        """Cut the link of the node. Raises Unavailable."""
        assert self._process is not None, "it was started"
        run_all(cut_commands(self._process.pid, is_cut=True))
        self._is_cut = True

    def heal(self) -> None:
        """Join the link again if it is cut. Raises Unavailable."""
        if self._is_cut and self._process is not None and self._process.poll() is None:
            run_all(cut_commands(self._process.pid, is_cut=False))
        self._is_cut = False

    def keep(self) -> None:
        """Restart the node if it has ended, without its earlier processes, like a machine after a reboot."""
        if self._process is not None and self._process.poll() is not None:
            self._processes.kill_all(self._process.pid)
            self.start(self._processes)

    def stop(self) -> None:
        """End the node in order if possible; the cluster's `Processes` end what is left of it. Idempotent."""
        _terminate(self._process)
        self._process = None


class Nodes:
    """Head and worker node: `start`, then `stop`. The cluster that is to run on them takes `environment`."""

    def __init__(self, directory: Path, number: int, num_threads: int, *, has_link: bool) -> None:
        """Take a directory for logs, and the number of threads of ranks that each node has room for."""
        addresses = (address_of(NETWORK, HEAD), address_of(NETWORK, WORKER)) if has_link else LOOPBACK_ADDRESSES
        self._temporary = Path(tempfile.mkdtemp(prefix="ringserve-"))  # names of sockets are bounded: a short path
        self._log = directory / f"head-{number}.log"
        self._num_threads = num_threads
        self._head: subprocess.Popen[bytes] | None = None
        self.ray_address = f"{addresses[HEAD]}:{_free_port(addresses[HEAD])}"
        tokens = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        secret = {SECRET_VARIABLE: secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
        self.environment: Mapping[str, str] = os.environ | HEALTH | tokens | secret
        join = self._command(addresses[WORKER], FAR, f"--address={self.ray_address}")
        log = directory / f"worker-{number}.log"
        self.worker = WorkerNode(addresses[WORKER], join, self.environment, log, has_link=has_link)

    def _command(self, address: str, resource: str, *options: str) -> Command:
        room = f'{{"{resource}": {self._num_threads}}}'
        sizes = (f"--num-cpus={self._num_threads}", f"--object-store-memory={OBJECT_STORE_BYTES}")
        # Each node has a folder of its own, because it reports the logs in its folder to the other nodes.
        places = (f"--node-ip-address={address}", f"--temp-dir={self._temporary / resource}")
        return (*START, *places, *sizes, f"--resources={room}", *options)

    def start(self, processes: Processes) -> None:
        """Start both nodes and add their processes to `processes`. Raises Unavailable."""
        host, _, port = self.ray_address.rpartition(":")
        options = ("--head", f"--port={port}", "--include-dashboard=false")
        with self._log.open("wb") as log:
            self._head = subprocess.Popen(
                self._command(host, NEAR, *options),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=self.environment,
            )
        processes.add(self._head.pid)
        deadline = time.monotonic() + HEAD_SECONDS
        # If the worker came first, `ringserve up` would take it for its own node.
        while STARTED not in self._log.read_text(encoding="utf-8", errors="replace"):
            if self._head.poll() is not None or time.monotonic() > deadline:
                raise Unavailable(f"the head of a Ray cluster did not start; its log was {self._log}")
            time.sleep(POLL_SECONDS)
        self.worker.start(processes)

    def stop(self) -> None:
        """End both nodes in order if possible; the cluster's `Processes` end what is left of them. Idempotent."""
        self.worker.stop()
        _terminate(self._head)
        self._head = None
        shutil.rmtree(self._temporary, ignore_errors=True)


def _in_namespace(command: Command) -> Command:
    """Return a command that runs this one in a namespace of its own, once a line on stdin says that the cable is in."""
    setup = (shlex.join(each) for each in address_commands(NETWORK, WORKER))
    script = " && ".join(("read -r line", *setup, f"exec {shlex.join(command)}"))
    return ("unshare", "--net", "--", "sh", "-c", script)


def _await_namespace(process: subprocess.Popen[bytes]) -> None:
    """Wait until a process is in a network namespace of its own. Raises Unavailable."""
    deadline = time.monotonic() + ENTER_SECONDS
    own = os.readlink("/proc/self/ns/net")
    while _namespace_of(process.pid) in ("", own):
        if process.poll() is not None or time.monotonic() > deadline:
            raise Unavailable("the worker node did not get a network namespace of its own")
        time.sleep(POLL_SECONDS)


def _namespace_of(pid: int) -> str:
    """Return what identifies the network namespace of a process; empty if it has ended."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


def _terminate(process: subprocess.Popen[bytes] | None) -> None:
    if process is not None and process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
