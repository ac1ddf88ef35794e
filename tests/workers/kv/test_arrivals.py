"""Ends of transfers as a leader waits for them: each once, whatever the order, and none after the rank is gone."""

from __future__ import annotations

import asyncio
import threading

import pytest

from ringserve.cp_core.errors import TransferError, Unavailable
from ringserve.workers.kv.arrivals import Arrivals, EndedTransfers
from ringserve.workers.kv.incoming import TransferTable
from ringserve.workers.protocol.transfers import KvEnd, KvEnds, TransferReport
from tests.waiting import WAIT_SECONDS
from tests.workers.kv.kv_peers import DESTINATION, cache_of, expect_of, key_of

REPORT = TransferReport(payload_bytes=7, seconds=0.0)


class OneRank:
    """Rank whose calls are counted while they wait."""

    def __init__(self) -> None:
        self.ended = EndedTransfers()
        self.num_waiting = self.most_waiting = 0

    async def poll(self, after: int, seconds: float) -> KvEnds:
        self.num_waiting += 1
        self.most_waiting = max(self.most_waiting, self.num_waiting)
        try:
            return await asyncio.to_thread(self.ended.poll, after, seconds)
        finally:
            self.num_waiting -= 1


async def test_one_call_waits_for_every_transfer_of_a_rank() -> None:
    rank = OneRank()
    arrivals = Arrivals(rank.poll)
    keys = [key_of(f"turn-{number}") for number in range(300)]
    for key in keys:
        arrivals.expect(key)
    waits = [asyncio.create_task(arrivals.wait(key, 30.0)) for key in keys]
    for key in reversed(keys):
        rank.ended.add(KvEnd(key=key, report=REPORT))
    assert await asyncio.gather(*waits) == [REPORT] * len(keys)
    assert rank.most_waiting == 1


async def test_an_end_that_comes_before_its_wait_is_not_lost() -> None:
    rank = OneRank()
    arrivals = Arrivals(rank.poll)
    early, late = key_of("early"), key_of("late")
    arrivals.expect(early)
    rank.ended.add(KvEnd(key=early, error=TransferError("it broke")))
    arrivals.expect(late)
    rank.ended.add(KvEnd(key=late, report=REPORT))
    assert await arrivals.wait(late, 30.0) == REPORT
    with pytest.raises(TransferError, match="it broke"):
        await arrivals.wait(early, 30.0)
    with pytest.raises(TransferError, match="'early' attempt 1 is not expected here"):
        await arrivals.wait(early, 30.0)


async def test_a_wait_ends_with_its_time_its_drop_or_its_rank() -> None:
    rank = OneRank()
    arrivals = Arrivals(rank.poll)
    dropped, lost = key_of("dropped"), key_of("lost")
    arrivals.expect(dropped)
    with pytest.raises(TransferError, match=r"'dropped' attempt 1 is not complete after 0\.01 s"):
        await arrivals.wait(dropped, 0.01)
    waiting = asyncio.create_task(arrivals.wait(dropped, 30.0))
    await asyncio.sleep(0)
    arrivals.drop(dropped)
    with pytest.raises(TransferError, match="was dropped by its destination"):
        await waiting
    arrivals.expect(lost)
    waiting = asyncio.create_task(arrivals.wait(lost, 30.0))
    await asyncio.sleep(0)
    arrivals.close("rank 0 died")
    with pytest.raises(Unavailable, match="rank 0 died"):
        await waiting
    rank.ended.close()


async def test_waits_end_with_the_error_of_a_rank_that_cannot_be_asked() -> None:
    async def gone(after: int, seconds: float) -> KvEnds:
        raise Unavailable("rank 0 did not answer")

    arrivals = Arrivals(gone)
    arrivals.expect(key_of())
    with pytest.raises(Unavailable, match="rank 0 did not answer"):
        await arrivals.wait(key_of(), 30.0)


def test_a_call_whose_answer_was_lost_is_repeated() -> None:
    ended = EndedTransfers()
    for name in ("a", "b", "c"):
        ended.add(KvEnd(key=key_of(name), report=REPORT))
    first = ended.poll(0, 0.0)
    assert first.stop == 3
    assert ended.poll(0, 0.0) == first
    assert ended.poll(2, 0.0) == KvEnds(stop=3, ends=first.ends[2:])
    assert ended.poll(3, 0.0) == KvEnds(stop=3, ends=())


def test_a_table_tells_of_each_transfer_once() -> None:
    table = TransferTable(cache_of(), DESTINATION)
    table.expect(expect_of(key_of("nothing"), 0, ()))
    table.expect(expect_of(key_of("dropped"), 3, (1,)))
    table.expect(expect_of(key_of("open"), 3, (2,)))
    table.drop(key_of("dropped"))
    table.drop(key_of("dropped"))
    table.drop(key_of("nothing"))
    ends = table.poll_ended(0, 0.0).ends
    assert [(end.key.transfer_id, end.report is not None) for end in ends] == [("nothing", True), ("dropped", False)]
    waiting = threading.Thread(target=table.poll_ended, args=(2, 60.0))
    waiting.start()
    table.abort_all(Unavailable("the rank is stopping"))
    waiting.join(WAIT_SECONDS)
    assert not waiting.is_alive()
    (last,) = table.poll_ended(2, 0.0).ends
    assert (last.key.transfer_id, str(last.error)) == ("open", "the rank is stopping")
