"""grpc.health.v1 follows progress: what a process finds wrong with itself is NOT_SERVING, at once and to watchers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ringserve.cp_core.errors import ConfigError, Unavailable
from ringserve.services.rpc.server import ADMITTING, LIVE, GrpcServer, HealthWatch
from ringserve.v1 import inference_pb2_grpc
from tests.waiting import WAIT_SECONDS

SERVICE = "ringserve.v1.Inference"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Process:
    """A server whose faults a test names."""

    def __init__(self) -> None:
        self.server = GrpcServer()
        servicer = inference_pb2_grpc.InferenceServicer()  # type: ignore[abstract]
        self.server.add(SERVICE, lambda target: inference_pb2_grpc.add_InferenceServicer_to_server(servicer, target))
        self.watch = HealthWatch("it", self.server, self.find_fault, interval=0.01)
        self.fault = ""
        self.error: Exception | None = None
        self.stub: Any = None

    async def find_fault(self) -> str:
        if self.error is not None:
            raise self.error
        return self.fault

    async def health(self, service: str = SERVICE) -> object:
        return (await self.stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=WAIT_SECONDS)).status


@pytest.fixture
async def process() -> AsyncIterator[Process]:
    made = Process()
    async with grpc.aio.insecure_channel(await made.server.start("127.0.0.1:0", is_serving=False)) as channel:
        made.stub = health_pb2_grpc.HealthStub(channel)
        yield made
        await made.watch.close()
    await made.server.stop(0)


async def test_a_process_is_ready_only_when_it_has_said_so_and_live_from_the_start(process: Process) -> None:
    assert await process.health() == NOT_SERVING
    assert await process.health(LIVE) == SERVING
    await process.watch.look()
    assert await process.health() == SERVING
    assert await process.health("") == SERVING


async def test_a_fault_ends_readiness_and_its_end_brings_it_back_while_the_process_stays_live(process: Process) -> None:
    for process.fault, status in (("stuck", NOT_SERVING), ("still stuck", NOT_SERVING), ("", SERVING)):
        await process.watch.look()
        assert await process.health() == status
        assert await process.health("") == status
        assert await process.health(LIVE) == SERVING


async def test_what_cannot_be_asked_is_not_ready(process: Process) -> None:
    await process.watch.look()
    process.error = Unavailable("the router cannot be reached")
    await process.watch.look()
    assert await process.health() == NOT_SERVING


async def test_what_has_served_admits_clients_while_its_router_is_away_but_not_beside_another_release(
    process: Process,
) -> None:
    away = Unavailable("the router cannot be reached")
    other = ConfigError("release: the caller runs ringserve 1 and the called process 2")
    steps: list[tuple[Exception | None, str, object]] = [
        (away, "", NOT_SERVING),  # it has never served
        (other, "", NOT_SERVING),
        (None, "", SERVING),
        (away, "", SERVING),
        (None, "no decode ring is ready", SERVING),
        (other, "", NOT_SERVING),
        (away, "", NOT_SERVING),
        (None, "", SERVING),
    ]
    for process.error, process.fault, status in steps:
        await process.watch.look()
        assert await process.health(ADMITTING) == status
        assert process.watch.is_admitting == (status == SERVING)
    await process.watch.close()
    assert not process.watch.is_admitting


async def test_watchers_hear_of_every_change(process: Process) -> None:
    process.watch.start()
    call = process.stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
    async with asyncio.timeout(WAIT_SECONDS):
        seen = [(await call.read()).status]
        while seen[-1] != SERVING:
            seen.append((await call.read()).status)
        process.fault = "stuck"
        assert (await call.read()).status == NOT_SERVING
        process.fault = ""
        assert (await call.read()).status == SERVING
    call.cancel()
