"""Decode rings that are about to evict give the KV unused for longest to a ring with room, where that pays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from ringserve.orchestration.conversations.rebalancing import FullRebalancing
from ringserve.orchestration.conversations.store import ConversationStore
from ringserve.orchestration.placement.registry import RegisteredRing, RingRegistry
from ringserve.orchestration.protocol.views import MoveReason
from ringserve.orchestration.tasks import TaskSet
from ringserve.views import KvMoves
from tests.orchestration.conversations.moving import Leader
from tests.orchestration.conversations.test_drain_rebalancing import ANSWER, Draining
from tests.orchestration.service import QUIET
from tests.rings import registration
from tests.waiting import eventually
from tests.workers.models import Oracle

KIND = "llama_gqa"
NUM_BLOCKS = 32
NAMES = "abcdef"


@pytest.fixture
def service(model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]) -> Draining:
    """Run a decode ring of 3 ranks with 32 blocks each, and another with four times as many."""
    made = Draining(
        model_paths[KIND], oracles[KIND], num_blocks=NUM_BLOCKS, other_prefill=[], other_decode=[3], heartbeat=QUIET
    )
    for name, leader in made.peers.leaders.items():
        blocks = NUM_BLOCKS * (1 if name == "decode-0" else 4)
        leader.ring.settings = replace(
            leader.ring.settings,
            ranks=replace(leader.ring.settings.ranks, num_blocks=blocks),
        )
    return made


async def fill(service: Draining) -> Leader:
    """Put six conversations of 49 tokens on a ring that holds 384, before it announces itself again."""
    other = service.peers.leaders["decode-1"]
    other.is_draining = True
    await other.announce()
    for number, name in enumerate(NAMES):
        await service.turn(name, [*range(number, number + 45)])
    other.is_draining = False
    await other.announce()
    assert service.retained("decode-0", NAMES) == NAMES
    return service.decode


async def totals(service: Draining) -> list[KvMoves]:
    return [each for each in (await service.router.get_server_info()).kv_moves if each.reason is MoveReason.FULL]


async def test_the_least_recently_used_go_before_they_are_evicted_and_are_not_computed_again(
    service: Draining, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringserve.orchestration.conversations.rebalancing.WORTH", 0.0)
    async with service:
        ring = await fill(service)
        await service.turn("a", [7])
        assert service.retained("decode-1", NAMES) == ""
        await ring.announce()
        await eventually(lambda: service.retained("decode-1", NAMES) == "bcde")
        await eventually(lambda: not service.router._full_rebalancing._work)
        assert service.retained("decode-0", NAMES) == "af"
        (told,) = await totals(service)
        assert (told.role, told.moved, told.failed) == ("decode", 4, 0)
        assert told.payload_bytes == 4 * (45 + ANSWER - 1) * service.model.kv_bytes_per_token
        await ring.announce()  # there is room now
        assert service.retained("decode-1", NAMES) == "bcde"
        answer = await service.turn("b", [7])
        assert (answer.begun.plan.decode_ring, answer.begun.plan.cached_tokens) == ("decode-1", 45 + ANSWER - 1)
        assert not ring.ring.pool.evictions
        service.check_integrity()


@pytest.mark.parametrize("reason", ["cheap to compute", "the other is full too", "it drains"])
async def test_nothing_moves_where_it_is_not_worth_it_or_no_ring_has_room(
    reason: str, service: Draining, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "ringserve.orchestration.conversations.rebalancing.WORTH", 1e9 if reason == "cheap to compute" else 0.0
    )
    async with service:
        ring, other = await fill(service), service.peers.leaders["decode-1"]
        if reason == "the other is full too":
            pool = other.ring.pool
            pool.make_room(pool.pin("of others", "turn", 0), [pool.block_tokens * NUM_BLOCKS * 3] * pool.num_ranks)
        other.is_draining = reason == "it drains"
        await other.announce()
        await ring.announce()
        await eventually(lambda: not service.router._full_rebalancing._work)
        assert service.retained("decode-1", NAMES) == ""
        assert await totals(service) == []


def test_where_all_rings_are_full_an_announcement_looks_at_none_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    rings, unused = RingRegistry(), cast(Any, None)
    rebalancing = FullRebalancing(ConversationStore(1), rings, unused, unused, unused, TaskSet("the test"))
    looked_at: list[RegisteredRing] = []

    def spare_share(ring: RegisteredRing) -> float:
        looked_at.append(ring)
        return 0.0

    monkeypatch.setattr("ringserve.orchestration.conversations.rebalancing._spare_share", spare_share)
    for number in range(20):
        rings.register(registration("decode", f"decode-{number}", spare_tokens=0))
        ring = rings.named("decode", f"decode-{number}")
        assert ring is not None
        rebalancing.note(ring)
        assert {each.name for each in looked_at} == {ring.name}
        looked_at.clear()
