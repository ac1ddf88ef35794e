"""Ranks of prompts that share a step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from ringserve.workers.protocol.steps import PrefillOutput, PrefillStep
from tests.orchestration.prefill.test_scheduling import FOLLOW_UP, MAX_TOKENS, answers
from tests.orchestration.service import Service
from tests.workers.models import Oracle, random_tokens


async def test_prompts_of_a_token_that_share_a_step_lie_on_all_ranks(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    prompts = [random_tokens(1, seed=number) for number in range(6)]
    async with Service(model_paths["llama_gqa"], 3, 2) as service:
        rank, steps = service.prefill_ranks.made[0], list[PrefillStep]()
        compute = rank.prefill

        async def noted(step: PrefillStep, timeout: float) -> PrefillOutput:
            steps.append(step)
            return await compute(step, timeout)

        rank.prefill = noted  # type: ignore[method-assign]
        done = await answers(service, [service.request(prompt, max_tokens=MAX_TOKENS) for prompt in prompts])
        service.check_integrity()
    assert [answer.token_ids for answer in done] == [oracles["llama_gqa"].greedy(each, MAX_TOKENS) for each in prompts]
    largest = max(steps, key=lambda step: len(step.sequences))
    tokens = [sum(sequence.layout.tokens_on(rank) for sequence in largest.sequences) for rank in range(3)]
    assert len(largest.sequences) > 1
    assert max(tokens) - min(tokens) <= 1


@pytest.mark.parametrize(("num_blocks", "lies_whole"), [(2048, True), (32, False)])
async def test_short_prompts_that_share_a_step_lie_whole_on_a_rank_each_where_it_has_room(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle], num_blocks: int, lies_whole: bool
) -> None:
    """Their conversations go on with shards that are as uneven as they can be, and the long prompt beside them too."""
    oracle, lengths = oracles["llama_gqa"], (91, 90, 89) if not lies_whole else (91, 90, 89, 600)
    prompts = [random_tokens(length, seed=length) for length in lengths]
    async with Service(model_paths["llama_gqa"], 3, 2, num_blocks=num_blocks, decode_blocks=2048) as service:
        rank, steps = service.prefill_ranks.made[0], list[PrefillStep]()
        compute = rank.prefill

        async def noted(step: PrefillStep, timeout: float) -> PrefillOutput:
            steps.append(step)
            return await compute(step, timeout)

        rank.prefill = noted  # type: ignore[method-assign]
        requests = [service.request(prompt, conversation=str(len(prompt)), max_tokens=MAX_TOKENS) for prompt in prompts]
        for prompt, answer in zip(prompts, await answers(service, requests), strict=True):
            assert answer.token_ids == oracle.greedy(prompt, MAX_TOKENS)
        shared = max(steps, key=lambda step: len(step.sequences)).sequences
        used = [sum(bool(each.layout.tokens_on(rank)) for rank in range(3)) for each in shared[:3]]
        assert (used == [1, 1, 1]) == lies_whole
        assert bool(service.prefill.layout_fallbacks["spread"]) != lies_whole
        for prompt in prompts:
            history = prompt + oracle.greedy(prompt, MAX_TOKENS) + random_tokens(FOLLOW_UP)
            again = service.request(history, conversation=str(len(prompt)), max_tokens=MAX_TOKENS)
            assert (await service.answer(again)).token_ids == oracle.greedy(history, MAX_TOKENS)
        service.check_integrity()
