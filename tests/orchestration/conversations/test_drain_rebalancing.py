"""Rings that drain give away retained KV of conversations before they leave; whatever fails, answers are exact."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ringserve.cp_core.errors import NotFound, Unavailable
from ringserve.orchestration.protocol.plans import PromptMode
from ringserve.orchestration.protocol.turns import TakeKv, TakenKv
from ringserve.orchestration.protocol.views import MoveReason
from ringserve.views import RingDrain
from tests.orchestration.conversations.moving import Leader, kv_of
from tests.orchestration.ring.test_kv_moves import HeldBack, kill_one
from tests.orchestration.service import Answer, Service
from tests.waiting import WAIT_SECONDS, eventually, pass_time
from tests.workers.models import Oracle, random_tokens

KIND = "llama_gqa"
ANSWER = 5
DRAIN_INTERVAL = 0.01


class Draining(Service):
    """Rings of different shapes; conversations begin on the first of each role, and continue wherever they may."""

    def __init__(self, path: Path, oracle: Oracle, **settings: object) -> None:
        shapes = {"other_prefill": [(1, 2)], "other_decode": [(2, 2)]} | settings
        super().__init__(path, 2, 3, **shapes)  # type: ignore[arg-type]
        self.oracle = oracle
        self.histories: dict[str, list[int]] = {}
        for leader in self.peers.leaders.values():
            leader.settings = replace(leader.settings, drain_interval=DRAIN_INTERVAL)

    async def turn(self, name: str, new: list[int]) -> Answer:
        """Run a conversation's next turn and check it."""
        history = self.histories.get(name, [])
        mode = PromptMode.APPEND if history else PromptMode.WHOLE_HISTORY
        answer = await self.answer(self.request(new, conversation=name, mode=mode, max_tokens=ANSWER))
        assert answer.token_ids == self.oracle.greedy([*history, *new], ANSWER)
        self.histories[name] = [*history, *new, *answer.token_ids]
        return answer

    async def begin(self, names: str, num_tokens: int = 30) -> None:
        """Begin conversations on the first rings."""
        others = [self.peers.leaders[name] for name in ("prefill-1", "decode-1")]
        for leader in others:
            leader.is_draining = True
            await leader.announce()
        for number, name in enumerate(names):
            await self.turn(name, random_tokens(num_tokens, seed=number))
        for leader in others:
            leader.is_draining = False
            await leader.announce()

    async def drain(self, name: str, seconds: float = WAIT_SECONDS) -> RingDrain:
        """Let a ring drain and leave. Return its progress at the end."""
        await self.router.drain_ring(name, seconds)
        return await self.left(name)

    async def left(self, name: str) -> RingDrain:
        leader = self.peers.leaders[name]
        async with asyncio.timeout(WAIT_SECONDS):
            await leader.has_left.wait()
        view = await self.progress(name)
        assert view.has_left
        await leader.close()
        return view

    async def progress(self, name: str) -> RingDrain:
        return next(view for view in (await self.router.get_server_info()).drains if view.ring == name)

    def retained(self, ring: str, names: str) -> str:
        pool = self.peers.leaders[ring].ring.pool
        return "".join(name for name in names if pool.num_retained(name))


@pytest.fixture
async def service(model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]) -> AsyncIterator[Draining]:
    made = Draining(model_paths[KIND], oracles[KIND])
    async with made:
        yield made


def blocks_in_use(leader: Leader) -> int:
    return sum(rank.total_blocks - rank.free_blocks for rank in leader.ring.pool.usage())


async def test_conversations_go_on_with_all_their_kv_when_a_ring_of_each_role_has_left(service: Draining) -> None:
    await service.begin("abc")
    before = {name: kv_of(service.decode, name) for name in "abc"}
    epochs = {name: (await service.router.get_conversation(name)).epoch for name in "abc"}
    for ring, other in (("decode-0", "decode-1"), ("prefill-0", "prefill-1")):
        view = await service.drain(ring)
        assert (view.moved, view.left, view.no_room, view.failed) == (3, 0, 0, 0)
        assert service.retained(other, "abc") == "abc"
        assert blocks_in_use(service.peers.leaders[ring]) == 0
    token_bytes = service.model.kv_bytes_per_token
    moves = {(each.role, each.reason): each for each in (await service.router.get_server_info()).kv_moves}
    assert moves["decode", MoveReason.DRAIN].payload_bytes == 3 * (30 + ANSWER - 1) * token_bytes
    assert moves["prefill", MoveReason.DRAIN].payload_bytes == 3 * 30 * token_bytes
    for name in "abc":
        assert torch.equal(kv_of(service.peers.leaders["decode-1"], name), before[name])
        shown = await service.router.get_conversation(name)
        assert shown.epoch == epochs[name] + 2
        assert [(place.ring, place.num_tokens) for place in shown.placements] == [("prefill-1", 30), ("decode-1", 34)]
        answer = await service.turn(name, [7, 8])
        assert answer.begun.plan.cached_tokens == 30 + ANSWER - 1
        assert answer.report.pulled_bytes == (ANSWER - 1) * token_bytes
    service.check_integrity()


async def test_those_used_last_go_first_where_there_is_not_room_for_all(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    service = Draining(model_paths[KIND], oracles[KIND], num_blocks=64)
    async with service:
        await service.begin("abcd", num_tokens=80)
        await service.turn("a", [9])
        pool = service.peers.leaders["decode-1"].ring.pool
        pool.make_room(pool.pin("of others", "turn", 0), [40 * pool.block_tokens] * pool.num_ranks)
        await service.peers.leaders["decode-1"].announce()
        view = await service.drain("decode-0")
        assert (view.moved, view.no_room, view.failed) == (2, 2, 0)
        assert service.retained("decode-1", "abcd") == "ad"
        assert not pool.evictions
        pool.settle("of others", "turn", 0)
        for name in "abcd":
            await service.turn(name, [7, 8])
        service.check_integrity()


async def test_a_turn_a_fork_and_a_deletion_wait_for_the_move_and_use_what_was_moved(
    service: Draining, monkeypatch: pytest.MonkeyPatch
) -> None:
    await service.begin("abc")
    held = HeldBack(service.decode, monkeypatch)
    monkeypatch.setattr("ringserve.orchestration.conversations.rebalancing.MOVES_AT_ONCE", 3)
    await service.router.drain_ring("decode-0", WAIT_SECONDS)
    await eventually(lambda: service.decode.ring.pool.usage()[0].kept_blocks == 0)  # all three are held
    turn = asyncio.create_task(service.turn("a", [7, 8]))
    fork = asyncio.create_task(service.router.fork_conversation("b", "f", None))
    deletion = asyncio.create_task(service.router.delete_conversation("c"))
    done, _ = await asyncio.wait([turn, fork, deletion], timeout=0.2)
    assert not done
    assert (await service.progress("decode-0")).left == 3
    held.go_on.set()
    assert (await turn).begun.plan.cached_tokens == 30 + ANSWER - 1
    assert [(place.ring, place.num_tokens) for place in (await fork).placements] == [
        ("prefill-0", 30),
        ("decode-1", 34),
    ]
    await deletion
    with pytest.raises(NotFound):
        await service.router.get_conversation("c")
    assert (await service.left("decode-0")).moved == 3
    assert service.retained("decode-1", "abcf") == "abf"
    service.check_integrity()


async def test_a_turn_that_waits_for_a_move_ends_by_its_own_deadline_or_an_abort(
    service: Draining, monkeypatch: pytest.MonkeyPatch
) -> None:
    await service.begin("a")
    held = HeldBack(service.decode, monkeypatch)
    await service.router.drain_ring("decode-0", WAIT_SECONDS)
    await held.asked.wait()
    late = service.request([7], conversation="a", mode=PromptMode.APPEND, deadline=20.0)
    waiting = asyncio.create_task(service.answer(late))
    await eventually(lambda: service.router._conversations.is_waiting(late.request_id))
    pass_time(20.0)
    with pytest.raises(Exception, match=r"waited for conversation 'a' until its deadline of 20\.0 s"):
        await waiting
    request = service.request([7], conversation="a", mode=PromptMode.APPEND)
    waiting = asyncio.create_task(service.answer(request))
    await eventually(lambda: service.router._conversations.is_waiting(request.request_id))
    with pytest.raises(Exception, match="busy with a move of its KV"):
        await service.answer(service.request([7], conversation="a", mode=PromptMode.APPEND))
    assert await service.router.abort_requests([request.request_id]) == ([request.request_id], [])
    with pytest.raises(Exception, match="aborted"):
        await waiting
    held.go_on.set()
    assert (await service.left("decode-0")).moved == 1
    await service.turn("a", [7])


async def test_what_a_turn_uses_when_the_ring_drains_is_moved_when_the_turn_has_ended(service: Draining) -> None:
    await service.begin("a")
    begun = await service.router.begin_turn(
        service.request([7, 8], conversation="a", mode=PromptMode.APPEND, max_tokens=60)
    )
    assert begun.plan.decode_ring == "decode-0"
    await service.router.drain_ring("decode-0", WAIT_SECONDS)
    events = [event async for event in service.decode.stream_turn(begun.turn_id)]
    assert events
    view = await service.left("decode-0")
    assert (view.moved, view.failed) == (1, 0)
    assert service.peers.leaders["decode-1"].ring.pool.num_retained("a") == 30 + ANSWER + 2 + 60 - 1


@pytest.mark.parametrize("dies", ["source", "target"])
async def test_a_ring_that_dies_in_the_middle_costs_nothing_but_the_kv(
    service: Draining, dies: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await service.begin("a")
    taker = service.peers.leaders["decode-1"]
    held = HeldBack(service.decode, monkeypatch)
    await service.router.drain_ring("decode-0", WAIT_SECONDS)
    await held.asked.wait()
    goes = service.decode if dies == "source" else taker
    incarnation = goes.ring.incarnation
    await kill_one(goes)
    held.go_on.set()
    await eventually(lambda: goes.ring.incarnation != incarnation and goes.ring.state == "ready")
    view = await service.left("decode-0")
    assert view.left == 0
    answer = await service.turn("a", [7, 8])
    assert answer.begun.plan.decode_ring == "decode-1"
    service.peers.leaders["decode-1"].ring.pool.check_integrity()
    service.decode.ring.pool.check_integrity()


async def test_a_ring_leaves_at_its_deadline_though_a_move_is_under_way(
    service: Draining, monkeypatch: pytest.MonkeyPatch
) -> None:
    await service.begin("a")
    held = HeldBack(service.decode, monkeypatch)
    free = blocks_in_use(service.peers.leaders["decode-1"])
    view = await service.drain("decode-0", 0.2)
    assert (view.moved, view.left) == (0, 1)
    held.go_on.set()
    await eventually(lambda: blocks_in_use(service.peers.leaders["decode-1"]) == free)
    answer = await service.turn("a", [7, 8])
    assert answer.begun.plan.cached_tokens == 30, "the prefill ring retained the prompt"


async def test_an_answer_that_was_lost_is_asked_for_again_and_nothing_moves_twice(
    service: Draining, monkeypatch: pytest.MonkeyPatch
) -> None:
    await service.begin("a")
    taker = service.peers.leaders["decode-1"]
    take: Callable[[TakeKv], Awaitable[TakenKv]] = taker.take_kv
    asked: list[TakeKv] = []

    async def lost_once(request: TakeKv) -> TakenKv:
        taken = await take(request)
        asked.append(request)
        if len(asked) == 1:
            raise Unavailable("the answer was lost")
        return taken

    monkeypatch.setattr(taker, "take_kv", lost_once)
    view = await service.drain("decode-0")
    assert (view.moved, view.failed) == (1, 0)
    assert asked[0] == asked[1]
    assert (await service.turn("a", [7, 8])).begun.plan.cached_tokens == 30 + ANSWER - 1


async def test_a_move_that_fails_is_counted_and_the_next_turn_computes_what_is_lost(
    service: Draining, monkeypatch: pytest.MonkeyPatch
) -> None:
    await service.begin("ab")

    async def fails(request: TakeKv) -> TakenKv:
        raise Unavailable("the ring does not answer")

    monkeypatch.setattr(service.peers.leaders["decode-1"], "take_kv", fails)
    view = await service.drain("decode-0")
    assert (view.moved, view.left, view.failed) == (0, 0, 2)
    (told,) = (await service.router.get_server_info()).kv_moves
    assert (told.moved, told.failed) == (0, 2)
    for name in "ab":
        assert (await service.turn(name, [7, 8])).begun.plan.cached_tokens == 30


async def test_a_ring_that_is_told_to_stay_gives_away_no_more(
    service: Draining, monkeypatch: pytest.MonkeyPatch
) -> None:
    await service.begin("abcd")
    monkeypatch.setattr("ringserve.orchestration.conversations.rebalancing.MOVES_AT_ONCE", 1)
    held = HeldBack(service.decode, monkeypatch)
    await service.router.drain_ring("decode-0", WAIT_SECONDS)
    await held.asked.wait()
    await service.router.undrain_ring("decode-0")
    assert (await service.router.get_server_info()).drains == ()
    held.go_on.set()
    await service.turn("d", [7])  # the move that was under way moved the conversation used last
    assert service.retained("decode-1", "abcd") == "d"
    assert service.retained("decode-0", "abcd") == "abc"
    for name in "abc":
        assert (await service.turn(name, [7])).begun.plan.decode_ring == "decode-0"


async def test_what_was_evicted_or_deleted_is_not_moved(service: Draining) -> None:
    await service.begin("abc")
    await service.decode.settle("a", "", 0)
    await service.router.delete_conversation("b")
    view = await service.drain("decode-0")
    assert (view.moved, view.left, view.no_room, view.failed) == (1, 0, 0, 0)
    assert service.retained("decode-1", "abc") == "c"
    await service.turn("a", [7])


async def test_the_only_ring_of_a_role_leaves_with_what_it_keeps(service: Draining) -> None:
    await service.begin("a")
    await service.drain("decode-1")
    await service.router.drain_ring("decode-0", WAIT_SECONDS, force=True)
    view = await service.left("decode-0")
    assert (view.moved, view.no_room) == (0, 1)


async def test_turns_forks_and_deletions_meet_moves_at_any_moment_and_nothing_is_lost(service: Draining) -> None:
    """Drain rings in turn while each conversation's turns follow each other as fast as they can."""
    free = service.free_blocks()
    await service.begin("abc")
    is_over, has_turned = False, asyncio.Event()

    async def talk(name: str) -> None:
        for number in range(6):
            await service.turn(name, [number + 1])
            has_turned.set()
            if number == 3:
                await service.router.fork_conversation(name, f"{name}{name}", None)
                service.histories[name * 2] = service.histories[name]
                await service.turn(name * 2, [9])
        await service.router.delete_conversation(name)

    async def drain_in_turn() -> None:
        names = itertools.cycle(["decode-0", "prefill-0", "decode-1", "prefill-1"])
        while not is_over:
            leader = service.peers.leaders[next(names)]
            leader.is_draining = True
            for _ in range(2):
                await leader.announce()
                has_turned.clear()
                if not is_over:
                    await has_turned.wait()
            leader.is_draining = False
            await leader.announce()

    async with asyncio.TaskGroup() as group:
        draining = group.create_task(drain_in_turn())
        try:
            await asyncio.gather(*(talk(name) for name in "abc"))
        finally:
            is_over = True
            has_turned.set()
        await draining
    for name in ("aa", "bb", "cc"):
        await service.turn(name, [7])
        await service.router.delete_conversation(name)
    assert any(each.moved for each in service.router.moves)
    await eventually(lambda: service.free_blocks() == free)
    service.check_integrity()
