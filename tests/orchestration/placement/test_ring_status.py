"""A ring is asked how it is; one that does not answer, or does not serve, gets no more turns."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cp_core.errors import RingserveError, Unavailable
from orchestration.placement.registry import RegisteredRing
from orchestration.placement.ring_status import status_of, withdraw_if_lost
from orchestration.protocol.rings import RingState
from orchestration.protocol.views import RingStatus
from tests.orchestration.placement.test_registry import registration


class Leader:
    """Answers as told, at either port."""

    def __init__(self, state: str = RingState.READY, error: RingserveError | None = None) -> None:
        self.state = state
        self.error = error
        self.asked: list[str] = []

    def prefill(self, endpoint: str) -> Leader:
        self.asked.append(f"prefill {endpoint}")
        return self

    def decode(self, endpoint: str) -> Leader:
        self.asked.append(f"decode {endpoint}")
        return self

    async def get_status(self) -> RingStatus:
        if self.error is not None:
            raise self.error
        lost = await status_of(RegisteredRing(registration("ring")), Leader(error=Unavailable("gone")))  # type: ignore[arg-type]
        return replace(lost, state=self.state, rebuilds=3)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_the_leader_of_that_role_is_asked(role: str) -> None:
    leader = Leader()
    status = await status_of(RegisteredRing(registration("ring", role=role)), leader)  # type: ignore[arg-type]
    assert (status.state, status.rebuilds) == ("ready", 3)
    assert leader.asked == [f"{role} ring:1"]


async def test_a_ring_that_does_not_answer_is_shown_as_lost_by_what_it_announced() -> None:
    ring = RegisteredRing(registration("ring", "third"))
    status = await status_of(ring, Leader(error=Unavailable("gone")))  # type: ignore[arg-type]
    assert (status.state, status.name, status.incarnation, status.num_ranks) == ("lost", "ring", "third", 2)
    assert ring.is_ready


@pytest.mark.parametrize(
    ("leader", "is_ready"),
    [(Leader(), True), (Leader(RingState.REBUILDING), False), (Leader(error=Unavailable("gone")), False)],
)
async def test_only_a_ring_that_serves_gets_more_turns(leader: Leader, is_ready: bool) -> None:
    ring = RegisteredRing(registration("ring"))
    await withdraw_if_lost(ring, leader)  # type: ignore[arg-type]
    assert ring.is_ready is is_ready
