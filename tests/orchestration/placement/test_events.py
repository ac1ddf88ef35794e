"""Log of the latest events, and what of the registry of rings enters it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count

from ringserve.orchestration.placement.events import MAX_EVENTS, MAX_TEXT, EventLog
from ringserve.orchestration.placement.registry import LEASE_TICKS, RingRegistry
from ringserve.orchestration.protocol.views import EventKind
from tests.rings import registration


def log(times: Iterator[int] | None = None) -> EventLog:
    ticks = count(1) if times is None else times
    return EventLog(lambda: float(next(ticks)))


def test_a_repeated_event_is_counted_where_it_happened_last() -> None:
    events = log()
    events.note(EventKind.REFUSAL, "", "no room")
    events.note(EventKind.RING, "a", "ring a drains")
    events.note(EventKind.REFUSAL, "", "no room")
    events.note(EventKind.REFUSAL, "", "no ring")
    events.note(EventKind.REFUSAL, "", "no room")
    assert [(each.at, each.text, each.count) for each in events.latest()] == [
        (2.0, "ring a drains", 1),
        (3.0, "no room", 2),
        (4.0, "no ring", 1),
        (5.0, "no room", 1),
    ]


def test_a_flood_leaves_the_latest_hundred_and_no_long_text() -> None:
    events = log()
    for number in range(MAX_EVENTS + 5):
        events.note(EventKind.RING, "", f"{number} {'x' * 1000}")
    kept = events.latest()
    assert (len(kept), kept[0].text[:2], len(kept[-1].text)) == (MAX_EVENTS, "5 ", MAX_TEXT)
    assert [each.at for each in kept] == sorted(each.at for each in kept)


def test_the_life_of_a_ring_is_told() -> None:
    registry = RingRegistry(lambda: 0.0, log())
    ring = registration()
    for changed in (
        {},
        {},
        {"is_rebuilding": True},
        {"is_rebuilding": True},
        {"incarnation": "second"},
        {"incarnation": "second", "is_draining": True},
        {"incarnation": "second"},
        {"incarnation": "third"},
        {"incarnation": "third", "is_leaving": True},
    ):
        registry.register(replace(ring, **changed))
    name = ring.name
    assert [(str(each.kind), each.text) for each in registry.events.latest()] == [
        ("ring", f"ring {name} serves with {ring.num_ranks} ranks"),
        ("lost", f"ring {name} lost a rank and is being rebuilt"),
        ("rebuilt", f"ring {name} serves again"),
        ("ring", f"ring {name} drains"),
        ("ring", f"ring {name} takes turns again"),
        ("lost", f"ring {name} was started again"),
        ("rebuilt", f"ring {name} serves again"),
        ("ring", f"ring {name} has left"),
    ]


def test_a_ring_that_falls_silent_and_speaks_again_is_told() -> None:
    registry = RingRegistry(lambda: 0.0, log())
    registry.register(registration())
    for _ in range(LEASE_TICKS + 2):
        registry.tick()
    registry.register(registration())
    texts = [each.text for each in registry.events.latest()]
    assert texts[1:] == [
        f"the leader of ring {registration().name} sends no heartbeat",
        f"ring {registration().name} serves again",
    ]


def test_the_evictions_of_each_ring_are_one_event_with_their_number() -> None:
    registry = RingRegistry(lambda: 0.0, log())
    first, second = registration(name="decode-0"), registration(name="decode-1")
    for num_evictions in (0, 3, 3, 8):
        for ring in (first, second):
            registry.register(replace(ring, num_evictions=num_evictions))
    registry.register(replace(first, incarnation="later", num_evictions=2))
    events = [each for each in registry.events.latest() if each.kind is EventKind.EVICTION]
    assert [(each.ring, each.text, each.count) for each in events] == [
        (name, f"ring {name} dropped retained KV to make room", 8) for name in ("decode-0", "decode-1")
    ]
