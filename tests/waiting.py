"""For what tells nobody that it has happened: what several tasks and threads have left behind when all are done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

WAIT_SECONDS = 20.0


async def eventually(holds: Callable[[], bool], seconds: float = WAIT_SECONDS) -> None:
    """Let the event loop, and the threads beside it, run until `holds`; fail the test after `seconds`.

    Where there is an event to wait for, wait for that.
    """
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.005)
