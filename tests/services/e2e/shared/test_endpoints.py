"""Health, reflection, metrics and status: what operators and their tools see of every process."""

from __future__ import annotations

import json
import urllib.request
from functools import partial
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from openai import OpenAI

from ringserve.mapping import enum_name
from ringserve.services.offline.reference import StockModel
from ringserve.services.rpc.server import LIVE
from ringserve.v1 import inference_pb2, rings_pb2, rings_pb2_grpc, router_pb2, router_pb2_grpc
from tests.services.e2e.cluster import Cluster, Inference, ids, scrape
from tests.waiting import WAIT_SECONDS
from tests.workers.models import random_tokens

SERVICES = {
    "gateway": "ringserve.v1.Inference",
    "router": "ringserve.v1.RouterService",
    "prefill": "ringserve.v1.RingService",
    "decode": "ringserve.v1.RingService",
}


def endpoint_of(cluster: Cluster, inference: Inference, process: str) -> str:
    """Return HOST:PORT of a process of the cluster."""
    endpoints = {ring.role: ring.endpoint for ring in inference.info().rings}
    return (endpoints | {"gateway": cluster.gateway, "router": cluster.router})[process]


@pytest.mark.parametrize(("process", "service"), SERVICES.items())
def test_every_process_answers_health_checks_and_lists_its_services(
    cluster: Cluster, inference: Inference, process: str, service: str
) -> None:
    with grpc.insecure_channel(endpoint_of(cluster, inference, process)) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)  # the stubs of these two packages know no methods
        for name in ("", service, LIVE):
            asked = health_pb2.HealthCheckRequest(service=name)
            for answer in health.Watch(asked, timeout=WAIT_SECONDS):  # a gateway looks every second
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    break
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        (listed,) = stub.ServerReflectionInfo(iter([ask]), timeout=WAIT_SECONDS)
        names = {each.name for each in listed.list_services_response.service}
        assert names == {service, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


@pytest.mark.parametrize("process", ["router", "prefill", "decode"])
def test_other_users_of_the_machine_can_ask_no_process_but_the_gateway(
    cluster: Cluster, inference: Inference, process: str
) -> None:
    with grpc.insecure_channel(endpoint_of(cluster, inference, process)) as channel:
        call: Any
        if process == "router":
            stub = router_pb2_grpc.RouterServiceStub(channel)
            call = partial(stub.RegisterRing, router_pb2.RegisterRingRequest(name="mine", role="prefill"))
        else:
            call = partial(rings_pb2_grpc.RingServiceStub(channel).GetStatus, rings_pb2.GetStatusRequest())
        with pytest.raises(grpc.RpcError) as refusal:
            call(timeout=WAIT_SECONDS)
    error: Any = refusal.value
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "RINGSERVE_PEER_SECRET" in error.details()


def test_metrics_count_requests_tokens_and_plans(cluster: Cluster, inference: Inference) -> None:
    before = scrape(cluster)
    first = inference.answer(ids(random_tokens(40, seed=20), max_tokens=5, conversation="metrics"))
    second = inference.answer(ids([1, 2, 3], max_tokens=5, conversation="metrics"))
    with pytest.raises(grpc.RpcError):
        inference.answer(ids([300]))
    inference.delete("metrics")
    after = scrape(cluster)

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    assert grown("ringserve_requests_total{outcome=length}") == 2
    assert grown("ringserve_requests_total{outcome=invalid_argument}") == 1
    assert grown("ringserve_prompt_tokens_total") == 40 + 48
    assert grown("ringserve_generation_tokens_total") == 10
    assert grown("ringserve_cached_prompt_tokens_total{source=kept_on_prefill}") == 40
    assert grown("ringserve_cached_prompt_tokens_total{source=pulled_from_decode}") == 4
    plans = {enum_name(inference_pb2.Algorithm, each.plan.algorithm) for each in (first, second)}
    assert sum(grown(f"ringserve_plans_total{{algorithm={name}}}") for name in plans) == 2
    assert grown("ringserve_time_to_first_token_seconds_count") == 2
    assert after["ringserve_requests_in_progress"] == 0


def test_openais_client_is_answered_by_the_rings(cluster: Cluster, inference: Inference, stock: StockModel) -> None:
    prompt = random_tokens(300)
    with OpenAI(base_url=f"http://{cluster.http}/v1", api_key="none", max_retries=0) as client:
        (model,) = client.models.list()
        answer = client.completions.create(model=model.id, prompt=prompt, max_tokens=5, temperature=0)
        stream = client.completions.create(model=model.id, prompt=prompt, max_tokens=5, temperature=0, stream=True)
        *_, last = stream
    expected = stock.greedy(prompt, 5).token_ids
    for extra in (answer.model_extra, last.model_extra):
        assert (extra or {})["ringserve"]["token_ids"] == expected
    with urllib.request.urlopen(f"http://{cluster.http}/health", timeout=WAIT_SECONDS) as health:
        assert json.loads(health.read()) == {"status": "ok"}


def test_status_shows_every_ring_for_people_and_for_machines(cluster: Cluster, inference: Inference) -> None:
    machine = cluster.ringserve.run("status", "--name", cluster.name, "--json")
    assert (machine.returncode, machine.stderr) == (0, "")
    report = json.loads(machine.stdout)
    assert [ring["name"] for ring in report["rings"]] == ["prefill-0", "decode-0"]
    for ring in report["rings"]:
        assert (ring["state"], ring["num_ranks"], len(ring["rank_pids"])) == ("ready", 2, 2)
        for rank in ring["kv_usage"]:
            assert rank["free_blocks"] + rank["active_blocks"] + rank["kept_blocks"] == rank["total_blocks"] == 1024
    people = cluster.ringserve.run("status", "--target", cluster.gateway)
    assert people.returncode == 0, people.stderr
    assert "prefill-0" in people.stdout
    assert "decode-0" in people.stdout


def test_the_model_is_described_as_it_is(inference: Inference) -> None:
    info = inference.stub.GetModelInfo(inference_pb2.GetModelInfoRequest(), timeout=WAIT_SECONDS)
    assert (info.model_type, info.dtype, info.num_layers, info.vocab_size) == ("llama", "float32", 2, 300)
    assert (info.num_heads, info.num_kv_heads, info.head_dim, info.max_context_length) == (4, 2, 16, 8192)
    assert info.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
