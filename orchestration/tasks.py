"""Background tasks, concurrent calls, and work at a lower priority, as every package of orchestration runs them."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, suppress
from typing import TypeVar

from ringserve.cp_core.errors import RingserveError, Unavailable

log = logging.getLogger(__name__)
T = TypeVar("T")

FIRST_PAUSE = 0.05
"""Seconds before the first repetition of a call whose callee could not be reached; each later wait is twice as long."""
MAX_PAUSE = 5.0
"""Seconds between two repetitions at most."""
IDLE_NICENESS = 20
"""From this niceness on, threads get Linux's policy SCHED_IDLE: beside ranks, which run at nice 15, even a thread at
nice 19 would get a third of a core."""


class TaskSet:
    """Background tasks of one `owner`, which a log line names when a task fails."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run `work` in the background, hold its task until it ends, and log an error that it raises."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("background work of %s failed", self._owner, exc_info=task.exception())

    async def close(self) -> None:
        """Cancel every task and wait until all have ended. Idempotent."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def begin_joined(what: str, work: Coroutine[None, None, T]) -> asyncio.Task[T]:
    """Begin work that callers join by `asyncio.shield`. An error is logged: all callers may be cancelled by then.

    If all callers were cancelled, nobody would retrieve the task's error, and Python would log it with a stack trace
    when the task is collected. `what` names the work in the log.
    """

    def note_error(task: asyncio.Task[T]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, RingserveError):
            log.info("%s failed: %s", what, error)
        elif error is not None:
            log.error("%s failed", what, exc_info=error)

    task = asyncio.create_task(work)
    task.add_done_callback(note_error)
    return task


async def gather_all(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Run calls concurrently and wait for every one, then raise the first error, if any. No call is left running."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


async def gather_first_error(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Run calls concurrently. The first error cancels the others and is raised bare, not in an exception group."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_as_coroutine(call)) for call in calls]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _as_coroutine(call: Awaitable[T]) -> T:
    return await call


async def finish_despite_cancellation(work: Awaitable[T]) -> T:
    """Wait until `work` has ended, even if the caller is cancelled meanwhile; then raise the cancellation.

    If `work` raises an error, that is raised instead.
    """
    task = asyncio.ensure_future(work)
    is_cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            is_cancelled = True
    result = task.result()
    if is_cancelled:
        raise asyncio.CancelledError
    return result


async def until_reached(
    call: Callable[[], Awaitable[T]], what: str, until: float, retried: type[Unavailable] = Unavailable
) -> T:
    """Repeat an idempotent call while it raises a `retried` error, until the time `until` on the event loop's clock.

    `what` names the call in the log. After that time, the last of these errors is raised; another error at once.
    """
    pause = FIRST_PAUSE
    while True:
        try:
            return await call()
        except retried as error:
            if asyncio.get_running_loop().time() + pause >= until:
                raise
            log.warning("%s: %s; trying again in %.2f s", what, error, pause)
        await asyncio.sleep(pause)
        pause = min(2 * pause, MAX_PAUSE)


QUEUED_ITEMS = 64
"""Maximum items that wait for the reader of `fan_in`. While there are so many, the streams wait."""


async def fan_in(
    streams: Sequence[AbstractAsyncContextManager[AsyncIterable[T]]],
    *,
    at_once: int | None = None,
    leads: Callable[[T], bool] | None = None,
) -> AsyncGenerator[tuple[int, T], None]:
    """Yield the items of all streams as they arrive, each with its stream's place.

    At most `at_once` streams run at a time (None: all). With `leads`, the first stream begins alone, and the others
    when it has yielded an item for which `leads` is true. The first failure ends all streams, and so does closing the
    generator. Each context is left as soon as its own stream ends, and sees no failure of another stream.
    """
    if len(streams) == 1:
        async with streams[0] as items:
            async for item in items:
                yield 0, item
        return
    arrived: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(QUEUED_ITEMS)
    slots = asyncio.Semaphore(at_once or len(streams))

    async def pump(place: int) -> None:
        try:
            async with slots, streams[place] as items:
                async for item in items:
                    await arrived.put((place, item))
            await arrived.put(None)
        except Exception as error:
            await arrived.put(error)

    waiting = list(range(len(streams)))
    pumps = [asyncio.create_task(pump(waiting.pop(0))) for _ in (waiting[:1] if leads else list(waiting))]
    try:
        num_running = len(streams)
        while num_running:
            found = await arrived.get()
            if isinstance(found, Exception):
                raise found
            if found is None:
                num_running -= 1
                continue
            yield found
            if waiting and leads is not None and leads(found[1]):
                pumps += [asyncio.create_task(pump(place)) for place in waiting]
                waiting = []
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


def beside_others(work: Callable[[], T], niceness: int) -> T:
    """Return what `work` returns, done in a thread whose nice value is `niceness` higher than the caller's.

    If all cores are busy, other threads therefore come first; from IDLE_NICENESS on, the thread runs only on idle
    cores. On Linux each thread has its own priority, which only root may raise again, so the thread ends with `work`.
    Threads that `work` starts have the low priority too: they must end with it.
    Example: `beside_others(lambda: import_module("numpy"), 10)`.
    """
    with ThreadPoolExecutor(1, "ringserve-beside", initializer=_lower_priority, initargs=(niceness,)) as threads:
        return threads.submit(work).result()


def _lower_priority(niceness: int) -> None:
    thread = threading.get_native_id()  # Linux knows a thread by an id like a process's
    with suppress(OSError, AttributeError):  # the latter on systems without such a policy
        if niceness >= IDLE_NICENESS:
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
            return
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + niceness)
