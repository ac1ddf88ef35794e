"""Faults of a ring and of the service: readiness comes from progress, not from living processes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ringserve.orchestration.protocol.views import ring_fault, service_fault
from ringserve.views import RingInfo, ServerInfo
from ringserve.workers.protocol.ranks import RankStatus

STUCK_SECONDS = 60.0
RANK = RankStatus(steps=7, seconds_since_step=0.5, running=1, open_transfers=1)


def status(role: str = "decode", state: str = "ready", *, draining: bool = False) -> RingInfo:
    return RingInfo(
        role=role,
        name=f"{role}-0",
        endpoint="here:1",
        incarnation="i",
        state=state,
        num_ranks=2,
        draining=draining,
    )


@pytest.mark.parametrize(
    ("rank", "words"),
    [
        (replace(RANK, seconds_since_step=61.0), "made no step for 61 s"),
        (replace(RANK, stalled_seconds=75.0), "got no byte for 75 s"),
    ],
)
def test_a_ring_whose_work_stands_still_is_not_ready(rank: RankStatus, words: str) -> None:
    assert words in ring_fault(status(), [RANK, rank], STUCK_SECONDS)


def test_a_ring_that_works_or_has_nothing_to_do_is_ready() -> None:
    idle = replace(RANK, running=0, seconds_since_step=3600.0)
    assert ring_fault(status(), [RANK, idle], STUCK_SECONDS) == ""
    assert ring_fault(status(), [], STUCK_SECONDS) == ""


def test_a_ring_that_is_rebuilt_or_drains_is_not_ready() -> None:
    assert ring_fault(status(state="rebuilding"), [], STUCK_SECONDS) == "ring decode-0 is rebuilding"
    assert ring_fault(status(draining=True), [], STUCK_SECONDS) == "ring decode-0 drains"


def test_the_service_is_ready_while_a_ring_of_each_role_takes_turns() -> None:
    def fault(*rings: RingInfo) -> str:
        return service_fault(ServerInfo(selector="auto", rings=rings, conversations=0, running_turns=0))

    assert fault(status("prefill"), status("decode")) == ""
    assert fault(status("prefill"), status("decode"), status("decode", "lost")) == ""
    assert fault(status("prefill"), status("decode", draining=True)) == "no decode ring takes turns"
    assert fault(status("prefill", "rebuilding"), status("decode")) == "no prefill ring takes turns"
    assert fault() == "no prefill ring takes turns"
    broken = replace(status("decode", "rebuilding"), failure="the model has changed")
    assert fault(status("prefill"), broken) == (
        "no decode ring takes turns; decode-0 cannot be rebuilt: the model has changed"
    )
