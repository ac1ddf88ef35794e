"""For what tells nobody that it has happened: what several tasks have left behind when all are done."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable

WAIT_SECONDS = 20.0

Selected = list[tuple[selectors.SelectorKey, int]]


class _Watcher(selectors.DefaultSelector):
    """Looks at conditions whenever the callbacks of one round have run: nothing else on the loop can make them true."""

    def __init__(self) -> None:
        super().__init__()
        self._watched: dict[asyncio.Future[None], Callable[[], bool]] = {}

    def watch(self, holds: Callable[[], bool], told: asyncio.Future[None]) -> None:
        self._watched[told] = holds
        told.add_done_callback(self._watched.pop)

    def select(self, timeout: float | None = None) -> Selected:
        for told, holds in list(self._watched.items()):
            if _tell(told, holds):
                timeout = 0
        return super().select(timeout)


def _tell(told: asyncio.Future[None], holds: Callable[[], bool]) -> bool:
    if told.done():
        return False
    try:
        if holds():
            told.set_result(None)
    except Exception as error:
        told.set_exception(error)
    return told.done()


class WatchedLoop(asyncio.SelectorEventLoop):
    """An event loop that says when a condition has come true."""

    def __init__(self) -> None:
        self._watcher = _Watcher()
        super().__init__(self._watcher)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Return when `holds`, which only what runs on this loop makes true."""
        told = self.create_future()
        self._watcher.watch(holds, told)
        await told


async def eventually(holds: Callable[[], bool], seconds: float = WAIT_SECONDS) -> None:
    """Let the event loop run until `holds`; fail the test after `seconds`.

    Where there is an event to wait for, wait for that. What a thread changes by itself shows when the loop next has
    something to do.
    """
    loop = asyncio.get_running_loop()
    assert isinstance(loop, WatchedLoop)
    async with asyncio.timeout(seconds):
        await loop.until(holds)
