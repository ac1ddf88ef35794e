"""gRPC server of every ringserve process, with health checks and reflection. It owns the process's gRPC port.

It has clear errors for a port that cannot be taken and for a message that cannot be decoded.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from inspect import iscoroutinefunction
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ringserve import __version__
from ringserve.channels import COMMON_OPTIONS
from ringserve.cp_core.errors import ConfigError, RingserveError, Unauthenticated
from ringserve.services.auth.tls import SECRET_VARIABLE
from ringserve.services.rpc.errors import abort_on_error

log = logging.getLogger(__name__)

SERVER_OPTIONS = (
    *COMMON_OPTIONS,
    # Allow frequent client pings. With gRPC's default limits the server would end the streams of a client that pings
    # (GOAWAY, too_many_pings).
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 250),
    ("grpc.http2.max_ping_strikes", 0),
)


LIVE = "ringserve.live"
"""Service name for liveness probes: SERVING while the process answers, whether or not it is ready."""
ADMITTING = "ringserve.admitting"
"""Service name for readiness probes of gateways behind a load balancer: see `HealthWatch.is_admitting`."""


EPOCH_KEY = "ringserve-epoch"
"""Metadata key of a router's calls: the router's epoch."""
SECRET_KEY = "ringserve-secret"
"""Metadata key of calls between ringserve processes: their shared secret."""
VERSION_KEY = "ringserve-peer-version"
"""Metadata key of calls between ringserve processes: the caller's release."""

Context = grpc.aio.ServicerContext[Any, Any]
MALFORMED_MESSAGE = "the request is not a valid message of this method"


class _Malformed:
    """Placeholder for a message that could not be decoded."""


MALFORMED = _Malformed()


class MalformedInterceptor(grpc.aio.ServerInterceptor):
    """Answer INVALID_ARGUMENT to undecodable bytes, for methods that take one message.

    By default gRPC answers UNKNOWN and logs a stack trace for each such call.
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

            if iscoroutinefunction(stream):  # the handler writes its responses itself

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


Admit = Callable[[Mapping[str, str]], None]
"""Check of a call's metadata. Raises the error to answer the call with."""


def make_peer_check() -> Admit:
    """Return a check that a call carries this environment's secret, if there is one, and this release.

    Calls from tools name no release and pass. The check raises Unauthenticated or ConfigError.
    """
    secret = os.environ.get(SECRET_VARIABLE, "").encode()

    def admit(metadata: Mapping[str, str]) -> None:
        if secret and not hmac.compare_digest(metadata.get(SECRET_KEY, "").encode(), secret):
            raise Unauthenticated(
                f"this port is for one cluster's processes, and the call lacks their secret ({SECRET_VARIABLE})"
            )
        release = metadata.get(VERSION_KEY, __version__)
        if release != __version__:
            raise ConfigError(
                f"release: the caller runs ringserve {release[:20]} and the called process {__version__}; "
                f"run one release in the whole cluster"
            )

    return admit


class AdmittingInterceptor(grpc.aio.ServerInterceptor):
    """Refuse callers by their metadata, before reading their message. Health checks and reflection are open to all."""

    def __init__(self, admit: Admit) -> None:
        self._admit = admit

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        if not handler_call_details.method.startswith("/grpc."):
            metadata = {key: str(value) for key, value in handler_call_details.invocation_metadata or ()}
            try:
                self._admit(metadata)
            except RingserveError as error:
                return _refusing(error)
        return await continuation(handler_call_details)


def _refusing(error: RingserveError) -> Any:
    """Return a handler that answers with an error. It is a stream handler, so it reads no request."""

    async def refuse(requests: AsyncIterator[Any], context: Context) -> None:
        async with abort_on_error(context):
            raise error

    return grpc.stream_stream_rpc_method_handler(refuse)


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
    """Listening gRPC server. `add` registers a servicer; `service` is its full name in health checks and reflection."""

    def __init__(
        self, tls: grpc.ServerCredentials | None = None, *, max_calls: int | None = None, admit: Admit | None = None
    ) -> None:
        """Serve at most `max_calls` calls at a time to callers that pass `admit`; in plain text without `tls`."""
        self._tls = tls
        admitting = [AdmittingInterceptor(admit)] if admit else []
        self._server = grpc.aio.server(
            options=SERVER_OPTIONS,
            interceptors=[MalformedInterceptor(), *admitting],
            maximum_concurrent_rpcs=max_calls,
        )
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._services: list[str] = []

    def add(self, service: str, register: Callable[[grpc.aio.Server], None]) -> None:
        register(self._server)
        self._services.append(service)

    async def start(self, listen: str, *, is_serving: bool = True) -> str:
        """Listen on HOST:PORT and return that address; port 0 takes a free port. Raises ConfigError.

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
        """Set the answer of grpc.health.v1 for the whole server and for each service."""
        serving = health_pb2.HealthCheckResponse.SERVING
        status = serving if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", *self._services):
            await self._health.set(service, status)

    async def set_admitting(self, is_admitting: bool) -> None:
        """Set the answer of grpc.health.v1 for `ADMITTING`."""
        status = health_pb2.HealthCheckResponse
        await self._health.set(ADMITTING, status.SERVING if is_admitting else status.NOT_SERVING)

    async def stop(self, grace: float) -> None:
        """Refuse new calls, and give running calls `grace` seconds."""
        await self.set_serving(False)
        await self.set_admitting(False)
        await self._server.stop(grace)

    async def wait(self) -> None:
        await self._server.wait_for_termination()


ASK_SECONDS = 1.0
"""Seconds between two health checks."""
ANSWER_SECONDS = 5.0
"""Timeout of a health check; a process that takes longer is not ready."""


class HealthWatch:
    """Repeated call of `find_fault`: a sentence means NOT_SERVING, an empty text SERVING.

    `name` is for logs. Close the watch before the server stops.

    The server is admitting from the first check without a fault on. It stays so during faults that may pass by
    themselves, since clients that are connected at least learn the fault. A fault that cannot pass, such as a router of
    another release, ends it.
    """

    def __init__(
        self, name: str, server: GrpcServer, find_fault: Callable[[], Awaitable[str]], interval: float = ASK_SECONDS
    ) -> None:
        self._name = name
        self._server = server
        self._find_fault = find_fault
        self._interval = interval
        self._shown: str | None = None
        self._asking: asyncio.Task[None] | None = None
        self.is_admitting = False

    @property
    def fault(self) -> str:
        """Fault that the last check found; empty if there is none."""
        return "it has only just started" if self._shown is None else self._shown

    def start(self) -> None:
        self._asking = asyncio.create_task(self._ask())

    async def _ask(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(self._interval)

    async def look(self) -> None:
        """Check once, and publish the answer if it has changed."""
        fault, passes = await self._fault()
        is_admitting = not fault or (passes and self.is_admitting)
        if self._shown is None or is_admitting != self.is_admitting:
            await self._server.set_admitting(is_admitting)
        self.is_admitting = is_admitting
        if self._shown is None or bool(fault) != bool(self._shown):
            log.log(logging.WARNING if fault else logging.INFO, "%s %s", self._name, _is(fault))
            await self._server.set_serving(not fault)
        self._shown = fault

    async def _fault(self) -> tuple[str, bool]:
        """Return a fault, and whether it may pass by itself."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await self._find_fault(), True
        except TimeoutError:
            return f"the health check took longer than {ANSWER_SECONDS:.0f} s", True
        except RingserveError as error:
            return str(error), not isinstance(error, ConfigError)

    async def close(self) -> None:
        self._shown, self.is_admitting = "it is about to end", False
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)


def _is(fault: str) -> str:
    return f"is not ready: {fault}" if fault else "is ready"
