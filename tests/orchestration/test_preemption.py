"""More turns than a decode ring has KV for: they grow, give way and come back, and no client can tell."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.orchestration.service import Answer, Service
from tests.orchestration.test_turn_failures import is_idle
from tests.workers.models import Oracle, random_tokens

LENGTHS = (21, 5, 34, 13)
MAX_TOKENS = (60, 66, 52, 40)
HEADROOM = 8


def small_service(path: Path, num_prefill: int, num_decode: int, **options: int | bool) -> Service:
    """Decode blocks for about two of the four turns whole, on as many ranks as there are."""
    return Service(
        path,
        num_prefill,
        num_decode,
        num_blocks=128,
        decode_blocks=48 // num_decode,
        headroom_tokens=HEADROOM,
        **options,  # type: ignore[arg-type]
    )


async def answer_all(service: Service, **sampling: float) -> list[Answer]:
    """The turns all at once: the first is the oldest."""
    requests = [
        service.request(random_tokens(length, seed=length), max_tokens=count, **sampling)  # type: ignore[arg-type]
        for length, count in zip(LENGTHS, MAX_TOKENS, strict=True)
    ]
    return list(await asyncio.gather(*(service.answer(request) for request in requests)))


@pytest.mark.parametrize("num_decode", [1, 2, 3])
@pytest.mark.parametrize("num_prefill", [1, 2, 3])
async def test_turns_that_gave_way_answer_as_transformers_does(
    num_prefill: int, num_decode: int, model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    async with small_service(model_paths["llama_gqa"], num_prefill, num_decode) as service:
        free = service.free_blocks()
        answers = await answer_all(service)
        assert service.decode.num_preemptions > 0
        assert (await service.decode.get_status()).num_preemptions == service.decode.num_preemptions
        await is_idle(service, free)
    for length, count, answer in zip(LENGTHS, MAX_TOKENS, answers, strict=True):
        assert answer.token_ids == oracles["llama_gqa"].greedy(random_tokens(length, seed=length), count)


async def test_drawn_tokens_are_the_same_with_and_without_preemption(model_paths: Mapping[str, Path]) -> None:
    path = model_paths["llama_gqa"]
    async with small_service(path, 2, 2) as service:
        preempted = await answer_all(service, temperature=0.9, seed=11)
        assert service.decode.num_preemptions > 0
    async with Service(path, 2, 2, preemption=False) as service:
        undisturbed = await answer_all(service, temperature=0.9, seed=11)
        assert service.decode.num_preemptions == 0
    assert [answer.token_ids for answer in preempted] == [answer.token_ids for answer in undisturbed]
