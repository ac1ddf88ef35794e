"""Watch over a process: grpc.health.v1 answers by whether it makes progress."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ringserve.cp_core.errors import RingserveError
from ringserve.services.rpc.server import GrpcServer

log = logging.getLogger(__name__)

ASK_SECONDS = 1.0
"""Seconds between looks."""
ANSWER_SECONDS = 5.0
"""Longest a look may take; a process that takes longer is not ready."""


class HealthWatch:
    """Repeated call of `find_fault`: a sentence means NOT_SERVING, an empty one SERVING.

    `name` is for logs. Close the watch before the server stops.
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

    @property
    def fault(self) -> str:
        """The fault of the last look; empty where there is none."""
        return "it has only just started" if self._shown is None else self._shown

    def start(self) -> None:
        self._asking = asyncio.create_task(self._ask())

    async def _ask(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(self._interval)

    async def look(self) -> None:
        """Ask once, and publish the answer where it has changed."""
        fault = await self._fault()
        if self._shown is None or bool(fault) != bool(self._shown):
            log.log(logging.WARNING if fault else logging.INFO, "%s %s", self._name, _is(fault))
            await self._server.set_serving(not fault)
        self._shown = fault

    async def _fault(self) -> str:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await self._find_fault()
        except TimeoutError:
            return f"it could not tell how it is within {ANSWER_SECONDS:.0f} s"
        except RingserveError as error:
            return str(error)

    async def close(self) -> None:
        self._shown = "it is about to end"
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)


def _is(fault: str) -> str:
    return f"is not ready: {fault}" if fault else "is ready"
