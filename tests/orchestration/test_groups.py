"""Which ring gets a turn: the one that holds its KV, else the least busy of those that serve."""

from __future__ import annotations

import pytest

from cp_core.errors import Unavailable
from cp_core.layout import spread
from orchestration.conversations import Placement
from orchestration.groups import GroupRegistry
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


def placement(name: str, incarnation: str = "first") -> Placement:
    return Placement(group=name, incarnation=incarnation, shards=spread(0, 4, (0, 0)))


def registry(*names: str) -> GroupRegistry:
    groups = GroupRegistry()
    for name in names:
        assert groups.register(registration(name))
    return groups


def test_no_ring_is_an_error_that_says_which_kind_is_missing() -> None:
    groups = registry("a")
    with pytest.raises(Unavailable, match="no decode ring is ready"):
        groups.choose("decode", None)


def test_the_ring_with_the_fewest_turns_is_chosen() -> None:
    groups = registry("a", "b")
    assert groups.choose("prefill", None).name == "a"
    groups.choose("prefill", None).num_turns = 1
    assert groups.choose("prefill", None).name == "b"


def test_the_ring_that_holds_the_kv_is_chosen_though_it_is_busier() -> None:
    groups = registry("a", "b")
    groups.choose("prefill", placement("b")).num_turns = 5
    assert groups.choose("prefill", placement("b")).name == "b"


def test_kv_of_an_earlier_incarnation_binds_to_nothing() -> None:
    groups = registry("a", "b")
    assert groups.choose("prefill", placement("b", "before")).name == "a"


def test_a_ring_found_gone_is_left_out_until_it_announces_itself() -> None:
    groups = registry("a", "b")
    groups.choose("prefill", placement("b")).is_ready = False
    assert groups.choose("prefill", placement("b")).name == "a"
    assert groups.register(registration("b")), "that it serves again is news"
    assert groups.choose("prefill", placement("b")).name == "b"


def test_a_repeated_announcement_is_no_news_and_a_new_incarnation_is() -> None:
    groups = registry("a")
    groups.choose("prefill", None).num_turns = 3
    assert not groups.register(registration("a"))
    assert groups.register(registration("a", "second"))
    group = groups.named("prefill", "a")
    assert group is not None
    assert (group.registration.incarnation, group.num_turns) == ("second", 3)
    assert len(groups.all()) == 1


def test_rings_of_both_roles_are_listed_and_found_by_role_and_name() -> None:
    groups = registry("a")
    groups.register(registration("a", role="decode"))
    assert [group.registration.role for group in groups.all()] == ["prefill", "decode"]
    assert groups.named("decode", "b") is None
