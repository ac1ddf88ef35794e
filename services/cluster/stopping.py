"""Orderly end of `ringserve up` and `ringserve demo` on SIGINT or SIGTERM.

An exception that a signal handler raises inside Ray's native code becomes another error or is lost. So the handler
only sets an event, which callers check, except inside `interruptible`.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType

POLL_SECONDS = 0.2
"""Seconds between two looks at `insisted`."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest(BaseException):
    """Request to stop, by a signal. A BaseException, so that no `except Exception` catches it as an error."""


class StopSignals:
    """Handler of both signals for the rest of the process's life.

    The first signal sets `requested`. The second sets `insisted`: an orderly end is cut short.
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
        """Let a signal raise StopRequest inside a block in which no native code of Ray runs."""
        check_stop(self.requested)
        self._may_raise = True
        try:
            yield
        finally:
            self._may_raise = False


@contextmanager
def keeping_handlers() -> Iterator[None]:
    """Restore the signal handlers after a block that calls `ray.init`, which replaces them.

    Ray's native handler logs a stack and sets an alarm that aborts the process three seconds after SIGTERM. On a busy
    machine, that is too soon for an orderly end and leaves Ray's processes behind.
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


async def run_until_set(insisted: threading.Event, work: Coroutine[None, None, None]) -> None:
    """Run `work` to its end, or cancel it when `insisted` is set. Raises the errors of `work`."""
    task = asyncio.create_task(work)
    while not task.done():
        if insisted.is_set():
            task.cancel()
        await asyncio.wait([task], timeout=POLL_SECONDS)
    if not task.cancelled():
        task.result()
