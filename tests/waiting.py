"""Waits for conditions without an event of their own, and the limits of all waits.

No test passes or fails by these limits: they end a test that hangs, on a machine where 50 other processes want its two
cores as well. The timeouts of whole tests are in pyproject.toml and conftest.py.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable

WAIT_SECONDS = 300.0
"""Limit of one wait: for a message, an answer, a thread, a process's end."""
START_SECONDS = 1200.0
"""Limit of a wait for processes that load torch or models first: a cluster starts in 25 s on an idle machine."""

Selected = list[tuple[selectors.SelectorKey, int]]


class _Watcher(selectors.DefaultSelector):
    """Selector that checks conditions after each round of callbacks: only these can make a condition true."""

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
    """Event loop that reports when a condition becomes true, and whose clock a test may move forward."""

    def __init__(self) -> None:
        self._watcher, self._skipped = _Watcher(), 0.0
        super().__init__(self._watcher)

    def time(self) -> float:
        return super().time() + self._skipped

    def skip(self, seconds: float) -> None:
        """Let these seconds pass at once: timers that are due by then fire in the next round."""
        self._skipped += seconds

    async def until(self, holds: Callable[[], bool]) -> None:
        """Return when `holds`; only callbacks of this loop may make it true."""
        told = self.create_future()
        self._watcher.watch(holds, told)
        await told


def pass_time(seconds: float) -> None:
    """Move the clock of the running event loop forward.

    A test waits until the code under test waits for a deadline, and lets it pass: a deadline so short that a test could
    wait for it might be over before, on a busy machine.
    """
    loop = asyncio.get_running_loop()
    assert isinstance(loop, WatchedLoop)
    loop.skip(seconds)


async def eventually(holds: Callable[[], bool], seconds: float = WAIT_SECONDS) -> None:
    """Let the event loop run until `holds`; fail the test after `seconds`.

    Wait for an event instead where one exists. The loop sees changes by a thread only at its next callback.
    """
    loop = asyncio.get_running_loop()
    assert isinstance(loop, WatchedLoop)
    async with asyncio.timeout(seconds):
        await loop.until(holds)
