"""gRPC server of every process of ringserve, with health checks, reflection and clear errors of ports and messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from inspect import iscoroutinefunction
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cp_core.errors import ConfigError

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""A prompt of a million tokens is 4 MB between our own processes, and gRPC's own default is 4 MB."""

MAX_METADATA_BYTES = 16 * 1024
"""Longest metadata of one call; a token takes 60 bytes."""

OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.so_reuseport", 0),  # a port in use must be an error, not a shared port
)


LIVE = "ringserve.live"
"""Service name of liveness probes: SERVING for as long as the process answers at all, ready or not."""


Context = grpc.aio.ServicerContext[Any, Any]
MALFORMED_MESSAGE = "the request is no valid message of this method"


class _Malformed:
    """Placeholder of a message that could not be decoded."""


MALFORMED = _Malformed()


class MalformedInterceptor(grpc.aio.ServerInterceptor):
    """Answer of INVALID_ARGUMENT to bytes that are no message, for methods that take one message.

    gRPC alone would answer UNKNOWN and log a stack trace for every such call.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        read = _tolerant(handler.request_deserializer)
        if handler.response_streaming:
            stream = handler.unary_stream

            if iscoroutinefunction(stream):  # it writes its responses itself

                async def checked_writer(request: Any, context: Context) -> None:
                    await _check(request, context)
                    await stream(request, context)

                return grpc.unary_stream_rpc_method_handler(checked_writer, read, handler.response_serializer)

            async def checked_stream(request: Any, context: Context) -> AsyncIterator[Any]:
                await _check(request, context)
                # A caller that hangs up closes the handler's stream at once, not at garbage collection.
                async with aclosing(stream(request, context)) as responses:
                    async for response in responses:
                        yield response

            return grpc.unary_stream_rpc_method_handler(checked_stream, read, handler.response_serializer)
        unary = handler.unary_unary

        async def checked(request: Any, context: Context) -> Any:
            await _check(request, context)
            return await unary(request, context)

        return grpc.unary_unary_rpc_method_handler(checked, read, handler.response_serializer)


def _tolerant(read: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def tolerant(data: bytes) -> Any:
        try:
            return read(data)
        except DecodeError:
            return MALFORMED

    return tolerant


async def _check(request: Any, context: Context) -> None:
    if request is MALFORMED:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, MALFORMED_MESSAGE)


class GrpcServer:
    """Listening gRPC server. `add` registers a servicer; `service` is its full name for health and reflection."""

    def __init__(self, tls: grpc.ServerCredentials | None = None) -> None:
        """Serve in plain text without `tls`."""
        self._tls = tls
        self._server = grpc.aio.server(options=OPTIONS, interceptors=[MalformedInterceptor()])
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._services: list[str] = []

    def add(self, service: str, register: Callable[[grpc.aio.Server], None]) -> None:
        register(self._server)
        self._services.append(service)

    async def start(self, listen: str, *, is_serving: bool = True) -> str:
        """Listen on HOST:PORT (port 0: any free one); return the address it is. Raises ConfigError.

        `is_serving` is the first answer to health checks.
        """
        names: Sequence[str] = (*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        host, _, wanted = listen.rpartition(":")
        try:
            if self._tls is None:
                port = self._server.add_insecure_port(listen)
            else:
                port = self._server.add_secure_port(listen, self._tls)
        except RuntimeError as error:
            raise ConfigError(f"listen: cannot listen on {listen}; is the port {wanted} in use?") from error
        await self._server.start()
        await self._health.set(LIVE, health_pb2.HealthCheckResponse.SERVING)
        await self.set_serving(is_serving)
        return f"{host}:{port}"

    async def set_serving(self, is_serving: bool) -> None:
        """Set the answer of grpc.health.v1, for the server as a whole and for each of its services."""
        serving = health_pb2.HealthCheckResponse.SERVING
        status = serving if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", *self._services):
            await self._health.set(service, status)

    async def stop(self, grace: float) -> None:
        """Refuse new calls, and give running ones `grace` seconds."""
        await self.set_serving(False)
        await self._server.stop(grace)

    async def wait(self) -> None:
        await self._server.wait_for_termination()
