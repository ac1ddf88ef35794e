"""Rings of several sizes on one machine: each prompt goes to the ring of its size, and any ring may die."""

from __future__ import annotations

import json
import urllib.request

import psutil
import pytest

from ringserve.client import Client, RingInfo
from ringserve.cp_core.cost.fit import PrefillSample, predicted_prefill
from ringserve.cp_core.cost.profile import HardwareProfile
from ringserve.mapping import enum_name
from ringserve.orchestration.placement.placer import LEAVE_SECONDS, TIE
from ringserve.services.offline.calibration.fitting import shape_of
from ringserve.services.offline.reference import StockModel
from ringserve.v1 import inference_pb2
from tests.services.e2e.cluster import Cluster, Inference, ids, kill, wait_until
from tests.waiting import WAIT_SECONDS
from tests.workers.models import random_tokens

RINGS = {"prefill-0": 1, "prefill-long-0": 2, "decode-0": 1, "decode-wide-0": 2}
"""Ranks by name."""
SHORT, LONG = 20, 1500
NUM_TOKENS = 800


def ring(inference: Inference, name: str) -> RingInfo:
    return next(ring for ring in inference.info().rings if ring.name == name)


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    return random_tokens(num_tokens, seed=seed)


def check_worth(plan: inference_pb2.Plan) -> None:
    """Check that a turn went to the prefill ring that its plan predicts to be faster.

    Times measured on a busy machine correct the predictions, so either ring may be the faster one.
    """
    seconds = {each.ring: each.total_seconds for each in plan.ring_alternatives}
    least = min(seconds[name] for name in ("prefill-0", "prefill-long-0"))
    assert seconds[plan.prefill_ring] <= (1 + TIE) * least + LEAVE_SECONDS, plan.reason


def test_every_ring_is_shown_with_its_size_and_serves_its_metrics(several: Cluster, inference: Inference) -> None:
    assert {ring.name: ring.num_ranks for ring in inference.info().rings} == RINGS
    shown = several.ringserve.run("status", "--name", several.name)
    assert shown.returncode == 0, shown.stderr
    assert "prefill rings: 1 of cp 2, 1 of cp 1; decode rings: 1 of cp 2, 1 of cp 1" in shown.stdout
    with urllib.request.urlopen(f"http://{several.metrics}/targets", timeout=WAIT_SECONDS) as answer:
        targets = {each["labels"].get("ringserve_ring", ""): each["targets"][0] for each in json.load(answer)}
    assert set(RINGS) < set(targets)
    for name in RINGS:
        with urllib.request.urlopen(f"http://{targets[name]}/metrics", timeout=WAIT_SECONDS) as page:
            assert f'ring="{name}"' in page.read().decode()


def test_plans_are_predicted_by_the_profile_that_the_cluster_was_given(
    several: Cluster, inference: Inference, slow_hardware: HardwareProfile
) -> None:
    with Client(several.gateway) as client:
        shape = shape_of(client.model_info())
    history: list[int] = []
    for new in (prompt_of(LONG, 1), prompt_of(LONG, 2)):
        answer = inference.answer(
            ids([*history, *new], conversation="predicted", mode=inference_pb2.PROMPT_MODE_WHOLE_HISTORY)
        )
        history += [*new, *answer.output_ids]
        plan = answer.plan
        sample = PrefillSample(
            cp=plan.prefill_ranks,
            tp=1,
            algorithm=enum_name(inference_pb2.Algorithm, plan.algorithm),
            new_tokens=plan.new_tokens,
            cached_tokens=plan.cached_tokens,
            seconds=1.0,
            cuts=tuple(chunk.stop for chunk in plan.chunks[:-1]),
        )
        predicted = plan.predicted_prefill_seconds / plan.correction  # by what earlier turns took
        assert predicted == pytest.approx(predicted_prefill(shape, slow_hardware, sample))


def test_each_prompt_goes_to_the_ring_that_is_worth_it(inference: Inference, stock: StockModel) -> None:
    for seed in range(3):
        for num_tokens in (SHORT, LONG):
            prompt = prompt_of(num_tokens, seed)
            answer = inference.answer(ids(prompt))
            assert list(answer.output_ids) == stock.greedy(prompt, 6).token_ids
            plan = answer.plan
            check_worth(plan)
            assert plan.prefill_ranks == RINGS[plan.prefill_ring]
            compared = {each.ring: (each.num_ranks, each.tp) for each in plan.ring_alternatives}
            assert compared == {"prefill-0": (1, 1), "prefill-long-0": (2, 1)}


def test_the_command_shows_the_rings_that_were_compared(several: Cluster) -> None:
    said = several.ringserve.run("generate", "--target", several.gateway, "--prompt", "Once", "--max-tokens", "2")
    assert said.returncode == 0, said.stderr
    (own,) = (line.split() for line in said.stderr.splitlines() if line.strip().startswith("*"))
    assert own[0] == "*"
    assert own[2:4] == [str(RINGS[own[1]]), "1"]
    machine = several.ringserve.run("generate", "--target", several.gateway, "--prompt", "Once", "--json")
    listed = json.loads(machine.stdout)["plan"]["ring_alternatives"]
    assert {each["ring"]: each["num_ranks"] for each in listed} == {"prefill-0": 1, "prefill-long-0": 2}


def test_a_conversation_goes_to_the_ring_that_each_of_its_turns_is_worth(
    inference: Inference, stock: StockModel
) -> None:
    history: list[int] = []
    name = ""
    for number, num_tokens in enumerate((SHORT, LONG, 3)):
        new = prompt_of(num_tokens, number)
        cached = max(0, len(history) - 1)
        answer = inference.answer(
            ids([*history, *new], conversation="wanders", mode=inference_pb2.PROMPT_MODE_WHOLE_HISTORY)
        )
        assert list(answer.output_ids) == stock.greedy([*history, *new], 6).token_ids
        before, name = name, answer.plan.prefill_ring
        check_worth(answer.plan)
        # A ring that it comes to fetches what is worth it from the decode ring.
        assert answer.plan.cached_tokens in ({cached} if name == before else {0, cached})
        history += [*new, *answer.output_ids]
        retained = {place.ring: place.num_tokens for place in inference.conversation("wanders").placements}
        assert retained == {name: len(history) - 6, answer.plan.decode_ring: len(history) - 1}


def test_while_a_ring_is_gone_the_others_serve_on(inference: Inference, stock: StockModel) -> None:
    short, long = prompt_of(SHORT, 7), prompt_of(LONG, 8)
    expected = {len(prompt): stock.greedy(prompt, 6).token_ids for prompt in (short, long)}
    lost = ring(inference, "prefill-long-0")
    with inference.running(ids(short, max_tokens=NUM_TOKENS)) as call:
        forks = psutil.Process(lost.rank_pids[1]).parent()
        assert forks is not None
        forks.suspend()  # no rank takes the place of the lost one meanwhile
        try:
            kill(lost.rank_pids[1])
            wait_until(lambda: ring(inference, lost.name).state != "ready", "the loss is noticed")
            for prompt in (short, long):
                answer = inference.answer(ids(prompt))
                assert list(answer.output_ids) == expected[len(prompt)]
                assert answer.plan.prefill_ring == "prefill-0", answer.plan.reason
        finally:
            forks.resume()
        *_, last = call
        assert last.complete.usage.completion_tokens == NUM_TOKENS, "a turn on other rings notices nothing"
    wait_until(lambda: ring(inference, lost.name).state == "ready", "the ring is rebuilt")
    answer = inference.answer(ids(long))
    assert list(answer.output_ids) == expected[LONG]
    check_worth(answer.plan)
    assert ring(inference, lost.name).rebuilds == lost.rebuilds + 1
