"""Every gRPC server of ours: health, reflection, and a port that is really its own."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from ringserve.cp_core.errors import ConfigError, Unauthenticated
from ringserve.services.rpc.server import GrpcServer
from ringserve.v1 import inference_pb2, inference_pb2_grpc
from tests.waiting import WAIT_SECONDS

SERVICE = "ringserve.v1.Inference"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def server_of_inference() -> GrpcServer:
    server = GrpcServer()
    servicer = inference_pb2_grpc.InferenceServicer()  # type: ignore[abstract]
    server.add(SERVICE, lambda target: inference_pb2_grpc.add_InferenceServicer_to_server(servicer, target))
    return server


@pytest.fixture
async def server() -> AsyncIterator[tuple[GrpcServer, grpc.aio.Channel]]:
    made = server_of_inference()
    async with grpc.aio.insecure_channel(await made.start("127.0.0.1:0")) as channel:
        yield made, channel
    await made.stop(0)


async def health_of(channel: grpc.aio.Channel, service: str) -> object:
    request = health_pb2.HealthCheckRequest(service=service)
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(request, timeout=WAIT_SECONDS)).status


async def reflected(channel: Any, request: reflection_pb2.ServerReflectionRequest) -> Any:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    async with asyncio.timeout(WAIT_SECONDS):
        (answer,) = [answer async for answer in stub.ServerReflectionInfo(iter([request]))]
    return answer


async def test_health_follows_what_the_process_says(server: tuple[GrpcServer, grpc.aio.Channel]) -> None:
    made, channel = server
    for is_serving, status in ((True, SERVING), (False, NOT_SERVING), (True, SERVING)):
        await made.set_serving(is_serving)
        assert await health_of(channel, "") == status
        assert await health_of(channel, SERVICE) == status


async def test_the_health_of_a_service_that_is_not_there_is_not_found(
    server: tuple[GrpcServer, grpc.aio.Channel],
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health_of(server[1], "another.Service")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_every_service(server: tuple[GrpcServer, grpc.aio.Channel]) -> None:
    answer = await reflected(server[1], reflection_pb2.ServerReflectionRequest(list_services=""))
    assert {service.name for service in answer.list_services_response.service} == {
        SERVICE,
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }


async def test_reflection_knows_the_contract(server: tuple[GrpcServer, grpc.aio.Channel]) -> None:
    request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE)
    answer = await reflected(server[1], request)
    assert inference_pb2.DESCRIPTOR.serialized_pb in answer.file_descriptor_response.file_descriptor_proto


async def test_port_0_takes_a_free_port_and_reports_it() -> None:
    servers = [server_of_inference(), server_of_inference()]
    addresses = [await server.start("127.0.0.1:0") for server in servers]
    assert len(set(addresses)) == 2
    for address in addresses:
        host, _, port = address.rpartition(":")
        assert host == "127.0.0.1"
        with socket.create_connection((host, int(port)), timeout=WAIT_SECONDS):
            pass
    await asyncio.gather(*(server.stop(0) for server in servers))


async def test_a_port_in_use_is_an_error_that_names_it() -> None:
    first, second = server_of_inference(), server_of_inference()
    address = await first.start("127.0.0.1:0")
    port = address.rpartition(":")[2]
    with pytest.raises(ConfigError, match=f"cannot listen on {address}; is the port {port} in use"):
        await second.start(address)
    async with grpc.aio.insecure_channel(address) as channel:
        assert await health_of(channel, "") == SERVING
    await first.stop(0)


async def test_a_stopped_server_refuses_calls_and_its_port_is_free_again() -> None:
    server = server_of_inference()
    address = await server.start("127.0.0.1:0")
    await server.stop(0)
    async with asyncio.timeout(WAIT_SECONDS):
        await server.wait()
    again = server_of_inference()
    assert await again.start(address) == address
    await again.stop(0)


async def test_an_unknown_caller_is_refused_before_its_message_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def admit(metadata: Mapping[str, str]) -> None:
        if metadata.get("authorization") != "Bearer right":
            raise Unauthenticated("authorization: the token is not known")

    class Servicer(inference_pb2_grpc.InferenceServicer):
        async def Abort(self, request: Any, context: Any) -> inference_pb2.AbortResponse:
            read.append(request.ByteSize())
            return inference_pb2.AbortResponse()

    servicer, server = Servicer(), GrpcServer(admit=admit)  # type: ignore[abstract]
    server.add(SERVICE, lambda target: inference_pb2_grpc.add_InferenceServicer_to_server(servicer, target))
    parsed: list[int] = []

    def noting(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
        def noted(data: bytes) -> Any:
            parsed.append(len(data))
            return parse(data)

        return noted

    monkeypatch.setattr("ringserve.services.rpc.server._tolerant", noting)
    options = [("grpc.max_send_message_length", 1 << 26)]
    async with grpc.aio.insecure_channel(await server.start("127.0.0.1:0"), options=options) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        large = inference_pb2.AbortRequest(request_ids=["x" * (1 << 24)])
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Abort(large, timeout=WAIT_SECONDS, metadata=metadata)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert refused.value.details() == "authorization: the token is not known"
        assert (parsed, read) == ([], [])
        await stub.Abort(large, timeout=WAIT_SECONDS, metadata=(("authorization", "Bearer right"),))
        assert read == [large.ByteSize()]
        assert await health_of(channel, "") == SERVING, "health is for all"
    await server.stop(0)


async def test_a_server_takes_so_many_calls_at_a_time() -> None:
    running, go_on = asyncio.Event(), asyncio.Event()

    class Servicer(inference_pb2_grpc.InferenceServicer):
        async def Abort(self, request: Any, context: Any) -> inference_pb2.AbortResponse:
            running.set()
            await go_on.wait()
            return inference_pb2.AbortResponse()

    servicer, server = Servicer(), GrpcServer(max_calls=1)  # type: ignore[abstract]
    server.add(SERVICE, lambda target: inference_pb2_grpc.add_InferenceServicer_to_server(servicer, target))
    async with grpc.aio.insecure_channel(await server.start("127.0.0.1:0")) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        first = asyncio.ensure_future(stub.Abort(inference_pb2.AbortRequest(), timeout=WAIT_SECONDS))
        await running.wait()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Abort(inference_pb2.AbortRequest(), timeout=WAIT_SECONDS)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        go_on.set()
        await first
    await server.stop(0)
