"""A Ray cluster that is there already, with the head as the Helm chart starts it, and nodes that come and go."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.helm.charts import CHART, mounted_config, only, render
from tests.services.e2e.cluster import Family, Ringserve, wait_until
from tests.waiting import START_SECONDS, WAIT_SECONDS

DRAIN_SECONDS = int(WAIT_SECONDS)


@dataclass(frozen=True)
class Head:
    """The head's container, as far as one process can be one."""

    process: subprocess.Popen[bytes]
    router: str
    log: Path
    environment: Mapping[str, str]
    ray_address: str


def configuration(model_path: Path, ray_port: int, router_port: int) -> dict[str, Any]:
    """Render the chart's configuration with ports of the system's choice and a model of the tests."""
    config: dict[str, Any] = yaml.safe_load(mounted_config(render())["config.yaml"])
    config["model"]["path"] = str(model_path)
    config["ray"]["address"] = f"127.0.0.1:{ray_port}"
    config["router"]["listen"] = f"0.0.0.0:{router_port}"
    config["metrics"] = {name: "0.0.0.0:0" for name in ("router", "prefill", "decode")}
    config["kv_cache"] = {"tokens_per_rank": 4096}
    return config


HEAD_OPTIONS = "--block --num-cpus=0 --object-store-memory=100000000 --include-dashboard=false --disable-usage-stats"


def head_start_command(ray_port: int, directory: Path) -> str:
    return f"ray start --head --port={ray_port} --temp-dir={directory} {HEAD_OPTIONS}"


def node_start_command(ray_address: str, address: str, role: str) -> str:
    """Return the command that KubeRay makes for a pod of the role from the chart's rayStartParams, through a shell."""
    rings = only(render(), "RayCluster")["spec"]["workerGroupSpecs"]
    (parameters,) = (ring["rayStartParams"] for ring in rings if ring["groupName"] == role)
    options = " ".join(f"--{name}={value}" for name, value in parameters.items())
    return f"ray start --address={ray_address} --node-ip-address={address} --block --disable-usage-stats {options}"


def environment(ringserve: Ringserve, command: str) -> Mapping[str, str]:
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    token = secrets.token_hex(32)
    ray = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "KUBERAY_GEN_RAY_START_CMD": command}
    return dict(ringserve.environment) | ray | {"PATH": programs}


@contextmanager
def running_head(ringserve: Ringserve, directory: Path, config: Mapping[str, Any], ray_port: int) -> Iterator[Head]:
    """Run head.sh; whatever it started is gone at the end."""
    path, log = directory / "config.yaml", directory / "head.log"
    path.write_text(yaml.safe_dump(dict(config)))
    # Sockets' names are bounded: a short path.
    ray_directory = Path(tempfile.mkdtemp(prefix="ringserve-test-"))
    variables = environment(ringserve, head_start_command(ray_port, ray_directory))
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["/bin/bash", str(CHART / "files/head.sh"), str(path), str(DRAIN_SECONDS)],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    family = Family(process.pid)
    try:
        router_port = config["router"]["listen"].rpartition(":")[2]
        yield Head(process, f"127.0.0.1:{router_port}", log, variables, f"127.0.0.1:{ray_port}")
    finally:
        family.look()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(WAIT_SECONDS)
        family.kill()  # agents of a Ray that has ended may hang
        shutil.rmtree(ray_directory, ignore_errors=True)


@contextmanager
def running_node(head: Head, address: str, role: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a Ray node with an address of its own, which stands for a pod of the role; wait until it has started.

    A node that ends by itself is started again, as Kubernetes does with a pod's container. Ray gives a node 30 seconds
    to come up, which is little on a busy machine.
    """
    command = f"exec {node_start_command(head.ray_address, address, role)}"
    families: list[Family] = []

    def start() -> subprocess.Popen[bytes]:
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["/bin/bash", "-c", command],
                env=dict(head.environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        families.append(Family(process.pid))
        return process

    process = start()

    def has_started() -> bool:
        nonlocal process
        if process.poll() is not None:
            families[-1].kill()
            process = start()
        return "Ray runtime started" in log.read_text()

    try:
        wait_until(has_started, f"node {address} has started", START_SECONDS)
        yield process
    finally:
        families[-1].look()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(WAIT_SECONDS)
        families[-1].kill()
