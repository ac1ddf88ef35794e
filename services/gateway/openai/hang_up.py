"""Work that ends when its client is gone, and streams of server-sent events that stay open through silence."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

log = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 15.0
"""A comment is sent after so long a silence: the prefill of a long prompt takes longer than proxies wait."""
KEEP_ALIVE = b": waiting\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold the events back
]


@asynccontextmanager
async def ended_by_hang_up(receive: Receive) -> AsyncIterator[None]:
    """The block is cancelled when the client hangs up: raises ClientDisconnect. The request's body has been read."""
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
    """An ASGI response: the events of a turn, each a line of JSON. Closing `events` ends the turn."""

    def __init__(self, events: AsyncGenerator[bytes, None], keep_alive_seconds: float = KEEP_ALIVE_SECONDS) -> None:
        self._events = events
        self._keep_alive_seconds = keep_alive_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        last = asyncio.get_running_loop().time()

        async def body(data: bytes, more: bool = True) -> None:
            nonlocal last
            last = asyncio.get_running_loop().time()
            await send({"type": "http.response.body", "body": data, "more_body": more})

        async def keep_alive() -> None:
            with suppress(OSError):  # the other task sends as well, and reports it
                while True:
                    silent = asyncio.get_running_loop().time() - last
                    await asyncio.sleep(max(self._keep_alive_seconds - silent, 0.01))
                    if asyncio.get_running_loop().time() - last >= self._keep_alive_seconds:
                        await body(KEEP_ALIVE)

        pinger = asyncio.create_task(keep_alive())
        try:
            async with aclosing(self._events), ended_by_hang_up(receive):
                await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
                async for event in self._events:
                    await body(event)
                pinger.cancel()
                await body(b"", more=False)
        except (ClientDisconnect, OSError):
            log.info("a client hung up; its turn is ended")
        finally:
            pinger.cancel()
