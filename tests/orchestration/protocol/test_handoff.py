"""The hand-off goes only where its diagram has an arrow."""

from __future__ import annotations

from itertools import product

import pytest

from orchestration.protocol.handoff import HandoffState

RESERVED, STREAMING, SEALED, ADMITTED, PREEMPTED, ABORTED, DONE = HandoffState

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
    (ADMITTED, PREEMPTED),
    (PREEMPTED, RESERVED),
    (PREEMPTED, DONE),
    (PREEMPTED, ABORTED),
    (RESERVED, PREEMPTED),
    (STREAMING, PREEMPTED),
}


@pytest.mark.parametrize(("before", "after"), list(product(HandoffState, HandoffState)))
def test_a_state_follows_only_along_an_arrow(before: HandoffState, after: HandoffState) -> None:
    if (before, after) in ARROWS:
        assert before.to(after) is after
    else:
        with pytest.raises(AssertionError, match=f"no hand-off goes from {before.name} to {after.name}"):
            before.to(after)


def test_only_what_is_over_leads_nowhere() -> None:
    assert {state for state in HandoffState if state.is_over} == {ABORTED, DONE}
    assert {before for before, _ in ARROWS} == {RESERVED, STREAMING, SEALED, ADMITTED, PREEMPTED}
