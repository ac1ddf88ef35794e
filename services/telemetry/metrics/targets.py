"""Which metrics ports a service has, in the format of Prometheus' HTTP service discovery: one entry finds them all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

from orchestration.protocol.views import ServerView
from services.telemetry.metrics.endpoint import Page, Reply
from services.telemetry.metrics.ring import SCRAPE_SECONDS


def targets_of(view: ServerView, gateway: str) -> list[dict[str, object]]:
    """This gateway, the router, and every ring that serves metrics. A lost ring is left out: its series go stale."""
    found = [("gateway", "", gateway), ("router", "", view.metrics_endpoint)]
    found += [(ring.role, ring.name, ring.metrics_endpoint) for ring in view.rings]
    return [
        {"targets": [address], "labels": {"ringserve_role": role, "ringserve_ring": ring}}
        for role, ring, address in found
        if address
    ]


def targets_page(
    get_server_info: Callable[[], Awaitable[ServerView]], gateway: Callable[[], str], loop: asyncio.AbstractEventLoop
) -> Page:
    """Asks the router each time. `gateway` gives this gateway's own metrics address."""

    async def ask() -> ServerView:
        async with asyncio.timeout(SCRAPE_SECONDS):
            return await get_server_info()

    def page(accept: str) -> Reply:
        view = asyncio.run_coroutine_threadsafe(ask(), loop).result(2 * SCRAPE_SECONDS)
        return Reply("application/json", json.dumps(targets_of(view, gateway())).encode())

    return page
