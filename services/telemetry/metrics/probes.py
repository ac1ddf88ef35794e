"""/live and /ready beside /metrics: what grpc.health.v1 says, for probes that cannot show a certificate."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from services.telemetry.metrics.endpoint import TEXT, Page, Reply
from services.telemetry.metrics.ring import SCRAPE_SECONDS


def probe_pages(find_fault: Callable[[], str], loop: asyncio.AbstractEventLoop) -> dict[str, Page]:
    """`find_fault`, called in any thread, says what keeps the process from serving; empty where nothing does. A process
    whose `loop` no longer turns is not live, though the thread that answers here is.
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

    return {"/live": live, "/ready": ready}
