"""Plain HTTP server for Prometheus and for probes: /metrics, /live, /ready, /admitting, and at a gateway /targets.

It owns its port and threads, and reads the process's state only through its pages. The probes tell what grpc.health.v1
tells, for clients that cannot show a certificate. /targets lists all metrics endpoints of a service, in the format of
Prometheus' HTTP service discovery.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import urlsplit

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, choose_encoder
from prometheus_client.registry import Collector

from ringserve.cp_core.errors import ConfigError
from ringserve.services.telemetry.metrics.ring import SCRAPE_SECONDS
from ringserve.views import ServerInfo

log = logging.getLogger(__name__)


class Reply(NamedTuple):
    content_type: str
    body: bytes
    status: int = 200


Page = Callable[[str], Reply]
"""Function that makes a page: it takes the Accept header and returns the reply."""
TEXT = "text/plain; charset=utf-8"
OPEN_METRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
UTF8_NAMES = "application/openmetrics-text; version=1.0.0; escaping=allow-utf-8"
IDLE_SECONDS = 30.0
"""Seconds after which an idle connection is closed."""


def metrics_page(source: Collector) -> Page:
    """Return the page of a registry, in the format that the scraper prefers, with the names as they are.

    prometheus_client writes `vllm_...` for `vllm:...` to a scraper that knows no UTF-8 names, such as Prometheus 2,
    though every Prometheus reads colons. A scraper that accepts OpenMetrics gets the unchanged names in that format,
    and the exemplars too, which the plain text format lacks.
    """

    def page(accept: str) -> Reply:
        encode, content_type = choose_encoder(accept)
        if "allow-utf-8" not in content_type:
            is_open = "openmetrics" in content_type
            encode, _ = choose_encoder(UTF8_NAMES if is_open else "")
            content_type = OPEN_METRICS if is_open else CONTENT_TYPE_PLAIN_0_0_4
        return Reply(content_type, encode(source))

    return page


class MetricsEndpoint:
    """HTTP server that listens until `close`."""

    def __init__(self, key: str, address: str, pages: Mapping[str, Page]) -> None:
        """Listen on `address`, HOST:PORT with port 0 for any free one; `key` names the setting in errors.

        Raises ConfigError.
        """
        host, _, port = address.rpartition(":")
        try:
            self._server = _Server((host.strip("[]"), int(port)), pages)
        except OSError as error:
            raise ConfigError(f"{key}: cannot listen on {address}: {error.strerror}") from error
        self.address = f"{host}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # an open connection of a scraper must not delay the end of the process

    def __init__(self, address: tuple[str, int], pages: Mapping[str, Page]) -> None:
        self.pages = pages
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    timeout = IDLE_SECONDS
    server: _Server

    def do_GET(self) -> None:
        page = self.server.pages.get(urlsplit(self.path).path)
        if page is None:
            self._send(Reply(TEXT, f"pages are {', '.join(self.server.pages)}\n".encode(), 404))
            return
        try:
            reply = page(self.headers.get("Accept", ""))
        except Exception:  # the last place before the network: logged whole, shown as one sentence
            log.exception("the page %s failed", self.path)
            reply = Reply(TEXT, b"internal error; the process's log has the details\n", 500)
        self._send(reply)

    def _send(self, reply: Reply) -> None:
        self.send_response(reply.status)
        self.send_header("Content-Type", reply.content_type)
        self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        self.wfile.write(reply.body)

    def log_message(self, format: str, *arguments: object) -> None:
        log.debug(format, *arguments)


def probe_pages(
    find_fault: Callable[[], str],
    loop: asyncio.AbstractEventLoop,
    is_admitting: Callable[[], bool] = lambda: False,
) -> dict[str, Page]:
    """Return the pages /live, /ready, and /admitting for servers behind a load balancer.

    `find_fault`, called in any thread, returns why the process does not serve; empty if it does. `is_admitting` tells
    whether clients are to connect all the same. A process whose event loop `loop` hangs is not live, though this
    server's threads answer.
    """

    def check_loop() -> None:
        turned = threading.Event()
        loop.call_soon_threadsafe(turned.set)
        if not turned.wait(SCRAPE_SECONDS):
            raise TimeoutError(f"the event loop did not turn within {SCRAPE_SECONDS:g} s")

    def ready(accept: str) -> Reply:
        check_loop()
        fault = find_fault()
        return Reply(TEXT, f"not ready: {fault}\n".encode(), 503) if fault else Reply(TEXT, b"ready\n")

    def live(accept: str) -> Reply:
        check_loop()
        return Reply(TEXT, b"live\n")

    def admitting(accept: str) -> Reply:
        return Reply(TEXT, b"admitting\n") if is_admitting() else ready(accept)

    return {"/live": live, "/ready": ready, "/admitting": admitting}


def targets_of(view: ServerInfo, gateway: str) -> list[dict[str, object]]:
    """Return the targets: this gateway, the router, and every ring that serves metrics. Lost rings are left out."""
    found = [("gateway", "", gateway), ("router", "", view.router_metrics_endpoint)]
    found += [(ring.role, ring.name, ring.metrics_endpoint) for ring in view.rings]
    return [
        {"targets": [address], "labels": {"ringserve_role": role, **({"ringserve_ring": ring} if ring else {})}}
        for role, ring, address in found
        if address
    ]


def targets_page(
    get_server_info: Callable[[], Awaitable[ServerInfo]], gateway: Callable[[], str], loop: asyncio.AbstractEventLoop
) -> Page:
    """Return the page /targets, which asks the router each time.

    `gateway` returns this gateway's own metrics address.
    """

    async def ask() -> ServerInfo:
        async with asyncio.timeout(SCRAPE_SECONDS):
            return await get_server_info()

    def page(accept: str) -> Reply:
        view = asyncio.run_coroutine_threadsafe(ask(), loop).result(2 * SCRAPE_SECONDS)
        return Reply("application/json", json.dumps(targets_of(view, gateway())).encode())

    return page
