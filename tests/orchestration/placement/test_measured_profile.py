"""Routers with a profile plan by it, and correct its predictions by the turns that run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ringserve.cp_core.cost.fit import PrefillSample, predicted_prefill
from ringserve.cp_core.cost.profile import HardwareProfile, format_profile, read_profile
from ringserve.orchestration.placement.costs import LEAST
from ringserve.orchestration.protocol.plans import PromptMode, TurnPlan
from ringserve.workers.protocol.steps import Algorithm
from tests.orchestration.service import Service
from tests.workers.models import random_tokens, save_model

NUM_RANKS = 2


def profile_in(directory: Path, **prefill: float) -> HardwareProfile:
    """Write a shipped profile with other constants to a file, and load it."""
    gtt = read_profile("gtt")
    path = directory / "measured.json"
    path.write_text(format_profile(replace(gtt, prefill=replace(gtt.prefill, **prefill))))
    return read_profile(str(path))


def predicted(service: Service, profile: HardwareProfile, plan: TurnPlan) -> float:
    """Predict the plan as it was cut, by the profile alone."""
    sample = PrefillSample(
        cp=NUM_RANKS,
        tp=1,
        algorithm=plan.algorithm,
        new_tokens=plan.new_tokens,
        cached_tokens=plan.cached_tokens,
        seconds=1.0,
        cuts=tuple(chunk.tokens.start for chunk in plan.chunks[1:]),
    )
    return predicted_prefill(service.model.shape, profile, sample)


@pytest.mark.parametrize(("link", "expected"), [(1e3, Algorithm.PASS_Q), (1e15, Algorithm.PASS_KV)])
async def test_links_of_the_profile_choose_the_algorithm_whatever_the_ring_measured(
    tmp_path: Path, link: float, expected: Algorithm
) -> None:
    profile = profile_in(tmp_path, link_bytes_per_second=link, all_to_all_bytes_per_second=link)
    async with Service(save_model("llama_gqa", tmp_path), NUM_RANKS, 1, profile=profile) as service:
        history = random_tokens(200, seed=0)
        first = await service.answer(service.request(history, conversation="a", mode=PromptMode.WHOLE_HISTORY))
        history += first.token_ids
        answer = await service.answer(service.request([*history, 1, 2], conversation="a"))
    plan = answer.begun.plan
    assert plan.algorithm is expected
    assert {chunk.algorithm for chunk in answer.report.chunks} == {expected}
    assert plan.predicted_prefill_seconds == pytest.approx(predicted(service, profile, plan))


async def test_a_profile_that_is_far_off_is_made_up_for_by_what_turns_took(tmp_path: Path) -> None:
    """Use a profile with a millionth of the real rates; after a few turns predictions are of the real size."""
    slow = profile_in(tmp_path, gemm_flops=1e4, attention_flops=1e4)
    measured = []
    async with Service(save_model("llama_gqa", tmp_path), NUM_RANKS, 1, selector="pass_kv", profile=slow) as service:
        for seed in range(LEAST + 1):
            answer = await service.answer(service.request(random_tokens(40, seed=seed), max_tokens=1))
            measured.append(answer.report.prefill_seconds)
            alone = predicted(service, slow, answer.begun.plan)
            if seed < LEAST:
                assert answer.begun.plan.predicted_prefill_seconds == pytest.approx(alone)
    assert alone > 100 * max(measured), "far off indeed"
    # A median of what the turns before took, which were of the same size.
    assert min(measured[:-1]) <= answer.begun.plan.predicted_prefill_seconds <= 1.001 * max(measured[:-1])
    assert answer.begun.plan.correction < 0.1
