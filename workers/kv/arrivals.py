"""Ends of incoming transfers: a rank reports each end to its leader once, and the leader waits for the ends it wants.

One call to a rank waits for all its transfers. A call per transfer would hold a thread of the rank from a turn's
reservation to its seal, and leave no thread for the sends that the seal needs.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

from ringserve.cp_core.errors import RingserveError, TransferError, Unavailable
from ringserve.workers.protocol.transfers import KvEnd, KvEnds, TransferKey, TransferReport

POLL_SECONDS = 10.0
"""Longest wait of one `poll` call."""


class EndedTransfers:
    """Transfer ends that the leader has not fetched yet, numbered from 0. Thread-safe.

    Each transfer ends once, so there are at most as many ends as transfers begun since the last `poll`.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ends: list[KvEnd] = []
        self._first = 0
        self._is_closed = False

    def add(self, end: KvEnd) -> None:
        """Add the end of a transfer."""
        with self._changed:
            self._ends.append(end)
            self._changed.notify_all()

    def poll(self, after: int, timeout: float) -> KvEnds:
        """Return the ends from number `after` on and forget earlier ends. Wait up to `timeout` seconds for one.

        A call may be repeated if its answer was lost.
        """
        with self._changed:
            assert after >= self._first, f"ends from number {after} on are forgotten"
            del self._ends[: after - self._first]
            self._first = after
            self._changed.wait_for(lambda: self._ends or self._is_closed, timeout)
            return KvEnds(stop=self._first + len(self._ends), ends=tuple(self._ends))

    def close(self) -> None:
        """Make waiting calls return. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


class Arrivals:
    """A leader's transfers into one rank, each from `expect` to `wait` or `drop`.

    While any transfer is expected, one call of `poll(after, seconds)` waits at the rank.
    """

    def __init__(self, poll: Callable[[int, float], Awaitable[KvEnds]]) -> None:
        self._poll = poll
        self._ends: dict[TransferKey, asyncio.Future[KvEnd]] = {}
        self._after = 0
        self._following: asyncio.Task[None] | None = None

    def expect(self, key: TransferKey) -> None:
        """Watch for the end of a transfer. Call it before the rank accepts the first byte."""
        self._ends[key] = asyncio.get_running_loop().create_future()
        if self._following is None or self._following.done():
            self._following = asyncio.create_task(self._follow())

    def drop(self, key: TransferKey) -> None:
        """Forget a transfer. A pending `wait` for it raises TransferError."""
        end = self._ends.pop(key, None)
        if end is not None and not end.done():
            end.set_result(KvEnd(key=key, error=TransferError(f"{_name(key)} was dropped by its destination")))

    async def wait(self, key: TransferKey, timeout: float) -> TransferReport:
        """Wait up to `timeout` seconds until every layer, head and token has arrived, then forget the transfer.

        Raises the error that aborted the transfer, or TransferError if it is not expected or not complete in time. A
        transfer that is not complete stays expected.
        """
        if key not in self._ends:
            raise TransferError(f"{_name(key)} is not expected here")
        try:
            async with asyncio.timeout(timeout):
                end = await asyncio.shield(self._ends[key])
        except TimeoutError:
            raise TransferError(f"{_name(key)} is not complete after {timeout:g} s") from None
        self._ends.pop(key, None)
        if end.error is not None:
            raise type(end.error)(str(end.error))
        assert end.report is not None, "a transfer ends with a report or an error"
        return end.report

    def close(self, reason: str) -> None:
        """End every wait, because the rank is gone. Idempotent."""
        if self._following is not None:
            self._following.cancel()
        self._fail_all(Unavailable(reason))

    async def _follow(self) -> None:
        try:
            while any(not end.done() for end in self._ends.values()):
                ended = await self._poll(self._after, POLL_SECONDS)
                self._after = ended.stop
                for end in ended.ends:
                    if end.key in self._ends and not self._ends[end.key].done():
                        self._ends[end.key].set_result(end)
        except RingserveError as error:
            self._fail_all(error)

    def _fail_all(self, error: RingserveError) -> None:
        for key, end in self._ends.items():
            if not end.done():
                end.set_result(KvEnd(key=key, error=error))


def _name(key: TransferKey) -> str:
    return f"transfer {key.transfer_id!r} attempt {key.attempt}"
