"""Corrections learned from measured times: a median that a few outliers do not move, and before it what is known."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringserve.cp_core.cost.selector import duration
from ringserve.cp_core.layout.shards import TokenRange
from ringserve.orchestration.placement.costs import FARTHEST, LEAST, LIKE, WINDOW, RingCorrections
from ringserve.orchestration.placement.planner import Planner, PlannerSettings, PromptOnRings
from ringserve.orchestration.protocol.plans import PlannedChunk, PromptMode, TurnPlan
from ringserve.orchestration.protocol.turns import PrefillReport
from ringserve.views import Correction
from ringserve.workers.protocol.steps import RING_ALGORITHMS, Algorithm
from tests.orchestration.fake_ranks import MODEL
from tests.rings import LLAMA_8B, registration

KV, Q = Algorithm.PASS_KV, Algorithm.PASS_Q
RING = registration(chunk_tokens=512)
OTHER = replace(RING, name="other")
WORK = 100.0
"""Work of turns of 64 to 256 work units."""


def noted(ratios: list[float], algorithm: Algorithm = KV) -> RingCorrections:
    corrections = RingCorrections()
    for ratio in ratios:
        corrections.note(RING, algorithm, WORK, predicted=1.0, measured=ratio)
    return corrections


@given(
    st.lists(st.floats(0.8, 1.25), min_size=LEAST, max_size=2 * WINDOW // 3),
    st.lists(st.sampled_from([1e-9, 1e-3, 50.0, 1e12]), max_size=WINDOW),
    st.randoms(),
)
def test_turns_that_are_off_do_not_spoil_it_while_they_are_fewer_than_half(
    honest: list[float], wild: list[float], order: random.Random
) -> None:
    turns = honest + wild[: (len(honest) - 1) // 2]
    order.shuffle(turns)
    assert len(turns) <= WINDOW
    assert 0.8 <= noted(turns).factor(RING, KV, WORK) <= 1.25


@given(st.lists(st.floats(1e-6, 1e6), max_size=LEAST - 1))
def test_few_turns_correct_within_what_they_show(ratios: list[float]) -> None:
    """They move a prediction toward their median, and not to it; a median that is far off is no matter of rates."""
    factor, shown = noted(ratios).factor(RING, KV, WORK), median(ratios) if ratios else 1.0
    if 1.0 / FARTHEST < shown < FARTHEST:
        assert min(1.0, shown) <= factor <= max(1.0, shown)
        assert abs(math.log(factor)) >= 0.8 * abs(math.log(shown))
    else:
        assert factor == 1.0


@given(st.lists(st.floats(1e-6, 1e6), max_size=3 * WINDOW))
def test_a_factor_is_that_of_the_latest_turns(ratios: list[float]) -> None:
    assert noted([*ratios, *[1.5] * WINDOW]).factor(RING, KV, WORK) == 1.5


def test_each_algorithm_of_each_ring_has_its_own() -> None:
    corrections = noted([2.0] * LEAST)
    for _ in range(LEAST):
        corrections.note(OTHER, KV, WORK, predicted=1.0, measured=5.0)
    assert corrections.factor(RING, Q, WORK) == 1.0
    assert (corrections.factor(RING, KV, WORK), corrections.factor(OTHER, KV, WORK)) == (2.0, 5.0)
    assert corrections.of_ring(RING) == (Correction(algorithm=KV, min_work=64, factor=2.0, num_turns=LEAST),)


def test_turns_after_cached_tokens_have_a_factor_of_their_own_beside_that_of_all() -> None:
    """Three of five turns follow cached tokens; too few of either kind say no more than all do."""
    corrections = RingCorrections()
    for count in range(2 * LEAST):
        if count == LEAST:
            common = corrections.factor(RING, KV, WORK)
            assert corrections.factor(RING, KV, WORK, is_cached=True) == common
            assert corrections.factor(RING, KV, WORK, is_cached=False) == common
        is_cached = count % 2 == 0
        corrections.note(RING, KV, WORK, predicted=1.0, measured=4.0 if is_cached else 2.0, is_cached=is_cached)
    for ring in (RING, OTHER):
        assert corrections.factor(ring, KV, WORK, is_cached=True) == 4.0
        assert corrections.factor(ring, KV, WORK, is_cached=False) == 2.0
        assert corrections.factor(ring, KV, WORK) == 3.0
    assert [each.factor for each in corrections.of_ring(RING)] == [3.0], "status shows that of all"


def test_a_plan_predicts_by_turns_like_it_and_rings_are_compared_by_all() -> None:
    planner = Planner(MODEL, PlannerSettings())
    cached = PromptOnRings(num_tokens=500, prefill=RING, decode=RING, retained_on_prefill=200, retained_on_decode=0)
    plain = cached._replace(num_tokens=500, retained_on_prefill=0)
    plans = [planner.plan(each, mode=PromptMode.NEW) for each in (cached, plain)]
    before = planner.predict_prefill(500, 200, RING), planner.predict_prefill(500, 0, RING)
    for plan, factor in zip(plans, (8.0, 2.0), strict=True):
        for _ in range(LEAST):
            planner.note_prefill(RING, report(plan, factor))
    after = [planner.plan(each, mode=PromptMode.NEW).predicted_prefill_seconds for each in (cached, plain)]
    assert after == pytest.approx(
        [plan.predicted_prefill_seconds * factor for plan, factor in zip(plans, (8.0, 2.0), strict=True)]
    )
    ratios = planner.predict_prefill(500, 200, RING) / before[0], planner.predict_prefill(500, 0, RING) / before[1]
    assert ratios == pytest.approx((5.0, 5.0)), "a cache is not worth less for what a step after it takes in addition"


def test_a_ring_that_has_had_too_few_turns_of_a_kind_is_taken_to_be_as_all_are() -> None:
    corrections = noted([2.0] * LEAST)
    assert corrections.factor(OTHER, KV, WORK) == 2.0
    corrections.note(OTHER, KV, WORK, predicted=1.0, measured=9.0)
    assert corrections.factor(OTHER, KV, WORK) == 2.0
    assert corrections.of_ring(OTHER) == (Correction(algorithm=KV, min_work=64, factor=2.0, num_turns=1),)


@given(st.floats(1.0, 1e15), st.floats(1.0, 1e15), st.floats(0.3, 3.0))
def test_what_turns_take_says_less_of_work_the_more_it_differs(work: float, other: float, ratio: float) -> None:
    corrections = RingCorrections()
    for _ in range(LEAST):
        corrections.note(RING, KV, work, predicted=1.0, measured=ratio)
    (correction,) = corrections.of_ring(RING)
    assert correction.min_work <= work < LIKE * correction.min_work
    assert corrections.factor(RING, KV, work) == ratio
    told = [abs(math.log(corrections.factor(RING, KV, other * LIKE**step))) for step in range(4)]
    if other >= work:
        assert told == sorted(told, reverse=True)
    assert max(told) <= abs(math.log(ratio)) * 1.000001
    assert corrections.factor(RING, Q, work) == 1.0


def test_what_is_far_from_the_rates_says_nothing_of_other_work() -> None:
    corrections = RingCorrections()
    for _ in range(LEAST):
        corrections.note(RING, KV, WORK, predicted=1.0, measured=2 * FARTHEST)
    assert corrections.factor(RING, KV, WORK) == 2 * FARTHEST
    assert corrections.factor(RING, KV, LIKE * WORK) == 1.0


def test_one_turn_of_each_of_two_lengths_tells_of_those_between_and_beyond() -> None:
    """As on a machine whose rates were measured too low while it was busy, but whose short steps are right."""
    corrections = RingCorrections()
    corrections.note(RING, KV, 40.0, predicted=0.1, measured=0.1)
    corrections.note(RING, KV, 3000.0, predicted=8.0, measured=4.4)
    short, middle, long, longer = (corrections.factor(RING, KV, work) for work in (40.0, 500.0, 3000.0, 20000.0))
    assert short > middle > long
    assert short == pytest.approx(1.0, abs=0.15)
    assert long == pytest.approx(0.55, abs=0.1)
    assert longer == pytest.approx(0.55, abs=0.15)


def test_rates_that_are_measured_again_begin_anew_for_all_rings() -> None:
    """One ring's old ratios are to its old rates: after its new ones they would correct what is right."""
    corrections = noted([2.0] * LEAST)
    corrections.note(OTHER, KV, WORK, predicted=1.0, measured=1.0)
    now = replace(RING, rates=replace(RING.rates, gemm_flops=2e9))
    assert corrections.factor(now, KV, WORK) == pytest.approx(1.0)
    assert corrections.factor(replace(OTHER, name="third"), KV, WORK) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "changed",
    [{"incarnation": "second"}, {"rates": replace(RING.rates, gemm_flops=2e9)}],
    ids=["rebuilt", "measured again"],
)
def test_what_a_ring_was_before_is_forgotten(changed: dict[str, object]) -> None:
    corrections = noted([2.0] * LEAST)
    now = replace(RING, **changed)  # type: ignore[arg-type]
    assert corrections.of_ring(now) == ()
    for _ in range(LEAST):
        corrections.note(now, KV, WORK, predicted=1.0, measured=3.0)
    assert corrections.of_ring(now) == (Correction(algorithm=KV, min_work=64, factor=3.0, num_turns=LEAST),)
    assert corrections.of_ring(RING) == ()


@pytest.mark.parametrize(("predicted", "measured"), [(0.0, 1.0), (1.0, 0.0), (1.0, float("inf")), (float("nan"), 1.0)])
def test_a_time_that_is_none_is_left_out(predicted: float, measured: float) -> None:
    corrections = RingCorrections()
    corrections.note(RING, KV, WORK, predicted=predicted, measured=measured)
    assert corrections.of_ring(RING) == ()


# --- in plans --------------------------------------------------------------------------------------------------------


def planned(planner: Planner, num_tokens: int = 2000, algorithm: Algorithm | None = None) -> TurnPlan:
    return planner.plan(
        PromptOnRings(num_tokens=num_tokens, retained_on_prefill=0, retained_on_decode=0, prefill=RING, decode=RING),
        mode=PromptMode.NEW,
        algorithm=algorithm,
    )


def report(plan: TurnPlan, factor: float, num_turns: int = 1) -> PrefillReport:
    """Return a report of the plan's chunks, in `factor` times the predicted seconds."""
    chunks = tuple(replace(chunk, num_turns=num_turns) for chunk in plan.chunks)
    return PrefillReport(prefill_seconds=factor * plan.predicted_prefill_seconds, chunks=chunks)


def test_later_predictions_are_those_of_the_model_times_what_turns_took() -> None:
    planner = Planner(MODEL, PlannerSettings())
    before = planned(planner)
    for _ in range(LEAST):
        planner.note_prefill(RING, report(before, 1.5))
    after = planned(planner)
    assert after.predicted_prefill_seconds == pytest.approx(1.5 * before.predicted_prefill_seconds)
    assert after.reason.startswith(f"pass-KV, predicted {duration(after.predicted_prefill_seconds)}: all five tie")
    assert after.correction == pytest.approx(1.5)
    # Ratios are to the model, not to what it was corrected to: the same time again changes nothing.
    planner.note_prefill(RING, report(before, 1.5))
    assert planned(planner) == after


@pytest.mark.parametrize("slowness", [0.8, 1.0, 1.4])
def test_predictions_are_within_a_sixth_after_ten_turns_and_within_a_half_before(slowness: float) -> None:
    """A ring measured itself on a machine that was busier, or less busy, than when it serves.

    Turns of many lengths take `slowness` times as long as its rates say, with steps of 30 ms in them, 15% more or less.
    """
    rates = replace(RING.rates, gemm_flops=1e11, attention_flops=1e11, step_seconds=0.03)
    ring, planner, drawn = replace(RING, rates=rates), Planner(LLAMA_8B, PlannerSettings()), random.Random(7)
    real = Planner(LLAMA_8B, PlannerSettings())
    errors = []
    for _ in range(60):
        num_tokens = drawn.randint(64, 192)
        prompt = PromptOnRings(num_tokens, 0, 0, prefill=ring, decode=ring)
        plan = planner.plan(prompt, mode=PromptMode.NEW)
        model = real.plan(prompt, mode=PromptMode.NEW).predicted_prefill_seconds
        measured = slowness * model * drawn.lognormvariate(0.0, 0.15)
        errors.append(abs(plan.predicted_prefill_seconds / measured - 1.0))
        planner.note_prefill(ring, report(plan, measured / plan.predicted_prefill_seconds))
    assert median(errors[:LEAST]) <= 0.5
    assert median(errors[10:]) <= 0.15


def test_what_is_learned_moves_predictions_and_no_choice() -> None:
    planner = Planner(MODEL, PlannerSettings())
    before = planned(planner)
    for name, factor in (
        (before.algorithm, 100.0),
        *((other, 0.01) for other in RING_ALGORITHMS if other != before.algorithm),
    ):
        plan = planned(planner, algorithm=name)
        for _ in range(LEAST):
            planner.note_prefill(RING, report(plan, factor))
    after = planned(planner)
    assert [chunk.algorithm for chunk in after.chunks] == [chunk.algorithm for chunk in before.chunks]
    ways = dict(after.alternatives)
    assert ways[KV] / ways[Q] == pytest.approx(dict(before.alternatives)[KV] / dict(before.alternatives)[Q])


def test_a_turn_that_shared_its_steps_or_took_both_algorithms_measures_neither() -> None:
    planner = Planner(MODEL, PlannerSettings())
    plan = planned(planner)
    planner.note_prefill(RING, report(plan, 9.0, num_turns=2))
    mixed = (
        PlannedChunk(tokens=TokenRange(0, 9), algorithm=KV, num_turns=1),
        PlannedChunk(tokens=TokenRange(9, 18), algorithm=Q, num_turns=1),
    )
    planner.note_prefill(RING, PrefillReport(prefill_seconds=1.0, chunks=mixed))
    planner.note_prefill(RING, PrefillReport())
    assert planner.corrections.of_ring(RING) == ()
