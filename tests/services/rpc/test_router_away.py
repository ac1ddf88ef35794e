"""Calls of a gateway while no router listens: it is started again in place, and no client hears of it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from ringserve.cp_core.errors import NotBegun, NotFound, Unavailable, Unreachable
from ringserve.orchestration.protocol.plans import PromptMode
from ringserve.orchestration.protocol.turns import BegunTurn, LostTurn, TurnRequest
from ringserve.services.gateway import turn_stream
from ringserve.services.gateway.turn_stream import begin_with_retries
from ringserve.services.rpc.peers import GrpcPeers
from ringserve.services.rpc.server import GrpcServer
from ringserve.services.rpc.servicers import RouterServicer
from ringserve.workers.sampling.parameters import SamplingParameters
from tests.services.gateway.test_turn_stream import PLAN
from tests.waiting import eventually

REQUEST = TurnRequest(
    request_id="r",
    conversation_id="c",
    prompt_mode=PromptMode.AUTO,
    token_ids=np.arange(3),
    sampling=SamplingParameters(seed=3),
    deadline_seconds=60.0,
)
BEGUN = BegunTurn(turn_id="t", decode_endpoint="d", prompt_tokens=3, plan=PLAN)


class Router:
    """Router that notes its calls. The call in which it `dies` gets no answer."""

    def __init__(self) -> None:
        self.begun: list[TurnRequest] = []
        self.deleted: list[str] = []
        self.dies = asyncio.Event()
        self.is_asked = asyncio.Event()

    async def begin_turn(self, request: TurnRequest) -> BegunTurn:
        self.begun.append(request)
        await self._answer()
        return BEGUN

    async def delete_conversation(self, conversation_id: str) -> None:
        self.deleted.append(conversation_id)
        await self._answer()
        if len(self.deleted) > 1:
            raise NotFound("it is deleted already")

    async def _answer(self) -> None:
        self.is_asked.set()
        if self.dies.is_set():
            await asyncio.Event().wait()

    def planned(self, call: Any) -> Any:
        return call


async def serving(router: Any, address: str = "127.0.0.1:0") -> tuple[GrpcServer, str]:
    server = GrpcServer()
    RouterServicer(router, router).register(server)
    return server, await server.start(address)


async def test_calls_wait_for_a_router_that_is_started_again() -> None:
    """One call is under way when the router dies, so the next is asked for the turn that may run."""
    router = Router()
    router.dies.set()
    server, address = await serving(router)
    peers = GrpcPeers(router_patience=60.0)
    port = peers.router(address)
    calls = [
        asyncio.create_task(begin_with_retries(port.begin_turn, REQUEST)),
        asyncio.create_task(port.delete_conversation("c")),
    ]
    await eventually(lambda: bool(router.begun and router.deleted))
    await server.stop(0)
    later = asyncio.create_task(begin_with_retries(port.begin_turn, REQUEST))
    router.dies.clear()
    server, _ = await serving(router, address)
    begun, _ = await asyncio.gather(*calls)
    assert begun == await later == BEGUN
    assert router.deleted == ["c", "c"]
    first, *others = router.begun
    assert first.resume is None
    assert any(each.resume == LostTurn() for each in others)
    await peers.close()
    await server.stop(0)


async def test_what_a_router_refuses_is_not_asked_again_and_one_that_stays_away_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turn_stream, "ROUTER_SECONDS", 0.05)
    monkeypatch.setattr(turn_stream, "ROUTER_PAUSE_SECONDS", 0.01)
    calls = 0

    async def refuse(request: TurnRequest) -> BegunTurn:
        nonlocal calls
        calls += 1
        raise NotBegun("no ring")

    with pytest.raises(NotBegun):
        await begin_with_retries(refuse, REQUEST)
    assert calls == 1

    async def fail(request: TurnRequest) -> BegunTurn:
        raise Unreachable("no router listens")

    with pytest.raises(Unavailable, match="no router listens"):
        await begin_with_retries(fail, REQUEST)
