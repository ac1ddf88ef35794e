"""Store of conversations: one turn at a time, a limit, an age, and no trace of those that finished no turn."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringserve.cp_core.errors import Busy, CapacityExceeded, ConversationLost, NotFound, TurnCancelled, Unavailable
from ringserve.cp_core.layout.shards import ShardMap, TokenRange, spread
from ringserve.orchestration.conversations.store import MAX_GONE, Conversation, ConversationStore
from ringserve.orchestration.placement.kv_locations import KvLocation
from ringserve.orchestration.protocol.journal import NoJournal
from ringserve.orchestration.protocol.views import rank_shards
from ringserve.workers.protocol.steps import TokenIds
from tests.waiting import eventually


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


class SlowJournal(NoJournal):
    """Journal whose deletions end when the test says so."""

    def __init__(self) -> None:
        self.writing: list[asyncio.Future[None]] = []

    def deleted(self, conversation_ids: Sequence[str]) -> Awaitable[None]:
        self.writing.append(asyncio.get_running_loop().create_future())
        return self.writing[-1]


@pytest.mark.parametrize("how", ["written", "failed", "cancelled"])
async def test_a_deletion_has_happened_if_the_journal_has_written_it(how: str) -> None:
    journal = SlowJournal()
    store = ConversationStore(10, journal=journal)
    conversation = finish(store, "c")
    deleting = asyncio.create_task(store.delete("c"))
    await eventually(lambda: bool(journal.writing))
    with pytest.raises(Busy, match="'c' is busy with its deletion"):
        store.open("c", "second")
    waiting = asyncio.create_task(store.open_in_turn("c", "third"))
    await eventually(lambda: store.is_waiting("third"))
    if how == "failed":
        journal.writing[0].set_exception(Unavailable("router.journal: database or disk is full"))
        with pytest.raises(Unavailable, match="disk is full"):
            await deleting
        assert (await waiting)[0] is conversation, "the turn that waited goes on with all its tokens"
        assert store.get("c").num_tokens == 10
        return
    if how == "cancelled":
        deleting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await deleting
    else:
        journal.writing[0].set_result(None)
        assert await deleting is conversation
    with pytest.raises(NotFound, match="'c' was deleted while this turn waited for it"):
        await waiting
    with pytest.raises(NotFound, match="there is no conversation 'c'"):
        store.get("c")


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
    there = KvLocation(ring="decode-0", incarnation="x", shards=shards)
    conversation.places = conversation.places.put("decode", there)
    (place,) = conversation.view().placements
    assert (place.role, place.ring, place.incarnation, place.num_tokens) == ("decode", "decode-0", "x", 10)
    assert place.ranks == rank_shards(shards)
    assert conversation.view().num_tokens == 10


RINGS = st.sampled_from([None, ("a", "1"), ("a", "2"), ("b", "1")])


@given(st.lists(st.tuples(st.sampled_from("xyz"), RINGS, RINGS, st.booleans()), max_size=12))
def test_the_conversations_of_a_ring_are_those_that_a_search_finds(
    changes: list[tuple[str, tuple[str, str] | None, tuple[str, str] | None, bool]],
) -> None:
    store, shards = ConversationStore(2), spread(0, 10, (0, 0))
    known: dict[str, Conversation] = {}
    for name, *rings, is_removed in changes:
        conversation, dropped = store.open(name, "turn")
        known[name] = conversation
        places = [at and KvLocation(ring=at[0], incarnation=at[1], shards=shards) for at in rings]
        conversation.places = conversation.places.changed(prefill=places[0], decode=places[1])
        store.finish(conversation, np.arange(10))
        store.close(conversation)
        gone = [*dropped, store.remove(name)] if is_removed else dropped
        for each in gone:
            del known[each.conversation_id]
            each.places = each.places.put("decode", None)  # as a turn that ends late
        for role, ring, incarnation in itertools.product(("prefill", "decode"), "ab", "12"):
            found = store.placed_at(role, ring, incarnation)
            places_of = ((each, each.places.at(role)) for each in known.values())
            there = [each for each, at in places_of if at and (at.ring, at.incarnation) == (ring, incarnation)]
            assert sorted(each.conversation_id for each in found) == sorted(each.conversation_id for each in there)


def test_a_placement_is_cut_like_its_shards() -> None:
    place = KvLocation(ring="g", incarnation="x", shards=spread(0, 10, (0, 0))).cut(6)
    assert place.num_tokens == 6
    assert place.shards == ShardMap.of([[TokenRange(0, 5)], [TokenRange(5, 6)]])


# --- waiting ---------------------------------------------------------------------------------------------------------


Opened = tuple[Conversation, list[Conversation]]


async def in_line(store: ConversationStore, *names: str) -> dict[str, asyncio.Task[Opened]]:
    """Return when these requests wait for "c" in this order."""
    waits = {}
    for name in names:
        came = asyncio.Event()

        async def stand(name: str = name, came: asyncio.Event = came) -> Opened:
            came.set()  # a task that waits for it continues when this task waits
            return await store.open_in_turn("c", name)

        waits[name] = asyncio.create_task(stand())
        await came.wait()
        assert store.is_waiting(name)
    return waits


async def test_turns_that_wait_get_the_conversation_in_the_order_in_which_they_came() -> None:
    store = ConversationStore(10)
    running, _ = store.open("c", "first")
    waits = await in_line(store, "second", "third", "fourth")
    assert store.get("c").view().num_waiting == 3
    store.close(running)
    with pytest.raises(Busy, match="'second'"):  # handed on at once: no turn comes between
        store.open("c", "pusher")
    for name, wait in waits.items():
        conversation, _ = await wait
        assert conversation.running_request == name
        assert [other for other in waits if waits[other].done()] == list(waits)[: list(waits).index(name) + 1]
        conversation.tokens = np.arange(3)
        store.close(conversation)
    assert store.get("c").is_idle


async def test_one_that_stops_waiting_is_passed_over() -> None:
    store = ConversationStore(10)
    running, _ = store.open("c", "first")
    waits = await in_line(store, "a", "b", "c", "d")
    waits["a"].cancel()
    assert store.end_wait("b", TurnCancelled("the request was aborted"))
    assert not store.end_wait("nobody", TurnCancelled("x"))
    await asyncio.gather(waits["a"], waits["b"], return_exceptions=True)
    running.tokens = np.arange(3)
    store.close(running)
    assert (await waits["c"])[0].running_request == "c"
    with pytest.raises(TurnCancelled, match="aborted"):
        await waits["b"]
    assert waits["a"].cancelled()
    assert not waits["d"].done()
    waits["d"].cancel()
    await asyncio.gather(waits["d"], return_exceptions=True)
    assert not store.is_waiting("d")


@pytest.mark.parametrize("how", ["cancelled", "aborted"])
async def test_one_that_ends_just_when_it_gets_its_turn_passes_it_on(how: str) -> None:
    store = ConversationStore(10)
    running, _ = store.open("c", "first")
    running.tokens = np.arange(3)
    waits = await in_line(store, "a", "b")
    store.close(running)
    if how == "cancelled":
        waits["a"].cancel()
    else:
        assert store.end_wait("a", TurnCancelled("the request was aborted"))
    assert (await waits["b"])[0].running_request == "b"
    (ended,) = await asyncio.gather(waits["a"], return_exceptions=True)
    assert isinstance(ended, asyncio.CancelledError if how == "cancelled" else TurnCancelled)


async def test_only_so_many_may_wait() -> None:
    store = ConversationStore(10, max_waiting=1)
    store.open("c", "first")
    waiting = (await in_line(store, "second"))["second"]
    with pytest.raises(CapacityExceeded, match="1 turns wait for 'c' and at most 1 are allowed"):
        await store.open_in_turn("c", "third")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert store.get("c").view().num_waiting == 0


async def test_those_that_wait_for_a_first_turn_that_fails_begin_the_conversation_anew() -> None:
    store = ConversationStore(10)
    running, _ = store.open("c", "first")
    waiting = (await in_line(store, "second"))["second"]
    store.close(running)
    assert (await waiting)[0].tokens is None
    assert store.get("c").running_request == "second"
    store.close(running)
    assert len(store) == 0


# --- age -------------------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def names(conversations: list[Conversation]) -> list[str]:
    return [item.conversation_id for item in conversations]


def test_a_conversation_is_forgotten_when_it_was_not_used_for_its_time_to_live() -> None:
    clock = Clock()
    store = ConversationStore(10, ttl_seconds=10.0, clock=clock)
    for name in ("a", "b"):
        finish(store, name)
    clock.now += 6
    finish(store, "a")
    clock.now += 6
    assert store.get("a").view(clock.now).idle_seconds == 6
    assert names(store.expire()) == ["b"]
    clock.now += 4
    assert names(store.expire()) == ["a"]
    assert store.next_expiry is None
    assert len(store) == 0


def test_one_that_is_busy_does_not_age() -> None:
    clock = Clock()
    store = ConversationStore(10, ttl_seconds=10.0, clock=clock)
    finish(store, "a")
    conversation, _ = store.open("a", "long")
    clock.now += 50
    assert store.expire() == []
    assert conversation.view(clock.now).idle_seconds == 0
    store.close(conversation)
    clock.now += 9
    assert store.expire() == []
    clock.now += 1
    assert names(store.expire()) == ["a"]


def test_a_turn_may_set_the_time_to_live_anew() -> None:
    clock = Clock()
    store = ConversationStore(10, clock=clock)
    for ttl, named in ((100.0, None), (5.0, 5.0), (None, 5.0)):
        conversation, _ = store.open("a", "turn", ttl)
        conversation.tokens = np.arange(3)
        store.close(conversation)
        assert named is None or conversation.ttl_seconds == named
    clock.now += 5
    assert names(store.expire()) == ["a"]
    conversation, _ = store.open("b", "turn", 5.0)
    conversation.tokens = np.arange(3)
    store.close(conversation)
    store.close(store.open("b", "turn", 0.0)[0])  # for ever
    clock.now += 1e6
    assert store.expire() == []


def test_one_made_again_under_an_old_name_has_an_age_of_its_own() -> None:
    clock = Clock()
    store = ConversationStore(10, ttl_seconds=10.0, clock=clock)
    finish(store, "a")
    clock.now += 9
    store.remove("a")
    finish(store, "a")
    clock.now += 9
    assert store.expire() == []
    clock.now += 1
    assert names(store.expire()) == ["a"]


# --- lists -----------------------------------------------------------------------------------------------------------


def test_conversations_that_are_deleted_before_their_time_to_live_leave_no_entries() -> None:
    clock = Clock()
    store = ConversationStore(100, ttl_seconds=1000.0, clock=clock)
    finish(store, "first")
    clock.now += 1
    for number in range(1000):
        finish(store, f"c{number}")
        store.remove(f"c{number}")
    finish(store, "last")
    assert len(store._expiries) <= 2 * len(store) + 64
    assert store.next_expiry == 1100
    clock.now = 1101
    assert names(store.expire()) == ["first", "last"]
    assert store.next_expiry is None


def test_pages_go_through_all_of_a_prefix_by_name_each_once() -> None:
    store = ConversationStore(100)
    expected = sorted(f"u{number}" for number in range(25))
    for name in (*reversed(expected), "other", "v1"):
        finish(store, name)
    seen: list[str] = []
    after = ""
    while True:
        page, after = store.page("u", after, 10)
        seen += names(page)
        if not after:
            break
        if len(seen) == 10:
            store.remove(seen[3])  # what goes meanwhile moves nothing
    assert seen == expected


def test_a_page_that_is_just_full_is_the_last() -> None:
    store = ConversationStore(100)
    for name in "abc":
        finish(store, name)
    assert store.page("", "", 3)[1] == ""
    assert store.page("", "", 2)[1] == "b"
    assert store.page("x", "", 2) == ([], "")


def test_the_reasons_of_forgotten_conversations_are_remembered_for_some() -> None:
    store = ConversationStore(1)
    for number in range(MAX_GONE + 2):
        finish(store, f"c{number}")
    assert store.why_gone(f"c{MAX_GONE}") == "it was dropped to make room: at most 1 conversations are remembered"
    assert store.why_gone("c0").startswith("it is not known here")
    finish(store, f"c{MAX_GONE}")
    assert store.why_gone(f"c{MAX_GONE}").startswith("it is not known here"), "it is there again"
    assert len(store._gone) <= MAX_GONE


def test_a_tenant_with_many_conversations_erases_its_own_and_no_other_tenants() -> None:
    store = ConversationStore(1000)
    for number in range(500):
        finish(store, f"calm/{number}")
    source = finish(store, "greedy/source")
    for number in range(10_000):
        fork, dropped = store.begin_fork(source, f"greedy/{number}", 10)
        store.end_fork(source, fork)
        assert all(old.conversation_id.startswith("greedy/") for old in dropped)
    assert len(store) == 1000
    assert len(store.of_tenant("calm")) == 500
    finish(store, "third/new")
    assert len(store.of_tenant("greedy")) + len(store.of_tenant("calm")) == 999, "one of the two with the most pays"


def test_a_tenant_whose_conversations_are_all_in_use_lets_others_make_room() -> None:
    store = ConversationStore(3)
    store.open("a/1", "one")
    store.open("a/2", "two")
    finish(store, "b/1")
    _, dropped = store.open("c/1", "three")
    assert [old.conversation_id for old in dropped] == ["b/1"]
    assert store.open("c/2", "four")[1] == [], "all are in use"


def test_damaged_tokens_are_an_error_for_their_own_turns_alone() -> None:
    def read() -> TokenIds:
        raise ConversationLost("the tokens of 'c' are damaged in the journal")

    damaged = Conversation("c", num_tokens=5, read=read)
    assert damaged.try_tokens() is None
    with pytest.raises(ConversationLost, match="are damaged"):
        _ = damaged.tokens
    whole = Conversation("d", num_tokens=3, read=lambda: np.arange(3))
    found = whole.try_tokens()
    assert found is not None
    assert found.tolist() == [0, 1, 2]
