"""End of a gateway's turns: by themselves, when their time is over, or on a second signal."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ringserve.client import AsyncClient, Sampling
from ringserve.client.retries import NO_RETRIES
from ringserve.cp_core.errors import DeadlineExceeded, Unavailable
from ringserve.services.gateway import servicer
from ringserve.services.gateway.turn_stream import TurnsUnderWay
from tests.services.local_gateway import LocalGateway, codec, gateway, model_path
from tests.waiting import eventually

__all__ = ["codec", "gateway", "model_path"]

GRACE_SECONDS = 60.0


def ending(gateway: LocalGateway, hurry: asyncio.Event, grace: float = GRACE_SECONDS) -> asyncio.Task[None]:
    return asyncio.create_task(gateway.servicer.end_turns(grace, hurry))


async def test_turns_end_by_themselves_and_that_is_all_that_is_waited_for(gateway: LocalGateway) -> None:
    async with AsyncClient(gateway.target) as client:
        stream = client.stream("x", sampling=Sampling(max_tokens=200, ignore_eos=True))
        await anext(stream)
        stopping = ending(gateway, asyncio.Event())
        answer = await stream.answer()
        assert len(answer.token_ids) == 200
        async with asyncio.timeout(GRACE_SECONDS / 2):
            await stopping


async def test_where_no_turn_runs_nothing_is_waited_for(gateway: LocalGateway) -> None:
    async with asyncio.timeout(GRACE_SECONDS / 2):
        await ending(gateway, asyncio.Event())


@pytest.mark.parametrize("grace", [0.05, GRACE_SECONDS])
async def test_turns_that_outlast_their_time_or_somebodys_patience_are_ended_everywhere(
    gateway: LocalGateway, grace: float
) -> None:
    free, hurry = gateway.service.free_blocks(), asyncio.Event()
    async with AsyncClient(gateway.target, retry=NO_RETRIES) as client:
        stream = client.stream("x", sampling=Sampling(max_tokens=8000, ignore_eos=True))
        await anext(stream)
        stopping = ending(gateway, hurry, grace)
        if grace == GRACE_SECONDS:
            hurry.set()
        with pytest.raises(Unavailable, match="the gateway is stopping; retry at another"):
            await stream.answer()
        async with asyncio.timeout(GRACE_SECONDS / 2):
            await stopping
    assert gateway.service.free_blocks() == free


@pytest.mark.parametrize("is_begun", [True, False])
async def test_who_reads_hears_of_it_whatever_rings_and_router_do(
    gateway: LocalGateway, is_begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    router, free, asked, answers = (
        gateway.service.router,
        gateway.service.free_blocks(),
        asyncio.Event(),
        asyncio.Event(),
    )

    async def never(*arguments: Any) -> Any:
        asked.set()
        await answers.wait()

    monkeypatch.setattr(router, "abort_requests", never)
    if not is_begun:
        monkeypatch.setattr(router, "begin_turn", never)
    async with AsyncClient(gateway.target, retry=NO_RETRIES) as client:
        stream = client.stream("x", sampling=Sampling(max_tokens=8000, ignore_eos=True))
        answer = asyncio.create_task(stream.answer())
        await (eventually(lambda: gateway.service.decode.num_running == 1) if is_begun else asked.wait())
        stopping = ending(gateway, asyncio.Event(), 0.0)
        with pytest.raises(Unavailable, match="the gateway is stopping; retry at another"):
            await answer
        assert not stopping.done()
        answers.set()
        await stopping
        with pytest.raises(Unavailable, match="the gateway is stopping; retry at another"):
            await client.stream("x").answer()
    await eventually(lambda: gateway.service.free_blocks() == free)


async def test_nothing_goes_on_asking_a_router_that_does_not_answer(
    gateway: LocalGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a turn that ends while the gateway does, which tells the router once more."""
    asked = []

    async def never(*arguments: Any) -> Any:
        asked.append(asyncio.current_task())
        await asyncio.Event().wait()

    monkeypatch.setattr(servicer, "ABORT_SECONDS", 0.05)
    with monkeypatch.context() as silent:
        silent.setattr(gateway.service.router, "abort_requests", never)
        async with AsyncClient(gateway.target, retry=NO_RETRIES) as client:
            stream = client.stream("x", sampling=Sampling(max_tokens=8000, ignore_eos=True))
            await anext(stream)
            stopping = ending(gateway, asyncio.Event(), 0.0)
            with pytest.raises(Unavailable):
                await stream.answer()
            await stopping
        await eventually(lambda: bool(asked) and all(task is not None and task.done() for task in asked))
    for turn in gateway.service.decode.turns_here():
        await gateway.service.decode.abort_turn(turn.turn_id, Unavailable("the test ends"))


async def test_a_turn_that_the_rings_do_not_end_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringserve.services.gateway.turn_stream.DEADLINE_GRACE_SECONDS", 0.0)
    turns = TurnsUnderWay()
    turn = turns.add("request", 0.01)
    with pytest.raises(DeadlineExceeded, match=r"did not end within its deadline of 0\.0 s"), turn:
        await asyncio.Event().wait()
    with pytest.raises(DeadlineExceeded), turn:
        pass
    turns.discard(turn)


async def test_a_client_that_hangs_up_while_the_gateway_stops_is_no_failure() -> None:
    turns, waits = TurnsUnderWay(), asyncio.Event()
    turn = turns.add("request", 60.0)

    async def wait() -> None:
        with turn:
            waits.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await waits.wait()
    turns.stop()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
