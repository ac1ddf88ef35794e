"""The HTTP server of a gateway: uvicorn in the gateway's own event loop, without its signal handlers and its logs."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from cp_core.errors import ConfigError
from services.auth.certificates import Certificate, of_ssl
from services.gateway.openai.header_limit import MAX_HEADER_BYTES

CERTIFICATE = "ringserve.certificate"


class _Server(uvicorn.Server):
    """Signals belong to the process, which ends every door in order."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Protocol(H11Protocol):
    """One connection. What its client's certificate proves stands in the state of each of its requests."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = self.app_state | {CERTIFICATE: of_ssl(transport.get_extra_info("ssl_object"))}


def certificate_of(scope: Scope) -> Certificate | None:
    """Of a request; None where its client showed none."""
    certificate = scope.get("state", {}).get(CERTIFICATE)
    assert certificate is None or isinstance(certificate, Certificate), "put there by our protocol"
    return certificate


class HttpServer:
    """One listening HTTP server: `start`, then `stop`."""

    def __init__(self, app: ASGIApp, tls: ssl.SSLContext | None = None) -> None:
        self._app = app
        self._tls = tls
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self, listen: str) -> str:
        """Listen on HOST:PORT (port 0: any free one); returns the address really listened on. Raises ConfigError."""
        host, _, wanted = listen.rpartition(":")
        listener = _listener(host, int(wanted))
        config = uvicorn.Config(
            self._app,
            loop="asyncio",
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        )
        config.load()
        config.ssl = self._tls  # made and proven by us; uvicorn would make its own from files
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        return f"{host}:{listener.getsockname()[1]}"

    async def stop(self, grace: float) -> None:
        """Take no new requests, give running ones `grace` seconds, then cancel them."""
        if self._server is None or self._serving is None:
            return
        if self._server.started:
            for listening in self._server.servers:
                listening.close()  # at once: uvicorn looks up ten times a second only
        self._server.config.timeout_graceful_shutdown = max(1, round(grace))
        self._server.should_exit = True
        await self._serving

    def hurry(self) -> None:
        """While it stops: wait for nobody any longer."""
        if self._server is not None:
            self._server.force_exit = True


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    # Without SO_REUSEPORT: a port in use must be an error, not a shared port.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host.strip("[]"), port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ConfigError(f"gateway.http: cannot listen on {host}:{port}: {error.strerror}") from error
    listener.setblocking(False)
    return listener
