"""A ring that sends no heartbeat, or comes back as another incarnation, holds up no turn."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from ringserve.cp_core.errors import Unavailable
from ringserve.orchestration.placement.registry import LEASE_TICKS
from ringserve.orchestration.protocol.turns import Reservation, Reserve
from tests.orchestration.service import Service
from tests.waiting import WAIT_SECONDS, eventually
from tests.workers.models import Oracle, random_tokens


class Losing(Service):
    """Two rings of each role. The leases end by hand, and what a lost leader is asked waits for ever."""

    def __init__(self, model_path: Path) -> None:
        super().__init__(model_path, 1, 1, other_prefill=[1], other_decode=[1], ring_lease=0.0)
        self.asked = asyncio.Event()

    async def silence(self, name: str) -> None:
        """End the lease of one ring."""
        announcing = self.peers.leaders[name]._announcing
        assert announcing is not None
        announcing.cancel()
        for _ in range(LEASE_TICKS + 1):
            for leader in self.peers.leaders.values():
                if leader.settings.name != name:
                    await leader.announce()
            self.router.tick()

    async def hang(self, *_: object) -> None:
        self.asked.set()
        await asyncio.Event().wait()


async def test_a_turn_that_a_silent_ring_was_to_reserve_goes_to_another(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Losing(model_paths["llama_gqa"]) as service:
        monkeypatch.setattr(service.prefill, "reserve", service.hang)
        other, waited = service.peers.leaders["prefill-1"], list[float]()
        reserve = other.reserve

        async def noted(request: Reserve) -> Reservation:
            waited.append(request.waited_seconds)
            return await reserve(request)

        monkeypatch.setattr(other, "reserve", noted)
        prompt = random_tokens(30)
        answering = asyncio.create_task(service.answer(service.request(prompt)))
        async with asyncio.timeout(WAIT_SECONDS):
            await service.asked.wait()
            await service.silence("prefill-0")
            answer = await answering
        assert answer.token_ids == oracles["llama_gqa"].greedy(prompt, 5)
        assert answer.begun.plan.prefill_ring == "prefill-1"
        assert waited[0] > 0.0, "it keeps its age there"


async def test_a_turn_that_a_silent_ring_prefills_ends_and_names_the_ring(
    model_paths: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Losing(model_paths["llama_gqa"]) as service:
        monkeypatch.setattr(service.prefill, "prefill", service.hang)
        answering = asyncio.create_task(service.answer(service.request(random_tokens(30))))
        async with asyncio.timeout(WAIT_SECONDS):
            await service.asked.wait()
            await service.silence("prefill-0")
            with pytest.raises(Unavailable, match="ring prefill-0 sends no heartbeat"):
                await answering
        await eventually(lambda: service.router.num_running == 0)


async def test_the_turns_of_a_silent_decode_ring_end_and_its_conversations_go_on_elsewhere(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    async with Losing(model_paths["llama_gqa"]) as service:
        prompt = random_tokens(30)
        request = service.request(prompt, conversation="c", max_tokens=5000)
        answering = asyncio.create_task(service.answer(request))
        await eventually(lambda: service.decode.num_running == 1)
        async with asyncio.timeout(WAIT_SECONDS):
            await service.silence("decode-0")
            assert (await service.router.next_return()).ring == "decode-0", "its leader is to be replaced"
            with pytest.raises(Unavailable, match="ring decode-0 sends no heartbeat"):
                await answering  # this leader lives all the same, and is told
            await eventually(lambda: service.router.num_running == 0)
            answer = await service.answer(service.request(prompt, conversation="c"))
        assert answer.token_ids == oracles["llama_gqa"].greedy(prompt, 5)
        assert answer.begun.plan.decode_ring == "decode-1"


async def test_the_turns_of_an_incarnation_that_is_gone_end_at_the_router(model_paths: Mapping[str, Path]) -> None:
    async with Losing(model_paths["llama_gqa"]) as service:
        request = service.request(random_tokens(30), max_tokens=5000)
        answering = asyncio.create_task(service.answer(request))
        await eventually(lambda: service.decode.num_running == 1)
        ring = next(each for each in service.router.rings if each.name == "decode-0")
        # As its successor announces itself, whom nobody asks about the turns of others.
        await service.router.register_ring(replace(ring.registration, incarnation="another"))
        await eventually(lambda: service.router.num_running == 0)
        with pytest.raises(Unavailable, match="ring decode-0 was started again"):
            await answering


async def test_leases_end_by_themselves(model_paths: Mapping[str, Path]) -> None:
    async with Service(model_paths["llama_gqa"], 1, 1, ring_lease=0.2) as service:
        for leader in service.peers.leaders.values():
            assert leader._announcing is not None
            leader._announcing.cancel()
        async with asyncio.timeout(WAIT_SECONDS):
            lost = {(await service.router.next_return()).ring for _ in range(2)}
        assert lost == {"prefill-0", "decode-0"}
        with pytest.raises(Unavailable, match="no prefill ring"):
            await service.router.begin_turn(service.request([1, 2, 3]))
        await service.prefill.announce()
        await service.decode.announce()
        assert len((await service.answer(service.request([1, 2, 3]))).token_ids) == 5


async def test_readiness_asks_no_ring_and_a_hung_leader_is_shown_as_lost(
    model_paths: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringserve.orchestration.placement.registry.STATUS_SECONDS", 0.05)
    async with Losing(model_paths["llama_gqa"]) as service:
        monkeypatch.setattr(service.prefill, "get_status", service.hang)
        async with asyncio.timeout(WAIT_SECONDS):
            assert await service.router.find_fault() == ""
            assert not service.asked.is_set()
            states = {ring.name: ring.state for ring in (await service.router.get_server_info()).rings}
            assert states == {"prefill-0": "lost", "prefill-1": "ready", "decode-0": "ready", "decode-1": "ready"}
            await service.silence("prefill-0")
            assert await service.router.find_fault() == ""
            await service.peers.leaders["prefill-1"].drain(60.0)
            assert await service.router.find_fault() == "no prefill ring takes turns"
