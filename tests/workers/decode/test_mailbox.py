"""Mailbox between a ring's leader and its decode loop."""

from __future__ import annotations

import time
from typing import Any

import pytest

from ringserve.cp_core.errors import Unavailable
from ringserve.workers.decode.loop import DecodeMailbox
from ringserve.workers.protocol.steps import DecodeEvent, FinishReason, GrowSequence, RemoveSequence
from ringserve.workers.sampling.parameters import TokenHistory
from tests.waiting import WAIT_SECONDS
from tests.workers.decode.admissions import admission
from tests.workers.rings import run_in_thread


def event(name: str, token_id: int, reason: FinishReason | None = None) -> DecodeEvent:
    return DecodeEvent(sequence_id=name, token_id=token_id, finish_reason=reason, kv_tokens=6)


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
    assert waiting.result(WAIT_SECONDS).events == (event("a", 1),)


def test_a_poll_with_nothing_to_tell_ends_at_its_timeout() -> None:
    began = time.monotonic()
    answer = DecodeMailbox(max_batch=4).poll(0, 0.05)
    assert (answer.start, answer.stop, answer.events) == (0, 0, ())
    assert time.monotonic() - began > 0.04


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


def test_growth_is_taken_alone_and_left_where_there_is_more_to_do() -> None:
    mailbox = DecodeMailbox(max_batch=4)
    growth = [GrowSequence(sequence_id=name, blocks=((1,),)) for name in "ab"]
    assert mailbox.take_growth() == []
    mailbox.submit(growth)
    assert mailbox.take_growth() == growth
    assert mailbox.take(0.0) == []
    mailbox.submit([growth[0], RemoveSequence(sequence_id="c")])
    assert mailbox.take_growth() is None
    assert len(mailbox.take(0.0)) == 2
    mailbox.close("the end")
    assert mailbox.take_growth() is None


def test_tables_that_grow_end_no_wait() -> None:
    mailbox = DecodeMailbox(max_batch=4)
    growth = GrowSequence(sequence_id="a", blocks=((1,),))
    mailbox.submit([growth])
    taken = run_in_thread(lambda: mailbox.take(WAIT_SECONDS))
    mailbox.submit([RemoveSequence(sequence_id="a")])
    assert taken.result(WAIT_SECONDS) == [growth, RemoveSequence(sequence_id="a")]


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
