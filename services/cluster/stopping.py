"""SIGINT and SIGTERM of a command that runs a cluster: a request for an orderly end, noticed where that is safe.

An exception that a signal handler raises inside Ray's native code comes out as another error, or not at all. So the
handler only sets an event, except inside `interruptible`.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType

POLL_SECONDS = 0.2
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest(BaseException):
    """Request to stop, by a signal. No `except Exception` on the way may take it for an error."""


class StopSignals:
    """Handler of both signals for the rest of the process's life.

    The first signal sets `requested`. The second sets `insisted`: work that would end in its own time is to end now.
    """

    def __init__(self) -> None:
        self.requested = threading.Event()
        self.insisted = threading.Event()
        self._may_raise = False
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested.is_set():
            self.insisted.set()
        self.requested.set()
        if self._may_raise:
            self._may_raise = False
            raise StopRequest

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """End a block at once on a signal, where no native code of others runs."""
        check_stop(self.requested)
        self._may_raise = True
        try:
            yield
        finally:
            self._may_raise = False


@contextmanager
def keeping_handlers() -> Iterator[None]:
    """Restore the signal handlers after `ray.init`, which puts its own before them for good.

    Its native one logs a stack and sets an alarm that aborts the process three seconds after SIGTERM: too soon for an
    orderly end on a busy machine, and Ray's processes would be left behind.
    """
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)


def check_stop(requested: threading.Event) -> None:
    """Raise StopRequest if a stop was requested."""
    if requested.is_set():
        raise StopRequest


async def until_set(insisted: threading.Event, work: Coroutine[None, None, None]) -> None:
    """Run `work` to its end, or cancel it when `insisted` is set. Raises what it raises."""
    task = asyncio.create_task(work)
    while not task.done():
        if insisted.is_set():
            task.cancel()
        await asyncio.wait([task], timeout=POLL_SECONDS)
    if not task.cancelled():
        task.result()
