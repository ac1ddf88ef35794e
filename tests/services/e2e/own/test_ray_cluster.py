"""The rings on a Ray cluster that is there already, started as the Helm chart starts them."""

from __future__ import annotations

import json
import signal
import subprocess
import urllib.request
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import grpc
import psutil

from ringserve.client import Client, RingInfo, ServerInfo
from ringserve.client.retries import NO_RETRIES
from ringserve.services.offline.reference import StockModel
from tests.services.e2e.cluster import Inference, Ringserve, ids, wait_until
from tests.services.e2e.gateways import started_gateway
from tests.services.e2e.ports import free_port
from tests.services.e2e.ray_clusters import (
    Head,
    configuration,
    running_head,
    running_node,
)
from tests.services.e2e.talking import under_load
from tests.waiting import START_SECONDS, WAIT_SECONDS
from tests.workers.models import random_tokens

NUM_TOKENS = 200
READY = "ringserve: ready, router at"


def is_router_there(inference: Inference) -> bool:
    try:
        inference.info()
    except grpc.RpcError:
        return False
    return True


def is_ready(head: Head, inference: Inference) -> bool:
    assert head.process.poll() is None, head.log.read_text()
    try:
        rings = inference.info().rings
    except grpc.RpcError:
        return False
    return len(rings) == 2 and all(ring.state == "ready" for ring in rings)


def check_metrics(info: ServerInfo) -> None:
    for address in (info.router_metrics_endpoint, *(ring.metrics_endpoint for ring in info.rings)):
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=WAIT_SECONDS) as answer:
            assert b"ringserve_build_info" in answer.read()


def up_of(head: Head) -> psutil.Process:
    """Return the process of `ringserve up`, which head.sh has started beside Ray."""
    (found,) = (each for each in psutil.Process(head.process.pid).children() if "up" in each.cmdline())
    return found


def test_rings_serve_on_the_nodes_of_pods_that_come_and_go_and_end_when_their_turns_have(
    ringserve: Ringserve, model_path: Path, stock: StockModel, tmp_path: Path
) -> None:
    """A deleted pod's hook drains the ring, its node goes, another node comes, and turns wait for the ring.

    When `ringserve up` dies, another takes the ranks over. The head's end lets turns end.
    """
    ray_port = free_port()
    config = configuration(model_path, ray_port, free_port())
    for role in ("prefill", "decode"):
        config[role]["cp"] = 1
    nodes = {"127.0.0.2": "prefill", "127.0.0.3": "decode", "127.0.0.4": "prefill"}
    with running_head(ringserve, tmp_path, config, ray_port) as head, ExitStack() as running:

        def start(address: str) -> subprocess.Popen[bytes]:
            return running.enter_context(running_node(head, address, nodes[address], tmp_path / f"{address}.log"))

        gateway = running.enter_context(started_gateway(ringserve, head.router, model_path, tmp_path / "gateway.log"))
        inference = Inference(gateway.address)
        wait_until(lambda: is_router_there(inference), "the router answers", START_SECONDS)
        leaving = start("127.0.0.2")
        start("127.0.0.3")
        wait_until(lambda: is_ready(head, inference), "no two rings are ready", START_SECONDS)

        def ring() -> RingInfo:
            return next(ring for ring in inference.info().rings if ring.name == "prefill-0")

        def move() -> None:
            assert list(ring().nodes) == ["127.0.0.2"]
            asked = ("--node", "127.0.0.2", "--target", head.router, "--json")
            drained = ringserve.run("drain", *asked)
            assert drained.returncode == 0, drained.stderr
            assert json.loads(drained.stdout) == {"node": "127.0.0.2", "rings": ["prefill-0"], "drained": True}
            assert (ring().state, ring().restarting) == ("away", True)
            again = ringserve.run("drain", *asked)
            assert json.loads(again.stdout)["rings"] == [], "it is on that node no more"
            leaving.send_signal(signal.SIGTERM)
            leaving.wait(WAIT_SECONDS)
            start("127.0.0.4")
            wait_until(lambda: ring().state == "ready", "the ring is back", START_SECONDS)

        under_load(partial(Client, gateway.address, retry=NO_RETRIES), 1, move, stock)
        assert list(ring().nodes) == ["127.0.0.4"]
        check_metrics(inference.info())

        ranks = {ring.name: list(ring.rank_pids) for ring in inference.info().rings}
        up_of(head).kill()
        wait_until(lambda: not is_router_there(inference), "the router ends with its maker")
        wait_until(lambda: is_ready(head, inference), "another takes the rings over", START_SECONDS)
        # One that is told to end while it starts does not wait for turns.
        wait_until(lambda: head.log.read_text().count(READY) == 2, "the other has started", START_SECONDS)
        assert {ring.name: list(ring.rank_pids) for ring in inference.info().rings} == ranks, "the same ranks"
        with inference.running(ids(random_tokens(50), max_tokens=NUM_TOKENS)) as call:
            head.process.send_signal(signal.SIGTERM)
            *_, last = call
            assert last.complete.usage.completion_tokens == NUM_TOKENS
        assert head.process.wait(WAIT_SECONDS) == 0, head.log.read_text()
