"""Plans and pools on the terminal."""

from __future__ import annotations

import pytest

from ringserve.client import Answer, Plan, RingInfo, ServerInfo
from ringserve.client.results import MAPPER, RingAlternative
from ringserve.services.cli.generate import show_plan
from ringserve.services.cli.status import pool_sizes
from ringserve.v1 import inference_pb2


def complete(*rings: tuple[str, int, int, float]) -> Answer:
    """Make a turn with alternatives (name, ranks, processes a rank, queue seconds) that prefill in 5 ms."""
    alternatives = tuple(
        RingAlternative(
            ring=name,
            num_ranks=cp,
            tp=tp,
            queue_seconds=queue,
            move_seconds=0.002,
            prefill_seconds=0.005,
            handoff_seconds=0.001,
            stall_seconds=0.003,
            total_seconds=queue + 0.011,
        )
        for name, cp, tp, queue in rings
    )
    return Answer(plan=Plan(algorithm="pass_q", prefill_ring="prefill-0", ring_alternatives=alternatives))


def test_rings_that_were_compared_are_shown_with_their_sizes_the_quickest_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_plan(complete(("prefill-wide-0", 4, 2, 1.5), ("prefill-0", 1, 1, 0.25)))
    shown = capsys.readouterr()
    assert shown.out == ""
    lines = [line.split() for line in shown.err.splitlines()[1:]]
    own, other = (next(line for line in lines if name in line) for name in ("prefill-0", "prefill-wide-0"))
    assert own == ["*", "prefill-0", "1", "1", *["261", "ms", "250", "ms", "2", "ms", "5", "ms", "1", "ms", "3", "ms"]]
    assert other == ["prefill-wide-0", "4", "2", *["1.51", "s", "1.5", "s", "2", "ms", "5", "ms", "1", "ms", "3", "ms"]]
    assert lines.index(own) < lines.index(other)


def test_a_client_in_python_gets_them_typed() -> None:
    sent = MAPPER.to_message(inference_pb2.Plan, complete(("prefill-wide-0", 4, 2, 1.5)).plan)
    plan = MAPPER.from_message(Plan, sent)
    (ring,) = plan.ring_alternatives
    assert (ring.ring, ring.num_ranks, ring.tp) == ("prefill-wide-0", 4, 2)
    assert (ring.queue_seconds, ring.total_seconds) == (1.5, 1.511)
    assert (ring.handoff_seconds, ring.stall_seconds) == (0.001, 0.003)


def test_where_no_rings_were_compared_the_plan_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    show_plan(complete())
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_pools_are_counted_by_role_and_size() -> None:
    shapes = [("prefill", 2, 1), ("prefill", 1, 1), ("prefill", 1, 1), ("prefill", 2, 2), ("decode", 3, 1)]
    rings = tuple(RingInfo(role=role, num_ranks=cp, tp=tp) for role, cp, tp in shapes)
    assert pool_sizes(ServerInfo(rings=rings)) == (
        "prefill rings: 1 of cp 2 x tp 2, 1 of cp 2, 2 of cp 1; decode rings: 1 of cp 3"
    )
    assert pool_sizes(ServerInfo()) == ""
