"""A Ray cluster that is there already, with the head as the Helm chart starts it, and nodes that come and go."""

from __future__ import annotations

import json
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

from tests.helm.charts import CHART, only, render
from tests.services.e2e.cluster import Family, Ringserve, wait_until

START_SECONDS = 100.0
STOP_SECONDS = 60.0
DRAIN_SECONDS = 30


@dataclass(frozen=True)
class Head:
    """The head's container, as far as one process can be one."""

    process: subprocess.Popen[bytes]
    router: str
    log: Path
    environment: Mapping[str, str]
    ray_address: str


def configuration(model_path: Path, ray_port: int, router_port: int) -> dict[str, Any]:
    """What the chart renders, with ports of the system's choice and a model of our own."""
    config: dict[str, Any] = yaml.safe_load(only(render(), "ConfigMap")["data"]["config.yaml"])
    config["model"]["path"] = str(model_path)
    config["ray"]["address"] = f"127.0.0.1:{ray_port}"
    config["router"]["listen"] = f"0.0.0.0:{router_port}"
    config["metrics"] = {name: "0.0.0.0:0" for name in ("router", "prefill", "decode")}
    config["kv_cache"] = {"tokens_per_rank": 4096}
    config["timeouts"]["start"] = START_SECONDS
    return config


OPTIONS = "--block --object-store-memory=100000000 --disable-usage-stats"


def ray_start_command(ray_port: int, directory: Path, *, is_worker: bool) -> str:
    """As KubeRay makes it from rayStartParams; a head that is a worker too is one of both pools at once."""
    groups = only(render(), "RayCluster")["spec"]["workerGroupSpecs"]
    resources = (
        groups[0]["rayStartParams"]["resources"].replace("}", r", \"ringserve-decode\": 2}").replace(": 1,", ": 2,")
    )
    offered = f"--num-cpus=4 --resources={resources}" if is_worker else "--num-cpus=0"
    return f"ray start --head --port={ray_port} --temp-dir={directory} --include-dashboard=false {OPTIONS} {offered}"


def environment(ringserve: Ringserve, command: str) -> Mapping[str, str]:
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    token = secrets.token_hex(32)
    ray = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "KUBERAY_GEN_RAY_START_CMD": command}
    return dict(ringserve.environment) | ray | {"PATH": programs}


@contextmanager
def running_head(
    ringserve: Ringserve, directory: Path, config: Mapping[str, Any], ray_port: int, *, is_worker: bool = True
) -> Iterator[Head]:
    """Run head.sh; whatever it started is gone at the end."""
    path, log = directory / "config.yaml", directory / "head.log"
    path.write_text(yaml.safe_dump(dict(config)))
    # Sockets' names are bounded: a short path.
    ray_directory = Path(tempfile.mkdtemp(prefix="ringserve-test-"))
    variables = environment(ringserve, ray_start_command(ray_port, ray_directory, is_worker=is_worker))
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
            process.wait(STOP_SECONDS)
        family.kill()  # agents of a Ray that has ended may hang
        shutil.rmtree(ray_directory, ignore_errors=True)


@contextmanager
def running_node(
    head: Head, address: str, resources: Mapping[str, int], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A worker's pod, as far as a node of an address of its own can be one; it has started.

    As a pod's, its container is started again where it ends by itself: Ray gives a node 30 seconds to come up, which is
    little on a busy machine.
    """
    command = ["ray", "start", f"--address={head.ray_address}", f"--node-ip-address={address}", *OPTIONS.split()]
    families: list[Family] = []

    def start() -> subprocess.Popen[bytes]:
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, "--num-cpus=1", f"--resources={json.dumps(dict(resources))}"],
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
            process.wait(STOP_SECONDS)
        families[-1].kill()
