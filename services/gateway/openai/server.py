"""HTTP server of a gateway: uvicorn in the gateway's own event loop, without its signal handlers and its logs.

Streams of server-sent events stay open through silence, and work ends when its client has hung up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, suppress

import uvicorn
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ringserve.cp_core.errors import ConfigError
from ringserve.services.auth.authenticator import Certificate, of_ssl
from ringserve.services.gateway.openai.errors import BadHttpRequest, error_body

CERTIFICATE = "ringserve.certificate"
IDLE_SECONDS = 75
"""Seconds for which an idle connection stays open: longer than pools of clients and proxies hold one (nginx 60)."""


class _Server(uvicorn.Server):
    """Server without signal handlers: the process ends every server in order."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Protocol(H11Protocol):
    """One connection. The names of its client's certificate are in the state of each of its requests."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = self.app_state | {CERTIFICATE: of_ssl(transport.get_extra_info("ssl_object"))}


def certificate_of(scope: Scope) -> Certificate | None:
    """Return the certificate of a request, or None where its client showed none."""
    certificate = scope.get("state", {}).get(CERTIFICATE)
    assert certificate is None or isinstance(certificate, Certificate), "put there by our protocol"
    return certificate


class HttpServer:
    """Listening HTTP server: `start`, then `stop`."""

    def __init__(self, app: ASGIApp, tls: ssl.SSLContext | None = None) -> None:
        self._app = app
        self._tls = tls
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self, listen: str) -> str:
        """Listen on HOST:PORT (port 0: any free one) and return the address listened on. Raises ConfigError."""
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
            timeout_keep_alive=IDLE_SECONDS,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        )
        config.load()
        config.ssl = self._tls  # made and checked before; uvicorn would make its own from files
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
        """Stop waiting for running requests."""
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


log = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 15.0
"""Seconds of silence before a comment is sent: the prefill of a long prompt takes longer than proxies wait."""
KEEP_ALIVE = b": waiting\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold the events back
]


@asynccontextmanager
async def ended_by_hang_up(receive: Receive) -> AsyncIterator[None]:
    """Cancel the block when the client hangs up, and raise ClientDisconnect. The request's body has been read."""
    task = asyncio.current_task()
    assert task is not None, "requests are served in tasks"
    is_gone = False

    async def watch() -> None:
        nonlocal is_gone
        while (await receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if is_gone and task.uncancel() == 0:
            raise ClientDisconnect from None
        raise
    finally:
        watcher.cancel()  # not awaited: that would be one more place where the cancellation could arrive


class EventStream:
    """ASGI response of a turn's events, `first` and then `events`, each a line of JSON. Closing them ends the turn."""

    def __init__(
        self, first: bytes, events: AsyncGenerator[bytes, None], keep_alive_seconds: float = KEEP_ALIVE_SECONDS
    ) -> None:
        self._first = first
        self._events = events
        self._keep_alive_seconds = keep_alive_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        last = asyncio.get_running_loop().time()

        async def body(data: bytes, more: bool = True) -> None:
            nonlocal last
            last = asyncio.get_running_loop().time()
            await send({"type": "http.response.body", "body": data, "more_body": more})

        async def keep_alive() -> None:
            with suppress(OSError):  # the other task sends too, and reports the error
                while True:
                    silent = asyncio.get_running_loop().time() - last
                    await asyncio.sleep(max(self._keep_alive_seconds - silent, 0.01))
                    if asyncio.get_running_loop().time() - last >= self._keep_alive_seconds:
                        await body(KEEP_ALIVE)

        pinger = asyncio.create_task(keep_alive())
        try:
            async with aclosing(self._events), ended_by_hang_up(receive):
                await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
                await body(self._first)
                async for event in self._events:
                    await body(event)
                pinger.cancel()
                await body(b"", more=False)
        except (ClientDisconnect, OSError):
            log.info("the client hung up; its turn is ended")
        finally:
            pinger.cancel()


MAX_HEADER_BYTES = 32 * 1024
"""Bytes of the headers of one request, its path included. h11 bounds only headers that arrive in pieces."""


class HeaderLimit:
    """Middleware that refuses larger headers before any of their content is read."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._app
        if scope["type"] == "http" and _size(scope) > MAX_HEADER_BYTES:
            refusal = BadHttpRequest(431, f"path and headers are larger than {MAX_HEADER_BYTES} bytes", "too_large")
            answer = JSONResponse(error_body(refusal), refusal.status)
        await answer(scope, receive, send)


def _size(scope: Scope) -> int:
    headers = sum(len(name) + len(value) for name, value in scope["headers"])
    return headers + len(scope["raw_path"]) + len(scope["query_string"])
