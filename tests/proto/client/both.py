"""Clients of both kinds, called alike."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from ringserve.client import AsyncClient, Client, RetryPolicy
from tests.services.local_gateway import LocalGateway

QUICK = RetryPolicy(max_attempts=3, first_delay_seconds=0.02, max_delay_seconds=0.1)


class InThreads:
    """`Client`, its stream or its conversation in worker threads, called as those of `AsyncClient` are."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._real, name)
        if not callable(attribute):
            return attribute
        if name in ("stream", "talk"):
            return lambda *values, **options: InThreads(attribute(*values, **options))
        return lambda *values, **options: asyncio.to_thread(attribute, *values, **options)

    async def __aenter__(self) -> InThreads:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._real.close)

    def __aiter__(self) -> InThreads:
        return self

    async def __anext__(self) -> Any:
        piece = await asyncio.to_thread(next, self._real, None)
        if piece is None:
            raise StopAsyncIteration
        return piece


@pytest.fixture(params=["asyncio", "threads"])
async def client(gateway: LocalGateway, request: pytest.FixtureRequest) -> AsyncIterator[AsyncClient]:
    """Return a client of either kind."""
    real: Any = AsyncClient if request.param == "asyncio" else lambda *v, **o: InThreads(Client(*v, **o))
    async with real(gateway.target, retry=QUICK) as client:
        yield client
