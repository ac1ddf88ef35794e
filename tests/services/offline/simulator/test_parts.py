"""Clock, retained KV, rings and traces of the simulator, each alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringserve.cp_core.cost.steps import StepLimits, WorkModel
from ringserve.cp_core.errors import CapacityExceeded, ConfigError
from ringserve.cp_core.layout.shards import TokenRange
from ringserve.orchestration.placement.registry import RegisteredRing
from ringserve.orchestration.prefill.scheduler import PrefillScheduler, ScheduledStep
from ringserve.orchestration.protocol.plans import PlannedChunk
from ringserve.orchestration.protocol.rings import PrefillScheduling
from ringserve.services.offline.simulator.rings import (
    Clock,
    DecodingTurn,
    PrefillingTurn,
    RetainedKv,
    SimulatedDecodeRing,
    SimulatedPrefillRing,
)
from ringserve.services.offline.simulator.trace import (
    DAY,
    FirstPrompts,
    SyntheticTrace,
    TracedConversation,
    TracedTurn,
    TraceShape,
    around,
    format_trace,
    read_trace,
)
from ringserve.workers.protocol.steps import Algorithm
from tests.rings import registration


def registered(role: str, capacity: int = 1000) -> RegisteredRing:
    return RegisteredRing(registration(role, f"{role}-0", num_ranks=1, capacity_tokens=capacity, chunk_tokens=1000))


def test_events_happen_in_order_of_time_and_then_of_entry() -> None:
    clock, seen = Clock(), []
    clock.after(2.0, lambda: seen.append(("late", clock.now)))
    clock.after(1.0, lambda: clock.after(1.0, lambda: seen.append(("later", clock.now))))
    clock.after(1.0, lambda: seen.append(("early", clock.now)))
    clock.run()
    assert seen == [("early", 1.0), ("late", 2.0), ("later", 2.0)]


def test_the_least_recently_used_conversation_makes_room_and_pinned_ones_never_do() -> None:
    kv = RetainedKv(100)
    for conversation, tokens in (("1", 40), ("2", 30), ("3", 30)):
        assert kv.try_pin(conversation, tokens)
        kv.unpin(conversation, tokens)
    assert kv.try_pin("1", 50), "10 more are needed, and the second is the oldest now"
    assert [kv.held(conversation) for conversation in ("1", "2", "3")] == [0, 0, 30]
    assert not kv.try_pin("4", 51), "only 50 are not pinned"
    assert kv.held("3") == 30, "nothing was evicted in vain"
    kv.unpin("1", 50)
    assert kv.held("1") == 50
    kv.check_integrity()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 60), st.integers(0, 60), st.booleans()), max_size=60))
def test_no_token_is_ever_counted_twice_or_lost(turns: list[tuple[int, int, int, bool]]) -> None:
    kv, pinned = RetainedKv(100), dict[str, int]()
    for number, tokens, retain, ends in turns:
        conversation = str(number)
        if conversation in pinned:
            if ends:
                kv.unpin(conversation, min(retain, pinned.pop(conversation)))
        elif kv.try_pin(conversation, tokens):
            pinned[conversation] = tokens
        else:
            assert sum(pinned.values()) + tokens > 100
        assert kv.num_pinned_tokens == sum(pinned.values())
        kv.check_integrity()


def prefill_ring(clock: Clock, scheduling: PrefillScheduling) -> SimulatedPrefillRing:
    """Make a ring whose tokens take 0.1 s each, in steps of at most 10 tokens."""
    work = WorkModel(pairs_per_token=1e12, flops_per_unit=1.0)
    limits = StepLimits(budget=10.0, tokens=10, min_chunk=1)
    scheduler = PrefillScheduler("prefill-0", work, limits, scheduling, rate=10.0)

    def seconds(step: ScheduledStep) -> float:
        return sum(len(piece.tokens) for piece in step.pieces) / 10

    return SimulatedPrefillRing(registered("prefill"), RetainedKv(100), clock, scheduler, seconds)


def arriving(ring: SimulatedPrefillRing, name: str, tokens: int, done: list[tuple[str, float]], clock: Clock) -> None:
    chunk = PlannedChunk(tokens=TokenRange(0, tokens), algorithm=Algorithm.PASS_KV)
    ring.reserve(name, chunk.tokens)
    ring.enter(PrefillingTurn(name, (chunk,), lambda *_: done.append((name, round(clock.now, 6)))))


def test_a_prefill_ring_takes_the_steps_of_the_prefill_scheduler() -> None:
    """Compute 30 tokens in steps of 10; 5 later ones join a step."""
    clock, done = Clock(), list[tuple[str, float]]()
    ring = prefill_ring(clock, PrefillScheduling())
    clock.after(1.0, lambda: arriving(ring, "long", 30, done, clock))
    clock.after(1.5, lambda: arriving(ring, "short", 5, done, clock))
    clock.run()
    assert ring.busy_seconds == pytest.approx(3.5)
    assert ring.predicted_wait == 0.0
    finished = dict(done)
    assert finished["short"] < 4.0
    assert finished["long"] == 4.5


def test_a_full_queue_says_when_to_ask_again() -> None:
    clock = Clock()
    ring = prefill_ring(clock, PrefillScheduling(max_queue_work=30.0))
    ring.reserve("first", TokenRange(0, 25))
    assert ring.predicted_wait == pytest.approx(2.5)
    with pytest.raises(CapacityExceeded) as full:
        ring.reserve("second", TokenRange(0, 25))
    assert full.value.retry_after_seconds == pytest.approx(2.0)


def test_a_decode_batch_slows_down_with_every_sequence_and_speeds_up_again() -> None:
    """Run steps of 1 s a sequence: one alone until 2 s, then two together at 2 s a step."""
    clock, seen = Clock(), []
    ring = SimulatedDecodeRing(registered("decode"), RetainedKv(100), clock, 2, lambda batch, _: float(batch))

    def admit(name: str, tokens: int) -> None:
        ring.admit(
            DecodingTurn(
                1,
                tokens,
                lambda: seen.append((name, "first", clock.now)),
                lambda: seen.append((name, "last", clock.now)),
            )
        )

    clock.after(0.0, lambda: admit("a", 4))
    clock.after(2.0, lambda: admit("b", 3))
    clock.after(3.0, lambda: admit("c", 1))
    clock.run()
    assert seen == [
        ("a", "first", 1.0),
        ("b", "first", 4.0),
        ("a", "last", 6.0),  # its third and fourth token took 2 s each
        ("c", "first", 8.0),  # it waited for a place in the batch until 6 s
        ("b", "last", 8.0),
        ("c", "last", 8.0),
    ]
    assert ring.largest_batch == 2


def test_a_made_trace_is_the_same_for_the_same_seed_and_has_the_asked_for_shape() -> None:
    shape = TraceShape(num_conversations=4000, mean_turns=3.0)
    trace = list(SyntheticTrace(shape, 7))
    assert trace == list(SyntheticTrace(shape, 7)) != list(SyntheticTrace(shape, 8))
    assert len(SyntheticTrace(shape, 7)) == len(trace) == 4000
    assert [one.start_seconds for one in trace] == sorted(one.start_seconds for one in trace)
    assert sum(len(one.turns) for one in trace) / len(trace) == pytest.approx(3.0, rel=0.1)
    firsts = [one.turns[0].new_tokens for one in trace]
    assert min(firsts) >= 4_000 / 1.5 - 1
    assert max(firsts) <= 128_000 * 1.5 + 1


@pytest.mark.parametrize("swing", [0.0, 0.5, 1.0])
def test_conversations_begin_most_often_in_the_middle_of_the_day(swing: float) -> None:
    trace = list(SyntheticTrace(TraceShape(num_conversations=8000, swing=swing), 7))
    middle = sum(0.25 * DAY < one.start_seconds < 0.75 * DAY for one in trace)
    # Half of the day, and the integral of its wave.
    assert middle / len(trace) == pytest.approx(0.5 + swing / math.pi, abs=0.02)
    assert 0.0 <= trace[0].start_seconds <= trace[-1].start_seconds <= DAY


def test_first_prompts_come_as_often_as_they_weigh_and_as_often_by_any_factor() -> None:
    kinds = (FirstPrompts(least=100, most=100, weight=1.0), FirstPrompts(least=1000, most=16_000, weight=3.0))
    firsts = [one.turns[0].new_tokens for one in SyntheticTrace(TraceShape(num_conversations=8000, first=kinds), 2)]
    long = [tokens for tokens in firsts if tokens > 100]
    assert len(long) / len(firsts) == pytest.approx(0.75, abs=0.02)
    assert (min(long), max(long)) == pytest.approx((1000, 16_000), rel=0.01)
    assert sum(tokens < 4000 for tokens in long) / len(long) == pytest.approx(0.5, abs=0.02)


def test_a_trace_written_is_the_same_when_it_is_read(tmp_path: Path) -> None:
    trace = list(SyntheticTrace(TraceShape(num_conversations=20, first=(around(500),)), 3))
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(format_trace(trace)))
    assert read_trace(path) == trace


TURN = {"new_tokens": 5, "output_tokens": 2, "think_seconds": 0.0}


def test_a_line_of_a_trace_is_a_conversation(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({"start_seconds": 1.5, "turns": [TURN]}) + "\n\n")
    turn = TracedTurn(new_tokens=5, output_tokens=2, think_seconds=0.0)
    assert read_trace(path) == [TracedConversation(start_seconds=1.5, turns=(turn,))]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "line 1 is not JSON"),
        ({"turns": [TURN]}, "line 1 is neither a conversation .* nor a request of Mooncake's form"),
        ({"start_seconds": -1, "turns": [TURN]}, "line 1 start_seconds is -1; allowed are 0 to 1000000000"),
        ({"start_seconds": "now", "turns": [TURN]}, "line 1 start_seconds is 'now'; a number is needed"),
        ({"start_seconds": 0, "turns": []}, r"line 1 has turns=\[\]"),
        ({"start_seconds": 0, "turns": [3]}, r"line 1 has turns=\[3\]"),
        (
            {"start_seconds": 0, "turns": [{"new_tokens": 1}]},
            "line 1 has a turn with the fields new_tokens; needed are exactly",
        ),
        ({"start_seconds": 0, "turns": [TURN | {"new_tokens": 0}]}, "line 1 new_tokens is 0; allowed are 1 to"),
    ],
)
def test_a_line_that_is_none_is_refused_by_its_number(tmp_path: Path, line: Any, sentence: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line if isinstance(line, str) else json.dumps(line))
    with pytest.raises(ConfigError, match=sentence):
        read_trace(path)


def test_a_trace_that_is_not_there_or_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--trace: .* cannot be read"):
        read_trace(tmp_path / "none")
    (tmp_path / "empty").write_text("")
    with pytest.raises(ConfigError, match="has no conversation"):
        read_trace(tmp_path / "empty")
