"""States of a turn on a decode ring: they change only along the arrows of the diagram of DecodeTurnState."""

from __future__ import annotations

from itertools import product

import pytest

from ringserve.orchestration.decode.turn import DecodeTurnState

RESERVED, STREAMING, SEALED, ADMITTED, STARVED, PREEMPTED, RESUMING, ABORTED, DONE = DecodeTurnState

ARROWS = {
    (RESERVED, STREAMING),
    (RESERVED, SEALED),
    (RESERVED, ABORTED),
    (STREAMING, SEALED),
    (STREAMING, ABORTED),
    (SEALED, ADMITTED),
    (SEALED, DONE),
    (SEALED, ABORTED),
    (ADMITTED, DONE),
    (ADMITTED, ABORTED),
    (ADMITTED, STARVED),
    (ADMITTED, PREEMPTED),
    (STARVED, ADMITTED),
    (STARVED, PREEMPTED),
    (STARVED, DONE),
    (STARVED, ABORTED),
    (PREEMPTED, RESUMING),
    (PREEMPTED, DONE),
    (PREEMPTED, ABORTED),
    (RESUMING, RESERVED),
    (RESUMING, PREEMPTED),
    (RESUMING, DONE),
    (RESUMING, ABORTED),
    (RESERVED, PREEMPTED),
    (STREAMING, PREEMPTED),
}


@pytest.mark.parametrize(("before", "after"), list(product(DecodeTurnState, DecodeTurnState)))
def test_a_state_follows_only_along_an_arrow(before: DecodeTurnState, after: DecodeTurnState) -> None:
    if (before, after) in ARROWS:
        assert before.to(after) is after
    else:
        with pytest.raises(AssertionError, match=f"no turn goes from {before.name} to {after.name}"):
            before.to(after)


def test_only_a_state_that_is_over_leads_nowhere() -> None:
    assert {state for state in DecodeTurnState if state.is_over} == {ABORTED, DONE}
    assert {before for before, _ in ARROWS} == set(DecodeTurnState) - {ABORTED, DONE}
