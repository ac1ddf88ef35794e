"""Gateways and rings of a running cluster are drained, replaced and restarted under load; no turn fails."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from openai import APIConnectionError, OpenAI

from ringserve.client import Client
from ringserve.services.offline.reference import StockModel
from tests.services.e2e.cluster import Cluster, Inference, Ringserve, ids, wait_until
from tests.services.e2e.gateways import started_gateway
from tests.services.e2e.talking import under_load
from tests.waiting import WAIT_SECONDS
from tests.workers.models import random_tokens

RINGS = {"prefill-0", "decode-0", "prefill-long-0", "decode-wide-0"}
RESTARTED = ("prefill-0", "decode-0")
NUM_TOKENS = 200
ENDED = {"outcome", "prompt_tokens", "cached_tokens", "completion_tokens", "ttft_seconds", "total_seconds"}
"""Fields of the line with which a request ends, besides those of all lines."""


def test_one_request_is_followed_through_every_process_by_its_id(
    ringserve: Ringserve, several: Cluster, inference: Inference
) -> None:
    inference.answer(ids(random_tokens(40), request_id="followed"))
    log = ringserve.directory / "state" / f"{several.name}.log"

    def lines() -> list[dict[str, str]]:
        # The first lines are of `up` for people; whatever comes after the rings have started is JSON.
        written = [line for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("{")]
        return [each for each in map(json.loads, written) if each.get("request_id") == "followed"]

    def processes() -> set[str]:
        return {line["process"].partition("-")[0] for line in lines()}

    everywhere = {"gateway", "router", "prefill", "decode"}
    wait_until(lambda: processes() == everywhere and any("outcome" in line for line in lines()), "all of its lines")
    assert len({line["turn_id"] for line in lines()}) == 1
    for line in lines():
        own = {"ring"} | (ENDED if "outcome" in line else set())
        assert set(line) - own == {"ts", "level", "process", "logger", "message", "request_id", "turn_id"}
        assert line.get("ring", "") == (line["process"] if "-" in line["process"] else "")


def test_a_gateway_that_is_told_to_end_finishes_its_turns_first(
    ringserve: Ringserve, several: Cluster, model_path: Path, tmp_path: Path
) -> None:
    """A gateway ends its gRPC and HTTP turns while it takes no others; a watcher of its health does not delay it."""
    log, options = tmp_path / "gateway.log", ("--drain-seconds", f"{WAIT_SECONDS:g}")
    with started_gateway(ringserve, several.router, model_path, log, *options) as gateway:
        inference = Inference(gateway.address)
        health: Any = health_pb2_grpc.HealthStub(inference.channel)  # the stubs of this package know no methods
        watching = health.Watch(health_pb2.HealthCheckRequest())
        wait_until(lambda: next(watching).status == health_pb2.HealthCheckResponse.SERVING, "a gateway that is ready")
        openai = OpenAI(base_url=f"http://{gateway.http}/v1", api_key="none", max_retries=0)
        ask: Any = partial(openai.completions.create, model=model_path.name, prompt=random_tokens(9), temperature=0)
        with (
            inference.running(ids(random_tokens(9), max_tokens=NUM_TOKENS)) as call,
            ask(stream=True, max_tokens=NUM_TOKENS) as over_http,
        ):
            assert next(over_http).choices[0].finish_reason is None
            gateway.process.terminate()
            assert next(watching).status == health_pb2.HealthCheckResponse.NOT_SERVING
            with pytest.raises(grpc.RpcError) as refusal:
                Inference(gateway.address).answer(ids(random_tokens(5)))
            assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
            with pytest.raises(APIConnectionError):
                ask()
            *_, last = call
            assert last.complete.usage.completion_tokens == NUM_TOKENS
            *_, last_over_http = over_http
            assert last_over_http.choices[0].finish_reason == "length"
        assert gateway.process.wait(WAIT_SECONDS) == 0


def test_gateways_and_a_ring_of_each_role_are_replaced_under_load_and_no_turn_fails(
    ringserve: Ringserve, several: Cluster, inference: Inference, model_path: Path, stock: StockModel, tmp_path: Path
) -> None:
    before = {ring.name: ring for ring in inference.info().rings}
    options = ("--drain-seconds", f"{WAIT_SECONDS:g}")

    def done(*command: str) -> Any:
        finished = ringserve.run(*command, "--name", several.name, "--json")
        assert finished.returncode == 0, finished.stderr
        return json.loads(finished.stdout)

    with (
        started_gateway(ringserve, several.router, model_path, tmp_path / "first.log", *options) as first,
        started_gateway(ringserve, several.router, model_path, tmp_path / "second.log", *options) as second,
    ):

        def replace_all() -> None:
            first.process.terminate()
            assert first.process.wait(WAIT_SECONDS) == 0
            drained = done("drain", "decode-0")
            assert (drained["ring"], drained["drained"], drained["failed"]) == ("decode-0", True, 0)
            assert "decode-0" not in {ring.name for ring in inference.info().rings}
            assert done("undrain", "decode-0") == {"ring": "decode-0", "serves": True}
            assert done("restart", "prefill-0") == {"rings": ["prefill-0"], "serves": True}

        under_load(partial(Client, f"ipv4:{first.address},{second.address}"), 2, replace_all, stock)
    after = {ring.name: ring for ring in inference.info().rings}
    assert set(after) == RINGS
    for ring in RESTARTED:
        assert before[ring].incarnation != after[ring].incarnation
        assert set(before[ring].rank_pids).isdisjoint(after[ring].rank_pids)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("drain", "decode-7"), "decode-7"),
        (("restart", "decode-7"), "decode-7"),
        (("drain",), "name one ring"),
        (("drain", "decode-0", "--node", "127.0.0.1"), "name one ring"),
        (("restart", "decode-0", "--seconds", "-1"), "seconds: -1 is not allowed"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence(
    ringserve: Ringserve, several: Cluster, command: tuple[str, ...], said: str
) -> None:
    refused = ringserve.run(*command, "--name", several.name)
    assert refused.returncode == 1
    assert said in refused.stderr
    assert len(refused.stderr.splitlines()) == 1, refused.stderr
