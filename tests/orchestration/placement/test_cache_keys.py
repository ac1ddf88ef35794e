"""Cache keys: turns of one key go to the same rings where others are no better."""

from __future__ import annotations

from dataclasses import replace

from ringserve.orchestration.placement.cache_keys import KeyedRings
from ringserve.orchestration.placement.kv_locations import Choice, WantedTurn
from tests.orchestration.placement.test_placer import Cluster, cluster, follow_up, names, new_turn


def of_key(key: str, num_tokens: int = 10_000) -> WantedTurn:
    return replace(new_turn(num_tokens), cache_key=key)


def end(choice: Choice) -> None:
    choice.prefill.busy_until = 0.0
    choice.decode.num_turns -= 1


def served(made: Cluster, turn: WantedTurn) -> tuple[str, str]:
    """Place a turn that ends before the next one comes."""
    choice = made.place(turn)
    end(choice)
    return names(choice)


def test_turns_of_a_key_go_to_the_same_rings_while_others_go_around() -> None:
    made = cluster(3, 3)
    ada = served(made, of_key("ada"))
    bob = served(made, of_key("bob"))
    assert ada != bob
    for _ in range(3):
        assert served(made, new_turn()) in {("p0", "d0"), ("p1", "d1"), ("p2", "d2")}
        assert served(made, of_key("bob")) == bob
        assert served(made, of_key("ada")) == ada


def test_a_key_does_not_make_its_turns_wait_and_the_latest_turn_counts() -> None:
    made = cluster(2, 1)
    first = made.place(of_key("ada", 100_000))
    second = made.place(of_key("ada"))
    assert (first.prefill.name, second.prefill.name) == ("p0", "p1"), "the key's ring has a queue"
    end(first)
    end(second)
    assert served(made, of_key("ada")) == ("p1", "d0")


def test_the_decode_ring_of_a_key_may_have_one_turn_more_than_the_least_loaded() -> None:
    made = cluster(1, 2)
    first = made.place(of_key("ada"))
    assert made.placer.choose(of_key("ada")).decode is first.decode
    assert made.placer.choose(new_turn()).decode is not first.decode
    first.decode.num_turns += 1
    assert made.placer.choose(of_key("ada")).decode is not first.decode


def test_kv_outweighs_a_key() -> None:
    made = cluster(3, 3)
    assert served(made, of_key("ada")) == ("p0", "d0")
    assert names(made.placer.choose(replace(follow_up("p2", "d1"), cache_key="ada"))) == ("p2", "d1")
    shared = replace(follow_up("p1", "d2"), shared={"prefill": "x", "decode": "x"})
    assert names(made.placer.choose(replace(shared, cache_key="ada"))) == ("p1", "d2")


def test_a_keys_rings_that_drain_are_full_or_refuse_are_not_taken() -> None:
    made = cluster(2, 2)
    first = made.place(of_key("ada"))
    end(first)
    assert names(made.placer.choose(of_key("ada"), [first.prefill, first.decode])) == ("p1", "d1")
    first.prefill.free_tokens = first.decode.free_tokens = 100
    assert names(made.placer.choose(of_key("ada"))) == ("p1", "d1")
    first.prefill.free_tokens = first.decode.free_tokens = 2_000_000
    assert names(made.placer.choose(of_key("ada"))) == ("p0", "d0")
    for role, name in (("prefill", "p0"), ("decode", "d0")):
        made.add(role, name, is_draining=True)
    assert names(made.placer.choose(of_key("ada"))) == ("p1", "d1")


def test_the_keys_used_latest_are_remembered() -> None:
    made = cluster(1, 1)
    keyed = KeyedRings(made.rings, max_keys=2)
    choice = made.placer.choose(new_turn())
    for key in ("", "a", "b", "a", "c"):
        keyed.note(key, choice)
    assert len(keyed) == 2
    assert [keyed.of(key, "decode") is choice.decode for key in ("a", "b", "c", "")] == [True, False, True, False]
