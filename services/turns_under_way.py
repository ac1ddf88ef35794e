"""What a gateway has under way: how much, and how to end it without asking anybody."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from cp_core.errors import Unavailable

STOPPING = "the gateway is stopping; retry at another"


class CallsUnderWay:
    """Counts what is inside of it, as a context; `none` is set while that is nothing."""

    def __init__(self) -> None:
        self.none = asyncio.Event()
        self.none.set()
        self._count = 0

    def __enter__(self) -> None:
        self._count += 1
        self.none.clear()

    def __exit__(self, *error: object) -> None:
        self._count -= 1
        if not self._count:
            self.none.set()


class TurnsUnderWay:
    """The turns that run, by request id, and for those that wait for a ring or the router the task that does.

    `stopping` is set when they are being ended.
    """

    def __init__(self) -> None:
        self.stopping = asyncio.Event()
        self._waiting: dict[str, asyncio.Task[object] | None] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._waiting))

    def add(self, request_id: str) -> None:
        self._waiting[request_id] = None

    def discard(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)

    @contextmanager
    def waiting(self, request_id: str) -> Iterator[None]:
        """Around what a turn waits for. Raises Unavailable, at once, when the gateway stops or has stopped."""
        if self.stopping.is_set():
            raise Unavailable(STOPPING)
        task = self._waiting[request_id] = asyncio.current_task()
        try:
            yield
        except asyncio.CancelledError:
            if not self.stopping.is_set() or task is None or task.uncancel():
                raise  # by somebody else, or by them as well
            raise Unavailable(STOPPING) from None
        finally:
            self._waiting[request_id] = None

    def stop(self) -> None:
        """End every turn, now or when what it has just told has been taken."""
        self.stopping.set()
        for task in self._waiting.values():
            if task is not None:
                task.cancel()
