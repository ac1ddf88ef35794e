"""Retained KV moves from any ring to any other of its role, whole or not at all, and neither side loses a block."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ringserve.cp_core.errors import Busy, CapacityExceeded, NotFound, TransferError, Unavailable
from ringserve.cp_core.layout.shards import spread
from ringserve.orchestration.protocol.turns import SendKv
from ringserve.orchestration.ring import kv_transfers
from ringserve.orchestration.ring.kv_pool import KvPool
from tests.orchestration.conversations.moving import Leader, kv_of, take
from tests.orchestration.service import Service
from tests.waiting import WAIT_SECONDS, eventually
from tests.workers.models import random_tokens
from tests.workers.thread_ranks import ThreadRank

KIND = "llama_gqa"
Shape = tuple[int, int]


def rings(service: Service, role: str) -> tuple[Leader, Leader]:
    return service.peers.leaders[f"{role}-0"], service.peers.leaders[f"{role}-1"]


@pytest.fixture
async def service(model_paths: Mapping[str, Path]) -> AsyncIterator[Service]:
    """Yield a service with conversation "c" on the rings of 2 and 3 ranks; the others, of 3 and 2 x 2, are empty."""
    async with Service(model_paths[KIND], 2, 3, other_prefill=[3], other_decode=[(2, 2)]) as made:
        await made.answer(made.request(random_tokens(41), conversation="c", max_tokens=9))
        yield made


@pytest.mark.parametrize("num_tokens", [1, 2, 23])
@pytest.mark.parametrize(
    ("source", "target"),
    [((1, 1), (3, 1)), ((3, 1), (2, 2)), ((2, 2), (1, 1)), ((4, 1), (1, 2)), ((2, 1), (2, 1))],
    ids=str,
)
async def test_kv_is_the_same_byte_for_byte_on_rings_of_any_shape_where_ranks_may_be_empty(
    source: Shape, target: Shape, num_tokens: int, model_paths: Mapping[str, Path]
) -> None:
    """Unwritten slots of the target are NaN. The decode rings' shards are uneven, token by token."""
    (prefill_cp, prefill_tp), (decode_cp, decode_tp) = source, source
    async with Service(
        model_paths[KIND],
        prefill_cp,
        decode_cp,
        prefill_tp=prefill_tp,
        decode_tp=decode_tp,
        other_prefill=[target],
        other_decode=[target],
    ) as service:
        request = service.request(random_tokens(num_tokens), conversation="c", max_tokens=6)
        answer = await service.answer(request)
        plan = answer.begun.plan
        for name in (plan.prefill_ring, plan.decode_ring):
            role = name.partition("-")[0]
            giver = service.peers.leaders[name]
            (taker,) = {each for each in rings(service, role) if each is not giver}
            before, free = kv_of(giver, "c"), [rank.free_blocks for rank in giver.ring.pool.usage()]
            taken = await taker.take_kv(take(giver, "c"))
            assert torch.equal(kv_of(taker, "c"), before)
            assert taken.incarnation == taker.ring.incarnation
            assert taken.payload_bytes == len(before) * service.model.kv_bytes_per_token
            assert taken.shards.num_tokens == len(before) == giver.ring.pool.num_retained("c")
            assert [rank.free_blocks for rank in giver.ring.pool.usage()] == free, "a copy: the router has it freed"
        service.check_integrity()


async def test_a_take_that_is_asked_again_is_answered_as_before(service: Service) -> None:
    giver, taker = rings(service, "decode")
    request = take(giver, "c")
    first = await taker.take_kv(request)
    await giver.settle("c", "", 0)
    assert await taker.take_kv(request) == first
    running = take(taker, "c")
    both = await asyncio.gather(giver.take_kv(running), giver.take_kv(running))
    assert both[0] == both[1]
    service.check_integrity()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_what_a_turn_is_about_to_release_is_moved_then(service: Service, role: str) -> None:
    giver, taker = rings(service, role)
    pool, whole = giver.ring.pool, take(giver, "c")
    retained = pool.num_retained("c")
    pool.pin("c", "a turn", retained)
    moving = [asyncio.create_task(taker.take_kv(each)) for each in (whole, whole)]
    await eventually(lambda: "c" in pool._settled)
    await giver.settle("c", "a turn", retained)
    first, second = await asyncio.gather(*moving)
    assert first == second
    assert taker.ring.pool.num_retained("c") == retained
    assert not pool._settled
    service.check_integrity()


async def test_those_who_wait_for_a_sequence_get_it_one_after_the_other() -> None:
    pool = KvPool(1, 8, 4)
    pool.make_room(pool.pin("c", "a turn", 0), [4])

    async def read(name: str) -> str:
        await pool.until_unpinned("c", WAIT_SECONDS)
        pool.pin("c", name, 4)
        await asyncio.sleep(0)
        pool.settle("c", name, 4)
        return name

    readers = [asyncio.create_task(read(name)) for name in ("first", "second", "third")]
    await eventually(lambda: "c" in pool._settled)
    sequence = pool.get("c")
    assert sequence is not None
    sequence.shards = spread(0, 4, (0,))
    pool.settle("c", "a turn", 4)
    assert await asyncio.gather(*readers) == ["first", "second", "third"]
    await pool.until_unpinned("c", WAIT_SECONDS)
    await pool.until_unpinned("unknown", WAIT_SECONDS)
    pool.pin("c", "another turn", 4)
    await pool.until_unpinned("c", 0.001)
    pool.check_integrity()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_what_is_not_there_or_in_use_is_not_moved(
    service: Service, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_transfers, "BUSY_SECONDS", 0.01)
    giver, taker = rings(service, role)
    free = service.free_blocks()
    whole = take(giver, "c")
    giver.ring.pool.pin("c", "a turn", giver.ring.pool.num_retained("c"))
    with pytest.raises(Busy, match="'c' is in use by 'a turn'"):
        await taker.take_kv(whole)
    await giver.settle("c", "a turn", 10)
    with pytest.raises(Busy, match="'c' is in use by 'a turn'"):
        await taker.take_kv(whole)  # an attempt that has failed stays so
    with pytest.raises(NotFound, match="tokens are asked for, 10 are cached"):
        await taker.take_kv(replace(whole, attempt=2))
    assert taker.ring.pool.num_retained("c") == 0
    taker.ring.pool.pin("c", "a turn", 0)
    with pytest.raises(Busy, match="'c' is in use by 'a turn'"):
        await taker.take_kv(take(giver, "c"))
    await taker.settle("c", "a turn", 0)
    await giver.settle("c", "", 0)
    await eventually(lambda: sum(service.free_blocks()) > sum(free))
    service.check_integrity()


async def test_a_ring_without_spare_room_takes_nothing_and_evicts_nothing(service: Service) -> None:
    giver, taker = rings(service, "decode")
    pool = taker.ring.pool
    rest = min(rank.free_blocks for rank in pool.usage()) - 2
    pool.make_room(pool.pin("of others", "turn", 0), [rest * pool.block_tokens] * pool.num_ranks)
    free = service.free_blocks()
    with pytest.raises(CapacityExceeded, match="blocks of 4 tokens are needed on rank 0 and 2 are spare"):
        await taker.take_kv(take(giver, "c"))
    assert service.free_blocks() == free
    assert not pool.evictions
    assert pool.spare_tokens == 2 * pool.block_tokens * pool.num_ranks


class HeldBack:
    """Source that does not send until it is released."""

    def __init__(self, leader: Leader, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked, self.go_on = asyncio.Event(), asyncio.Event()
        for rank in leader.ring.ranks:
            monkeypatch.setattr(rank, "send_kv", self._wait_before(rank.send_kv))

    def _wait_before(self, send: object) -> object:
        async def wait(*arguments: object) -> object:
            self.asked.set()
            await self.go_on.wait()
            return await send(*arguments)  # type: ignore[operator]

        return wait


async def test_a_caller_that_goes_away_does_not_end_a_move(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    giver, taker = rings(service, "decode")
    held = HeldBack(giver, monkeypatch)
    request = take(giver, "c")
    asking = asyncio.create_task(taker.take_kv(request))
    await held.asked.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    turn = asyncio.create_task(taker.kv_moves.until_free("c"))
    held.go_on.set()
    await turn
    assert torch.equal(kv_of(taker, "c"), kv_of(giver, "c"))
    assert (await taker.take_kv(request)).shards.num_tokens == giver.ring.pool.num_retained("c")


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_what_is_forgotten_while_it_moves_is_freed_on_both_sides(
    service: Service, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller of the move has gone, so the router takes the conversation for idle."""
    giver, taker = rings(service, role)
    held = HeldBack(giver, monkeypatch)
    moving = asyncio.create_task(taker.take_kv(take(giver, "c")))
    await held.asked.wait()
    frees = [asyncio.create_task(ring.settle("c", "", 0)) for ring in (giver, taker)]
    await asyncio.wait(frees, timeout=0.05)
    held.go_on.set()
    await asyncio.gather(moving, *frees)
    assert [rank.free_blocks for ring in (giver, taker) for rank in ring.ring.pool.usage()] == [2048] * sum(
        ring.settings.num_ranks for ring in (giver, taker)
    )
    service.check_integrity()


async def kill_one(leader: Leader) -> None:
    rank = leader.ring.ranks[-1]
    assert isinstance(rank, ThreadRank)
    await rank.kill()


@pytest.mark.parametrize("dies", ["source", "target"])
async def test_a_move_whose_ring_dies_fails_and_leaves_the_other_ring_as_it_was(
    service: Service, dies: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    giver, taker = rings(service, "decode")
    stays, goes = (taker, giver) if dies == "source" else (giver, taker)
    free = [rank.free_blocks for rank in stays.ring.pool.usage()]
    held = HeldBack(giver, monkeypatch)
    incarnation, request = goes.ring.incarnation, take(giver, "c")
    moving = asyncio.create_task(taker.take_kv(request))
    await held.asked.wait()
    await kill_one(goes)
    held.go_on.set()
    with pytest.raises((Unavailable, TransferError)):
        await moving
    await eventually(lambda: goes.ring.incarnation != incarnation and goes.ring.state == "ready")
    await stays.kv_moves.until_free("c")
    assert [rank.free_blocks for rank in stays.ring.pool.usage()] == free
    assert taker.ring.pool.num_retained("c") == 0
    if dies == "source":
        with pytest.raises((Unavailable, TransferError)):  # as the first time, where the giver remembers its end
            await taker.take_kv(request)  # of an incarnation that is gone
    else:
        await taker.take_kv(request)  # to the ring's next life
        assert torch.equal(kv_of(taker, "c"), kv_of(giver, "c"))
    stays.ring.pool.check_integrity()
    goes.ring.pool.check_integrity()


async def test_a_transfer_that_does_not_arrive_by_its_deadline_ends_on_both_sides(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    giver, taker = rings(service, "decode")
    free = service.free_blocks()

    async def silent(*_: object) -> None:
        """Ignore the order to expect bytes."""

    monkeypatch.setattr(taker.ring.ranks[0], "expect_kv", silent)
    with pytest.raises(TransferError):
        await taker.take_kv(take(giver, "c", deadline=0.3))
    assert service.free_blocks() == free
    await giver.kv_moves.until_free("c")
    assert giver.ring.pool.hold("c", "next", 1).pinned_by == "next"
    service.check_integrity()


async def test_a_send_that_is_asked_for_twice_is_made_once(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    giver, taker = rings(service, "decode")
    asked: list[SendKv] = []
    once = giver.send_kv

    async def twice(request: SendKv) -> object:
        asked.append(request)
        first, second = await asyncio.gather(once(request), once(request))
        assert first is second
        return first

    monkeypatch.setattr(giver, "send_kv", twice)
    await taker.take_kv(take(giver, "c"))
    assert len(asked) == 1
    assert torch.equal(kv_of(taker, "c"), kv_of(giver, "c"))
