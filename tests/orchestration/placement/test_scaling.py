"""Numbers of rings by load: growth at once, shrinking only after a while, and what the load is."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringserve.orchestration.placement.registry import RegisteredRing, RingRegistry
from ringserve.orchestration.placement.scaling import LoadMeter, RoleLoad, RoleScaler, ScalingSettings, emptiest
from tests.orchestration.placement.test_registry import Time
from tests.rings import registration

SETTINGS = ScalingSettings(busy_share=0.5, max_wait=2.0, clear_seconds=10.0, shrink_seconds=100.0, window_seconds=60.0)


def load(serving: int, demand: float, *, coming: int = 0, wait: float = 0.0) -> RoleLoad:
    return RoleLoad(serving=serving, coming=coming, demand=demand, wait=wait)


def test_as_many_rings_are_wanted_as_are_busy_for_their_share_and_at_once() -> None:
    scaler = RoleScaler(SETTINGS, least=1)
    assert scaler.wanted(load(1, 1.2), 8, 0.0) == 3
    assert scaler.wanted(load(3, 9.0), 8, 5.0) == 8, "no more than there are"


def test_a_new_turn_that_would_wait_brings_one_ring_at_a_time() -> None:
    scaler = RoleScaler(SETTINGS, least=1)
    assert scaler.wanted(load(2, 0.1, wait=3.0), 8, 0.0) == 3
    assert scaler.wanted(load(2, 0.1, coming=1, wait=9.0), 8, 5.0) == 3, "one is coming"
    assert scaler.wanted(load(3, 0.1, wait=math.inf), 8, 10.0) == 4


def test_rings_are_given_up_only_when_fewer_have_been_enough_for_a_while() -> None:
    scaler = RoleScaler(SETTINGS, least=2)
    assert scaler.wanted(load(6, 3.0), 6, 0.0) == 6
    for second in range(5, 100, 5):
        assert scaler.wanted(load(6, 0.4 if second != 50 else 2.0), 6, float(second)) == 6
    assert scaler.wanted(load(6, 0.4), 6, 105.0) == 4, "four were needed at second 50"
    assert scaler.wanted(load(4, 0.4), 6, 155.0) == 2, "never fewer than the least"


@given(
    looks=st.lists(
        st.tuples(st.floats(0, 50), st.floats(0, 20), st.integers(0, 3), st.integers(1, 12)), min_size=1, max_size=60
    ),
    least=st.integers(1, 4),
)
def test_the_wanted_number_is_within_its_bounds_whatever_the_load(
    looks: list[tuple[float, float, int, int]], least: int
) -> None:
    scaler = RoleScaler(SETTINGS, least)
    now = 0.0
    for demand, wait, coming, most in looks:
        now += 5.0
        serving = max(0, most - coming)
        wanted = scaler.wanted(load(serving, demand, coming=min(coming, most), wait=wait), most, now)
        assert min(least, most) <= wanted <= most


@pytest.fixture
def clock() -> Time:
    return Time()


def ring(rings: RingRegistry, role: str, number: int) -> RegisteredRing:
    rings.register(
        registration(role, f"{role}-{number}", capacity_tokens=1000, max_batch=10 if role == "decode" else 0)
    )
    found = rings.named(role, f"{role}-{number}")
    assert found is not None
    return found


def test_the_demand_for_prefill_is_the_work_that_arrives_and_the_backlog(clock: Time) -> None:
    rings = RingRegistry(clock)
    prefills, decode = [ring(rings, "prefill", number) for number in range(2)], ring(rings, "decode", 0)
    meter = LoadMeter(rings, SETTINGS)
    clock.now = 10.0
    rings.place(prefills[0], decode, prefill_seconds=12.0, num_tokens=1)
    rings.place(prefills[1], decode, prefill_seconds=8.0, num_tokens=1)
    found = meter.prefill(coming=1)
    assert (found.serving, found.coming, found.wait) == (2, 1, 8.0)
    assert found.demand == pytest.approx(20.0 / 10.0 + (20.0 - 2 * 2.0) / 10.0)
    clock.now = 60.0
    assert meter.prefill(0).demand == pytest.approx(20.0 / 60.0)
    clock.now = 90.0
    assert meter.prefill(0).demand == 0.0
    assert meter.prefill(0).wait == 0.0


def test_the_demand_for_decode_is_that_of_places_or_of_kv_whichever_is_fuller(clock: Time) -> None:
    rings = RingRegistry(clock)
    decodes = [ring(rings, "decode", number) for number in range(2)]
    meter = LoadMeter(rings, SETTINGS)
    decodes[0].num_turns, decodes[1].num_turns = 10, 2
    for each in decodes:
        each.free_tokens = 900
    found = meter.decode(0)
    assert found.demand == pytest.approx(1.2)
    assert found.wait == 0.0
    decodes[0].free_tokens = decodes[1].free_tokens = 100
    assert meter.decode(0).demand == pytest.approx(1.8)
    decodes[1].num_turns = 12
    assert meter.decode(0).wait == math.inf, "no place is free anywhere"
    decodes[1].registration = replace(decodes[1].registration, is_draining=True)
    assert meter.decode(0).serving == 1


def test_the_ring_that_goes_is_the_one_with_the_fewest_turns_then_the_least_kv(clock: Time) -> None:
    rings = RingRegistry(clock)
    first, second, third = (ring(rings, "decode", number) for number in range(3))
    first.num_turns, second.free_tokens, third.free_tokens = 1, 100, 900
    first.free_tokens = 1000
    assert emptiest([first, second, third], 0.0) is third
