"""Several answers to one prompt: each is a turn, and their streams are merged into one."""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace

from orchestration.protocol.turns import TurnRequest
from ringserve.v1 import inference_pb2
from services.gateway.turn_stream import Responses

QUEUED_RESPONSES = 64
"""Responses that wait for a slow client before the turns' streams wait too."""


def turns_of(request: TurnRequest, num_completions: int) -> list[TurnRequest]:
    """Return one turn for each answer. The first is the request itself; the others ask for the answer alone."""
    others = [
        replace(
            request,
            request_id=f"{request.request_id}/{index}",
            sampling=replace(request.sampling, seed=derived_seed(request.sampling.seed, index), prompt_logprobs=None),
        )
        for index in range(1, num_completions)
    ]
    return [request, *others]


def derived_seed(seed: int, index: int) -> int:
    """Return the seed of answer `index`, 64 bits: the seed of answer 0 is the request's own."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(struct.pack("<QQ", seed, index), digest_size=8).digest()
    return int.from_bytes(digest, "little")


async def merged(turns: Sequence[AbstractAsyncContextManager[Responses]]) -> Responses:
    """Yield responses as they arrive: the first turn's `start`, then those of all turns but their starts.

    The first failure ends all turns, and so does closing the iterator: every context is left.
    """
    arrived: asyncio.Queue[inference_pb2.GenerateResponse | Exception | None] = asyncio.Queue(QUEUED_RESPONSES)

    async def pump(turn: AbstractAsyncContextManager[Responses]) -> None:
        try:
            async with turn as responses:
                async for response in responses:
                    if not response.HasField("start"):
                        await arrived.put(response)
            await arrived.put(None)
        except Exception as error:
            await arrived.put(error)

    async with turns[0] as first:
        yield await anext(first)
        running: list[AbstractAsyncContextManager[Responses]] = [nullcontext(first), *turns[1:]]
        pumps = [asyncio.create_task(pump(turn)) for turn in running]
        try:
            num_running = len(pumps)
            while num_running:
                response = await arrived.get()
                if isinstance(response, Exception):
                    raise response
                if response is None:
                    num_running -= 1
                else:
                    yield response
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
