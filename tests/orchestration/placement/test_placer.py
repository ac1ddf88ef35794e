"""Choice of rings alone: least predicted time, the own ring where staying pays, ties in turn."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringserve.cp_core.errors import Unavailable
from ringserve.cp_core.layout.shards import TokenRange, spread
from ringserve.orchestration.placement.costs import LEAST
from ringserve.orchestration.placement.kv_locations import Choice, KvLocation, WantedTurn
from ringserve.orchestration.placement.placer import LEAVE_SECONDS, MAX_ALTERNATIVES, TIE, RingPlacer
from ringserve.orchestration.placement.planner import Planner, PlannerSettings
from ringserve.orchestration.placement.registry import RegisteredRing, RingRegistry
from ringserve.orchestration.protocol.plans import PlannedChunk
from ringserve.orchestration.protocol.turns import PrefillReport
from ringserve.workers.protocol.steps import Algorithm
from tests.rings import GPU_RATES as RATES
from tests.rings import LLAMA_8B as MODEL
from tests.rings import registration

SLOW_LINKS = replace(RATES, link_bytes_per_second=1e9, link_latency_seconds=5e-3)


class Cluster:
    """Registry whose clock stands still, and the placer over it."""

    def __init__(self, selector: str = "auto") -> None:
        self.rings = RingRegistry(lambda: 100.0)
        self.planner = Planner(MODEL, PlannerSettings(selector=selector))
        self.placer = RingPlacer(self.rings, self.planner)

    def add(self, role: str, name: str, num_ranks: int = 2, **changes: object) -> RegisteredRing:
        fields = {"num_ranks": num_ranks, "rates": RATES, "capacity_tokens": 2_000_000, "chunk_tokens": 65_536}
        self.rings.register(registration(role, name, **(fields | changes)))
        ring = self.rings.named(role, name)
        assert ring is not None
        return ring

    def place(self, turn: WantedTurn) -> Choice:
        """Choose, and count the turn to the rings' load."""
        choice = self.placer.choose(turn)
        self.placer.place(turn, choice)
        choice.prefill.num_turns += 1
        choice.decode.num_turns += 1
        return choice


def cluster(num_prefill: int = 2, num_decode: int = 2) -> Cluster:
    made = Cluster()
    for number in range(num_prefill):
        made.add("prefill", f"p{number}")
    for number in range(num_decode):
        made.add("decode", f"d{number}")
    return made


def at(name: str, num_tokens: int, incarnation: str = "first") -> KvLocation:
    return KvLocation(ring=name, incarnation=incarnation, shards=spread(0, num_tokens, (0, 0)))


def new_turn(num_tokens: int = 10_000) -> WantedTurn:
    return WantedTurn(num_tokens=num_tokens, answer_tokens=100)


def follow_up(prefill: str = "p0", decode: str = "d0", history: int = 50_000) -> WantedTurn:
    """Return a turn of 200 more tokens after a history of which the prefill ring lacks the last answer."""
    return WantedTurn(
        num_tokens=history + 200,
        answer_tokens=100,
        match_tokens=history,
        prefill=at(prefill, history - 300),
        decode=at(decode, history - 1),
    )


def names(choice: Choice) -> tuple[str, str]:
    return choice.prefill.name, choice.decode.name


@pytest.mark.parametrize(("prefills", "decodes", "missing"), [(0, 1, "prefill"), (1, 0, "decode")])
def test_no_ring_is_an_error_that_says_which_kind_is_missing(prefills: int, decodes: int, missing: str) -> None:
    with pytest.raises(Unavailable, match=f"no {missing} ring is ready"):
        cluster(prefills, decodes).placer.choose(new_turn())


def test_a_ring_that_cannot_be_rebuilt_is_named_with_the_reason_until_it_is() -> None:
    made = cluster(1, 2)
    for name, failure in (("d0", "model m has changed since the service began"), ("d1", "")):
        made.add("decode", name, is_rebuilding=True, failure=failure)
    why = "no decode ring is ready; ring d0 cannot be rebuilt: model m has changed since the service began; retry in"
    with pytest.raises(Unavailable, match=why):
        made.placer.choose(new_turn())
    made.add("decode", "d0")
    assert names(made.placer.choose(new_turn())) == ("p0", "d0")


def test_turns_of_a_quiet_cluster_go_to_every_ring_in_turn() -> None:
    made = cluster(3, 3)
    seen = []
    for _ in range(6):
        choice = made.place(new_turn())
        seen.append(names(choice))
        choice.prefill.busy_until = 0.0  # it is done before the next comes
        choice.decode.num_turns = 0
    assert seen == 2 * [("p0", "d0"), ("p1", "d1"), ("p2", "d2")]


def test_turns_that_come_at_once_share_the_rings_by_their_work() -> None:
    made = cluster(2, 1)
    assert made.place(new_turn(200_000)).prefill.name == "p0"
    assert [made.place(new_turn(5_000)).prefill.name for _ in range(3)] == 3 * ["p1"], "they are done long before"


def test_a_conversation_stays_where_its_kv_is_though_other_rings_are_idle() -> None:
    made = cluster(3, 3)
    made.rings.named("decode", "d1").num_turns = 0  # type: ignore[union-attr]
    made.rings.named("decode", "d2").num_turns = 2  # type: ignore[union-attr]
    choice = made.placer.choose(follow_up("p1", "d2"))
    assert names(choice) == ("p1", "d2")
    assert choice.remarks == ()


def test_a_conversation_leaves_a_queue_that_is_longer_than_its_kv_takes_to_move() -> None:
    made = cluster()
    busy = made.rings.named("prefill", "p0")
    assert busy is not None
    idle = made.placer.choose(follow_up())
    other = next(each for each in idle.alternatives if each.ring == "p1")
    own = next(each for each in idle.alternatives if each.ring == "p0")
    assert other.move_seconds > own.move_seconds, "all of the history, not the last answer alone"
    worth = other.total_seconds * (1 + TIE) + LEAVE_SECONDS - own.total_seconds
    busy.busy_until = 100.0 + 0.99 * worth
    assert names(made.placer.choose(follow_up())) == ("p0", "d0")
    busy.busy_until = 100.0 + 1.01 * worth
    choice = made.placer.choose(follow_up())
    assert names(choice) == ("p1", "d0")
    assert choice.remarks == ("the conversation leaves prefill ring p0",)


def test_a_conversation_leaves_a_decode_ring_whose_batch_is_full() -> None:
    made = Cluster()
    made.add("prefill", "p0")
    full, free = (made.add("decode", name, max_batch=8) for name in ("d0", "d1"))
    full.num_turns = free.num_turns = 7
    assert made.placer.choose(follow_up()).decode is full
    full.num_turns = 12
    choice = made.placer.choose(follow_up())
    assert choice.decode is free
    assert choice.remarks == ("the conversation leaves decode ring d0",)


@pytest.mark.parametrize("is_known", [True, False])
def test_what_only_the_decode_ring_keeps_that_is_left_is_fetched_from_it_and_not_computed(is_known: bool) -> None:
    made = Cluster()
    made.add("prefill", "p0")
    made.add("prefill", "p1").busy_until = 1e4
    full, free = (made.add("decode", name, max_batch=8) for name in ("d0", "d1"))
    full.num_turns = 12
    free.num_turns = 7
    full.is_ready = is_known  # else it was found to be gone
    turn = replace(follow_up(), prefill=at("p0", 10_000))
    choice = made.placer.choose(turn)
    assert choice.decode is free
    cost = next(each for each in choice.alternatives if each.ring == "p0")
    planner, p0 = made.planner, made.rings.named("prefill", "p0")
    assert p0 is not None
    computed = planner.predict_prefill(turn.num_tokens, 10_000, p0.registration)
    if is_known:
        move = planner.predict_move(turn.match_tokens - 1 - 10_000, p0.registration, full.registration)
        assert cost.move_seconds == pytest.approx(move)
        assert cost.move_seconds + cost.prefill_seconds < computed
    else:
        assert cost.move_seconds == 0.0
        assert cost.prefill_seconds == pytest.approx(computed)


def test_a_ring_that_drains_is_left_and_its_kv_fetched() -> None:
    made = cluster(2, 1)
    made.add("prefill", "p0", is_draining=True)
    choice = made.placer.choose(replace(follow_up(), decode=None))
    assert choice.prefill.name == "p1"
    p1 = choice.prefill.registration
    assert choice.prefill_seconds == pytest.approx(made.planner.predict_prefill(50_200, 49_700, p1))


def test_rings_without_room_are_left_out_while_others_have_it() -> None:
    made = cluster()
    own = made.rings.named("decode", "d0")
    assert own is not None
    own.free_tokens = 1000
    assert made.placer.choose(follow_up()).decode.name == "d1"
    for ring in made.rings.ready("decode"):
        ring.free_tokens = 1000
    assert made.placer.choose(follow_up()).decode is own, "what was announced is seconds old: the rings are asked"


def test_short_prompts_take_small_rings_and_long_ones_large_rings() -> None:
    made = Cluster()
    made.add("prefill", "large", 8, rates=SLOW_LINKS)
    made.add("prefill", "small", 1, rates=SLOW_LINKS)
    made.add("decode", "d0")
    assert made.placer.choose(new_turn(500)).prefill.name == "small"
    assert made.placer.choose(new_turn(500_000)).prefill.name == "large"


def test_time_that_the_model_leaves_out_sends_no_prompt_to_a_ring_of_the_wrong_size() -> None:
    """Make each step take 20 ms more than predicted: many times what short prompts are predicted to take."""
    made = Cluster()
    made.add("prefill", "large", 8, rates=SLOW_LINKS)
    made.add("prefill", "small", 1, rates=SLOW_LINKS)
    made.add("decode", "d0")
    taken = []
    for _ in range(3 * LEAST):
        for num_tokens in (100, 500_000):
            choice = made.placer.choose(new_turn(num_tokens))
            taken.append(choice.prefill.name)
            ring = choice.prefill.registration
            chunk = PlannedChunk(tokens=TokenRange(0, num_tokens), algorithm=Algorithm.PASS_KV, num_turns=1)
            predicted = made.planner.predict_prefill(num_tokens, 0, replace(ring, name="never seen"))
            report = PrefillReport(prefill_seconds=0.02 + predicted, chunks=(chunk,))
            made.planner.note_prefill(ring, report)
    assert taken == 3 * LEAST * ["small", "large"]
    (short,) = made.planner.corrections.of_ring(made.rings.named("prefill", "small").registration)  # type: ignore[union-attr]
    assert short.factor > 5.0, "it was learned"


def test_a_turn_that_fits_only_the_largest_rings_goes_there_whatever_waits() -> None:
    made = cluster()
    large = made.add("prefill", "p9", capacity_tokens=4_000_000)
    large.busy_until = 1e4
    assert made.placer.choose(new_turn(2_000_000)).prefill is large
    assert made.placer.choose(new_turn(9_000_000)).prefill is large, "the caller refuses it by that ring's size"


def test_kv_of_an_earlier_incarnation_counts_for_nothing() -> None:
    made = cluster(2, 1)
    turn = replace(follow_up("p1"), prefill=at("p1", 49_700, "before"), decode=None)
    costs = {each.ring: each for each in made.placer.choose(turn).alternatives}
    assert costs["p0"].total_seconds == pytest.approx(costs["p1"].total_seconds)


def test_rings_that_refused_are_not_chosen_again() -> None:
    made = cluster()
    first = made.placer.choose(follow_up())
    second = made.placer.choose(follow_up(), [first.prefill, first.decode])
    assert names(second) == ("p1", "d1")
    with pytest.raises(Unavailable, match="no other prefill ring"):
        made.placer.choose(follow_up(), made.rings.all())


def test_a_single_pair_of_rings_has_no_alternatives() -> None:
    choice = cluster(1, 1).placer.choose(follow_up())
    assert (choice.remarks, choice.alternatives) == ((), ())


rings = st.lists(
    st.tuples(st.sampled_from([1, 2, 4]), st.floats(0.0, 50.0), st.booleans()),
    min_size=2,
    max_size=2 * MAX_ALTERNATIVES,
)


@given(
    rings=rings,
    turns=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    history=st.integers(400, 400_000),
    own=st.integers(0, 20),
)
def test_no_ring_is_chosen_that_is_clearly_slower_than_another(
    rings: list[tuple[int, float, bool]], turns: list[int], history: int, own: int
) -> None:
    made = Cluster()
    for number, (num_ranks, queue, slow) in enumerate(rings):
        ring = made.add("prefill", f"p{number}", num_ranks, rates=SLOW_LINKS if slow else RATES)
        ring.busy_until = 100.0 + queue
    for number, running in enumerate(turns):
        made.add("decode", f"d{number}", max_batch=16).num_turns = running
    turn = follow_up(f"p{own % len(rings)}", f"d{own % len(turns)}", history)
    choice = made.placer.choose(turn)
    again = made.placer.choose(turn)
    assert (choice.prefill, choice.decode, choice.alternatives) == (again.prefill, again.decode, again.alternatives)
    totals = [each.total_seconds for each in choice.alternatives]
    chosen = next(each for each in choice.alternatives if each.ring == choice.prefill.name)
    assert 1 <= len(totals) <= MAX_ALTERNATIVES
    assert all(min(each.queue_seconds, each.move_seconds, each.prefill_seconds) >= 0.0 for each in choice.alternatives)
    assert chosen.total_seconds <= min(totals) * (1 + TIE) + LEAVE_SECONDS + 1e-9
    others = [ring for ring in made.rings.ready("prefill") if not turn.has_kv_on(ring)]
    if choice.prefill in others:
        alike = [ring.queue_seconds(100.0) for ring in others if ring.kind == choice.prefill.kind]
        assert chosen.queue_seconds == min(alike), "of its kind it is the least busy"
    if not turn.has_kv_on(choice.decode):
        assert choice.decode.num_turns == min(running for n, running in enumerate(turns) if n != own % len(turns))
