"""Requests between our own processes whose content cannot be read are refused like any other bad request."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc
import pytest

from ringserve.orchestration.protocol.inventory import KnownEpoch, Registered
from ringserve.orchestration.protocol.turns import RingRegistration
from ringserve.services.rpc.server import GrpcServer
from ringserve.services.rpc.servicers import RouterServicer
from ringserve.services.rpc.wire.contract import to_message
from ringserve.v1 import router_pb2, router_pb2_grpc
from tests.rings import registration


class UnaskedRouter:
    """Router that must not be called."""

    def __getattr__(self, name: str) -> Any:
        def verb(*values: object) -> None:
            raise AssertionError(f"{name} was called")

        return verb


@pytest.mark.parametrize("method", ["EndTurn", "ResumeTurn"])
async def test_token_ids_that_cannot_be_read_are_an_invalid_argument(method: str) -> None:
    server = GrpcServer()
    router: Any = UnaskedRouter()
    RouterServicer(router, router).register(server)
    request = getattr(router_pb2, f"{method}Request")(token_ids=b"seven b")
    async with grpc.aio.insecure_channel(await server.start("127.0.0.1:0")) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await getattr(router_pb2_grpc.RouterServiceStub(channel), method)(request)
    await server.stop(0)
    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert failure.value.details() == "token_ids: 7 bytes are no whole number of ids of 4 bytes"


async def test_inventories_are_read_one_after_the_other_and_signs_of_life_come_between() -> None:
    heard: list[str] = []

    class HearingRouter:
        async def register_ring(self, ring: RingRegistration, known: KnownEpoch) -> Registered:
            heard.append(ring.name)
            return Registered(running_turns=0, epoch=known.epoch)

    router: Any = HearingRouter()
    servicer, context = RouterServicer(router, router), cast(Any, None)
    telling = [to_message(router_pb2.RegisterRingRequest, registration("decode", name)) for name in ("a", "b")]
    for request in telling:
        request.inventory.SetInParent()
    living = to_message(router_pb2.RegisterRingRequest, registration("decode", "c"))
    await asyncio.gather(*(servicer.RegisterRing(request, context) for request in (*telling, living)))
    assert heard == ["c", "a", "b"]
