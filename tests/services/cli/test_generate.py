"""How an answer was computed, as the terminal shows it."""

from __future__ import annotations

import re
import sys

import pytest

from ringserve.client import Answer, Plan, Usage
from ringserve.client.results import MAPPER, Alternative, Chunk, Failover, RingAlternative, SparsePlan
from ringserve.services.cli.generate import show_plan
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
    lines = [line.split() for line in shown.err.splitlines() if not line.startswith("rings ")]
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


def test_a_plan_is_a_small_table_of_its_fields(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    lost = Failover(role="decode", cause="killed", after_tokens=5, prefill_ring="p", decode_ring="e", lost_seconds=1.5)
    plan = Plan(
        algorithm="pass_q",
        new_tokens=3,
        cached_tokens=7,
        prefill_ring="p",
        decode_ring="d",
        prefill_seconds=0.2,
        predicted_prefill_seconds=0.1,
        alternatives=(Alternative(algorithm="pass_kv", predicted_prefill_seconds=0.3),),
        reason="because " * 12,
        chunks=tuple(Chunk(algorithm="chain", fallback=name) for name in ("level_cuts", "", "level_cuts")),
        failovers=(lost,),
        sparse=SparsePlan(keep=0.25),
    )
    usage = Usage(prompt_tokens=10, cached_tokens=7, completion_tokens=2)
    show_plan(Answer(plan=plan, usage=usage, ttft_seconds=0.25, ttit_seconds=0.0125, finish_reason="length"))
    lines = capsys.readouterr().err.splitlines()
    assert max(map(len, lines)) <= 80
    assert [re.sub(r" {2,}", "|", line.rstrip()) for line in lines if not line.startswith(" ")] == [
        "algorithm|pass_q, with 0.25 of other ranks' keys",
        "tokens|3 new, 7 cached, 2 answered (length)",
        "rings|p -> d",
        "TTFT|250 ms",
        "prefill|200 ms, predicted 100 ms",
        "TTIT|12.5 ms",
        "predicted|pass_kv 300 ms",
        "why|" + " ".join(["because"] * 8),
        "layout|level_cuts for lack of room",
        "lost decode|after 5 tokens (killed), went on at p -> e after 1.5 s",
    ]
