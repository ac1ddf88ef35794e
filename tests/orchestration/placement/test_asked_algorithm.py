"""Turns that ask for an algorithm get it, with the same tokens; and learned corrections are shown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ringserve.orchestration.placement.costs import LEAST
from ringserve.orchestration.protocol.plans import PromptMode
from ringserve.services.offline.reference import StockModel
from ringserve.workers.protocol.steps import RING_ALGORITHMS, Algorithm
from tests.orchestration.service import Service
from tests.workers.models import random_tokens, save_model

NUM_NEW = (1, 2, 37)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
async def test_both_algorithms_give_the_tokens_of_transformers(tmp_path: Path, num_ranks: int) -> None:
    path = save_model("llama_gqa", tmp_path)
    stock = StockModel(path)
    async with Service(path, num_ranks, 2, selector="pass_kv") as service:
        for algorithm in RING_ALGORITHMS:
            history: list[int] = []
            for seed, length in enumerate(NUM_NEW):
                prompt = history + random_tokens(length, seed=seed)
                request = service.request(prompt, conversation=algorithm, mode=PromptMode.WHOLE_HISTORY)
                answer = await service.answer(replace(request, algorithm=algorithm))
                assert answer.token_ids == stock.greedy(prompt, len(answer.token_ids)).token_ids
                assert answer.begun.plan.algorithm is algorithm
                assert answer.begun.plan.reason.endswith(": the request asked for it")
                assert {chunk.algorithm for chunk in answer.report.chunks} == {algorithm}
                history = prompt + answer.token_ids
        service.check_integrity()


async def test_the_server_shows_what_rings_announced_and_how_their_turns_compare(tmp_path: Path) -> None:
    async with Service(save_model("llama_gqa", tmp_path), 2, 1, selector="pass_q") as service:
        for seed in range(LEAST):
            await service.answer(service.request(random_tokens(20, seed=seed), max_tokens=1))
        prefill, decode = (await service.router.get_server_info()).rings
    assert prefill.rates is not None
    assert prefill.rates.gemm_flops > 0
    assert prefill.capacity_tokens > 0
    assert [(each.algorithm, each.num_turns) for each in prefill.corrections] == [(Algorithm.PASS_Q, LEAST)]
    assert prefill.corrections[0].factor > 0
    assert prefill.corrections[0].factor != 1.0
    assert decode.corrections == ()
