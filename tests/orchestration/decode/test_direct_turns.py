"""Turns whose decode ring computes the prompt itself give the tokens of transformers after any history."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from ringserve.orchestration.protocol.plans import PromptMode
from ringserve.workers.protocol.steps import Algorithm
from ringserve.workers.sampling.parameters import SamplingParameters
from tests.orchestration.service import BLOCK_TOKENS, Answer, Service
from tests.workers.models import Oracle, random_tokens

RING_SIZES = (1, 2, 3)
# Less than a token a rank, then shards that are uneven on every ring.
LENGTHS = (1, 2, 65, 257)
FOLLOW_UPS = (1, 7, 2, 13)
MAX_TOKENS = 5
DIRECT = Algorithm.DECODE_RING

Models = Mapping[str, Path]
Oracles = Mapping[str, Oracle]


async def follow(
    service: Service, new: list[int], *, algorithm: Algorithm | None = DIRECT, **options: object
) -> Answer:
    """Run one more turn of conversation "c"."""
    request = service.request(new, conversation="c", mode=PromptMode.APPEND, max_tokens=MAX_TOKENS)
    return await service.answer(replace(request, algorithm=algorithm, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("num_decode", RING_SIZES)
@pytest.mark.parametrize(("kind", "num_prefill"), [("llama_gqa", 2), ("qwen3", 1)])
async def test_follow_ups_computed_by_the_decode_ring_are_exact(
    kind: str, num_prefill: int, num_decode: int, model_paths: Models, oracles: Oracles
) -> None:
    async with Service(model_paths[kind], num_prefill, num_decode, max_direct_tokens=16) as service:
        before = service.free_blocks()
        for length in LENGTHS:
            history = random_tokens(length, seed=length)
            first = await service.answer(service.request(history, conversation="c", max_tokens=MAX_TOKENS))
            history += first.token_ids
            for number, size in enumerate(FOLLOW_UPS):
                new = random_tokens(size, seed=1000 * length + number)
                answer = await follow(service, new)
                plan = answer.begun.plan
                assert answer.token_ids == oracles[kind].greedy([*history, *new], MAX_TOKENS), (length, size)
                assert (plan.algorithm, plan.prefill_ring, plan.prefill_ranks) == (DIRECT, "decode-0", num_decode)
                # The answer's last token has no KV yet.
                assert (plan.cached_tokens, plan.new_tokens) == (len(history) - 1, size + 1)
                assert [chunk.algorithm for chunk in answer.report.chunks] == [DIRECT]
                assert answer.report.prefill_seconds > 0
                assert (answer.report.pulled_bytes, answer.finished.migrated_bytes) == (0, 0)
                history += new + answer.token_ids
            placements = {place.role: place for place in (await service.router.get_conversation("c")).placements}
            # The prefill ring lags behind: it retains what it computed.
            assert placements["prefill"].num_tokens == length
            held = [rank.num_tokens for rank in placements["decode"].ranks]
            assert sum(held) == len(history) - 1
            assert max(held) - min(held) <= BLOCK_TOKENS
            await service.router.delete_conversation("c")
        service.check_integrity()
        assert service.free_blocks() == before


async def test_a_later_turn_of_many_tokens_pulls_what_the_prefill_ring_missed(
    model_paths: Models, oracles: Oracles
) -> None:
    oracle = oracles["llama_gqa"]
    async with Service(model_paths["llama_gqa"], 2, 3, selector="auto", max_direct_tokens=16) as service:
        history = random_tokens(50)
        history += (await service.answer(service.request(history, conversation="c"))).token_ids
        for number in range(3):
            new = random_tokens(6, seed=number)
            history += new + (await follow(service, new)).token_ids
        new = random_tokens(90, seed=9)
        answer = await follow(service, new, algorithm=None)
        plan = answer.begun.plan
        assert answer.token_ids == oracle.greedy([*history, *new], MAX_TOKENS)
        assert plan.algorithm is not DIRECT
        assert [(item.source, len(item.tokens)) for item in plan.cached_sources] == [
            ("kept_on_prefill", 50),
            ("pulled_from_decode", len(history) - 1 - 50),
        ]
        assert answer.report.pulled_bytes > 0
        history += new + answer.token_ids
        # The decode ring continues over KV that came by the hand-off.
        last = await follow(service, [7, 8, 9])
        assert last.token_ids == oracle.greedy([*history, 7, 8, 9], MAX_TOKENS)
        service.check_integrity()


async def test_an_edited_history_uses_nothing_that_disagrees_on_either_ring(
    model_paths: Models, oracles: Oracles
) -> None:
    """The prefill ring still holds the old tokens after the edit; a later turn over it must not take them."""
    oracle = oracles["llama_gqa"]
    async with Service(model_paths["llama_gqa"], 2, 3, max_direct_tokens=16) as service:
        prompt = random_tokens(60)
        first = await service.answer(service.request(prompt, conversation="c"))
        history = [*prompt, *first.token_ids]
        edited = [*history[:50], (history[50] + 1) % 300, 5, 6]
        whole = PromptMode.WHOLE_HISTORY
        answer = await follow(service, edited, prompt_mode=whole)
        assert answer.begun.plan.cached_tokens == 50
        assert answer.token_ids == oracle.greedy(edited, MAX_TOKENS)
        placements = {place.role: place for place in (await service.router.get_conversation("c")).placements}
        assert placements["prefill"].num_tokens == 50
        # A fork shares the prefill ring's matching KV, and a long turn of either conversation uses it.
        history = [*edited, *answer.token_ids]
        fork = await service.router.fork_conversation("c", "fork", None)
        assert {place.role: place.num_tokens for place in fork.placements} == {
            "prefill": 50,
            "decode": len(history) - 1,
        }
        for name in ("c", "fork"):
            longer = [*history, *random_tokens(40, seed=1)]
            request = replace(service.request(longer, conversation=name), algorithm=Algorithm.PASS_KV)
            again = await service.answer(request)
            assert again.begun.plan.cached_tokens == len(history) - 1, "the prefill ring's 50, and what was pulled"
            assert again.token_ids == oracle.greedy(longer, MAX_TOKENS)
            longer += [*again.token_ids, 8, 9]
            direct = await service.answer(replace(service.request(longer, conversation=name), algorithm=DIRECT))
            assert direct.token_ids == oracle.greedy(longer, MAX_TOKENS)
        service.check_integrity()


async def test_forks_go_on_apart_and_share_no_block_that_is_written(model_paths: Models, oracles: Oracles) -> None:
    oracle = oracles["llama_gqa"]
    async with Service(model_paths["llama_gqa"], 2, 3, max_direct_tokens=16) as service:
        history = random_tokens(33)
        history += (await service.answer(service.request(history, conversation="c"))).token_ids
        await service.router.fork_conversation("c", "fork", None)
        requests = [
            replace(
                service.request(random_tokens(5, seed=seed), conversation=name, mode=PromptMode.APPEND),
                algorithm=DIRECT,
            )
            for seed, name in enumerate(("c", "fork"))
        ]
        answers = await asyncio.gather(*(service.answer(request) for request in requests))
        for seed, answer in enumerate(answers):
            assert answer.begun.plan.algorithm is DIRECT
            assert answer.token_ids == oracle.greedy([*history, *random_tokens(5, seed=seed)], MAX_TOKENS)
        service.check_integrity()


async def test_sampling_logprobs_stops_and_early_ends_are_as_over_a_prefill_ring(model_paths: Models) -> None:
    sampling = SamplingParameters(
        temperature=1.1, seed=5, repetition_penalty=1.2, presence_penalty=0.3, logprobs=2, max_tokens=12
    )
    prompt, new = random_tokens(41), random_tokens(6, seed=1)
    answers: list[Answer] = []
    for algorithm in (Algorithm.PASS_Q, DIRECT):
        async with Service(model_paths["llama_gqa"], 2, 3, max_direct_tokens=16) as service:
            await service.answer(service.request(prompt, conversation="c"))
            request = service.request(new, conversation="c", mode=PromptMode.APPEND, sampling=sampling)
            answers.append(await service.answer(replace(request, algorithm=algorithm)))
            # One turn stops at its first token; the reader of the other finds that its text has ended.
            stop = SamplingParameters(max_tokens=9, stop_token_ids=tuple(range(300)))
            for number, each in enumerate((stop, SamplingParameters(max_tokens=9, ends_by_text=True))):
                request = service.request([3, 4], conversation="c", mode=PromptMode.APPEND, sampling=each)
                asked = replace(request, algorithm=algorithm)
                answers.append(await service.answer(asked, finish_after=2 if number else None))
            history = (await service.router.get_conversation("c")).num_tokens
            assert history == 41 + 5 + 6 + 12 + 2 + 1 + 2 + 2
            service.check_integrity()
    for over_prefill, direct in zip(answers[:3], answers[3:], strict=True):
        assert direct.token_ids == over_prefill.token_ids
        assert direct.finished.finish_reason == over_prefill.finished.finish_reason
        assert [each.top_ids for each in direct.logprobs] == [each.top_ids for each in over_prefill.logprobs]
        for one, other in zip(direct.logprobs, over_prefill.logprobs, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


async def test_turns_of_many_conversations_mix_with_those_that_decode(model_paths: Models, oracles: Oracles) -> None:
    oracle = oracles["llama_gqa"]
    async with Service(model_paths["llama_gqa"], 2, 3, max_direct_tokens=16, max_batch=4) as service:
        names = [f"c{number}" for number in range(8)]
        histories = {name: random_tokens(20 + number, seed=number) for number, name in enumerate(names)}

        async def turn(name: str, prompt: list[int], algorithm: Algorithm | None, max_tokens: int) -> None:
            request = service.request(prompt, conversation=name, max_tokens=max_tokens)
            answer = await service.answer(replace(request, algorithm=algorithm))
            assert answer.token_ids == oracle.greedy(prompt, max_tokens), name
            histories[name] = [*prompt, *answer.token_ids]

        await asyncio.gather(*(turn(name, histories[name], None, 4) for name in names))
        for number in range(3):
            # Some over the prefill ring, most by the decode ring, one batch of both.
            await asyncio.gather(
                *(
                    turn(
                        name,
                        histories[name] + random_tokens(1 + place, seed=100 * number + place),
                        Algorithm.PASS_Q if (place + number) % 3 == 0 else DIRECT,
                        3 + place,
                    )
                    for place, name in enumerate(names)
                )
            )
        service.check_integrity()
