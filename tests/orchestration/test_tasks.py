"""Background tasks and concurrent calls: errors, cancellation, order of results; work at a lower priority."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import threading
from typing import Any

import pytest

from ringserve.cp_core.errors import Unavailable
from ringserve.orchestration.tasks import (
    IDLE_NICENESS,
    TaskSet,
    begin_joined,
    beside_others,
    finish_despite_cancellation,
    gather_all,
    gather_first_error,
)

DEAD = Unavailable("rank 1 died")


async def test_gather_all_waits_for_every_call_before_it_raises() -> None:
    failed, may_end, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def fail() -> None:
        failed.set()
        raise DEAD

    async def slow() -> None:
        await may_end.wait()
        ended.set()

    together = asyncio.create_task(gather_all([fail(), slow()]))
    await failed.wait()
    over, _ = await asyncio.wait([together], timeout=0.01)
    assert not over
    may_end.set()
    with pytest.raises(Unavailable, match="rank 1 died"):
        await together
    assert ended.is_set()


async def test_gather_first_error_cancels_the_others_and_raises_the_error_itself() -> None:
    ended: list[str] = []

    async def fail() -> None:
        raise DEAD

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    with pytest.raises(Unavailable, match="rank 1 died"):
        await gather_first_error([forever(), fail()])
    assert ended == ["cancelled"]


async def test_concurrent_calls_return_their_results_in_order() -> None:
    ended = [asyncio.Event() for _ in range(5)]

    async def number(value: int) -> int:
        if value < 4:
            await ended[value + 1].wait()  # the last one ends first
        ended[value].set()
        return value

    for gather in (gather_first_error, gather_all):
        for event in ended:
            event.clear()
        assert await gather(number(value) for value in range(5)) == [*range(5)]


async def test_a_cancelled_caller_waits_for_work_that_must_finish() -> None:
    started, may_end, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        started.set()
        await may_end.wait()
        ended.set()

    caller = asyncio.create_task(finish_despite_cancellation(work()))
    await started.wait()
    caller.cancel()
    await asyncio.sleep(0)
    assert not caller.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended.is_set()


async def test_a_task_set_logs_an_error_with_its_owner_and_cancels_the_others_on_close(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail() -> None:
        raise DEAD

    async def forever() -> None:
        await asyncio.Event().wait()

    tasks = TaskSet("ring decode-0")
    failing, waiting = tasks.spawn(fail()), tasks.spawn(forever())
    with caplog.at_level(logging.ERROR):
        await asyncio.wait([failing])
        await asyncio.sleep(0)
    assert "background work of ring decode-0 failed" in caplog.text
    assert len(tasks) == 1
    await tasks.close()
    assert waiting.cancelled()
    assert len(tasks) == 0


async def test_an_error_of_joined_work_is_logged_in_one_line_where_its_caller_has_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A caller that left never looks at the error; Python must not tell of it with a stack trace."""
    caplog.set_level(logging.INFO)
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    may_fail = asyncio.Event()

    async def fail() -> None:
        await may_fail.wait()
        raise DEAD

    work = begin_joined("turn t", fail())

    async def join(task: asyncio.Task[None]) -> None:
        await asyncio.shield(task)

    caller = asyncio.create_task(join(work))
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.wait([caller])
    may_fail.set()
    await asyncio.wait([work])
    del work, caller
    gc.collect()
    assert not told
    assert [record.getMessage() for record in caplog.records] == ["turn t failed: rank 1 died"]
    assert not caplog.records[0].exc_info


def test_what_is_done_beside_others_leaves_the_caller_its_priority_and_raises_its_errors() -> None:
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = priority()
    assert beside_others(priority, 5) == min(before + 5, 19)
    assert priority() == before
    with pytest.raises(ZeroDivisionError):
        beside_others(lambda: 1 // 0, 5)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has this policy")
def test_work_with_the_niceness_of_idle_time_has_cores_that_nobody_wants() -> None:
    before = os.sched_getscheduler(0)
    assert beside_others(lambda: os.sched_getscheduler(0), IDLE_NICENESS) == os.SCHED_IDLE
    assert os.sched_getscheduler(0) == before
