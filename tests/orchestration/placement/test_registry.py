"""Registry of rings: which serve, how busy each is taken to be between two announcements, and their status."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from ringserve.cp_core.errors import RingserveError, Unavailable
from ringserve.orchestration.placement.registry import (
    LEASE_TICKS,
    RegisteredRing,
    RingRegistry,
    status_of,
    withdraw_if_lost,
)
from ringserve.orchestration.protocol.rings import RingState
from ringserve.orchestration.protocol.turns import RingRegistration
from ringserve.views import RingInfo
from tests.rings import registration as ring_registration


def registration(name: str, incarnation: str = "first", role: str = "prefill") -> RingRegistration:
    return ring_registration(role, name, incarnation=incarnation, capacity_tokens=100, chunk_tokens=10)


class Time:
    """Clock that is set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def registered(rings: RingRegistry, name: str, role: str = "prefill") -> RegisteredRing:
    rings.register(registration(name, role=role))
    ring = rings.named(role, name)
    assert ring is not None
    return ring


def test_a_ring_found_gone_is_left_out_until_it_announces_itself() -> None:
    rings = RingRegistry()
    for name in ("a", "b"):
        registered(rings, name)
    assert [ring.name for ring in rings.ready("prefill")] == ["a", "b"]
    rings.ready("prefill")[1].is_ready = False
    assert [ring.name for ring in rings.ready("prefill")] == ["a"]
    assert rings.register(registration("b")), "that it serves again is news"
    assert [ring.name for ring in rings.ready("prefill")] == ["a", "b"]


def test_the_standing_of_a_ring_is_told_before_it_comes_and_after_it_has_left() -> None:
    rings, seen = RingRegistry(), []
    first = registration("a")
    drains, rebuilds = replace(first, is_draining=True), replace(first, is_rebuilding=True)
    for told in (first, drains, rebuilds, replace(first, is_leaving=True)):
        seen.append(rings.state_of("a"))
        rings.register(told)
    seen.append(rings.state_of("a"))
    rings.register(registration("a", "second"))
    seen.append(rings.state_of("a"))
    assert seen == ["starting", "ready", "draining", "lost", "away", "ready"]


def test_a_repeated_announcement_is_no_news_and_a_new_incarnation_is() -> None:
    rings = RingRegistry()
    ring = registered(rings, "a")
    ring.num_turns = 3
    assert not rings.register(registration("a"))
    assert rings.register(registration("a", "second"))
    assert (ring.registration.incarnation, ring.num_turns) == ("second", 3)
    assert len(rings.all()) == 1


def test_rings_of_both_roles_are_listed_and_found_by_role_and_name() -> None:
    rings = RingRegistry()
    registered(rings, "a")
    registered(rings, "a", "decode")
    assert [ring.registration.role for ring in rings.all()] == ["prefill", "decode"]
    assert rings.named("decode", "b") is None


def test_what_a_ring_says_of_its_queue_counts_and_gets_less_with_time() -> None:
    time = Time()
    rings = RingRegistry(time)
    ring = registered(rings, "a")
    rings.register(replace(registration("a"), waiting_work=600.0, work_rate=200.0, free_tokens=70))
    assert (ring.queue_seconds(0.0), ring.queue_seconds(1.0), ring.queue_seconds(9.0)) == (3.0, 2.0, 0.0)
    assert ring.free_tokens == 70


def test_turns_placed_since_a_ring_announced_itself_count_until_it_does_so_again() -> None:
    time = Time()
    rings = RingRegistry(time)
    prefill, decode = registered(rings, "a"), registered(rings, "b", "decode")
    for _ in range(2):
        rings.place(prefill, decode, prefill_seconds=2.0, num_tokens=30)
    assert prefill.queue_seconds(1.0) == 3.0
    assert (prefill.free_tokens, decode.free_tokens) == (40, 40)
    time.now = 1.0
    rings.register(replace(registration("a"), waiting_work=1.0, work_rate=1.0, free_tokens=90))
    assert (prefill.queue_seconds(1.0), prefill.free_tokens) == (1.0, 90)


def test_a_ring_whose_last_turn_is_prefilled_has_no_queue_whatever_was_predicted() -> None:
    time = Time()
    rings = RingRegistry(time)
    prefill, decode = registered(rings, "a"), registered(rings, "b", "decode")
    first, second = (rings.place(prefill, decode, prefill_seconds=5.0, num_tokens=1) for _ in range(2))
    time.now = 1.0
    first.end_prefill()
    first.end_prefill()
    assert prefill.queue_seconds(1.0) == 9.0, "the other one is still there, and only one end was told"
    second.end_prefill()
    assert prefill.queue_seconds(1.0) == 0.0


def test_a_prompt_whose_kv_was_evicted_counts_with_all_that_is_computed() -> None:
    rings = RingRegistry(Time())
    prefill, decode = registered(rings, "a"), registered(rings, "b", "decode")
    first, second = (rings.place(prefill, decode, prefill_seconds=1.0, num_tokens=1) for _ in range(2))
    first.correct(4.0)
    first.correct(4.0)
    assert prefill.queue_seconds(0.0) == 5.0
    second.end_prefill()
    second.correct(9.0)
    assert prefill.queue_seconds(0.0) == 5.0, "a prompt that was computed counts no more"


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_a_ring_that_tells_no_rate_keeps_the_routers_estimate(rate: float) -> None:
    rings = RingRegistry(Time())
    prefill, decode = registered(rings, "a"), registered(rings, "b", "decode")
    rings.place(prefill, decode, prefill_seconds=2.0, num_tokens=1)
    rings.register(replace(registration("a"), work_rate=rate))
    assert prefill.queue_seconds(0.0) == (0.0 if rate else 2.0)


class Leader:
    """Peers and leader in one, which answer with `state` or raise `error`."""

    def __init__(self, state: str = RingState.READY, error: RingserveError | None = None) -> None:
        self.state = state
        self.error = error
        self.asked: list[str] = []

    def leader(self, role: str, endpoint: str) -> Leader:
        self.asked.append(f"{role} {endpoint}")
        return self

    async def get_status(self) -> RingInfo:
        if self.error is not None:
            raise self.error
        lost = await status_of(RegisteredRing(registration("ring")), Leader(error=Unavailable("gone")))  # type: ignore[arg-type]
        return replace(lost, state=self.state, rebuilds=3)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_the_leader_of_that_role_is_asked(role: str) -> None:
    leader = Leader()
    status = await status_of(RegisteredRing(registration("ring", role=role)), leader)  # type: ignore[arg-type]
    assert (status.state, status.rebuilds) == ("ready", 3)
    assert leader.asked == [f"{role} ring:1"]


async def test_a_ring_that_does_not_answer_is_shown_as_lost_by_what_it_announced() -> None:
    ring = RegisteredRing(registration("ring", "third"))
    status = await status_of(ring, Leader(error=Unavailable("gone")))  # type: ignore[arg-type]
    assert (status.state, status.name, status.incarnation, status.num_ranks) == ("lost", "ring", "third", 2)
    assert ring.is_ready


@pytest.mark.parametrize(
    ("leader", "is_ready"),
    [(Leader(), True), (Leader(RingState.REBUILDING), False), (Leader(error=Unavailable("gone")), False)],
)
async def test_only_a_ring_that_serves_gets_more_turns(leader: Leader, is_ready: bool) -> None:
    ring = RegisteredRing(registration("ring"))
    await withdraw_if_lost(ring, leader)  # type: ignore[arg-type]
    assert ring.is_ready is is_ready


# --- leases ----------------------------------------------------------------------------------------------------------


def lose(rings: RingRegistry, name: str) -> list[str]:
    """End the lease of a ring while the other rings announce themselves; return the rings that are lost."""
    lost = []
    for _ in range(LEASE_TICKS + 1):
        for ring in rings.all():
            if ring.name != name:
                rings.register(ring.registration)
        lost += [ring.name for ring in rings.tick()]
    return lost


async def test_a_silent_ring_is_lost_once_takes_no_turns_and_serves_when_it_is_announced_again() -> None:
    rings = RingRegistry()
    silent, other = registered(rings, "silent"), registered(rings, "other")
    assert lose(rings, "silent") == ["silent"]
    assert not rings.tick()
    assert rings.ready("prefill") == [other]
    status = await status_of(silent, Leader())  # type: ignore[arg-type]
    assert status.state == "lost", "its leader is not asked"
    assert rings.register(registration("silent")), "that it serves again is news"
    assert rings.ready("prefill") == [silent, other]
    assert silent.lost is None


async def test_a_call_to_a_ring_fails_when_the_ring_is_lost_and_so_does_a_later_one() -> None:
    rings = RingRegistry()
    ring = registered(rings, "silent")
    begun = asyncio.Event()

    async def wait() -> None:
        begun.set()
        await asyncio.Event().wait()

    call = asyncio.ensure_future(ring.guarded(wait()))
    await begun.wait()
    lose(rings, "silent")
    with pytest.raises(Unavailable, match="ring silent sends no heartbeat"):
        await call
    with pytest.raises(Unavailable, match="ring silent sends no heartbeat"):
        await ring.guarded(asyncio.Event().wait())
    late = ring.guarded(asyncio.Event().wait())
    rings.register(registration("silent"))
    with pytest.raises(Unavailable, match="ring silent sends no heartbeat"):
        await late  # it was refused before the ring came back
    assert await ring.guarded(asyncio.sleep(0, "answer")) == "answer"


@pytest.mark.parametrize(
    ("announced", "why", "is_ready"),
    [
        (registration("a", "second"), "ring a was started again", True),
        (replace(registration("a"), is_rebuilding=True), "ring a lost a rank and is being rebuilt", False),
    ],
)
async def test_an_incarnation_that_is_gone_fails_its_calls(
    announced: RingRegistration, why: str, is_ready: bool
) -> None:
    rings = RingRegistry()
    lost: list[str] = []
    rings.on_lost = lambda ring, error: lost.append(str(error))
    ring = registered(rings, "a")
    call = ring.guarded(asyncio.Event().wait())
    await asyncio.sleep(0)
    assert rings.register(announced)
    with pytest.raises(Unavailable, match=why):
        await call
    assert not rings.register(announced), "told again"
    assert len(lost) == 1
    assert ring.takes_turns is is_ready


async def test_a_ring_that_is_rebuilt_is_shown_so_whatever_its_leader_answers() -> None:
    rings = RingRegistry()
    ring = registered(rings, "a")
    rings.register(replace(registration("a"), is_rebuilding=True))
    for leader in (Leader(), Leader(error=Unavailable("gone"))):
        assert (await status_of(ring, leader)).state == "rebuilding"  # type: ignore[arg-type]
