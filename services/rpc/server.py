"""A gRPC server as every process of ringserve runs it: health and reflection included, ports reported clearly."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cp_core.errors import ConfigError
from services.rpc.malformed import MalformedInterceptor

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""A prompt of a million tokens is about 3 MB; gRPC's own default of 4 MB would be close."""

MAX_METADATA_BYTES = 16 * 1024
"""Of one call; a token takes 60 bytes."""

OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.so_reuseport", 0),  # a port in use must be an error, not a shared port
)


LIVE = "ringserve.live"
"""To health checks: SERVING for as long as the process answers at all, ready or not. What liveness probes ask."""


class GrpcServer:
    """One listening gRPC server. `add` registers a servicer; `service` is its full name for health and reflection."""

    def __init__(self, tls: grpc.ServerCredentials | None = None) -> None:
        """Without `tls` everybody may listen in."""
        self._tls = tls
        self._server = grpc.aio.server(options=OPTIONS, interceptors=[MalformedInterceptor()])
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._services: list[str] = []

    def add(self, service: str, register: Callable[[grpc.aio.Server], None]) -> None:
        register(self._server)
        self._services.append(service)

    async def start(self, listen: str, *, is_serving: bool = True) -> str:
        """Listen on HOST:PORT (port 0: any free one); returns the address really listened on. Raises ConfigError.

        `is_serving` is what health checks are told at first.
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
        """What grpc.health.v1 answers, for the server as a whole and for each of its services."""
        serving = health_pb2.HealthCheckResponse.SERVING
        status = serving if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", *self._services):
            await self._health.set(service, status)

    async def stop(self, grace: float) -> None:
        """Refuse new calls, give running ones `grace` seconds."""
        await self.set_serving(False)
        await self._server.stop(grace)

    async def wait(self) -> None:
        await self._server.wait_for_termination()
