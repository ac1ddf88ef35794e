"""Requests between our own processes whose content cannot be read are refused like any other bad request."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from ringserve.v1 import router_pb2, router_pb2_grpc
from services.rpc.server import GrpcServer
from services.rpc.servicers import RouterServicer


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
