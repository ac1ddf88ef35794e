"""What the router knows of rings: who serves, and how busy it takes each to be between two announcements."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestration.groups import Group, GroupRegistry
from orchestration.turn import GroupRegistration
from workers.steps import RingRates


def registration(name: str, incarnation: str = "first", role: str = "prefill") -> GroupRegistration:
    return GroupRegistration(
        role=role,
        name=name,
        endpoint=f"{name}:1",
        incarnation=incarnation,
        num_ranks=2,
        rates=RingRates(gemm_flops=1, attention_flops=1, link_bytes_per_second=1, link_latency_seconds=1),
        capacity_tokens=100,
        chunk_tokens=10,
    )


class Time:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def registered(groups: GroupRegistry, name: str, role: str = "prefill") -> Group:
    groups.register(registration(name, role=role))
    group = groups.named(role, name)
    assert group is not None
    return group


def test_a_ring_found_gone_is_left_out_until_it_announces_itself() -> None:
    groups = GroupRegistry()
    for name in ("a", "b"):
        registered(groups, name)
    assert [group.name for group in groups.ready("prefill")] == ["a", "b"]
    groups.ready("prefill")[1].is_ready = False
    assert [group.name for group in groups.ready("prefill")] == ["a"]
    assert groups.register(registration("b")), "that it serves again is news"
    assert [group.name for group in groups.ready("prefill")] == ["a", "b"]


def test_a_repeated_announcement_is_no_news_and_a_new_incarnation_is() -> None:
    groups = GroupRegistry()
    group = registered(groups, "a")
    group.num_turns = 3
    assert not groups.register(registration("a"))
    assert groups.register(registration("a", "second"))
    assert (group.registration.incarnation, group.num_turns) == ("second", 3)
    assert len(groups.all()) == 1


def test_rings_of_both_roles_are_listed_and_found_by_role_and_name() -> None:
    groups = GroupRegistry()
    registered(groups, "a")
    registered(groups, "a", "decode")
    assert [group.registration.role for group in groups.all()] == ["prefill", "decode"]
    assert groups.named("decode", "b") is None


def test_what_a_ring_says_of_its_queue_counts_and_gets_less_with_time() -> None:
    time = Time()
    groups = GroupRegistry(time)
    group = registered(groups, "a")
    groups.register(replace(registration("a"), waiting_work=600.0, work_rate=200.0, free_tokens=70))
    assert (group.queue_seconds(0.0), group.queue_seconds(1.0), group.queue_seconds(9.0)) == (3.0, 2.0, 0.0)
    assert group.free_tokens == 70


def test_turns_placed_since_a_ring_announced_itself_count_until_it_does_so_again() -> None:
    time = Time()
    groups = GroupRegistry(time)
    prefill, decode = registered(groups, "a"), registered(groups, "b", "decode")
    for _ in range(2):
        groups.place(prefill, decode, prefill_seconds=2.0, num_tokens=30)
    assert prefill.queue_seconds(1.0) == 3.0
    assert (prefill.free_tokens, decode.free_tokens) == (40, 40)
    time.now = 1.0
    groups.register(replace(registration("a"), waiting_work=1.0, work_rate=1.0, free_tokens=90))
    assert (prefill.queue_seconds(1.0), prefill.free_tokens) == (1.0, 90)


def test_a_ring_whose_last_turn_is_prefilled_has_no_queue_whatever_was_predicted() -> None:
    time = Time()
    groups = GroupRegistry(time)
    prefill, decode = registered(groups, "a"), registered(groups, "b", "decode")
    first, second = (groups.place(prefill, decode, prefill_seconds=5.0, num_tokens=1) for _ in range(2))
    time.now = 1.0
    first.end_prefill()
    first.end_prefill()
    assert prefill.queue_seconds(1.0) == 9.0, "the other one is still there, and only one end was told"
    second.end_prefill()
    assert prefill.queue_seconds(1.0) == 0.0


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_a_ring_that_tells_no_rate_keeps_the_routers_estimate(rate: float) -> None:
    groups = GroupRegistry(Time())
    prefill, decode = registered(groups, "a"), registered(groups, "b", "decode")
    groups.place(prefill, decode, prefill_seconds=2.0, num_tokens=1)
    groups.register(replace(registration("a"), work_rate=rate))
    assert prefill.queue_seconds(0.0) == (0.0 if rate else 2.0)
