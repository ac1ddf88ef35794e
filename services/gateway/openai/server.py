"""HTTP server of the gateway process: uvicorn in its event loop, without uvicorn's signal handlers and logs.

Event streams stay open through silence, and a turn ends when its client hangs up.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import math
import os
import resource
import socket
import ssl
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterator, MutableSet, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any
from weakref import WeakSet

import uvicorn
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ringserve.cp_core.errors import ConfigError
from ringserve.orchestration.protocol.turns import exceeds_share
from ringserve.services.auth.authenticator import Certificate, read_ssl_certificate
from ringserve.services.gateway.openai.errors import BadHttpRequest, error_body
from ringserve.services.gateway.openai.models import quote

log = logging.getLogger(__name__)

CERTIFICATE = "ringserve.certificate"
HEADER_SECONDS = 30
"""Seconds for a request's headers, as many as slow mobile networks need; other servers take 10 to 60."""
TELL_SECONDS = 60.0
"""Seconds between two log lines about refused connections."""
MAX_REFUSALS = 100
"""Connections that are refused in a row before the loop turns again."""
IDLE_SECONDS = 75
"""Seconds for which an idle connection stays open: longer than pools of clients and proxies hold one (nginx 60)."""


class _Server(uvicorn.Server):
    """Server without signal handlers: the gateway process stops its servers in order."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Protocol(H11Protocol):
    """One connection. The ASGI state of each request holds the client's certificate.

    A connection closes if the headers of a request are late: of the first one HEADER_SECONDS after the connection
    began, of a later one HEADER_SECONDS after its first byte. uvicorn alone would wait for ever.
    """

    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = self.app_state | {CERTIFICATE: read_ssl_certificate(transport.get_extra_info("ssl_object"))}
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._await_headers()
        else:
            self._end_wait()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and self.conn.trailing_data[0]:
            self._await_headers()  # a part of the next request has come already

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_wait()
        super().connection_lost(exc)

    def _await_headers(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _end_wait(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


def max_connections() -> int:
    """Return how many connections may be open: half of the process's descriptors, so that gRPC has the other half."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft // 2 if soft != resource.RLIM_INFINITY else sys.maxsize


class _Connection(socket.socket):
    """Accepted connection, which counts in each of `among` until it is closed."""

    among: Sequence[MutableSet[socket.socket]]

    def close(self) -> None:
        for connections in self.among:
            connections.discard(self)
        super().close()


def _network(host: str) -> str:
    """Return an IPv4 address, or the /64 network of an IPv6 address: one customer has at least that many addresses.

    Example: 2001:db8::1 and 2001:db8::2 are both of 2001:db8::/64.
    """
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.version == 4:
        return host
    mapped = address.ipv4_mapped  # a socket that listens on IPv4 and IPv6 shows IPv4 addresses in this form
    return str(mapped or ipaddress.ip_network((address, 64), strict=False))


class _Listener(socket.socket):
    """Listening socket that closes connections beyond a limit as it accepts them, before any TLS handshake.

    One address, or one IPv6 network, may hold at most three quarters of the connections, so that others always find a
    place. A proxy, which is one address for all its clients, hardly notices that.

    Without a free descriptor asyncio logs a traceback for each place in the backlog, thousands a second. Here a spare
    descriptor is given up to accept a connection, which is closed at once.
    """

    def __init__(self, family: int) -> None:
        # asyncio sends small parts at once (TCP_NODELAY) only if a socket says that its protocol is TCP. Otherwise the
        # first event of a stream waits up to 40 ms for the client to acknowledge the headers.
        super().__init__(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._limit = max_connections()
        self._connections: MutableSet[socket.socket] = WeakSet()
        self._by_network: dict[str, MutableSet[socket.socket]] = {}
        self._spare: int | None = os.open(os.devnull, os.O_RDONLY)
        self._told_at = -math.inf

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection within the limit. Raises BlockingIOError if none waits, or after MAX_REFUSALS."""
        for _ in range(MAX_REFUSALS):
            try:
                accepted, address = super().accept()
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                self._tell("no file descriptor is free")
                self._refuse_by_spare()
                continue
            network = _network(address[0])
            mine, total = self._of(network), len(self._connections)
            if total < self._limit and not exceeds_share(len(mine), 1, total, self._limit):
                connection = _Connection(self.family, self.type, self.proto, fileno=accepted.detach())
                connection.among = (self._connections, mine)
                for connections in connection.among:
                    connections.add(connection)
                return connection, address
            accepted.close()
            whose = f", {len(mine)} of them by {network}" if total < self._limit else ""
            self._tell(f"{total} of {self._limit} HTTP connections are open{whose}")
        raise BlockingIOError

    def _of(self, network: str) -> MutableSet[socket.socket]:
        """Return the connections of a network. Networks without any are forgotten now and then."""
        if len(self._by_network) > 2 * len(self._connections) + MAX_REFUSALS:
            self._by_network = {name: those for name, those in self._by_network.items() if those}
        return self._by_network.setdefault(network, WeakSet())

    def close(self) -> None:
        """Stop listening. Accepted connections stay open."""
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
        super().close()

    def _refuse_by_spare(self) -> None:
        """Close the next connection. Raises BlockingIOError if none waits, or another thread takes the descriptor."""
        try:
            if self._spare is not None:
                os.close(self._spare)
                self._spare = None
            try:
                super().accept()[0].close()
            finally:  # also if none waits: Linux looks for a descriptor before it looks for a connection
                self._spare = os.open(os.devnull, os.O_RDONLY)
        except OSError:
            raise BlockingIOError from None

    def _tell(self, why: str) -> None:
        if time.monotonic() - self._told_at >= TELL_SECONDS:
            self._told_at = time.monotonic()
            log.warning("%s; new connections are closed", why)


def read_certificate(scope: Scope) -> Certificate | None:
    """Return the client certificate of a request; None if the client showed none."""
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
        """Listen on HOST:PORT and return that address; port 0 takes a free port. Raises ConfigError."""
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
        config.ssl = self._tls  # already checked; uvicorn would build its own context from files
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        return f"{host}:{listener.getsockname()[1]}"

    async def stop(self, grace: float) -> None:
        """Refuse new requests, give running requests `grace` seconds, then cancel them."""
        if self._server is None or self._serving is None:
            return
        if self._server.started:
            for listening in self._server.servers:
                listening.close()  # at once: uvicorn checks `should_exit` only ten times a second
        self._server.config.timeout_graceful_shutdown = max(1, round(grace))
        self._server.should_exit = True
        await self._serving

    def hurry(self) -> None:
        """Stop waiting for running requests."""
        if self._server is not None:
            self._server.force_exit = True


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = _Listener(family)
    # No SO_REUSEPORT: a port in use must be an error, not a shared port.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host.strip("[]"), port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ConfigError(f"gateway.http: cannot listen on {host}:{port}: {error.strerror}") from error
    listener.setblocking(False)
    return listener


KEEP_ALIVE_SECONDS = 15.0
"""Seconds of silence before a comment is sent: a long prefill takes longer than proxies wait."""
KEEP_ALIVE = b": waiting\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold the events back
]


@asynccontextmanager
async def cancel_on_hang_up(receive: Receive) -> AsyncIterator[None]:
    """Cancel the block and raise ClientDisconnect when the client hangs up. Read the request's body first."""
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
        watcher.cancel()  # not awaited: the cancellation could arrive during that await too


class EventStream:
    """ASGI response that streams a turn's events: `first`, then `events`. It closes `events`, which ends the turn."""

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
            with suppress(OSError):  # the main task sends too, and reports the error
                while True:
                    silent = asyncio.get_running_loop().time() - last
                    await asyncio.sleep(max(self._keep_alive_seconds - silent, 0.01))
                    if asyncio.get_running_loop().time() - last >= self._keep_alive_seconds:
                        await body(KEEP_ALIVE)

        pinger = asyncio.create_task(keep_alive())
        try:
            async with aclosing(self._events), cancel_on_hang_up(receive):
                await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
                await body(self._first)
                async for event in self._events:
                    await body(event)
                pinger.cancel()
                await body(b"", more=False)
        except (ClientDisconnect, OSError):
            log.info("the client hung up, ending its turn")
        finally:
            pinger.cancel()


TWO_LENGTHS = {b"content-length", b"transfer-encoding"}
MAX_HEADER_BYTES = 32 * 1024
"""Limit on one request's headers and path, in bytes. h11 limits only headers that arrive in pieces."""


class HeaderLimit:
    """Middleware that refuses requests with more than MAX_HEADER_BYTES of headers, or with two lengths.

    It does not read their content. With both Content-Length and Transfer-Encoding, a proxy in front may see another end
    of the request than we do, and forward the rest as a request of somebody else (RFC 9112, 6.1); so the connection
    closes, too.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._app
        if scope["type"] == "http" and _size(scope) > MAX_HEADER_BYTES:
            refusal = BadHttpRequest(431, f"path and headers are larger than {MAX_HEADER_BYTES} bytes", "too_large")
            answer = JSONResponse(error_body(refusal), refusal.status)
        elif scope["type"] == "http" and {name for name, _ in scope["headers"]} >= TWO_LENGTHS:
            refusal = BadHttpRequest(400, "Content-Length: not allowed beside Transfer-Encoding")
            answer = JSONResponse(error_body(refusal), refusal.status, {"connection": "close"})
        await answer(scope, receive, send)


def _size(scope: Scope) -> int:
    headers = sum(len(name) + len(value) for name, value in scope["headers"])
    return headers + len(scope["raw_path"]) + len(scope["query_string"])


PRIVATE_SUFFIXES = (".localhost", ".local", ".internal", ".home.arpa", ".svc")
"""Ends of names that no stranger can register and point at this machine, clusters' own among them."""


class BrowserGuard:
    """Middleware for a gateway without tokens: web pages of other sites in a user's browser must not reach it.

    A page can send requests to 127.0.0.1 and, once its own name is made to resolve there (DNS rebinding), read the
    answers (CVE-2024-28224 in Ollama). So names in the Host header must be known, and a browser's request must not come
    from another site, nor have a content type that needs no preflight. HttpConfig explains `origins` and `hosts`.
    Requests without Origin and Sec-Fetch-Site pass with any content type: no browser sends them, and `curl -d` does.
    """

    def __init__(self, app: ASGIApp, origins: Collection[str], hosts: Collection[str]) -> None:
        self._app = app
        self._origins = origins
        self._hosts = {host.lower() for host in hosts} | {socket.gethostname().lower(), socket.getfqdn().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._app
        if scope["type"] == "http" and (refusal := self._refuse(scope["method"], Headers(scope=scope))) is not None:
            answer = JSONResponse(error_body(refusal), refusal.status)
        await answer(scope, receive, send)

    def _refuse(self, method: str, headers: Headers) -> BadHttpRequest | None:
        host = headers.get("host", "")
        if host and not self._is_known(host):
            return BadHttpRequest(
                403, f"Host: {quote(host)} is not a name of this gateway; add it to http.hosts to allow it", "forbidden"
            )
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if (origin is None and site is None) or method == "OPTIONS" or {"*", origin} & set(self._origins):
            return None
        # Following a link to the page is no call.
        is_link = method in ("GET", "HEAD") and headers.get("sec-fetch-mode") == "navigate"
        if site == "cross-site" and not is_link:
            page = quote(origin or "another site")
            return BadHttpRequest(
                403, f"Origin: pages of {page} may not call; add it to http.origins to allow it", "forbidden"
            )
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if method == "POST" and kind != "application/json":
            return BadHttpRequest(
                415, f"Content-Type: {quote(kind)} is not accepted from web pages; send application/json", "unsupported"
            )
        return None

    def _is_known(self, host: str) -> bool:
        """Return True for an address, a name that cannot be a stranger's, or one of the configured names."""
        if "*" in self._hosts:
            return True
        name = host.lower()
        name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
        name = name.removesuffix(".")
        with suppress(ValueError):
            ipaddress.ip_address(name)
            return True
        return "." not in name or name.endswith(PRIVATE_SUFFIXES) or name in self._hosts
