"""Choices among ordered rings equal those of a search through all rings, whatever happens meanwhile."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringserve.cp_core.layout.shards import spread
from ringserve.orchestration.placement import placer
from ringserve.orchestration.placement.costs import RingCosts, StepSeconds
from ringserve.orchestration.placement.kv_locations import KvLocation, WantedTurn
from ringserve.orchestration.placement.placer import RingPlacer
from ringserve.orchestration.placement.planner import Planner, PlannerSettings
from ringserve.orchestration.placement.registry import LoadShare, Ordered, RegisteredRing, RingRegistry
from ringserve.orchestration.protocol.turns import RingRegistration
from ringserve.views import RingRates
from tests.orchestration.placement.exhaustive_placement import ExhaustivePlacer
from tests.orchestration.placement.test_placer import SLOW_LINKS
from tests.rings import GPU_RATES as RATES
from tests.rings import LLAMA_8B as MODEL

RETAINED = 0.9
"""Share of a conversation's tokens that a ring retains; the rest was evicted."""


class Happenings:
    """Registry of rings of several kinds to which every possible event happens, by a seeded chance."""

    def __init__(self, seed: int, num_rings: int) -> None:
        self.draw = random.Random(seed)
        self.now = 100.0
        self.rings = RingRegistry(lambda: self.now)
        self.quick = RingPlacer(self.rings, Planner(MODEL, PlannerSettings()))
        self.thorough = ExhaustivePlacer(self.rings, MODEL)
        self.running: list[tuple[RegisteredRing, RegisteredRing, LoadShare]] = []
        self.where: dict[int, WantedTurn] = {}
        for number in range(num_rings):
            for role in ("prefill", "decode"):
                self.rings.register(self.registration(role, f"{role}-{number}"))

    def registration(self, role: str, name: str) -> RingRegistration:
        draw = self.draw
        return RingRegistration(
            role=role,
            name=name,
            endpoint=f"{name}:1",
            incarnation=draw.choice(("first", "second")),
            num_ranks=draw.choice((1, 2, 4)),
            rates=self.rates(),
            capacity_tokens=draw.choice((60_000, 600_000)),
            chunk_tokens=65_536,
            max_batch=draw.choice((0, 3)),
            work_rate=draw.choice((0.0, 1000.0)),
            waiting_work=draw.choice((0.0, 500.0, 5000.0)),
            free_tokens=draw.choice((None, 10_000)),
            is_draining=draw.random() < 0.1,
        )

    def rates(self) -> RingRates:
        kind = self.draw.choice((RATES, SLOW_LINKS))
        return replace(kind, attention_flops=kind.attention_flops * self.draw.uniform(0.9, 1.1))

    def happen(self) -> None:
        """Do one of: time passes, a ring announces, is lost, leaves, returns; a prefill ends, a turn ends."""
        draw, rings = self.draw, self.rings.all()
        what = draw.randrange(6)
        if what == 0:
            self.now += draw.expovariate(1.0)
        elif what == 1:
            ring = draw.choice(rings)
            self.rings.register(self.registration(ring.role, ring.name))
        elif what == 2:
            draw.choice(rings).is_ready = False
        elif what == 3:
            ring = draw.choice(rings)
            self.rings.register(replace(ring.registration, is_leaving=True))
            fresh = replace(self.registration(ring.role, ring.name), incarnation=f"third-{draw.random()}")
            self.rings.register(replace(fresh, is_draining=False))
        elif what == 4 and self.running:
            draw.choice(self.running)[2].end_prefill()
        elif self.running:
            prefill, decode, placed = self.running.pop(draw.randrange(len(self.running)))
            placed.end_prefill()
            prefill.num_turns -= 1
            decode.num_turns -= 1

    def wanted(self) -> tuple[int, WantedTurn]:
        """Return a turn of one of a few conversations."""
        conversation, new = self.draw.randrange(12), round(10 ** self.draw.uniform(1.0, 5.0))
        before = self.where.get(conversation)
        if before is None:
            return conversation, WantedTurn(num_tokens=new, answer_tokens=50)
        history = before.num_tokens + before.answer_tokens
        return conversation, replace(before, num_tokens=history + new, match_tokens=self.draw.choice((history, 10)))

    def place(self, conversation: int, turn: WantedTurn, refused: list[RegisteredRing]) -> None:
        choice = self.quick.choose(turn, refused)
        placed = self.quick.place(turn, choice)
        choice.prefill.num_turns += 1
        choice.decode.num_turns += 1
        self.running.append((choice.prefill, choice.decode, placed))
        self.where[conversation] = replace(
            turn, prefill=self.placement(choice.prefill, turn), decode=self.placement(choice.decode, turn)
        )
        if turn.num_tokens > 300_000:
            del self.where[conversation]

    def placement(self, ring: RegisteredRing, turn: WantedTurn) -> KvLocation:
        kept = round(turn.num_tokens * self.draw.choice((RETAINED, 1.0)))
        registration = ring.registration
        return KvLocation(
            ring=registration.name,
            incarnation=registration.incarnation,
            shards=spread(0, kept, (0,) * registration.num_ranks),
        )


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), num_rings=st.integers(1, 9))
def test_the_rings_are_those_that_a_search_through_all_would_choose(seed: int, num_rings: int) -> None:
    cluster = Happenings(seed, num_rings)
    for _ in range(12):
        for _ in range(cluster.draw.randrange(4)):
            cluster.happen()
        conversation, turn = cluster.wanted()
        rings = cluster.rings.all()
        refused = cluster.draw.sample(rings, cluster.draw.choice((0, 0, 0, min(2, len(rings) // 4))))
        if any(all(ring in refused for ring in cluster.rings.ready(role)) for role in ("prefill", "decode")):
            continue
        choice = cluster.quick.choose(turn, refused)
        assert (choice.prefill.name, choice.decode.name) == cluster.thorough.choose(turn, refused)
        cluster.place(conversation, turn, refused)


def test_a_ring_that_has_left_is_forgotten_though_its_turns_still_end() -> None:
    cluster = Happenings(1, 2)
    ring = cluster.rings.named("prefill", "prefill-0")
    decode = cluster.rings.named("decode", "decode-0")
    assert ring is not None
    assert decode is not None
    placed = cluster.rings.place(ring, decode, prefill_seconds=1.0, num_tokens=10)
    cluster.rings.register(replace(ring.registration, is_leaving=True))
    placed.end_prefill()
    ring.num_turns -= 1
    assert cluster.rings.least_busy(lambda other: other is ring) == []


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(-20, 20), st.booleans()), max_size=300), st.integers(0, 8))
def test_the_first_of_ordered_items_is_the_least_of_the_latest_keys(
    moves: list[tuple[int, int, bool]], limit: int
) -> None:
    ordered, latest = Ordered[int](), dict[int, tuple[int, int]]()
    for item, key, is_gone in moves:
        if is_gone:
            ordered.discard(item)
            latest.pop(item, None)
        else:
            latest[item] = (key, item)
            ordered.put(item, latest[item])
        accepted = [item for item in latest if item <= limit]
        expected = min(accepted, key=lambda item: latest[item], default=None)
        assert ordered.first(lambda item: item <= limit) == expected
        assert len(ordered) == len(latest)


@pytest.mark.parametrize("num_moves", [100, 10_000])
def test_keys_that_no_longer_count_take_no_room(num_moves: int) -> None:
    ordered = Ordered[str]()
    for number in range(num_moves):
        ordered.put("a", -number)
        ordered.put("b", number)
    assert len(ordered._heap) < 100
    assert ordered.first(lambda item: True) == "a"


def test_a_choice_among_many_rings_looks_at_no_more_of_them_than_among_few(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    predicted, accepted = RingCosts.seconds, placer._may_take

    def seconds(costs: RingCosts, ring: RingRegistration, new_tokens: int, cached_tokens: int) -> StepSeconds:
        asked.append(ring.name)
        return predicted(costs, ring, new_tokens, cached_tokens)

    def may_take(ring: RegisteredRing, *conditions: Any) -> bool:
        asked.append(ring.name)
        return accepted(ring, *conditions)

    monkeypatch.setattr(RingCosts, "seconds", seconds)
    monkeypatch.setattr(placer, "_may_take", may_take)
    counts = []
    for num_rings in (16, 400):
        cluster = Happenings(3, 0)
        for number in range(num_rings):
            for role in ("prefill", "decode"):
                ring = replace(cluster.registration(role, f"{role}-{number}"), num_ranks=2, max_batch=0)
                idle = replace(ring, free_tokens=None, is_draining=False, rates=RATES, waiting_work=0.0)
                cluster.rings.register(replace(idle, capacity_tokens=600_000, incarnation="first", work_rate=0.0))
        cluster.draw.seed(3)
        turn, steps = WantedTurn(num_tokens=1000, answer_tokens=50), []
        for _ in range(30):
            asked.clear()
            cluster.place(0, turn, [])
            steps.append(len(asked))
            turn = replace(cluster.where[0], num_tokens=turn.num_tokens + 60, match_tokens=turn.num_tokens)
        counts.append(steps)
    assert counts[0] == counts[1]
    assert max(counts[1]) < 20
