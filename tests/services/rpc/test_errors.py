"""Errors cross the network as themselves, and nothing else of the process does."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from grpc_status import rpc_status

from ringserve.client import Client
from ringserve.cp_core import errors
from ringserve.cp_core.errors import RingserveError, Unavailable, Unreachable
from ringserve.errors import RETRY_KEY
from ringserve.services.rpc.errors import (
    CODES,
    MAX_MESSAGE,
    abort_on_error,
    answer,
    error_from,
    find_status_code,
    make_error,
)
from ringserve.services.rpc.server import GrpcServer
from ringserve.v1 import inference_pb2, inference_pb2_grpc
from tests.waiting import WAIT_SECONDS

Context = grpc.aio.ServicerContext[Any, Any]
ABORT = inference_pb2.AbortRequest()
GENERATE = inference_pb2.GenerateRequest()

EXPECTED = {
    "InvalidRequest": grpc.StatusCode.INVALID_ARGUMENT,
    "ContextTooLong": grpc.StatusCode.INVALID_ARGUMENT,
    "Unauthenticated": grpc.StatusCode.UNAUTHENTICATED,
    "Forbidden": grpc.StatusCode.PERMISSION_DENIED,
    "NotFound": grpc.StatusCode.NOT_FOUND,
    "ConversationLost": grpc.StatusCode.FAILED_PRECONDITION,
    "Busy": grpc.StatusCode.ABORTED,
    "CapacityExceeded": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "DeadlineExceeded": grpc.StatusCode.DEADLINE_EXCEEDED,
    "TurnCancelled": grpc.StatusCode.CANCELLED,
    "Unavailable": grpc.StatusCode.UNAVAILABLE,
    "Stopping": grpc.StatusCode.UNAVAILABLE,
    "NotBegun": grpc.StatusCode.UNAVAILABLE,
    "StaleIncarnation": grpc.StatusCode.UNAVAILABLE,
    "DiskFull": grpc.StatusCode.UNAVAILABLE,
    "TransferError": grpc.StatusCode.UNAVAILABLE,
    "NotFinite": grpc.StatusCode.INTERNAL,
    "ReshardError": grpc.StatusCode.INTERNAL,
    "ModelRefused": grpc.StatusCode.FAILED_PRECONDITION,
    "ConfigError": grpc.StatusCode.FAILED_PRECONDITION,
}
EVERY_ERROR = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, RingserveError) and kind not in (RingserveError, Unreachable)
]


class Failing(inference_pb2_grpc.InferenceServicer):
    """Raises `error` from `Abort`, and from `Generate` after one response."""

    def __init__(self) -> None:
        self.error: Exception = RuntimeError()

    async def Abort(self, request: inference_pb2.AbortRequest, context: Context) -> inference_pb2.AbortResponse:
        return await answer(context, self._fail())

    async def _fail(self) -> inference_pb2.AbortResponse:
        raise self.error

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        async with abort_on_error(context):
            async for response in self._fail_later():
                yield response

    async def _fail_later(self) -> AsyncIterator[inference_pb2.GenerateResponse]:
        yield inference_pb2.GenerateResponse()
        raise self.error


class FailingServer:
    """A real server on loopback and a client of it."""

    def __init__(self, address: str, stub: inference_pb2_grpc.InferenceAsyncStub, servicer: Failing) -> None:
        self.address = address
        self._stub = stub
        self._servicer = servicer

    async def fail(self, error: Exception) -> list[grpc.aio.AioRpcError]:
        """Return the error as it arrives by a unary call and by a stream."""
        self._servicer.error = error
        with pytest.raises(grpc.aio.AioRpcError) as unary:
            await self._stub.Abort(ABORT, timeout=WAIT_SECONDS)
        call = self._stub.Generate(GENERATE, timeout=WAIT_SECONDS)
        assert await call.read() == inference_pb2.GenerateResponse(), "what was sent before the error arrives"
        with pytest.raises(grpc.aio.AioRpcError) as stream:
            await call.read()
        return [unary.value, stream.value]


@pytest.fixture
async def server() -> AsyncIterator[FailingServer]:
    servicer, server = Failing(), GrpcServer()  # type: ignore[abstract]
    server.add(
        "ringserve.v1.Inference", lambda target: inference_pb2_grpc.add_InferenceServicer_to_server(servicer, target)
    )
    address = await server.start("127.0.0.1:0")
    async with grpc.aio.insecure_channel(address) as channel:
        yield FailingServer(address, inference_pb2_grpc.InferenceStub(channel), servicer)
    await server.stop(0)


def test_every_error_has_the_code_of_the_table() -> None:
    assert {kind.__name__: CODES[kind] for kind in EVERY_ERROR} == EXPECTED
    assert {kind.__name__: find_status_code(kind("x")) for kind in EVERY_ERROR} == EXPECTED


def test_an_error_without_a_code_of_its_own_has_its_parents() -> None:
    class Narrower(errors.StaleIncarnation):
        pass

    assert find_status_code(Narrower("x")) is grpc.StatusCode.UNAVAILABLE
    assert find_status_code(RingserveError("x")) is grpc.StatusCode.INTERNAL


async def test_that_a_peer_cannot_reach_another_is_told_as_unavailable(server: FailingServer) -> None:
    """The way that is cut is not the caller's own."""
    for failure in await server.fail(Unreachable("the leader cannot be reached")):
        back = error_from(failure, "the gateway")
        assert (type(back), str(back)) == (Unavailable, "the leader cannot be reached")


def test_an_unknown_name_is_unavailable() -> None:
    error = make_error("FromTheFuture", "what")
    assert (type(error), str(error)) == (Unavailable, "what")


@pytest.mark.parametrize("kind", EVERY_ERROR)
async def test_an_error_comes_back_as_itself(server: FailingServer, kind: type[RingserveError]) -> None:
    message = "field: 'wért' 😀 100 % is not allowed; use another"
    for failure in await server.fail(kind(message)):
        assert failure.code() is EXPECTED[kind.__name__]
        assert failure.details() == message
        back = error_from(failure, "the peer")
        assert (type(back), str(back)) == (kind, message)


@pytest.mark.parametrize("error", [ValueError("secret"), AssertionError("secret"), KeyError("secret")])
async def test_what_nobody_expected_is_internal_and_shows_nothing_of_itself(
    server: FailingServer, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        failures = await server.fail(error)
    for failure in failures:
        assert failure.code() is grpc.StatusCode.INTERNAL
        assert failure.details() == "internal error; the server's log has the details"
        assert "secret" not in str(failure.trailing_metadata())
        back = error_from(failure, "the decode leader")
        assert (type(back), str(back)) == (Unavailable, "the decode leader cannot be reached (internal)")
    assert sum("secret" in (record.exc_text or "") for record in caplog.records) == 2, "the log has it, whole"


@pytest.mark.parametrize("character", ["x", "😀", "\x07"])
async def test_an_error_that_quotes_too_much_still_arrives(server: FailingServer, character: str) -> None:
    for failure in await server.fail(errors.InvalidRequest("role: " + 100_000 * character)):
        assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT
        said = failure.details() or ""
        assert said.startswith("role: " + character)
        assert said.endswith(character + " ...")
        assert len(said) == MAX_MESSAGE
        assert details(failure)["BadRequest"].field_violations[0].field == "role"


@pytest.mark.parametrize(("seconds", "milliseconds"), [(2.5, "2500"), (0.0101, "11"), (0.0, "0"), (1e6, "1000000000")])
async def test_a_refusal_carries_when_to_retry_to_peers_and_clients(
    server: FailingServer, seconds: float, milliseconds: str
) -> None:
    refused = errors.CapacityExceeded("the queue is full", retry_after_seconds=seconds)
    for failure in await server.fail(refused):
        assert (RETRY_KEY, milliseconds) in list(failure.trailing_metadata() or ())
        back = error_from(failure, "the peer")
        assert isinstance(back, errors.CapacityExceeded)
        assert back.retry_after_seconds == int(milliseconds) / 1000
    with Client(server.address) as client, pytest.raises(errors.CapacityExceeded, match="the queue is full") as caught:
        await asyncio.to_thread(client.abort, ["r"])
    assert caught.value.retry_after_seconds == int(milliseconds) / 1000


async def test_a_refusal_that_knows_no_time_names_none(server: FailingServer) -> None:
    for failure in await server.fail(errors.CapacityExceeded("no blocks")):
        assert RETRY_KEY not in dict(failure.trailing_metadata() or ())
        back = error_from(failure, "the peer")
        assert isinstance(back, errors.CapacityExceeded)
        assert back.retry_after_seconds is None


def details(failure: Any) -> dict[str, Any]:
    """Return the details of the status as a client of any language reads them, by the name of their type."""
    status = rpc_status.from_call(failure)  # raises where code or message are not those of the call
    assert status is not None
    kinds = {kind.__name__: kind for kind in (ErrorInfo, BadRequest, RetryInfo)}
    found = {}
    for each in status.details:
        message = kinds[each.TypeName().rpartition(".")[2]]()
        assert each.Unpack(message)
        found[type(message).__name__] = message
    return found


async def test_programs_read_reason_field_and_time_from_the_details(server: FailingServer) -> None:
    for failure in await server.fail(errors.InvalidRequest("sampling_params.top_p: 2.0 is not allowed; use 0 to 1")):
        told = details(failure)
        assert told.keys() == {"ErrorInfo", "BadRequest"}
        assert (told["ErrorInfo"].reason, told["ErrorInfo"].domain) == ("INVALID_REQUEST", "ringserve")
        (violation,) = told["BadRequest"].field_violations
        assert violation.field == "sampling_params.top_p"
        assert violation.description == "2.0 is not allowed; use 0 to 1"
    for failure in await server.fail(errors.CapacityExceeded("the queue is full", retry_after_seconds=2.5)):
        told = details(failure)
        assert told["RetryInfo"].retry_delay.ToMilliseconds() == 2500
        assert told["ErrorInfo"].reason == "CAPACITY_EXCEEDED"
    for failure in await server.fail(errors.InvalidRequest("the body must be a JSON object")):
        assert details(failure).keys() == {"ErrorInfo"}


@pytest.mark.parametrize("error", [kind("x") for kind in EVERY_ERROR], ids=lambda error: type(error).__name__)
async def test_every_error_has_a_reason(server: FailingServer, error: RingserveError) -> None:
    for failure in await server.fail(error):
        assert re.fullmatch(r"[A-Z][A-Z_]*[A-Z]", details(failure)["ErrorInfo"].reason)


class Slow(inference_pb2_grpc.InferenceServicer):
    """Answers when it is too late."""

    async def Abort(self, request: inference_pb2.AbortRequest, context: Context) -> inference_pb2.AbortResponse:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


async def test_what_grpc_itself_reports_is_unavailable() -> None:
    server = GrpcServer()
    slow = Slow()  # type: ignore[abstract]
    server.add("slow", lambda target: inference_pb2_grpc.add_InferenceServicer_to_server(slow, target))
    address = await server.start("127.0.0.1:0")
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await stub.Abort(ABORT, timeout=0.05)
        with pytest.raises(grpc.aio.AioRpcError) as missing:
            await stub.GetServerInfo(inference_pb2.GetServerInfoRequest(), timeout=WAIT_SECONDS)
        await server.stop(0)
        with pytest.raises(grpc.aio.AioRpcError) as gone:
            await stub.Abort(ABORT, timeout=WAIT_SECONDS)
    said = [str(error_from(caught.value, "the router")) for caught in (late, missing, gone)]
    assert said == [
        "the router did not answer in time",
        "the router does not know this call (unimplemented): another process or release listens there",
        "the router cannot be reached (unavailable)",
    ]
