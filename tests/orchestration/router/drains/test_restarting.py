"""Turns wait for a ring that restarts, where it is the only one of its role, and do not fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from ringserve.cp_core.errors import (
    Busy,
    CapacityExceeded,
    DeadlineExceeded,
    InvalidRequest,
    NotBegun,
    NotFound,
    TurnCancelled,
)
from ringserve.orchestration.decode.leader import DecodeLeader
from ringserve.orchestration.placement.registry import RingRegistry
from ringserve.orchestration.prefill.leader import PrefillLeader
from ringserve.orchestration.protocol.plans import PromptMode
from ringserve.orchestration.protocol.rings import AWAY, RingEvent
from ringserve.orchestration.protocol.turns import Reservation, Reserve, RingRegistration, TurnRequest
from ringserve.orchestration.protocol.views import service_fault
from ringserve.orchestration.router.drains import RingReturns
from ringserve.views import RingInfo
from tests.orchestration.service import Answer, Service
from tests.rings import registration as ring_registration
from tests.waiting import WAIT_SECONDS, eventually, pass_time
from tests.workers.models import random_tokens
from tests.workers.thread_ranks import ThreadRanks

MAX_WAITING = 3


class Restarting(Service):
    """One prefill ring of 2 ranks, one decode ring of 3; at most three turns wait for one of them."""

    def __init__(self, model_path: Path) -> None:
        super().__init__(model_path, 2, 3, max_waiting_turns=MAX_WAITING)
        for leader in (self.prefill, self.decode):
            leader.settings = replace(leader.settings, drain_interval=0.01)

    async def gone(self, name: str) -> RingEvent:
        """Wait for the event that the process that started the ring gets when the ring has left, and end its leader."""
        leader = self.peers.leaders[name]
        async with asyncio.timeout(WAIT_SECONDS):
            await leader.has_left.wait()
            event = await self.router.next_return()
        await leader.close()
        return event

    async def come_back(self, name: str) -> None:
        before = self.peers.leaders[name]
        register, ranks = self.router.register_ring, ThreadRanks(poisoned=True)
        if isinstance(before, PrefillLeader):
            leader: PrefillLeader | DecodeLeader = PrefillLeader(before.settings, ranks, self.peers, register)
        else:
            leader = DecodeLeader(before.settings, ranks, self.peers, self.router, register)
        self.peers.leaders[name] = leader
        await leader.start(name)

    async def away(self, name: str) -> None:
        await self.router.restart_ring(name, WAIT_SECONDS)
        assert await self.gone(name) == RingEvent(ring=name)

    def ask(self, request: TurnRequest) -> asyncio.Task[Answer]:
        return asyncio.create_task(self.answer(request))

    async def waiting(self, count: int) -> None:
        await eventually(lambda: self.router.num_waiting_for_rings == count)


def registration(name: str, incarnation: str) -> RingRegistration:
    role = name.partition("-")[0]
    return ring_registration(role, name, endpoint=name, incarnation=incarnation, capacity_tokens=100, chunk_tokens=10)


@pytest.fixture
async def service(model_paths: Mapping[str, Path]) -> AsyncIterator[Restarting]:
    made = Restarting(model_paths["llama_gqa"])
    async with made:
        yield made


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
async def test_turns_wait_for_the_only_ring_of_a_role_and_give_the_same_tokens(service: Restarting, name: str) -> None:
    prompt = random_tokens(13)
    first = await service.answer(service.request(prompt, conversation="c"))
    history = [*prompt, *first.token_ids, 7, 8]
    alone = await service.answer(service.request(history))
    await service.away(name)
    waiting = [service.ask(service.request(history, conversation="c")), service.ask(service.request(prompt))]
    await service.waiting(2)
    await service.come_back(name)
    second, again = await asyncio.gather(*waiting)
    assert second.token_ids == alone.token_ids
    assert again.token_ids == first.token_ids
    other = "decode-0" if name == "prefill-0" else "prefill-0"
    assert {second.begun.plan.prefill_ring, second.begun.plan.decode_ring} == {name, other}
    assert service.router.num_waiting_for_rings == 0
    service.check_integrity()


async def test_a_ring_that_comes_back_while_others_are_asked_is_shown_once(
    service: Restarting, monkeypatch: pytest.MonkeyPatch
) -> None:
    await service.away("prefill-0")
    is_asked, may_answer, get_status = asyncio.Event(), asyncio.Event(), service.decode.get_status

    async def held() -> RingInfo:
        is_asked.set()
        await may_answer.wait()
        return await get_status()

    monkeypatch.setattr(service.decode, "get_status", held)
    asking = asyncio.create_task(service.router.get_server_info())
    await is_asked.wait()
    await service.come_back("prefill-0")
    may_answer.set()
    shown = (await asking).rings
    assert sorted((ring.name, ring.state) for ring in shown) == [("decode-0", "ready"), ("prefill-0", AWAY)]


async def test_running_turns_end_before_the_ring_leaves_and_new_ones_wait(service: Restarting) -> None:
    begun = await service.router.begin_turn(service.request(random_tokens(9), max_tokens=40))
    await service.router.restart_ring("decode-0", WAIT_SECONDS)
    await service.router.restart_ring("decode-0", WAIT_SECONDS)  # asked twice
    waiting = service.ask(service.request(random_tokens(5)))
    await service.waiting(1)
    assert not service.decode.has_left.is_set()
    events = [event async for event in service.decode.stream_turn(begun.turn_id)]
    assert events[-1].finish_reason == "length"  # type: ignore[union-attr]
    assert await service.gone("decode-0") == RingEvent(ring="decode-0")
    await service.come_back("decode-0")
    assert len((await waiting).token_ids) == 5


async def test_a_turn_that_waits_for_the_ring_that_keeps_its_conversation_does_not_keep_it_from_leaving(
    service: Restarting,
) -> None:
    await service.answer(service.request(random_tokens(13), conversation="c"))
    begun = await service.router.begin_turn(service.request(random_tokens(9), max_tokens=40))
    await service.router.restart_ring("decode-0", 10 * WAIT_SECONDS)
    waiting = service.ask(service.request([7], conversation="c", mode=PromptMode.APPEND))
    await service.waiting(1)
    assert [event async for event in service.decode.stream_turn(begun.turn_id)]
    assert await service.gone("decode-0") == RingEvent(ring="decode-0")
    await service.come_back("decode-0")
    assert len((await waiting).token_ids) == 5


async def test_turns_that_waited_begin_in_the_order_in_which_they_came(service: Restarting) -> None:
    await service.away("prefill-0")
    began: list[int] = []

    async def begin(number: int) -> None:
        await service.router.begin_turn(service.request(random_tokens(5)))
        began.append(number)

    tasks = []
    for number in range(MAX_WAITING):
        tasks.append(asyncio.create_task(begin(number)))
        await service.waiting(number + 1)
    await service.come_back("prefill-0")
    await asyncio.gather(*tasks)
    assert began == [0, 1, 2]


async def test_a_turn_waits_no_longer_than_its_own_deadline(service: Restarting) -> None:
    await service.away("prefill-0")
    waiting = service.ask(service.request(random_tokens(5), conversation="c", deadline=100.0))
    await service.waiting(1)
    pass_time(100.0)
    with pytest.raises(DeadlineExceeded, match="waited for prefill ring prefill-0 to come back until its deadline"):
        await waiting
    await service.come_back("prefill-0")
    assert (await service.answer(service.request(random_tokens(5), conversation="c"))).token_ids


async def test_a_turn_that_waited_has_only_the_time_that_is_left(
    service: Restarting, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved: list[float] = []
    reserve = DecodeLeader.reserve

    async def noting(leader: DecodeLeader, request: Reserve) -> Reservation:
        reserved.append(request.deadline_seconds)
        return await reserve(leader, request)

    monkeypatch.setattr(DecodeLeader, "reserve", noting)
    await service.answer(service.request(random_tokens(5), deadline=WAIT_SECONDS))
    await service.away("prefill-0")
    waiting = service.ask(service.request(random_tokens(5), deadline=WAIT_SECONDS))
    await service.waiting(1)
    await service.come_back("prefill-0")
    await waiting
    at_once, later = reserved
    assert at_once == WAIT_SECONDS
    assert 0 < later < WAIT_SECONDS


async def test_a_ring_that_does_not_come_back_is_not_waited_for_any_longer() -> None:
    rings = RingRegistry()
    ring = registration("prefill-0", "first")
    rings.register(ring)
    rings.register(replace(ring, role="decode", name="decode-0"))
    returns = RingReturns(rings, seconds=0.05, max_waiting=MAX_WAITING)
    returns.expect(ring, 0.0)
    rings.register(replace(ring, is_leaving=True))
    assert [away.name for away in returns.away()] == ["prefill-0"]
    deadline = asyncio.get_running_loop().time() + WAIT_SECONDS
    assert await returns.until_served("request", deadline)
    assert not rings.ready("prefill"), "it returned without the ring"
    assert not returns.away()
    assert not await returns.until_served("another", deadline), "nothing is to be waited for"


async def test_no_turn_waits_for_a_ring_while_the_other_role_has_none_that_comes() -> None:
    rings = RingRegistry()
    ring = registration("prefill-0", "first")
    rings.register(ring)
    returns = RingReturns(rings, seconds=WAIT_SECONDS, max_waiting=MAX_WAITING)
    returns.expect(ring, 0.0)
    rings.register(replace(ring, is_leaving=True))
    assert not await returns.until_served("request", asyncio.get_running_loop().time() + WAIT_SECONDS)


async def test_no_more_turns_wait_than_are_allowed(service: Restarting) -> None:
    await service.away("decode-0")
    waiting = [service.ask(service.request(random_tokens(5))) for _ in range(MAX_WAITING)]
    await service.waiting(MAX_WAITING)
    with pytest.raises(CapacityExceeded, match="3 turns wait for ring decode-0 to come back and at most 3 are allowed"):
        await service.answer(service.request(random_tokens(5)))
    await service.come_back("decode-0")
    assert all(answer.token_ids for answer in await asyncio.gather(*waiting))


async def test_a_waiting_turn_can_be_aborted_and_hung_up_on(service: Restarting) -> None:
    await service.away("prefill-0")
    request = service.request(random_tokens(5), conversation="c")
    waiting = service.ask(request)
    await service.waiting(1)
    with pytest.raises(Busy, match="is running already"):
        await service.router.begin_turn(request)
    with pytest.raises(Busy):
        await service.answer(service.request(random_tokens(5), conversation="c"))
    assert await service.router.abort_requests([request.request_id]) == ([request.request_id], [])
    with pytest.raises(TurnCancelled):
        await waiting
    hung_up = service.ask(service.request(random_tokens(5), conversation="c"))
    await service.waiting(1)
    hung_up.cancel()
    await asyncio.gather(hung_up, return_exceptions=True)
    assert service.router.num_waiting_for_rings == 0
    await service.come_back("prefill-0")
    assert (await service.answer(service.request(random_tokens(5), conversation="c"))).token_ids


async def test_the_service_stays_ready_while_turns_would_wait(service: Restarting) -> None:
    before = {ring.name: ring for ring in (await service.router.get_server_info()).rings}
    assert {ring.nodes for ring in before.values()} == {("127.0.0.1",)}
    await service.away("prefill-0")
    view = await service.router.get_server_info()
    away = next(ring for ring in view.rings if ring.name == "prefill-0")
    assert (away.state, away.restarting, away.num_ranks) == (AWAY, True, 2)
    assert service_fault(view) == ""
    await service.come_back("prefill-0")
    after = {ring.name: ring for ring in (await service.router.get_server_info()).rings}
    assert not any(ring.restarting for ring in after.values())
    assert before["prefill-0"].incarnation != after["prefill-0"].incarnation
    assert after.keys() == before.keys()


async def test_a_ring_that_is_to_stay_away_after_all_is_not_waited_for(service: Restarting) -> None:
    begun = await service.router.begin_turn(service.request(random_tokens(9), max_tokens=40))
    await service.router.restart_ring("decode-0", WAIT_SECONDS)
    waiting = service.ask(service.request(random_tokens(5)))
    await service.waiting(1)
    await service.router.drain_ring("decode-0", WAIT_SECONDS, force=True)
    with pytest.raises(NotBegun, match="no decode ring is ready"):
        await waiting
    assert [event async for event in service.decode.stream_turn(begun.turn_id)]
    async with asyncio.timeout(WAIT_SECONDS):
        await service.decode.has_left.wait()
    assert "decode-0" not in {ring.name for ring in (await service.router.get_server_info()).rings}


async def test_a_ring_may_be_told_to_stay_while_it_drains_to_restart(service: Restarting) -> None:
    begun = await service.router.begin_turn(service.request(random_tokens(9), max_tokens=40))
    await service.router.restart_ring("decode-0", WAIT_SECONDS)
    waiting = service.ask(service.request(random_tokens(5)))
    await service.waiting(1)
    await service.router.undrain_ring("decode-0")
    assert (await waiting).token_ids
    assert [event async for event in service.decode.stream_turn(begun.turn_id)]
    assert not service.decode.has_left.is_set()


async def test_a_ring_that_loses_a_rank_while_it_drains_restarts_all_the_same(service: Restarting) -> None:
    begun = await service.router.begin_turn(service.request(random_tokens(9), max_tokens=4000))
    await service.router.restart_ring("decode-0", WAIT_SECONDS)
    waiting = service.ask(service.request(random_tokens(5)))
    await service.waiting(1)
    before = service.decode.ring.incarnation
    service.decode.ring.report_lost(NotFound("a rank"), before)
    with pytest.raises(Exception, match="lost a rank"):
        async for _ in service.decode.stream_turn(begun.turn_id):
            pass
    assert await service.gone("decode-0") == RingEvent(ring="decode-0")
    await service.come_back("decode-0")
    assert (await waiting).token_ids


async def test_a_ring_leaves_with_its_nodes_named_and_one_that_has_left_comes_back(service: Restarting) -> None:
    for node in ("10.0.0.2", "10.0.0.1"):
        await service.router.restart_ring("decode-0", WAIT_SECONDS, leaving_node=node)
    assert await service.gone("decode-0") == RingEvent(ring="decode-0", leaving_nodes=("10.0.0.1", "10.0.0.2"))
    await service.come_back("decode-0")
    await service.router.drain_ring("decode-0", WAIT_SECONDS, force=True)
    async with asyncio.timeout(WAIT_SECONDS):
        await service.peers.decode("decode-0").has_left.wait()
    await service.peers.decode("decode-0").close()
    for _ in range(2):
        await service.router.restart_ring("decode-0", WAIT_SECONDS)
    assert await service.router.next_return() == RingEvent(ring="decode-0")
    await service.come_back("decode-0")
    assert (await service.answer(service.request(random_tokens(5)))).token_ids


async def test_what_cannot_be_restarted_is_refused_with_a_sentence(service: Restarting) -> None:
    with pytest.raises(NotFound, match="'decode-7' is not known"):
        await service.router.restart_ring("decode-7", 1.0)
    with pytest.raises(InvalidRequest, match="seconds: -1 is not allowed"):
        await service.router.restart_ring("decode-0", -1.0)
    assert service_fault(await service.router.get_server_info()) == ""
