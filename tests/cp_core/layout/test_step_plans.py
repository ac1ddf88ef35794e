"""Decode plans: every part is sent exactly once, and no query further than it is needed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringserve.cp_core.layout.step_plans import Band, DecodePlan, PassQRoute, Rows


@st.composite
def plans(draw: st.DrawFn) -> DecodePlan:
    size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    batch = draw(st.integers(0, 9))
    owners = draw(st.lists(st.integers(0, size - 1), min_size=batch, max_size=batch))
    counts = st.lists(st.sampled_from([0, 0, 1, 7]), min_size=size, max_size=size).map(tuple)
    return DecodePlan(size, tuple(owners), tuple(draw(counts) for _ in owners))


@given(plans())
def test_every_rank_that_holds_anything_of_a_sequence_answers_once_and_no_other(plan: DecodePlan) -> None:
    routes = [PassQRoute(plan, rank) for rank in range(plan.num_ranks)]
    answers = [
        (visit.rows[place], rank)
        for rank, route in enumerate(routes)
        for visit in route.visits
        for place in visit.answered
    ]
    held = [(row, rank) for row in range(len(plan)) for rank in range(plan.num_ranks) if plan.held[row][rank]]
    assert sorted(answers) == held


@given(plans())
def test_what_a_rank_sends_on_is_what_the_next_one_expects(plan: DecodePlan) -> None:
    routes = [PassQRoute(plan, rank) for rank in range(plan.num_ranks)]
    for rank, route in enumerate(routes):
        following = routes[(rank + 1) % plan.num_ranks]
        for visit, arriving in zip(route.visits, following.visits[1:], strict=False):
            assert arriving.source == visit.source
            assert [visit.rows[place] for place in visit.onward] == list(arriving.rows)
        assert not route.visits[-1].onward, "nothing travels back to where it came from"


@given(plans())
def test_the_owner_expects_from_each_rank_what_that_rank_answers(plan: DecodePlan) -> None:
    routes = [PassQRoute(plan, rank) for rank in range(plan.num_ranks)]
    for owner, route in enumerate(routes):
        for peer, places in enumerate(route.returns):
            (visit,) = [visit for visit in routes[peer].visits if visit.source == owner]
            assert [visit.rows[place] for place in visit.answered] == [route.own[place] for place in places]


def test_a_query_goes_no_further_than_the_last_rank_that_holds_keys_of_it() -> None:
    """Four ranks, all rows owned by rank 1: one lies there alone, one reaches rank 2, one rank 0 at the ring's end."""
    plan = DecodePlan(4, (1, 1, 1), ((0, 5, 0, 0), (0, 5, 1, 0), (3, 5, 0, 0)))
    assert [plan.sent_on(1, hop) for hop in range(5)] == [[0, 1, 2], [1, 2], [2], [2], []]


@pytest.mark.parametrize(
    ("owners", "held", "message"),
    [
        ((0,), (), "1 owners of 0 sequences"),
        ((0,), ((1, 2, 3),), "one count a rank"),
        ((2,), ((1, 2),), "owners are ranks of the ring"),
    ],
)
def test_a_plan_that_does_not_fit_its_ring_is_a_bug_and_says_so(
    owners: tuple[int, ...], held: tuple[tuple[int, ...], ...], message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        DecodePlan(2, owners, held)


def test_bounds_of_a_band_are_uploaded_once_for_all_layers() -> None:
    band = Band(Rows(0, 3), np.array([0, 1, 4]), np.array([2, 5, 6]))
    elsewhere = torch.device("meta")
    first, stop = band.bounds_on(elsewhere)
    assert (first.dtype, first.shape, stop.dtype, stop.shape) == (torch.int32, (3,), torch.int32, (3,))
    assert all(once is again for once, again in zip((first, stop), band.bounds_on(elsewhere), strict=True))
    assert [each.tolist() for each in band.bounds_on(torch.device("cpu"))] == [[0, 1, 4], [2, 5, 6]]
