"""Block copies reach every process of their rank, and have succeeded or lost the ring before the caller continues."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from ringserve.cp_core.errors import RingserveError, Unavailable
from ringserve.cp_core.layout.shards import spread
from ringserve.orchestration.protocol.inventory import Registered
from ringserve.orchestration.protocol.rings import RingSettings
from ringserve.orchestration.protocol.turns import ForkKv
from ringserve.orchestration.ring.kv_pool import KvPool, SequenceKv
from ringserve.orchestration.ring.kv_transfers import copy_blocks
from ringserve.workers.protocol.ranks import RankSettings
from ringserve.workers.protocol.transfers import BlockPair
from tests.orchestration.fake_ranks import FakeRank, FakeRanks
from tests.orchestration.ring.test_leader import Leader
from tests.orchestration.service import DirectPeers
from tests.waiting import eventually


class SlowRank(FakeRank):
    """Rank that copies when `may_copy` is set."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.may_copy = asyncio.Event()

    async def copy_blocks(self, pairs: Sequence[BlockPair], timeout: float) -> None:
        await self.may_copy.wait()
        await super().copy_blocks(pairs, timeout)


async def started(tp: int = 1) -> tuple[Leader, FakeRanks]:
    async def announce(registration: object, known: object) -> Registered:
        return Registered(running_turns=0)

    ranks = FakeRanks()
    settings = RingSettings(
        role="prefill",
        name="ring",
        num_ranks=2,
        watch_interval=3600.0,
        retry_pause=0.001,
        ranks=RankSettings(
            tp=tp,
            model_path="model",
            num_blocks=8,
            block_tokens=4,
        ),
    )
    leader = Leader(settings, ranks, DirectPeers(), announce)
    await leader.start("here:1")
    return leader, ranks


def retain(pool: KvPool, name: str, num_tokens: int) -> SequenceKv:
    sequence = pool.pin(name, "turn", 0)
    shards = spread(0, num_tokens, (0, 0))
    pool.make_room(sequence, shards.held)
    sequence.shards = shards
    pool.settle(name, "turn", num_tokens)
    return sequence


async def test_each_process_of_a_rank_copies_that_ranks_blocks_and_no_other() -> None:
    leader, ranks = await started(tp=2)
    source = retain(leader.ring.pool, "a", 11)  # 6 tokens and 5: a last block filled in part on either rank
    forked = await leader.fork_kv(ForkKv(source_id="a", kv_id="b", num_tokens=9))  # 6 and 3
    fork = leader.ring.pool.get("b")
    assert fork is not None
    assert forked.shards == fork.shards == source.shards.truncate(9)
    first = BlockPair(source=source.blocks[0][1], destination=fork.blocks[0][1])
    second = BlockPair(source=source.blocks[1][0], destination=fork.blocks[1][0])
    assert [rank.copied for rank in ranks.latest] == [[first], [first], [second], [second]]
    assert (await leader.get_retained(["a", "b", "c"])).num_tokens == (11, 9, 0)
    leader.ring.pool.check_integrity()
    await leader.close()


async def test_full_blocks_need_no_call() -> None:
    leader, ranks = await started()
    retain(leader.ring.pool, "a", 16)
    await leader.fork_kv(ForkKv(source_id="a", kv_id="b", num_tokens=16))
    assert [rank.copied for rank in ranks.latest] == [[], []]
    await leader.close()


async def test_a_fork_that_is_cancelled_ends_when_its_copies_have_and_is_whole_or_gone() -> None:
    leader, _ = await started()
    slow = [SlowRank(0), SlowRank(1)]
    leader.ring.ranks = slow
    pool = leader.ring.pool
    retain(pool, "a", 11)
    forking = asyncio.create_task(leader.fork_kv(ForkKv(source_id="a", kv_id="b", num_tokens=11)))
    await eventually(lambda: pool.get("b") is not None)
    for _ in range(3):  # on every call
        forking.cancel()
        ended, _ = await asyncio.wait([forking], timeout=0.01)
        assert not ended, "ranks may be copying"
    pool.check_integrity()
    for rank in slow:
        rank.may_copy.set()
    with pytest.raises(asyncio.CancelledError):
        await forking
    assert pool.get("b") is None
    pool.check_integrity()
    await leader.close()


async def test_a_rank_that_cannot_copy_loses_its_ring() -> None:
    leader, ranks = await started()
    sequence = retain(leader.ring.pool, "a", 11)
    ranks.latest[1].fail(Unavailable("rank 1 died"))
    with pytest.raises(RingserveError, match="rank 1 died"):
        await leader.fork_kv(ForkKv(source_id="a", kv_id="b", num_tokens=11))
    assert sequence.shards.num_tokens == 11
    await eventually(lambda: leader.ring.rebuilds == 1)
    await leader.close()


async def test_nothing_is_copied_on_a_later_life_of_the_ring() -> None:
    leader, ranks = await started()
    pool = leader.ring.pool
    retain(pool, "a", 11)
    fork = pool.fork("a", "b", "fork", 11)
    with pytest.raises(Unavailable, match="was rebuilt"):
        await copy_blocks(leader.ring, pool, fork, "an earlier one")
    assert [rank.copied for rank in ranks.latest] == [[], []]
    await leader.close()
