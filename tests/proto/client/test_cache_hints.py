"""Hints about the cache, as both Python clients send them."""

from __future__ import annotations

import asyncio

import pytest

from orchestration.protocol.turns import BegunTurn, TurnRequest
from ringserve.client import AsyncClient, Client, Sampling
from ringserve.client.requests import RequestOptions
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
