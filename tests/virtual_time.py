"""Event loop whose clock jumps to the next timer when nothing else is to be done: hours pass in a moment."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Loop for code that does no I/O. Its clock begins at 0 and moves only while every task waits for a timer."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now

    def jump(self, seconds: float) -> None:
        """Move the clock forward."""
        self._now += seconds


class _JumpingSelector(selectors.DefaultSelector):
    """Selector that never waits: what it was to wait passes on the loop's clock."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "the loop would wait for ever: nothing is ready and no timer is set"
        if timeout > 0:
            self._loop.jump(timeout)
        return super().select(0)
