"""A turn whose logits are not finite fails alone: other turns of its batch and its rings go on."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from ringserve.cp_core.cost.decode import GATHER, HELIX
from ringserve.cp_core.cost.model import PASS_Q
from ringserve.cp_core.errors import NotFinite
from ringserve.workers.sampling.parameters import SamplingParameters, TokenBias
from tests.orchestration.service import Service
from tests.workers.models import random_tokens
from tests.workers.thread_ranks import ThreadRanks

BAD = 7
"""Token whose embedding is damaged on some ranks."""

FAILED = "are not finite .NaN or infinite., so the turn has failed; the same request would fail again"
Models = Mapping[str, Path]


def damage(ranks: ThreadRanks) -> None:
    for rank in ranks.made:
        embedding = rank.worker.parts.model.model.get_input_embeddings()
        with torch.no_grad():
            embedding.weight[BAD] = torch.nan


def good_prompt(seed: int = 0) -> list[int]:
    return [token if token != BAD else BAD + 1 for token in random_tokens(20, seed=seed)]


async def check_rings_go_on(service: Service, prompt: list[int], expected: list[int], free: list[int]) -> None:
    assert (await service.answer(service.request(prompt))).token_ids == expected
    assert [leader.ring.rebuilds for leader in service.peers.leaders.values()] == [0, 0]
    assert service.free_blocks() == free
    service.check_integrity()


@pytest.mark.parametrize("max_direct_tokens", [0, 4096], ids=["prefill ring", "decode ring"])
async def test_a_prompt_with_a_broken_token_fails_its_turn_alone(max_direct_tokens: int, model_paths: Models) -> None:
    prompt = good_prompt()
    async with Service(model_paths["llama_gqa"], 2, 2, max_direct_tokens=max_direct_tokens) as service:
        expected = (await service.answer(service.request(prompt))).token_ids
        free = service.free_blocks()
        damage(service.prefill_ranks)
        damage(service.decode_ranks)
        broken = [*prompt[:9], BAD, *prompt[9:]]
        answers = await asyncio.gather(
            service.answer(service.request(broken)),
            service.answer(service.request(prompt)),
            return_exceptions=True,
        )
        assert isinstance(answers[0], NotFinite), answers[0]
        with pytest.raises(NotFinite, match=f"the model's logits for position 21 of turn .* {FAILED}"):
            await service.answer(service.request(broken))
        assert not isinstance(answers[1], BaseException), answers[1]
        assert answers[1].token_ids == expected
        await check_rings_go_on(service, prompt, expected, free)


@pytest.mark.parametrize("variant", [GATHER, PASS_Q, HELIX])
async def test_a_row_that_breaks_in_the_batch_ends_its_turn_alone(variant: str, model_paths: Models) -> None:
    prompt = good_prompt()
    async with Service(model_paths["llama_gqa"], 1, 2, decode_variant=variant) as service:
        expected = (await service.answer(service.request(prompt, max_tokens=12))).token_ids
        assert BAD not in expected
        free = service.free_blocks()
        damage(service.decode_ranks)
        bias = (TokenBias(token_id=BAD, bias=100.0),)
        breaking = [SamplingParameters(max_tokens=12, logit_bias=bias, logprobs=top) for top in (None, 2)]
        answers = await asyncio.gather(
            service.answer(service.request(prompt, max_tokens=12)),
            *(service.answer(service.request(good_prompt(1), sampling=sampling)) for sampling in breaking),
            return_exceptions=True,
        )
        assert not isinstance(answers[0], BaseException), answers[0]
        assert answers[0].token_ids == expected
        assert [type(answer) for answer in answers[1:]] == [NotFinite, NotFinite]
        await check_rings_go_on(service, prompt, expected[:5], free)


async def test_a_conversation_goes_on_after_a_turn_that_was_not_finite(model_paths: Models) -> None:
    prompt = good_prompt()
    async with Service(model_paths["llama_gqa"], 1, 1) as service:
        first = await service.answer(service.request(prompt, conversation="c"))
        damage(service.prefill_ranks)
        history = [*prompt, *first.token_ids]
        with pytest.raises(NotFinite):
            await service.answer(service.request([*history, BAD], conversation="c"))
        second = await service.answer(service.request([*history, BAD + 1], conversation="c"))
        assert second.begun.plan.cached_tokens >= len(prompt), "the KV of the first turn is still there"
