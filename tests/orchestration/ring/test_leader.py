"""A leader announces its ring to the router, again and again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from ringserve.cp_core.errors import RingserveError, Unavailable
from ringserve.orchestration.protocol.inventory import KnownEpoch, Registered, TurnOnRing
from ringserve.orchestration.protocol.rings import RingSettings, RingState
from ringserve.orchestration.protocol.turns import RingRegistration
from ringserve.orchestration.ring import leader as leaders
from ringserve.orchestration.ring.leader import RingLeader
from ringserve.views import RingInfo
from ringserve.workers.protocol.ranks import RankSettings
from tests.orchestration.fake_ranks import RATES, FakeRanks
from tests.orchestration.service import DirectPeers
from tests.waiting import eventually


class Leader(RingLeader):
    """Leader of a ring without turns."""

    async def measure(self, until_quiet: Callable[[], Awaitable[None]]) -> None:
        await self.ring.measure()

    async def fail_all(self, error: RingserveError) -> None:
        return

    @property
    def num_turns(self) -> int:
        return 0

    def turns_here(self) -> tuple[TurnOnRing, ...]:
        return ()

    async def get_status(self) -> RingInfo:
        return self.status_with(running=0, waiting=0)


class Router:
    """Router that notes announcements; the next ones raise `errors`."""

    def __init__(self) -> None:
        self.heard: list[RingRegistration] = []
        self.errors: list[RingserveError] = []
        self.coming = 0
        self.known: list[KnownEpoch] = []
        self.epoch = 0

    async def register(self, registration: RingRegistration, known: KnownEpoch) -> Registered:
        self.heard.append(registration)
        self.known.append(known)
        if self.errors:
            raise self.errors.pop(0)
        return Registered(running_turns=self.coming, epoch=self.epoch)


def made(announce_interval: float = 0.001) -> tuple[Leader, Router, FakeRanks]:
    router, ranks = Router(), FakeRanks()
    settings = RingSettings(
        role="prefill",
        name="ring",
        num_ranks=2,
        watch_interval=0.001,
        retry_pause=0.001,
        announce_interval=announce_interval,
        ranks=RankSettings(
            model_path="model",
            num_blocks=5,
            block_tokens=4,
        ),
    )
    return Leader(settings, ranks, DirectPeers(), router.register), router, ranks


async def test_a_ring_is_announced_with_its_endpoint_and_what_it_holds() -> None:
    leader, router, _ = made(announce_interval=3600)
    await leader.start("here:1")
    assert router.heard == [
        RingRegistration(
            role="prefill",
            name="ring",
            endpoint="here:1",
            incarnation=leader.ring.incarnation,
            num_ranks=2,
            rates=RATES,
            capacity_tokens=40,
            chunk_tokens=leader.settings.chunk_tokens,
            min_chunk_tokens=leader.settings.prefill_scheduling.min_chunk_tokens,
            free_tokens=40,
            spare_tokens=40,
        )
    ]
    await leader.close()


async def test_a_ring_stays_announced_though_the_router_is_away_for_a_while() -> None:
    leader, router, _ = made()
    await leader.start("here:1")
    router.errors = [Unavailable("no router")] * 3
    await eventually(lambda: len(router.heard) >= 6)
    assert len(set(router.heard)) == 1
    await leader.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}, "a closed ring says nothing"


async def test_a_ring_that_the_router_does_not_hear_announces_itself_more_often(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(leaders, "RETRY_SECONDS", 0.001)
    leader, router, _ = made(announce_interval=3600)
    await leader.start("here:1")
    router.errors = [Unavailable("no router")] * 3
    with caplog.at_level(logging.WARNING):
        await leader._try_announce()  # before the task that announces the ring at intervals has begun
        await eventually(lambda: leader._is_heard)
    assert len(router.heard) == 1 + 4
    assert len(caplog.records) == 1, "an outage is told once"
    await leader.close()


async def test_a_start_repeats_an_announcement_that_the_router_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaders, "RETRY_SECONDS", 0.001)
    leader, router, _ = made(announce_interval=3600)
    router.errors = [Unavailable("no router")] * 3
    await leader.start("here:1")
    assert len(router.heard) >= 4
    assert leader.ring.state is RingState.READY
    await leader.close()


async def test_a_rebuilt_ring_is_announced_as_its_new_incarnation_only() -> None:
    leader, router, ranks = made()
    await leader.start("here:1")
    first = leader.ring.incarnation
    router.errors = []
    ranks.latest[0].fail(Unavailable("rank 0 died"))
    await eventually(lambda: leader.ring.rebuilds == 1)
    router.heard.clear()
    await eventually(lambda: len(router.heard) >= 4)
    assert {registration.incarnation for registration in router.heard} == {leader.ring.incarnation}
    assert first != leader.ring.incarnation
    await leader.close()


async def test_a_leader_whose_router_cannot_be_reached_does_not_start() -> None:
    leader, router, ranks = made()
    leader.settings = replace(leader.settings, control_timeout=0.0)
    router.errors = [Unavailable("no router")]
    with pytest.raises(Unavailable, match="no router"):
        await leader.start("here:1")
    assert ranks.num_open == 0
    await leader.close()


async def test_a_status_before_the_ring_is_up_says_so() -> None:
    leader, _, _ = made()
    status = leader.status_with(running=0, waiting=0)
    assert (status.state, status.rank_pids, status.attention_backend) == ("starting", (), "")
    await leader.start("here:1")
    status = leader.status_with(running=1, waiting=2)
    assert (status.state, status.rank_pids, status.attention_backend) == ("ready", (0, 1), "fake")
    assert (status.num_requests_running, status.num_requests_waiting) == (1, 2)
    assert [rank.total_blocks for rank in status.kv_usage] == [5, 5]
    await leader.close()


async def test_a_status_tells_what_served_the_latest_decode_step() -> None:
    leader, _, ranks = made()
    await leader.start("here:1")
    assert leader.status_with(running=0, waiting=0).decode_variant == ""
    ranks.latest[0].decode_variant = "gather"
    await eventually(lambda: leader.status_with(running=0, waiting=0).decode_variant == "gather")
    ranks.latest[0].decode_variant = "pass_q"
    await eventually(lambda: leader.status_with(running=0, waiting=0).decode_variant == "pass_q")
    await leader.close()
