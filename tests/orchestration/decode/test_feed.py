"""Feed of the decode loop: order, limits, and turns that leave at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from ringserve.cp_core.errors import Unavailable
from ringserve.orchestration.decode.engine import DecodeFeed
from ringserve.orchestration.decode.turn import DecodeTurn
from ringserve.workers.protocol.steps import DecodeEvent, FinishReason
from tests.orchestration.decode.decode_turns import decode_turn
from tests.orchestration.fake_ranks import FakeRank
from tests.waiting import WAIT_SECONDS, eventually


class Batch:
    """Batch of at most two turns on a fake rank, read all the time."""

    def __init__(self) -> None:
        self.rank = FakeRank(0)
        self.seen: list[tuple[str, int | None]] = []
        self.batch = DecodeFeed(self.rank, 2, 5.0, self._on_event)
        self.reading = asyncio.create_task(self.batch.read())

    def _on_event(self, turn: DecodeTurn, event: DecodeEvent) -> None:
        assert turn.turn_id == event.sequence_id
        self.seen.append((turn.turn_id, event.token_id))

    async def join(self, *names: str) -> list[DecodeTurn]:
        turns = [decode_turn(name) for name in names]
        for turn in turns:
            await self.batch.join(turn)
        return turns

    @property
    def counts(self) -> tuple[int, int]:
        return self.batch.num_running, self.batch.num_waiting


@pytest.fixture
async def batch() -> AsyncIterator[Batch]:
    made = Batch()
    yield made
    made.reading.cancel()
    await asyncio.gather(made.reading, return_exceptions=True)


def token(name: str, token_id: int, reason: FinishReason | None = None) -> DecodeEvent:
    return DecodeEvent(sequence_id=name, token_id=token_id, finish_reason=reason, kv_tokens=1)


def aborted(name: str) -> DecodeEvent:
    return DecodeEvent(sequence_id=name, token_id=None, finish_reason=FinishReason.ABORT, kv_tokens=1)


async def test_turns_are_admitted_in_order_up_to_the_limit(batch: Batch) -> None:
    await batch.join("a", "b", "c", "d")
    assert batch.rank.admitted == ["a", "b"]
    assert batch.counts == (2, 2)


async def test_the_turn_that_waits_longest_takes_the_free_place(batch: Batch) -> None:
    first, *_ = await batch.join("a", "b", "c", "d")
    batch.rank.post(token("a", 1), token("b", 2), token("a", 3, FinishReason.LENGTH))
    await eventually(lambda: batch.rank.admitted == ["a", "b", "c"])
    assert first.left_batch.is_set()
    assert batch.seen == [("a", 1), ("b", 2), ("a", 3)]
    assert batch.counts == (2, 1)
    batch.rank.post(token("b", 4, FinishReason.STOP), token("c", 5, FinishReason.STOP))
    await eventually(lambda: batch.rank.admitted == ["a", "b", "c", "d"])
    assert batch.counts == (1, 0)


async def test_polls_go_on_from_the_last_events(batch: Batch) -> None:
    await batch.join("a")
    batch.rank.post(token("a", 1), token("a", 2))
    batch.rank.post()
    batch.rank.post(token("a", 3))
    await eventually(lambda: len(batch.rank.polled) == 4)
    assert batch.rank.polled == [0, 2, 2, 3]


async def test_events_of_turns_that_are_not_in_the_batch_are_ignored(batch: Batch) -> None:
    await batch.join("a", "b", "c")
    batch.rank.post(token("stranger", 1), token("c", 2), aborted("stranger"))
    batch.rank.post(token("a", 3, FinishReason.STOP), token("a", 4))
    await eventually(lambda: bool(batch.seen))
    assert batch.seen == [("a", 3)]


async def test_a_turn_that_waits_leaves_without_a_word_to_the_loop(batch: Batch) -> None:
    turns = await batch.join("a", "b", "c", "d")
    await batch.batch.leave(turns[2])
    assert batch.rank.removed == []
    batch.rank.post(token("a", 1, FinishReason.STOP))
    await eventually(lambda: batch.rank.admitted == ["a", "b", "d"])


async def test_a_running_turn_has_left_when_the_loop_says_so(batch: Batch) -> None:
    turns = await batch.join("a", "b", "c")
    leaving = asyncio.create_task(batch.batch.leave(turns[0]))
    await eventually(lambda: batch.rank.removed == ["a"])
    batch.rank.post(token("a", 1))  # one more step was under way
    await eventually(lambda: batch.seen == [("a", 1)])
    assert not leaving.done()
    batch.rank.post(aborted("a"))
    async with asyncio.timeout(WAIT_SECONDS):
        await leaving
    assert batch.counts == (2, 0)
    assert batch.rank.admitted == ["a", "b", "c"]


async def test_a_turn_that_finishes_while_it_leaves_has_left(batch: Batch) -> None:
    (turn,) = await batch.join("a")
    leaving = asyncio.create_task(batch.batch.leave(turn))
    await eventually(lambda: batch.rank.removed == ["a"])
    batch.rank.post(token("a", 1, FinishReason.LENGTH))  # the turn had left already: no abort follows
    async with asyncio.timeout(WAIT_SECONDS):
        await leaving


async def test_leaving_when_one_was_never_there_is_harmless(batch: Batch) -> None:
    await batch.batch.leave(decode_turn("stranger"))
    assert batch.rank.submitted == []


async def test_a_removal_never_overtakes_its_admission(batch: Batch) -> None:
    batch.rank.gate.clear()
    turn = decode_turn("a")
    joining = asyncio.create_task(batch.batch.join(turn))
    await eventually(lambda: batch.batch.num_running == 1)
    joining.cancel()  # as the end of a turn cancels its sealing, which admits it
    await asyncio.gather(joining, return_exceptions=True)
    leaving = asyncio.create_task(batch.batch.leave(turn))
    await eventually(lambda: len(batch.batch._submissions) == 2)  # the removal follows the admission
    batch.rank.gate.set()
    await eventually(lambda: batch.rank.removed == ["a"])
    assert [command.sequence_id for command in batch.rank.submitted] == ["a", "a"]
    assert batch.rank.admitted == ["a"]
    batch.rank.post(aborted("a"))
    async with asyncio.timeout(WAIT_SECONDS):
        await leaving


async def test_cancelling_one_turn_does_not_lose_the_admission_of_another(batch: Batch) -> None:
    await batch.join("a", "b", "c")
    batch.rank.gate.clear()
    batch.rank.post(token("b", 1, FinishReason.STOP))
    await eventually(lambda: batch.counts == (2, 0))
    batch.reading.cancel()  # the caller that submitted the admission is cancelled
    await asyncio.gather(batch.reading, return_exceptions=True)
    batch.rank.gate.set()
    await eventually(lambda: batch.rank.admitted == ["a", "b", "c"])


async def test_a_lost_rank_ends_the_reading_with_its_error(batch: Batch) -> None:
    await batch.join("a")
    batch.rank.fail(Unavailable("rank 0 died"))
    batch.rank.post()
    with pytest.raises(Unavailable, match="rank 0 died"):
        await asyncio.wait_for(batch.reading, WAIT_SECONDS)


async def test_commands_that_were_lost_end_the_reading_too(batch: Batch) -> None:
    async def submit(commands: object, timeout: float) -> None:
        raise Unavailable("no answer")

    batch.rank.submit = submit  # type: ignore[method-assign]
    with pytest.raises(Unavailable, match="no answer"):
        await batch.join("a")
    batch.rank.post()
    with pytest.raises(Unavailable, match="no answer"):
        await asyncio.wait_for(batch.reading, WAIT_SECONDS)


async def test_an_abandoned_batch_holds_nobody_back(batch: Batch) -> None:
    turns = await batch.join("a", "b", "c")
    batch.batch.abandon(Unavailable("the ring is lost"))
    assert batch.counts == (0, 0)
    async with asyncio.timeout(WAIT_SECONDS):
        for turn in turns:
            await batch.batch.leave(turn)
    assert batch.rank.removed == []
    assert turns[0].left_batch.is_set()
