"""A request to stop reaches the command that was asked, also once Ray has put its own handlers before ours."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from ringserve.cp_core.errors import NotFound
from ringserve.services.cluster.stopping import (
    STOP_SIGNALS,
    StopRequest,
    StopSignals,
    check_stop,
    keeping_handlers,
    run_until_set,
)
from tests.waiting import WAIT_SECONDS


@pytest.fixture(autouse=True)
def _restored_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_a_request_although_another_library_took_it_over(number: signal.Signals) -> None:
    signals = StopSignals()
    taken: list[int] = []
    with keeping_handlers():
        signal.signal(number, lambda received, frame: taken.append(received))
    os.kill(os.getpid(), number)
    assert signals.requested.wait(WAIT_SECONDS)
    assert taken == []
    with pytest.raises(StopRequest):
        check_stop(signals.requested)


def test_the_second_signal_insists() -> None:
    signals = StopSignals()
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.requested.wait(WAIT_SECONDS)
    assert not signals.insisted.is_set()
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.insisted.wait(WAIT_SECONDS)


async def test_work_is_cancelled_on_the_second_signal_and_not_before() -> None:
    insisted, has_ended = threading.Event(), False

    async def work() -> None:
        nonlocal has_ended
        goes_on = asyncio.Event()
        asyncio.get_running_loop().call_soon(goes_on.set)
        await goes_on.wait()
        has_ended = True

    await run_until_set(insisted, work())
    assert has_ended
    threading.Timer(0.05, insisted.set).start()
    async with asyncio.timeout(WAIT_SECONDS):
        await run_until_set(insisted, asyncio.Event().wait())  # type: ignore[arg-type]


async def test_what_the_work_raises_is_raised() -> None:
    async def work() -> None:
        raise NotFound("no ring")

    with pytest.raises(NotFound, match="no ring"):
        await run_until_set(threading.Event(), work())


def test_handlers_come_back_after_an_error_too() -> None:
    def fail() -> None:
        with keeping_handlers():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            raise ValueError("no Ray")

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError, match="no Ray"):
        fail()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_thread_that_may_set_no_handlers_is_left_alone() -> None:
    ended: list[bool] = []

    def work() -> None:
        with keeping_handlers():
            pass
        ended.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(WAIT_SECONDS)
    assert ended == [True]
