"""Prompts of running turns: others that begin alike wait for them where that is sooner, and share them at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ringserve.cp_core.cost.profile import HardwareProfile, read_profile
from ringserve.cp_core.errors import TurnCancelled
from ringserve.orchestration.protocol.turns import TurnRequest
from ringserve.orchestration.router import admission, lifecycle
from tests.orchestration.service import Answer, Service
from tests.waiting import eventually
from tests.workers.models import Oracle, random_tokens

MODEL = "llama_gqa"
MAX_TOKENS = 5
DOCUMENT = random_tokens(90, 3)
Models = Mapping[str, Path]
Oracles = Mapping[str, Oracle]


def profile(**prefill: float) -> HardwareProfile:
    """Return rates that do not depend on how busy the machine is."""
    gtt = read_profile("gtt")
    return replace(gtt, prefill=replace(gtt.prefill, **prefill))


SLOW_PRODUCTS = profile(gemm_flops=1e4, attention_flops=1e4)
"""Time goes by tokens: who waits computes less."""
SLOW_STARTS = profile(layer_overhead_seconds=10.0)
"""A step takes as long for a few tokens as for many: who waits loses a step."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no turn lose patience because the machine is busy."""
    monkeypatch.setattr(admission, "LEAST_PATIENCE_SECONDS", 60.0)


@asynccontextmanager
async def serving(
    model_paths: Models, num_prefill: int = 2, num_decode: int = 3, **settings: Any
) -> AsyncIterator[Service]:
    made: dict[str, Any] = {"retain_prompts": True, "profile": SLOW_PRODUCTS} | settings
    async with Service(model_paths[MODEL], num_prefill, num_decode, **made) as service:
        yield service
        await eventually(lambda: service.router.num_running == 0)
        service.check_integrity()
        assert service.router.prefixes is not None
        assert not service.router.prefixes._running
        assert not service.router.prefixes._under_way


def computed(answers: list[Answer]) -> int:
    return sum(len(chunk.tokens) for answer in answers for chunk in answer.report.chunks)


def is_computed(service: Service, request_id: str) -> bool:
    assert service.router.prefixes is not None
    prompt = service.router.prefixes.of_request(request_id)
    return prompt is not None and prompt.places is not None


def waits_of(service: Service) -> int:
    assert service.router._prompt_waits is not None
    return len(service.router._prompt_waits._waiting)


def begin(service: Service, request: TurnRequest) -> asyncio.Task[Answer]:
    return asyncio.create_task(service.answer(request))


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(2, 3), (3, 1)])
async def test_prompts_that_arrive_together_compute_what_they_share_once(
    num_prefill: int, num_decode: int, model_paths: Models, oracles: Oracles
) -> None:
    prompts = [DOCUMENT + random_tokens(3 + number, 10 + number) for number in range(5)]
    async with serving(model_paths, num_prefill, num_decode, chunk_tokens=32) as service:
        answers = await asyncio.gather(*(service.answer(service.request(prompt)) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == oracles[MODEL].greedy(prompt, MAX_TOKENS)
    assert computed(answers) == len(DOCUMENT) + sum(len(prompt) - len(DOCUMENT) for prompt in prompts)


async def test_a_prompt_is_shared_though_its_turn_ended_before_the_router_heard_that_it_was_computed(
    model_paths: Models, oracles: Oracles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "_note_computed", lambda turn, task: None)
    prompts = [DOCUMENT + random_tokens(3 + number, 10 + number) for number in range(2)]
    async with serving(model_paths, chunk_tokens=32) as service:
        answers = await asyncio.gather(*(service.answer(service.request(prompt)) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == oracles[MODEL].greedy(prompt, MAX_TOKENS)
    assert computed(answers) == len(DOCUMENT) + sum(len(prompt) - len(DOCUMENT) for prompt in prompts)


async def test_a_follower_waits_for_the_prompt_that_it_names(model_paths: Models, oracles: Oracles) -> None:
    prompt = random_tokens(20, 1)
    async with serving(model_paths, other_prefill=[2]) as service:
        first = service.request(prompt)
        others = [replace(service.request(prompt), follows=first.request_id) for _ in range(3)]
        answers = await asyncio.gather(*map(service.answer, (first, *others)))
        assert [answer.token_ids for answer in answers] == [oracles[MODEL].greedy(prompt, MAX_TOKENS)] * 4
        assert computed(answers) == len(prompt) + 3
        alone = await service.answer(replace(service.request(random_tokens(20, 2)), follows="nobody"))
        assert alone.begun.plan.cached_tokens == 0


async def test_the_prompt_of_a_turn_that_still_decodes_is_shared_also_when_it_is_cancelled(
    model_paths: Models, oracles: Oracles
) -> None:
    async with serving(model_paths) as service:
        for number, is_cancelled in enumerate((False, True)):
            document = random_tokens(50, 20 + number)
            first = service.request(document, max_tokens=80)
            running = begin(service, first)
            await eventually(partial(is_computed, service, first.request_id))
            follow_up = document + random_tokens(7, number)
            second = begin(service, service.request(follow_up, max_tokens=30))
            if is_cancelled:
                await service.router.abort_requests([first.request_id])
                with pytest.raises(TurnCancelled):
                    await running
            else:
                assert (await running).token_ids == oracles[MODEL].greedy(document, 80)
            answer = await second
            assert answer.token_ids == oracles[MODEL].greedy(follow_up, 30)
            assert is_cancelled or answer.begun.plan.cached_tokens == len(document)


async def test_waiting_turns_go_on_by_themselves_when_the_first_is_cancelled(
    model_paths: Models, oracles: Oracles
) -> None:
    document = random_tokens(300, 5)
    async with serving(model_paths, chunk_tokens=8) as service:
        first = service.request(document)
        running = begin(service, first)
        await eventually(lambda: service.router.num_running == 1)
        prompts = [[*document, number] for number in range(3)]
        waiting = [begin(service, service.request(prompt)) for prompt in prompts]
        await eventually(lambda: waits_of(service) == 3)
        await service.router.abort_requests([first.request_id])
        with pytest.raises(TurnCancelled):
            await running
        answers = await asyncio.gather(*waiting)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == oracles[MODEL].greedy(prompt, MAX_TOKENS)
        assert computed(answers) == len(document) + 3, "one of them computes, and the others wait for that one"


async def test_a_turn_that_waits_for_a_prompt_can_be_aborted(model_paths: Models) -> None:
    async with serving(model_paths, chunk_tokens=8) as service:
        document = random_tokens(300, 5)
        first, second = service.request(document), service.request([*document, 1], conversation="c")
        running, waiting = begin(service, first), begin(service, second)
        await eventually(lambda: waits_of(service) == 1)
        assert service.router._is_known(second.request_id)
        assert await service.router.abort_requests([second.request_id]) == ([second.request_id], [])
        with pytest.raises(TurnCancelled):
            await waiting
        assert not service.router._conversations.is_known("c")
        await service.router.abort_requests([first.request_id])
        with pytest.raises(TurnCancelled):
            await running


async def test_a_turn_does_not_wait_much_longer_than_predicted(
    model_paths: Models, oracles: Oracles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "LEAST_PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(admission, "PATIENCE", 0.0)
    async with serving(model_paths, chunk_tokens=32) as service:
        prompts = [[*DOCUMENT, number] for number in range(2)]
        answers = await asyncio.gather(*(service.answer(service.request(prompt)) for prompt in prompts))
    assert computed(answers) == 2 * (len(DOCUMENT) + 1)
    assert [answer.token_ids for answer in answers] == [oracles[MODEL].greedy(each, MAX_TOKENS) for each in prompts]


async def test_a_turn_computes_its_prompt_itself_where_waiting_is_not_sooner(
    model_paths: Models, oracles: Oracles
) -> None:
    async with serving(model_paths, chunk_tokens=32, profile=SLOW_STARTS, other_prefill=[2]) as service:
        prompts = [[*DOCUMENT, number] for number in range(2)]
        answers = await asyncio.gather(*(service.answer(service.request(prompt)) for prompt in prompts))
    assert computed(answers) == 2 * (len(DOCUMENT) + 1)
    assert [answer.token_ids for answer in answers] == [oracles[MODEL].greedy(each, MAX_TOKENS) for each in prompts]
