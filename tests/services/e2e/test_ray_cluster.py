"""The rings on a Ray cluster that is there already, started as the Helm chart starts them."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from services.reference import StockModel
from tests.helm.charts import CHART, only, render
from tests.services.e2e.cluster import Family, Inference, Ringserve, ids, wait_until
from tests.services.e2e.gateways import started_gateway
from tests.services.e2e.ports import free_port
from tests.workers.models import random_tokens

START_SECONDS = 100.0
STOP_SECONDS = 60.0


@dataclass(frozen=True)
class Head:
    """The head's container, as far as one process can be one."""

    process: subprocess.Popen[bytes]
    router: str
    log: Path


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


def ray_start_command(ray_port: int, directory: Path) -> str:
    """As KubeRay makes it from rayStartParams; this one node is head and worker of both pools at once."""
    groups = only(render(), "RayCluster")["spec"]["workerGroupSpecs"]
    resources = (
        groups[0]["rayStartParams"]["resources"].replace("}", r", \"ringserve-decode\": 2}").replace(": 1,", ": 2,")
    )
    return (
        f"ray start --head --block --port={ray_port} --temp-dir={directory} --num-cpus=4 --include-dashboard=false "
        f"--object-store-memory=100000000 --disable-usage-stats --resources={resources}"
    )


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
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["/bin/bash", str(CHART / "files/head.sh"), str(path)],
            env=environment(ringserve, ray_start_command(ray_port, ray_directory)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    family = Family(process.pid)
    try:
        yield Head(process, f"127.0.0.1:{config['router']['listen'].rpartition(':')[2]}", log)
    finally:
        family.look()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(STOP_SECONDS)
        family.kill()  # agents of a Ray that has ended may hang
        shutil.rmtree(ray_directory, ignore_errors=True)


def is_ready(head: Head, door: Inference) -> bool:
    assert head.process.poll() is None, head.log.read_text()
    try:
        groups = door.info().groups
    except grpc.RpcError:
        return False
    return len(groups) == 2 and all(group.state == "ready" for group in groups)


@pytest.mark.timeout(300)
def test_rings_serve_on_a_cluster_of_ray_behind_a_gateway_of_their_own(
    ringserve: Ringserve, model_path: Path, stock: StockModel, tmp_path: Path
) -> None:
    ray_port = free_port()
    config = configuration(model_path, ray_port, free_port())
    prompt = random_tokens(50, seed=3)
    with running_head(ringserve, tmp_path, config, ray_port) as head:
        with started_gateway(ringserve, head.router, model_path, tmp_path / "gateway.log") as gateway:
            door = Inference(gateway.address)
            wait_until(lambda: is_ready(head, door), "no two rings are ready", START_SECONDS)
            complete = door.answer(ids(prompt, max_tokens=5))
            assert list(complete.output_ids) == stock.greedy(prompt, 5).token_ids
            info = door.info()
            for address in (info.router_metrics_endpoint, *(group.metrics_endpoint for group in info.groups)):
                with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
                    assert b"ringserve_build_info" in answer.read()
        head.process.send_signal(signal.SIGTERM)
        assert head.process.wait(STOP_SECONDS) == 0, head.log.read_text()


@pytest.mark.timeout(180)
def test_the_head_ends_when_the_rings_cannot_be_run(ringserve: Ringserve, model_path: Path, tmp_path: Path) -> None:
    ray_port = free_port()
    config = configuration(model_path, ray_port, free_port())
    config["prefill"]["tp"] = 3
    with running_head(ringserve, tmp_path, config, ray_port) as head:
        assert head.process.wait(STOP_SECONDS) == 1
        assert "prefill.tp: 3" in head.log.read_text()
