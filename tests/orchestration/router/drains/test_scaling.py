"""The router lets rings leave while fewer will do, and brings back those alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ringserve.cp_core.errors import Busy, Unavailable
from ringserve.orchestration.placement.registry import RingRegistry
from ringserve.orchestration.placement.scaling import ScalingSettings
from ringserve.orchestration.protocol.rings import RingEvent
from ringserve.orchestration.router.drains import RingReturns, Scaling
from tests.orchestration.placement.test_registry import Time
from tests.rings import registration

SETTINGS = ScalingSettings(busy_share=0.5, shrink_seconds=100.0)
NUM_RINGS = 4


class FakeDrains:
    """Drains that are over when a test says so."""

    def __init__(self, rings: RingRegistry, returns: RingReturns) -> None:
        self._rings = rings
        self._returns = returns
        self.asked: list[tuple[str, str]] = []
        self.error: Exception | None = None

    def announce(self, name: str, **changes: Any) -> None:
        ring = self._rings.find(name)
        known = ring.registration if ring is not None else self._rings.left(name)
        assert known is not None
        told = replace(known, **changes)
        self._rings.register(told)
        self._returns.note(told)

    async def drain(self, name: str, seconds: float, *, force: bool) -> None:
        assert not force
        if self.error is not None:
            raise self.error
        self.asked.append(("drain", name))
        self.announce(name, is_draining=True)

    def leave(self, name: str) -> None:
        self.announce(name, is_leaving=True)

    async def undrain(self, name: str) -> None:
        self.asked.append(("undrain", name))
        left = self._rings.left(name)
        if left is not None:
            self._returns.bring_back(left)
        else:
            self.announce(name, is_draining=False)

    def come_back(self, name: str) -> None:
        self.announce(name, incarnation="second", is_draining=False, is_leaving=False)


class Cluster:
    """Four decode rings, of which one always serves."""

    def __init__(self) -> None:
        self.clock = Time()
        self.rings = RingRegistry(self.clock)
        self.returns = RingReturns(self.rings, seconds=60.0, max_waiting=9)
        self.drains = FakeDrains(self.rings, self.returns)
        for number in range(NUM_RINGS):
            self.rings.register(registration("decode", f"decode-{number}", capacity_tokens=1000, max_batch=10))
        self.scaling = Scaling(self.rings, self.drains, self.returns, SETTINGS, {"decode": 1})  # type: ignore[arg-type]

    async def pass_time(self, seconds: float) -> None:
        for _ in range(int(seconds / 5)):
            self.clock.now += 5.0
            await self.scaling.look("decode")

    def busy(self, turns: int) -> None:
        for ring in self.rings.ready("decode"):
            ring.num_turns, ring.free_tokens = turns, 1000

    async def events(self) -> list[RingEvent]:
        return [await self.returns.next_event() for _ in range(self.returns._wanted.qsize())]


@pytest.fixture
async def cluster() -> Cluster:
    return Cluster()


async def test_idle_rings_leave_after_a_while_and_return_when_they_are_needed(cluster: Cluster) -> None:
    cluster.busy(0)
    await cluster.pass_time(100.0)
    assert cluster.drains.asked == []
    await cluster.pass_time(20.0)
    assert cluster.drains.asked == [("drain", "decode-0"), ("drain", "decode-1"), ("drain", "decode-2")]
    assert [(event.ring, event.parked) for event in await cluster.events()] == [
        ("decode-0", True), ("decode-1", True), ("decode-2", True)
    ]  # fmt: skip
    for number in range(3):
        cluster.drains.leave(f"decode-{number}")
    cluster.drains.asked.clear()
    await cluster.pass_time(200.0)
    assert cluster.drains.asked == []

    cluster.busy(9)  # of ten places: two rings are needed
    await cluster.pass_time(5.0)
    assert cluster.drains.asked == [("undrain", "decode-0")]
    assert [(event.ring, event.parked) for event in await cluster.events()] == [("decode-0", None), ("decode-0", False)]
    await cluster.pass_time(30.0)
    assert len(cluster.drains.asked) == 1, "one is coming"
    cluster.drains.come_back("decode-0")
    cluster.busy(9)
    await cluster.pass_time(5.0)
    assert cluster.drains.asked[1:] == [("undrain", "decode-1"), ("undrain", "decode-2")]


async def test_a_ring_that_still_drains_is_kept(cluster: Cluster) -> None:
    cluster.busy(0)
    await cluster.pass_time(110.0)
    cluster.drains.asked.clear()
    cluster.busy(9)
    await cluster.pass_time(5.0)
    assert cluster.drains.asked == [("undrain", "decode-0")]
    assert [ring.name for ring in cluster.rings.ready("decode")] == ["decode-0", "decode-3"]


async def test_a_ring_that_an_operator_has_drained_stays_away(cluster: Cluster) -> None:
    await cluster.drains.drain("decode-3", 1.0, force=False)
    cluster.drains.leave("decode-3")
    cluster.drains.asked.clear()
    cluster.busy(10)
    await cluster.pass_time(50.0)
    assert cluster.drains.asked == []


@pytest.mark.parametrize("error", [Busy("it is the only one"), Unavailable("its leader is gone")])
async def test_a_ring_that_cannot_be_told_is_not_counted_as_away(cluster: Cluster, error: Exception) -> None:
    cluster.busy(0)
    cluster.drains.error = error
    with pytest.raises(type(error)):
        await cluster.pass_time(200.0)
    assert await cluster.events() == []
    cluster.drains.error = None
    await cluster.pass_time(5.0)
    assert len(cluster.drains.asked) == 3
