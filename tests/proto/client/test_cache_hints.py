"""Hints about the cache, and bounds of approximate turns, as both Python clients send them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from ringserve.client import AsyncClient, Client, Sampling
from ringserve.client.requests import RequestOptions
from ringserve.cp_core.errors import InvalidRequest
from ringserve.orchestration.protocol.plans import Bound
from ringserve.orchestration.protocol.turns import BegunTurn, TurnRequest
from tests.services.local_gateway import LocalGateway
from tests.workers.models import Oracle

FIVE = Sampling(max_tokens=5, temperature=0.0)
PROMPT = [1, 2, 3]


async def test_hints_of_both_clients_reach_the_router(
    gateway: LocalGateway, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[tuple[bool, str]]()
    begin_turn = gateway.service.router.begin_turn

    async def begin(request: TurnRequest) -> BegunTurn:
        told.append((request.no_cache, request.cache_key))
        return await begin_turn(request)

    monkeypatch.setattr(gateway.service.router, "begin_turn", begin)
    hints: list[RequestOptions] = [{}, {"no_cache": True}, {"cache_key": "ada"}]
    expected = oracle.greedy(PROMPT, 5)
    async with AsyncClient(gateway.target) as client:
        for each in hints:
            answer = await client.ask(PROMPT, **(each | RequestOptions(sampling=FIVE)))
            assert list(answer.token_ids) == expected
    with Client(gateway.target) as in_thread:
        for each in hints:
            answer = await asyncio.to_thread(in_thread.ask, PROMPT, **(each | RequestOptions(sampling=FIVE)))
            assert list(answer.token_ids) == expected
    assert told[:2] == [(False, ""), (True, "")]
    assert told[2][1]
    assert told[3:] == told[:3]


async def test_bounds_of_both_clients_reach_the_router(gateway: LocalGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[Bound | None]()
    begin_turn = gateway.service.router.begin_turn

    async def begin(request: TurnRequest) -> BegunTurn:
        told.append(request.bound)
        return await begin_turn(replace(request, bound=None))

    monkeypatch.setattr(gateway.service.router, "begin_turn", begin)
    bounds: list[RequestOptions] = [{"max_loss": 0.5}, {"max_ttft": 2.0}, {"max_loss": 0.0}, {}]
    async with AsyncClient(gateway.target) as client:
        for each in bounds:
            answer = await client.ask(PROMPT, **(each | RequestOptions(sampling=FIVE)))
            assert answer.plan.sparse is None
    with Client(gateway.target) as in_thread:
        for each in bounds:
            await asyncio.to_thread(in_thread.ask, PROMPT, **(each | RequestOptions(sampling=FIVE)))
    loss = Bound(name="max_loss", limit=0.5)
    assert told == [loss, Bound(name="max_ttft", limit=2.0), replace(loss, limit=0.0), None] * 2


async def test_a_bound_without_measured_losses_is_refused_by_its_name(gateway: LocalGateway) -> None:
    async with AsyncClient(gateway.target) as client:
        with pytest.raises(InvalidRequest, match=r"max_ttft: 2 is not allowed, since no losses are known here"):
            await client.ask(PROMPT, max_ttft=2.0)
