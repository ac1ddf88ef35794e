"""A router that stood still while another took its place wakes up: it can neither place nor end anything."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from ringserve.cp_core.errors import RingserveError, StaleIncarnation, Unavailable
from ringserve.orchestration.journal.journal import SqliteJournal
from ringserve.orchestration.router.router import Router
from tests.orchestration.service import DirectPeers, Service, is_idle
from tests.waiting import eventually
from tests.workers.models import Oracle, random_tokens, save_model

PROMPT = random_tokens(60)


class FencedPeers:
    """Directory of one router: each of its calls carries its epoch, as over gRPC."""

    def __init__(self, peers: DirectPeers, epoch: int) -> None:
        self._peers = peers
        self._epoch = epoch

    def leader(self, role: str, endpoint: str) -> Any:
        return _Fenced(self._peers, role, endpoint, self._epoch)


class _Fenced:
    def __init__(self, peers: DirectPeers, role: str, endpoint: str, epoch: int) -> None:
        self._leader, self._port = peers.leaders[endpoint], peers.leader(role, endpoint)
        self._epoch = epoch

    def __getattr__(self, verb: str) -> Callable[..., Awaitable[Any]]:
        async def call(*arguments: object, **options: object) -> Any:
            self._leader.check_epoch(self._epoch)
            return await getattr(self._port, verb)(*arguments, **options)

        return call


def router_of(service: Service, journal: Path) -> Router:
    opened = SqliteJournal(journal)
    peers = FencedPeers(service.peers, opened.epoch)
    return Router(service._router_settings, service._planner, peers, journal=opened)


def hold_tokens(service: Service, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Keep what the decode ring's lead rank tells from its leader until the event: no turn ends before."""
    lead, may_tell = service.decode.ring.ranks[0], asyncio.Event()
    poll = lead.poll

    async def held(cursor: int, wait: float, timeout: float) -> Any:
        await may_tell.wait()
        return await poll(cursor, wait, timeout)

    monkeypatch.setattr(lead, "poll", held)
    return may_tell


async def test_a_router_that_was_replaced_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_model("llama_gqa", tmp_path / "model")
    service = Service(model, 2, 3, orphan_timeout=30.0)
    service.router = old = router_of(service, tmp_path / "journal")
    async with service:
        free = service.free_blocks()
        first = await service.answer(service.request(PROMPT, conversation="c", max_tokens=4))
        running = service.request(random_tokens(40), max_tokens=400)
        begun = await old.begin_turn(running)
        await eventually(lambda: service.decode.num_running == 1)
        may_tell = hold_tokens(service, monkeypatch)
        # No second router opens the journal of a live one: the file's lock is lost, on a network volume perhaps.
        shutil.copytree(tmp_path / "journal", tmp_path / "copy")
        service.router = router_of(service, tmp_path / "copy")
        service.router.restore()
        for leader in service.peers.leaders.values():
            await leader.announce()
        await eventually(lambda: service.router.num_running == 1)
        with pytest.raises(RingserveError):
            await old.delete_conversation("gone")
        held = service.free_blocks()
        await old.abort_requests([running.request_id])
        await old.delete_conversation("c")
        with pytest.raises(Unavailable):
            await old.begin_turn(service.request(PROMPT, max_tokens=4))
        assert service.router.num_running == 1
        assert service.decode.num_running == 1
        assert service.decode.ring.pool.num_retained("c") > 0
        assert sum(service.free_blocks()) <= sum(held), "it freed nothing"
        may_tell.set()
        tokens: list[int] = []
        async for event in service.decode.stream_turn(begun.turn_id):
            tokens.extend(getattr(event, "token_ids", ()))
        oracle = Oracle(model)
        assert tokens == oracle.greedy(random_tokens(40), 400)
        assert first.token_ids == oracle.greedy(PROMPT, 4)
        await eventually(lambda: service.router.num_running == 0)
        await service.router.delete_conversation("c")
        await is_idle(service, free)
        with pytest.raises(StaleIncarnation, match="epoch 2, which has replaced the one of epoch 1"):
            service.decode.check_epoch(1)
        await old.close()
