"""A ring that drains takes no new turns, ends those that run, and leaves; no accepted turn fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from ringserve.cp_core.errors import Busy, InvalidRequest, NotFound, Unavailable
from ringserve.orchestration.decode.leader import DecodeLeader
from ringserve.orchestration.prefill.leader import PrefillLeader
from ringserve.orchestration.protocol.rings import RingEvent
from tests.orchestration.service import Answer, Service
from tests.waiting import WAIT_SECONDS
from tests.workers.models import random_tokens
from tests.workers.thread_ranks import ThreadRanks


class TwoOfEach(Service):
    """Two prefill rings of 2 ranks and two decode rings of 3."""

    def __init__(self, model_path: Path) -> None:
        super().__init__(model_path, 2, 3)
        self._path = model_path
        for leader in (self.prefill, self.decode):
            self.add(leader.settings.role, 1)

    def add(self, role: str, number: int) -> None:
        """Add a leader whose ring has yet to start."""
        name, register, ranks = f"{role}-{number}", self.router.register_ring, ThreadRanks(poisoned=True)
        if role == "prefill":
            settings = replace(self.prefill.settings, name=name, drain_interval=0.01)
            self.peers.leaders[name] = PrefillLeader(settings, ranks, self.peers, register)
        else:
            settings = replace(self.decode.settings, name=name, drain_interval=0.01)
            self.peers.leaders[name] = DecodeLeader(settings, ranks, self.peers, self.router, register)

    async def drained(self, name: str) -> None:
        """Drain a ring and end it, as the process that started it does."""
        leader = self.peers.leaders[name]
        await self.router.drain_ring(name, WAIT_SECONDS)
        async with asyncio.timeout(WAIT_SECONDS):
            await leader.has_left.wait()
        await leader.close()

    async def restart(self, name: str) -> None:
        role, _, number = name.partition("-")
        await self.drained(name)
        self.add(role, int(number))
        await self.peers.leaders[name].start(name)

    def rings(self) -> set[str]:
        return {ring.name for ring in self.router.rings}


@pytest.fixture
async def service(model_paths: Mapping[str, Path]) -> AsyncIterator[TwoOfEach]:
    made = TwoOfEach(model_paths["llama_gqa"])
    async with made:
        yield made


async def test_a_draining_ring_ends_its_turn_and_takes_no_other(service: TwoOfEach) -> None:
    begun = await service.router.begin_turn(service.request(random_tokens(9), max_tokens=40))
    name = begun.plan.decode_ring
    other = {"decode-0": "decode-1", "decode-1": "decode-0"}[name]
    await service.router.drain_ring(name, WAIT_SECONDS)
    leader = service.peers.decode(name)
    statuses = {status.name: status.draining for status in (await service.router.get_server_info()).rings}
    assert statuses[name]
    assert not statuses[other]
    for _ in range(3):
        answer = await service.answer(service.request(random_tokens(5)))
        assert answer.begun.plan.decode_ring == other
    assert not leader.has_left.is_set()
    events = [event async for event in leader.stream_turn(begun.turn_id)]
    assert events[-1].finish_reason == "length"  # type: ignore[union-attr]
    async with asyncio.timeout(WAIT_SECONDS):
        await leader.has_left.wait()
    assert name not in service.rings()


async def test_a_ring_waits_for_a_turn_that_the_router_has_begun_and_it_has_not_seen(service: TwoOfEach) -> None:
    leader = service.peers.decode("decode-1")
    ring = service.router.rings[-1]
    assert ring.name == "decode-1"
    ring.num_turns += 1  # as between the choice of a ring and its reservation
    await service.router.drain_ring("decode-1", WAIT_SECONDS)
    for _ in range(3):
        await service.answer(service.request(random_tokens(5)))
    assert not leader.has_left.is_set()
    ring.num_turns -= 1
    async with asyncio.timeout(WAIT_SECONDS):
        await leader.has_left.wait()


async def test_a_rolling_restart_under_load_fails_no_turn_and_changes_no_token(service: TwoOfEach) -> None:
    expected = await service.answer(service.request([*range(1, 12)], max_tokens=8))
    answers: list[Answer] = []
    is_over = asyncio.Event()

    async def talk(name: str) -> None:
        while not is_over.is_set():
            answers.append(await service.answer(service.request([*range(1, 12)], max_tokens=8)))
            history = (await service.answer(service.request([*range(1, 9)], conversation=name))).token_ids
            assert len(history) == 5

    async with asyncio.TaskGroup() as clients:
        for number in range(3):
            clients.create_task(talk(f"c{number}"))
        try:
            for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
                await service.restart(name)
        finally:
            is_over.set()
    assert len(answers) > 4
    assert all(answer.token_ids == expected.token_ids for answer in answers)
    assert service.rings() == {"prefill-0", "prefill-1", "decode-0", "decode-1"}
    for leader in service.peers.leaders.values():
        leader.ring.pool.check_integrity()


async def test_a_conversation_goes_on_elsewhere_when_its_rings_have_left(service: TwoOfEach) -> None:
    first = await service.answer(service.request(random_tokens(13), conversation="c"))
    prefill, decode = first.begun.plan.prefill_ring, first.begun.plan.decode_ring
    alone = await service.answer(service.request([*random_tokens(13), *first.token_ids, 7, 8]))
    for name in (prefill, decode):
        await service.drained(name)
    second = await service.answer(service.request([*random_tokens(13), *first.token_ids, 7, 8], conversation="c"))
    assert {second.begun.plan.prefill_ring, second.begun.plan.decode_ring}.isdisjoint({prefill, decode})
    assert second.token_ids == alone.token_ids


async def test_a_turn_past_the_deadline_of_the_drain_ends_with_a_sentence(service: TwoOfEach) -> None:
    begun = await service.router.begin_turn(service.request(random_tokens(9), max_tokens=4000))
    leader = service.peers.decode(begun.decode_endpoint)
    await service.router.drain_ring(leader.settings.name, 0.05)
    async with asyncio.timeout(WAIT_SECONDS):
        await leader.has_left.wait()
    assert leader.num_turns == 1
    await leader.close()
    with pytest.raises(Unavailable, match="shutting down"):
        async for _ in leader.stream_turn(begun.turn_id):
            pass


async def test_a_ring_may_be_told_to_stay_while_it_drains(service: TwoOfEach) -> None:
    begun = await service.router.begin_turn(service.request(random_tokens(9), max_tokens=40))
    leader = service.peers.decode(begun.decode_endpoint)
    await service.router.drain_ring(leader.settings.name, WAIT_SECONDS)
    await service.router.undrain_ring(leader.settings.name)
    assert [event async for event in leader.stream_turn(begun.turn_id)]
    assert not leader.has_left.is_set()
    assert all(ring.takes_turns for ring in service.router.rings)


async def test_the_last_ring_of_a_role_drains_only_by_force(service: TwoOfEach) -> None:
    await service.drained("prefill-1")
    with pytest.raises(Busy, match="prefill-0 is the only prefill ring"):
        await service.router.drain_ring("prefill-0", WAIT_SECONDS)
    await service.router.drain_ring("prefill-0", WAIT_SECONDS, force=True)
    with pytest.raises(
        Unavailable, match="no prefill ring is ready: an operator drained prefill-0, prefill-1; retry when one is back"
    ):
        await service.answer(service.request(random_tokens(5)))


async def test_a_ring_that_has_left_is_called_back_by_name(service: TwoOfEach) -> None:
    await service.drained("decode-0")
    await service.router.undrain_ring("decode-0")
    assert await service.router.next_return() == RingEvent(ring="decode-0")


async def test_an_announcement_that_comes_after_the_good_bye_changes_nothing(service: TwoOfEach) -> None:
    leader = service.peers.decode("decode-0")
    await service.drained("decode-0")
    leader.is_leaving = False
    await leader.announce()
    assert "decode-0" not in service.rings()


async def test_what_cannot_be_drained_is_refused_with_a_sentence(service: TwoOfEach) -> None:
    with pytest.raises(NotFound, match="'decode-7' is not known; there are prefill-0"):
        await service.router.drain_ring("decode-7", 1.0)
    with pytest.raises(NotFound, match="'decode-7' is not known"):
        await service.router.undrain_ring("decode-7")
    with pytest.raises(InvalidRequest, match="seconds: nan is not allowed"):
        await service.router.drain_ring("decode-0", float("nan"))
