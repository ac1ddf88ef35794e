"""The router's book of conversations: one turn at a time, a limit, and nothing left of what never finished."""

from __future__ import annotations

import numpy as np
import pytest

from cp_core.errors import Busy, NotFound
from cp_core.layout import TokenRange, spread
from orchestration.conversations import Conversation, ConversationStore, Placement


def finish(store: ConversationStore, name: str) -> Conversation:
    """Run a turn of a conversation to its end."""
    conversation, _ = store.open(name, f"request of {name}")
    conversation.tokens = np.arange(10)
    store.close(conversation)
    return conversation


def test_a_conversation_takes_one_turn_at_a_time() -> None:
    store = ConversationStore(10)
    conversation, _ = store.open("c", "first")
    with pytest.raises(Busy, match="'c' is busy with request 'first'"):
        store.open("c", "second")
    with pytest.raises(Busy, match="'c' is busy with request 'first' and cannot be deleted"):
        store.remove("c")
    conversation.tokens = np.arange(3)
    store.close(conversation)
    assert store.open("c", "second")[0] is conversation


def test_a_conversation_that_never_finished_a_turn_is_forgotten() -> None:
    store = ConversationStore(10)
    conversation, _ = store.open("c", "first")
    assert store.get("c").view().running_request_id == "first"
    store.close(conversation)
    assert len(store) == 0
    with pytest.raises(NotFound, match="there is no conversation 'c'"):
        store.get("c")


def test_removing_takes_it_out_once() -> None:
    store = ConversationStore(10)
    conversation = finish(store, "c")
    assert store.remove("c") is conversation
    with pytest.raises(NotFound, match="'c'"):
        store.remove("c")


def test_the_least_recently_used_idle_conversation_makes_place() -> None:
    store = ConversationStore(3)
    for name in "abc":
        finish(store, name)
    finish(store, "a")
    busy, _ = store.open("b", "running")
    _, dropped = store.open("d", "new")
    assert [item.conversation_id for item in dropped] == ["c"]
    assert len(store) == 3
    assert busy.running_request == "running"


def test_busy_conversations_are_never_dropped() -> None:
    store = ConversationStore(1)
    first, _ = store.open("a", "one")
    _, dropped = store.open("b", "two")
    assert dropped == []
    first.tokens = np.arange(2)
    store.close(first)
    _, dropped = store.open("c", "three")
    assert dropped == [first]


def test_a_view_shows_each_ring_that_holds_kv() -> None:
    store = ConversationStore(1)
    conversation = finish(store, "c")
    assert conversation.view().placements == ()
    shards = spread(0, 10, (0, 0))
    conversation.decode = Placement(group="decode-0", incarnation="x", shards=shards)
    (place,) = conversation.view().placements
    assert (place.role, place.group, place.incarnation, place.num_tokens) == ("decode", "decode-0", "x", 10)
    assert place.shards == shards
    assert conversation.view().num_tokens == 10


def test_a_placement_is_cut_like_its_shards() -> None:
    place = Placement(group="g", incarnation="x", shards=spread(0, 10, (0, 0))).cut(6)
    assert place.num_tokens == 6
    assert place.shards.ranks == ((TokenRange(0, 5),), (TokenRange(5, 6),))
