"""Turns whose decode ring computes the new tokens: when the predictions choose that, and what the plan says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ringserve.cp_core.cost.model import PREFILL_ALGORITHMS
from ringserve.cp_core.cost.selector import duration
from ringserve.cp_core.errors import InvalidRequest
from ringserve.orchestration.placement.costs import LEAST
from ringserve.orchestration.placement.kv_locations import WantedTurn
from ringserve.orchestration.placement.planner import Planner, PlannerSettings, PromptOnRings
from ringserve.orchestration.placement.registry import RegisteredRing
from ringserve.orchestration.protocol.plans import PlannedChunk, PromptMode, TurnPlan
from ringserve.orchestration.protocol.turns import PrefillReport
from ringserve.views import RingRates
from ringserve.workers.protocol.steps import Algorithm
from tests.orchestration.placement.test_placer import SLOW_LINKS, Cluster, at
from tests.rings import GPU_RATES as RATES
from tests.rings import LLAMA_8B as MODEL

HISTORY = 50_000
DIRECT = Algorithm.DECODE_RING


def cluster(num_prefill: int = 1, selector: str = "auto", links: RingRates = RATES, **decode: object) -> Cluster:
    """Make prefill rings, and one equal decode ring that takes up to 128 tokens, in 0.5 s at most."""
    made = Cluster(selector)
    for number in range(num_prefill):
        made.add("prefill", f"p{number}", rates=links)
    options: dict[str, Any] = {"max_direct_tokens": 128, "max_direct_seconds": 0.5} | decode
    made.add("decode", "d0", **options)
    return made


def follow_up(new: int = 20, lag: int = 300, algorithm: Algorithm | None = None) -> WantedTurn:
    """Return a turn of `new` tokens after a history of which the prefill ring lacks the last `lag`."""
    return WantedTurn(
        num_tokens=HISTORY + new,
        answer_tokens=100,
        match_tokens=HISTORY,
        prefill=at("p0", HISTORY - lag),
        decode=at("d0", HISTORY),
        algorithm=algorithm,
    )


def ring(made: Cluster, role: str, name: str) -> RegisteredRing:
    ring = made.rings.named(role, name)
    assert ring is not None
    return ring


def test_the_kv_is_there_and_nothing_need_be_moved() -> None:
    made = cluster()
    choice = made.placer.choose(follow_up())
    assert choice.is_direct
    assert (choice.computing.name, choice.prefill.name) == ("d0", "p0")
    itself, over = choice.alternatives
    assert (itself.ring, over.ring) == ("d0", "p0")
    assert itself.prefill_seconds == pytest.approx(over.prefill_seconds, rel=0.2), "rings of one kind"
    assert (itself.move_seconds, itself.handoff_seconds) == (0.0, 0.0)
    assert over.move_seconds > 0
    assert over.handoff_seconds > 0
    assert itself.total_seconds < over.total_seconds
    assert choice.remarks == ()


@pytest.mark.parametrize(
    ("changes", "turn"),
    [
        ({"max_direct_tokens": 0}, follow_up()),
        ({"max_direct_tokens": 19}, follow_up()),
        ({"max_direct_seconds": 1e-6}, follow_up()),
        ({"incarnation": "rebuilt"}, follow_up()),
        ({}, follow_up(129)),
        ({}, follow_up(algorithm=Algorithm.PASS_Q)),
        ({}, replace(follow_up(), refused_direct="d0")),
        ({}, WantedTurn(num_tokens=20, answer_tokens=9)),
        # Half as fast, with nothing to pull: the way over the prefill ring is the shorter one.
        ({"rates": replace(RATES, gemm_flops=RATES.gemm_flops / 4, attention_flops=RATES.attention_flops / 4)},
         follow_up(100, lag=0)),
    ],
    ids=["off", "too many", "too long a stall", "lost", "more", "other asked", "refused", "no history", "slow"],
)  # fmt: skip
def test_a_prefill_ring_computes_the_rest(changes: dict[str, object], turn: WantedTurn) -> None:
    choice = cluster(**changes).placer.choose(turn)  # type: ignore[arg-type]
    assert not choice.is_direct
    assert choice.computing.name == "p0"


def test_in_a_tie_the_kv_stays_where_it_is() -> None:
    """The prefill ring has all of it, and its way is predicted to be a little shorter: by less than predictions err."""
    for slower, is_direct in ((1.0, True), (1.15, True), (1.5, False)):
        made = cluster(rates=replace(RATES, attention_flops=RATES.attention_flops / slower))
        choice = made.placer.choose(follow_up(100, lag=0))
        itself, over = sorted(choice.alternatives, key=lambda way: way.ring)
        assert choice.is_direct is is_direct
        if slower == 1.15:
            assert over.total_seconds < itself.total_seconds < 1.1 * over.total_seconds


@pytest.mark.parametrize("selector", ["pass_kv", "pass_q"])
def test_an_algorithm_that_is_configured_is_taken(selector: str) -> None:
    assert not cluster(selector=selector).placer.choose(follow_up()).is_direct
    assert cluster(selector=selector).placer.choose(follow_up(algorithm=DIRECT)).is_direct, "a turn may ask"


def test_turns_that_decode_wait_for_the_prompt_and_that_counts_as_often_as_it_is_waited() -> None:
    made = cluster()
    ring(made, "decode", "d0").num_turns = 30
    busy = made.placer.choose(follow_up())
    assert not busy.is_direct
    assert busy.direct is not None
    assert busy.direct.stall_seconds == pytest.approx(30 * busy.direct.prefill_seconds)
    # A queue on the prefill ring outweighs it.
    ring(made, "prefill", "p0").busy_until = made.rings.clock() + 60.0
    assert made.placer.choose(follow_up()).is_direct


def test_prompts_queue_on_a_decode_ring_until_they_are_computed() -> None:
    made = cluster()
    ring(made, "prefill", "p0").busy_until = made.rings.clock() + 0.2
    placed = []
    while (choice := made.placer.choose(follow_up(100))).is_direct:
        placed.append(made.placer.place(follow_up(100), choice))
        assert len(placed) < 1000
    assert placed, "the first goes there"
    assert choice.direct is not None
    assert choice.direct.queue_seconds == pytest.approx(len(placed) * choice.direct.prefill_seconds)
    before = ring(made, "prefill", "p0").queue_seconds(made.rings.clock())
    for each in placed:
        each.end_prefill()
    assert made.placer.choose(follow_up(100)).is_direct
    assert ring(made, "prefill", "p0").queue_seconds(made.rings.clock()) == before, "none of it was that ring's"


def test_a_history_far_longer_on_the_decode_ring_is_neither_pulled_nor_computed_again() -> None:
    """Compare with slow links between the rings: the way over a prefill ring takes seconds."""
    made = cluster(num_prefill=2, links=SLOW_LINKS)
    choice = made.placer.choose(follow_up(20, lag=HISTORY - 100))
    assert choice.is_direct
    assert [each.ring for each in choice.alternatives] == ["d0", "p0", "p1"]
    assert choice.alternatives[0].total_seconds < min(each.total_seconds for each in choice.alternatives[1:])


@pytest.mark.parametrize("new", [129, 20])
def test_asking_for_what_cannot_be_is_an_error(new: int) -> None:
    turn = follow_up(new, algorithm=DIRECT)
    if new == 20:
        turn = replace(turn, decode=None)
    kept = HISTORY if new == 129 else 0
    says = rf"decode_ring is for up to 128 new tokens .* this turn has {HISTORY + new - kept} after {kept}"
    with pytest.raises(InvalidRequest, match=says):
        cluster().placer.choose(turn)


# --- in plans --------------------------------------------------------------------------------------------------------


def planned(planner: Planner, made: Cluster, algorithm: Algorithm | None = None) -> TurnPlan:
    prompt = PromptOnRings(
        num_tokens=HISTORY + 20,
        retained_on_prefill=HISTORY - 300,
        retained_on_decode=HISTORY,
        prefill=ring(made, "prefill", "p0").registration,
        decode=ring(made, "decode", "d0").registration,
    )
    return planner.plan_direct(prompt, mode=PromptMode.APPEND, algorithm=algorithm)


def test_the_plan_names_the_decode_ring_and_lists_every_other_way() -> None:
    planner, made = Planner(MODEL, PlannerSettings()), cluster()
    plan = planned(planner, made)
    assert (plan.algorithm, plan.prefill_ring, plan.decode_ring) == (DIRECT, "d0", "d0")
    assert (plan.new_tokens, plan.cached_tokens) == (20, HISTORY)
    assert [(item.source, len(item.tokens)) for item in plan.cached_sources] == [("kept_on_decode", HISTORY)]
    assert [name for name, _ in plan.alternatives] == ["decode_ring", *PREFILL_ALGORITHMS, "pull", "recompute"]
    assert plan.predicted_prefill_seconds == dict(plan.alternatives)["decode_ring"] > 0
    taken = f"decode ring, predicted {duration(plan.predicted_prefill_seconds)}"
    assert plan.reason == f"{taken}: its KV need not move"
    assert planned(planner, made, DIRECT).reason == f"{taken}: the request asked for it"


def test_what_turns_took_there_corrects_what_is_predicted_and_not_which_way_is_taken() -> None:
    made = cluster()
    planner = made.planner
    before, chosen = planned(planner, made), made.placer.choose(follow_up())
    (chunk,) = before.chunks
    report = PrefillReport(
        prefill_seconds=3 * before.predicted_prefill_seconds,
        chunks=(PlannedChunk(tokens=chunk.tokens, algorithm=DIRECT, num_turns=1),),
    )
    decode = ring(made, "decode", "d0").registration
    for _ in range(LEAST):
        planner.note_prefill(decode, report)
    after = planned(planner, made)
    assert after.predicted_prefill_seconds == pytest.approx(3 * before.predicted_prefill_seconds)
    assert before.correction == 1.0
    assert after.correction == pytest.approx(3.0)
    (correction,) = planner.corrections.of_ring(decode)
    assert (correction.algorithm, correction.num_turns) == (DIRECT, LEAST)
    assert made.placer.choose(follow_up()) == chosen
    # How long others would have to wait for it is another matter: that is what it takes. An idle ring may take longer.
    made.rings.register(replace(decode, max_direct_seconds=2 * before.predicted_prefill_seconds))
    assert made.placer.choose(follow_up()).is_direct
    ring(made, "decode", "d0").num_turns += 1
    too_long = made.placer.choose(follow_up())
    assert not too_long.is_direct
    assert too_long.remarks == ("ring d0 would delay its batch too long by computing the prompt itself",)
