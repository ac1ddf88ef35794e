"""Time spans that rings record of a turn, however far it came."""

from __future__ import annotations

import time

from ringserve.cp_core.layout.shards import TokenRange
from ringserve.orchestration.prefill.run import PrefillTimes
from ringserve.orchestration.protocol.plans import PlannedChunk
from ringserve.orchestration.protocol.turns import PrefillReport, SentKv
from ringserve.workers.protocol.steps import Algorithm
from tests.orchestration.decode.decode_turns import decode_turn


def chunk(start: int, stop: int) -> PlannedChunk:
    return PlannedChunk(tokens=TokenRange(start, stop), algorithm=Algorithm.PASS_Q, num_turns=3)


def test_a_turn_that_never_computed_was_in_the_queue_to_its_end() -> None:
    (only,) = PrefillTimes().spans("prefill-0", 1, reserved_at=5.0, ended=8.0)
    assert (only.name, only.began, only.ended) == ("queue", 5.0, 8.0)
    assert only.attributes == {"ringserve.ring": "prefill-0", "ringserve.attempt": 1}


def test_a_pull_comes_before_the_queue_and_each_span_begins_where_the_one_before_ends() -> None:
    times, began = PrefillTimes(), time.monotonic()
    times.note_pull(1234, 0.25)
    times.note_chunk(chunk(10, 20), 0.0)
    times.note_chunk(chunk(20, 50), 0.0)
    ended = time.monotonic()
    spans = times.spans("prefill-0", 2, reserved_at=began - 1.0, ended=ended)
    assert [each.name for each in spans] == ["pull", "queue", "prefill", "hand-over"]
    pull, queue, prefill, hand_over = spans
    assert pull.attributes == {"ringserve.ring": "prefill-0", "ringserve.attempt": 2, "ringserve.bytes": 1234}
    assert abs(pull.ended - pull.began - 0.25) < 1e-9
    assert pull.ended == queue.began <= queue.ended == prefill.began <= prefill.ended == hand_over.began
    assert hand_over.ended == ended
    assert [(part.began >= prefill.began, part.ended <= prefill.ended) for part in prefill.parts] == [(True, True)] * 2
    assert prefill.parts[1].attributes == {
        "ringserve.tokens.start": 20,
        "ringserve.tokens.stop": 50,
        "ringserve.algorithm": "pass_q",
        "ringserve.turns_in_step": 3,
    }


def test_a_turn_that_failed_while_its_kv_came_tells_nothing_of_decoding() -> None:
    assert decode_turn("turn", first_token=None).spans("decode-0", 9.0) == []


def test_a_turn_of_one_token_has_a_migration_and_no_decoding() -> None:
    turn = decode_turn("turn", first_token=None)
    turn.times.note_migration("decode-0", 1, SentKv(payload_bytes=77, seconds=0.5))
    turn.times.first_token_at = time.monotonic()
    turn.add_token(7, None)
    (only,) = turn.spans("decode-0", time.monotonic())
    assert (only.name, only.attributes["ringserve.bytes"], turn.times.migrated_bytes) == ("migration", 77, 77)


def test_every_time_that_kv_came_counts_and_decoding_goes_from_the_second_token_to_the_end() -> None:
    turn = decode_turn("turn", first_token=None)
    for _ in range(2):
        turn.times.note_migration("decode-0", 1, SentKv(payload_bytes=50, seconds=0.5))
    turn.num_attempts = 2
    turn.times.first_token_at = time.monotonic() - 1.0
    for token in (7, 8, 9):
        turn.add_token(token, None)
    ended = time.monotonic() + 1.0
    first, second, hand_off, decode = turn.spans("decode-0", ended)
    assert (first.name, second.name, turn.times.migrated_bytes, turn.times.migration_seconds) == (
        "migration",
        "migration",
        100,
        1.0,
    )
    assert (hand_off.name, hand_off.began, hand_off.ended) == ("hand-off", turn.times.first_token_at, decode.began)
    assert (decode.name, decode.ended) == ("decode", ended)
    assert decode.attributes == {"ringserve.ring": "decode-0", "ringserve.tokens": 3, "ringserve.attempts": 2}


def test_a_turn_whose_prompt_was_computed_here_tells_its_queue_and_its_step_and_no_migration() -> None:
    turn = decode_turn("turn", first_token=None)
    step = PlannedChunk(tokens=TokenRange(90, 100), algorithm=Algorithm.DECODE_RING, num_turns=1)
    turn.times.reserved_at = time.monotonic() - 2.0
    turn.times.note_prompt("decode-0", 1, PrefillReport(prefill_seconds=0.5, queue_seconds=1.5, chunks=(step,)))
    turn.times.first_token_at = time.monotonic() - 1.0
    turn.add_token(7, None)
    turn.add_token(8, None)
    queue, prefill, hand_off, decode = turn.spans("decode-0", time.monotonic() + 1.0)
    assert [queue.name, prefill.name, hand_off.name, decode.name] == ["queue", "prefill", "hand-off", "decode"]
    assert (queue.began, queue.ended) == (turn.times.reserved_at, prefill.began)
    assert abs(prefill.ended - prefill.began - 0.5) < 1e-9
    assert prefill.attributes == {
        "ringserve.ring": "decode-0",
        "ringserve.attempt": turn.request.attempt,
        "ringserve.tokens.start": 90,
        "ringserve.tokens.stop": 100,
        "ringserve.algorithm": "decode_ring",
    }
