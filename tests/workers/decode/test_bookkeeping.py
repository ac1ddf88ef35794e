"""Decode batch of every rank, the encoding of its changes, and the leader's mailbox."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cp_core.errors import Unavailable
from cp_core.layout.shards import appended
from tests.workers.rings import run_in_thread
from workers.decode.mailbox import DecodeMailbox
from workers.decode.messages import BatchChange, decode_change, encode_change
from workers.decode.step import BatchState
from workers.kv.cache import runs
from workers.protocol.decode_commands import AdmitSequence, DecodeEvent, FinishReason, GrowSequence, RemoveSequence
from workers.sampling.parameters import SamplingParameters, TokenBias, TokenHistory

BLOCK_TOKENS = 4


def admission(name: str = "a", held: tuple[int, ...] = (3, 2), **changes: Any) -> AdmitSequence:
    fields: dict[str, Any] = {
        "token_id": 9,
        "position": sum(held),
        "blocks": tuple(tuple(range(100 * rank, 100 * rank + 40, 2)) for rank in range(len(held))),
        "sampling": SamplingParameters(max_tokens=4, stop_token_ids=(7,)),
    }
    return AdmitSequence(sequence_id=name, held=held, **fields | changes)


def event(name: str, token_id: int, reason: FinishReason | None = None) -> DecodeEvent:
    return DecodeEvent(sequence_id=name, token_id=token_id, finish_reason=reason, kv_tokens=6)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple), st.integers(0, 30))
def test_ranks_agree_who_stores_what_and_stay_within_a_token(held: tuple[int, ...], num_steps: int) -> None:
    batches = [BatchState(rank, len(held), BLOCK_TOKENS) for rank in range(len(held))]
    for batch in batches:
        batch.advance((), BatchChange(admitted=(admission("a", held),)))
    for step in range(num_steps):
        writers = [len(batch.append().slots) for batch in batches]
        assert sum(writers) == 1, "one rank stores each token"
        for batch in batches:
            batch.advance((step,), BatchChange())
    wanted = appended(sum(held), num_steps, held)
    for rank, batch in enumerate(batches):
        row = batch.rows[0]
        assert row.position == sum(held) + num_steps
        assert row.held[rank] - held[rank] == sum(len(item) for item in wanted.ranks[rank])
        assert tuple(row.runs) == runs(row.blocks, row.held[rank], BLOCK_TOKENS)
    grown = [a for a, b in zip(batches[0].rows[0].held, held, strict=True) if a > b]
    assert max(grown, default=0) - min(grown, default=0) <= 1


def test_rows_leave_before_others_join_and_keep_their_order() -> None:
    batch = BatchState(0, 2, BLOCK_TOKENS)
    batch.advance((), BatchChange(admitted=(admission("a"), admission("b"), admission("c"))))
    batch.advance((1, 2, 3), BatchChange(removed=("b",), admitted=(admission("d"),)))
    assert [(row.sequence_id, row.token_id, row.position) for row in batch.rows] == [
        ("a", 1, 6),
        ("c", 3, 6),
        ("d", 9, 5),
    ]


def test_tables_grow_and_new_tokens_go_there() -> None:
    batch = BatchState(1, 2, BLOCK_TOKENS)
    join = admission(held=(5, 3), blocks=((0, 1), (7,)))
    growth = GrowSequence(sequence_id="a", blocks=((2,), (8, 3)))
    batch.advance((), BatchChange(admitted=(join,), grown=(growth,)))
    slots = []
    for step in range(12):
        slots += batch.append().slots
        batch.advance((step,), BatchChange())
    # Slots of blocks 7, 8 and 3 after the three stored tokens.
    assert slots == [31, 32, 33, 34, 35, 12, 13]
    assert [len(run) for run in batch.rows[0].runs] == [8, 2]


def test_a_sequence_that_outgrows_its_blocks_is_a_bug_and_says_so() -> None:
    batch = BatchState(0, 1, BLOCK_TOKENS)
    batch.advance((), BatchChange(admitted=(admission(held=(4,), blocks=((0,),)),)))
    with pytest.raises(AssertionError, match="'a' has outgrown its 1 blocks"):
        batch.append()


samplings = st.builds(
    SamplingParameters,
    seed=st.integers(0, (1 << 64) - 1),
    max_tokens=st.integers(1, 1 << 31),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    top_k=st.integers(0, 1 << 31),
    min_tokens=st.integers(0, 1 << 31),
    stop_token_ids=st.lists(st.integers(0, 1 << 31)).map(tuple),
    logit_bias=st.lists(st.builds(TokenBias, st.integers(0, 1 << 31), st.floats(-100, 100))).map(tuple),
)


@given(
    st.builds(
        BatchChange,
        removed=st.lists(st.text(max_size=9)).map(tuple),
        admitted=st.lists(
            st.builds(
                AdmitSequence,
                sequence_id=st.text(max_size=9),
                token_id=st.integers(0, 1 << 20),
                position=st.integers(0, 1 << 40),
                held=st.lists(st.integers(0, 1 << 40)).map(tuple),
                blocks=st.lists(st.lists(st.integers(0, 1 << 30)).map(tuple)).map(tuple),
                sampling=samplings,
                history=st.builds(TokenHistory, num_generated=st.integers(0, 1 << 31)),
            )
        ).map(tuple),
        grown=st.lists(
            st.builds(
                GrowSequence,
                sequence_id=st.text(max_size=9),
                blocks=st.lists(st.lists(st.integers(0, 1 << 30)).map(tuple)).map(tuple),
            )
        ).map(tuple),
    )
)
def test_a_change_arrives_as_it_was_sent(change: BatchChange) -> None:
    assert decode_change(encode_change(change)) == change


def test_asking_again_returns_the_same_events_and_asking_on_forgets_them() -> None:
    mailbox = DecodeMailbox(max_batch=4)
    mailbox.post([event("a", 1), event("a", 2)])
    first = mailbox.poll(0, 1.0)
    assert mailbox.poll(0, 1.0) == first
    mailbox.post([event("a", 3)])
    assert mailbox.poll(2, 1.0).events == (event("a", 3),)
    with pytest.raises(AssertionError, match="cursor 0 was never given or is forgotten"):
        mailbox.poll(0, 1.0)
    with pytest.raises(AssertionError, match="cursor 9 was never given"):
        mailbox.poll(9, 1.0)


def test_a_poll_waits_for_the_first_event_and_no_longer() -> None:
    mailbox = DecodeMailbox(max_batch=4)
    waiting = run_in_thread(lambda: mailbox.poll(0, 30.0))
    mailbox.post([event("a", 1)])
    assert waiting.result(5.0).events == (event("a", 1),)


def test_a_poll_with_nothing_to_tell_ends_at_its_timeout() -> None:
    began = time.monotonic()
    answer = DecodeMailbox(max_batch=4).poll(0, 0.05)
    assert (answer.start, answer.stop, answer.events) == (0, 0, ())
    assert 0.04 < time.monotonic() - began < 5.0


def test_a_closed_mailbox_gives_its_last_events_and_then_says_why() -> None:
    mailbox = DecodeMailbox(max_batch=4)
    mailbox.post([event("a", 1)])
    mailbox.close("rank 1 died")
    mailbox.close("later")
    assert len(mailbox.poll(0, 1.0).events) == 1
    with pytest.raises(Unavailable, match="rank 1 died"):
        mailbox.poll(1, 30.0)
    with pytest.raises(Unavailable, match="rank 1 died"):
        mailbox.submit([admission("b")])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"history": TokenHistory(num_generated=4)}, "has all its tokens already"),
        ({"token_id": 7}, "has stopped already"),
        ({"position": 6}, "lacks KV before its newest token"),
    ],
)
def test_an_admission_that_could_not_run_fails_its_caller(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        DecodeMailbox(max_batch=4).submit([admission("a", **wrong)])


def test_a_batch_is_never_overfilled_and_no_sequence_is_in_it_twice() -> None:
    mailbox = DecodeMailbox(max_batch=2)
    mailbox.submit([admission("a"), admission("b")])
    with pytest.raises(AssertionError, match="3 sequences exceed a batch of 2"):
        mailbox.submit([admission("c")])
    with pytest.raises(AssertionError, match="'a' is in the batch already"):
        mailbox.submit([admission("a")])
    mailbox.post([event("a", 7, FinishReason.STOP)])
    mailbox.submit([admission("c")])
    mailbox.submit([RemoveSequence(sequence_id="c"), admission("d")])
    assert len(mailbox.take(0.0)) == 5
