"""KV that no conversation uses is free again after the router was started again, whichever ring tells first."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from ringserve.orchestration.protocol.plans import PromptMode
from ringserve.orchestration.protocol.turns import FinishedEvent
from ringserve.orchestration.router import recovery
from tests.orchestration.service import Service
from tests.waiting import eventually
from tests.workers.models import random_tokens

MODEL = "llama_gqa"
OLD, NEW = ("prefill-0", "decode-0"), ("prefill-1", "decode-1")
"""Rings of a conversation before its latest turn, and those of that turn."""


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "RELEASE_SECONDS", 0.01)


def two_rings_a_role(model_paths: Mapping[str, Path], journal: Path, *, retain_prompts: bool = False) -> Service:
    return Service(
        model_paths[MODEL], 1, 1, other_prefill=[1], other_decode=[1], journal=journal, retain_prompts=retain_prompts
    )


async def announce(service: Service, names: Sequence[str]) -> None:
    """Let rings tell one after the other what they hold."""
    for name in names:
        await service.peers.leaders[name].announce()


def withdraw(service: Service, names: Sequence[str]) -> None:
    """Let rings take no turns until they announce themselves again."""
    for name in names:
        ring = service.router._rings.find(name)
        assert ring is not None
        ring.is_ready = False


async def restart(service: Service, names: Sequence[str]) -> None:
    await service.crash_router()
    service.start_router()
    await announce(service, names)


async def forget(service: Service, free: list[int]) -> None:
    """Delete the conversation; all KV must be free then."""
    await service.router.delete_conversation("c")
    await eventually(lambda: service.free_blocks() == free)
    service.check_integrity()


@pytest.mark.parametrize("order", [(*NEW, *OLD), (*OLD, *NEW), ("decode-1", "prefill-0", "decode-0", "prefill-1")])
async def test_rings_that_a_running_turn_has_left_release_the_conversation(
    model_paths: Mapping[str, Path], tmp_path: Path, order: Sequence[str]
) -> None:
    async with two_rings_a_role(model_paths, tmp_path) as service:
        free = service.free_blocks()
        await service.answer(service.request(random_tokens(40), conversation="c"))
        withdraw(service, OLD)
        request = service.request(random_tokens(9), conversation="c", mode=PromptMode.APPEND, max_tokens=120)
        begun = await service.router.begin_turn(request)
        assert (begun.plan.prefill_ring, begun.plan.decode_ring) == NEW
        events = service.peers.decode(begun.decode_endpoint).stream_turn(begun.turn_id)
        await anext(events)
        await restart(service, order)
        assert [event async for event in events if isinstance(event, FinishedEvent)]
        await forget(service, free)


@pytest.mark.parametrize("order", [(*NEW, *OLD), (*OLD, *NEW)])
async def test_of_two_rings_that_retain_an_idle_conversation_one_releases_it(
    model_paths: Mapping[str, Path], tmp_path: Path, order: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_rings_a_role(model_paths, tmp_path) as service:
        free = service.free_blocks()
        await service.answer(service.request(random_tokens(40), conversation="c"))
        withdraw(service, OLD)
        # The router dies before it has told the rings that the conversation has left them.
        monkeypatch.setattr(service.router._turns, "_leave_other_rings", lambda turn: asyncio.sleep(0))
        await service.answer(service.request(random_tokens(9), conversation="c", mode=PromptMode.APPEND))
        await restart(service, order)
        await eventually(lambda: all(not _retained(service, name) for name in OLD))
        assert all(_retained(service, name) for name in NEW)
        await forget(service, free)


async def test_a_conversation_that_was_deleted_when_the_router_died_leaves_no_kv(
    model_paths: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_rings_a_role(model_paths, tmp_path) as service:
        free = service.free_blocks()
        await service.answer(service.request(random_tokens(40), conversation="c"))
        monkeypatch.setattr(service.router._turns, "free", lambda conversation: asyncio.sleep(0))
        await service.router.delete_conversation("c")
        assert service.free_blocks() != free
        await restart(service, (*OLD, *NEW))
        await eventually(lambda: service.free_blocks() == free)
        service.check_integrity()


async def test_histories_without_a_conversation_which_the_journal_lacks_are_released(
    model_paths: Mapping[str, Path], tmp_path: Path
) -> None:
    async with two_rings_a_role(model_paths, tmp_path, retain_prompts=True) as service:
        free = service.free_blocks()
        await service.answer(service.request(random_tokens(40)))
        assert service.free_blocks() != free
        await restart(service, (*OLD, *NEW))
        await eventually(lambda: service.free_blocks() == free)
        service.check_integrity()


async def test_a_turn_waits_until_the_rings_have_told_that_retain_its_conversation(
    model_paths: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "LATE_SECONDS", 60.0)
    async with two_rings_a_role(model_paths, tmp_path) as service:
        first = await service.answer(service.request(random_tokens(40), conversation="c"))
        await restart(service, NEW)
        request = service.request([7], conversation="c", mode=PromptMode.APPEND)
        answering = asyncio.create_task(service.answer(request))
        await announce(service, OLD)
        answer = await answering
        assert answer.begun.plan.cached_tokens == 40 + len(first.token_ids) - 1


async def test_a_ring_that_does_not_tell_holds_up_turns_for_a_while_only(
    model_paths: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "LATE_SECONDS", 0.01)
    async with two_rings_a_role(model_paths, tmp_path) as service:
        for name in OLD:
            announcing = service.peers.leaders[name]._announcing
            assert announcing is not None
            announcing.cancel()
        await restart(service, NEW)
        answer = await service.answer(service.request(random_tokens(40), conversation="c"))
        assert (answer.begun.plan.prefill_ring, answer.begun.plan.decode_ring) == NEW


def _retained(service: Service, name: str) -> int:
    return service.peers.leaders[name].ring.pool.num_retained("c")
