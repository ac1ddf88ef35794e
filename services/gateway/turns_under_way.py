"""What a gateway has under way: how much, and how to end it without asking anybody."""

from __future__ import annotations

import asyncio

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


class TurnUnderWay:
    """A turn that runs. A context around whatever it waits for, which raises Unavailable, at once, when the gateway
    stops or has stopped.
    """

    def __init__(self, request_id: str, stopping: asyncio.Event) -> None:
        self.request_id = request_id
        self._stopping = stopping
        self._waits: asyncio.Task[object] | None = None

    def __enter__(self) -> None:
        if self._stopping.is_set():
            raise Unavailable(STOPPING)
        self._waits = asyncio.current_task()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        task, self._waits = self._waits, None
        # Where somebody else has cancelled it, alone or as well, that goes on.
        if kind is asyncio.CancelledError and self._stopping.is_set() and task is not None and not task.uncancel():
            raise Unavailable(STOPPING) from None

    def stop(self) -> None:
        """Wait no longer."""
        if self._waits is not None:
            self._waits.cancel()


class TurnsUnderWay:
    """The turns that run; `stopping` is set when they are being ended."""

    def __init__(self) -> None:
        self.stopping = asyncio.Event()
        self._turns: set[TurnUnderWay] = set()

    def add(self, request_id: str) -> TurnUnderWay:
        turn = TurnUnderWay(request_id, self.stopping)
        self._turns.add(turn)
        return turn

    def discard(self, turn: TurnUnderWay) -> None:
        self._turns.discard(turn)

    @property
    def request_ids(self) -> set[str]:
        return {turn.request_id for turn in self._turns}

    def stop(self) -> None:
        """End every turn: now where it waits, else when what it has just told has been taken."""
        self.stopping.set()
        for turn in self._turns:
            turn.stop()
