"""Preempted turns are sampled, scored and finished as if they had never left the batch."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from ringserve.workers.sampling.parameters import SamplingParameters
from tests.orchestration.decode.test_preemption import LENGTHS, MAX_TOKENS, small_service
from tests.orchestration.service import Answer, Service, is_idle
from tests.workers.models import VOCAB_SIZE, random_tokens

FINISHES = (40, None, 33, 40)


async def answer_all(service: Service, *, ends_by_text: bool) -> list[Answer]:
    """Run the turns concurrently, the first being the oldest. The readers finish some before they end."""
    turns = []
    for number, (length, count, finish) in enumerate(zip(LENGTHS, MAX_TOKENS, FINISHES, strict=True)):
        sampling = SamplingParameters(
            max_tokens=count,
            temperature=0.9,
            seed=number,
            top_p=0.95,
            repetition_penalty=1.2,
            presence_penalty=0.5,
            frequency_penalty=0.5,
            min_tokens=30,
            stop_token_ids=tuple(range(0, VOCAB_SIZE, 30)),
            logprobs=2,
            prompt_logprobs=1,
            ends_by_text=ends_by_text,
        )
        request = service.request(random_tokens(length, seed=length), sampling=sampling)
        turns.append(service.answer(request, finish_after=finish if ends_by_text else None))
    return list(await asyncio.gather(*turns))


@pytest.mark.parametrize("ends_by_text", [False, True])
async def test_tokens_and_log_probabilities_are_those_of_turns_that_stayed(
    ends_by_text: bool, model_paths: Mapping[str, Path]
) -> None:
    async with small_service(model_paths["llama_gqa"], 2, 3) as service:
        free = service.free_blocks()
        found = await answer_all(service, ends_by_text=ends_by_text)
        assert service.decode.num_preemptions > 0
        await is_idle(service, free)
    async with Service(model_paths["llama_gqa"], 2, 2) as service:
        stayed = await answer_all(service, ends_by_text=False)
    for answer, wanted, length, finish in zip(found, stayed, LENGTHS, FINISHES, strict=True):
        counted = finish if ends_by_text else None
        assert answer.token_ids == wanted.token_ids[:counted]
        assert [each.token_id for each in answer.logprobs] == answer.token_ids
        for one, other in zip(answer.logprobs, wanted.logprobs[:counted], strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert one.top_ids == other.top_ids
        assert [each.token_id for each in answer.prompt_logprobs] == random_tokens(length, seed=length)[1:]
