"""Rings of several sizes on one machine: each prompt goes to the ring of its size, and any ring may die."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from cp_core.cost.profile import read_profile
from ringserve.v1 import inference_pb2
from services.reference import StockModel
from tests.services.e2e.cluster import Cluster, Inference, Ringserve, ids, kill, running_cluster, wait_until
from tests.workers.models import random_tokens

pytestmark = pytest.mark.timeout(240)

RINGS = {"prefill-0": 1, "prefill-long-0": 2, "decode-0": 1, "decode-wide-0": 2}
"""Ranks by name."""
SHORT, LONG = 20, 1500
NUM_TOKENS = 1500
REBUILD_SECONDS = 90.0


def slow_hardware(path: Path) -> Path:
    """What the router is told of the rings, so that no noise of this machine chooses: attention takes long, and so do
    messages. A short prompt is quicker alone, a long one by two."""
    profile = read_profile("gtt")
    prefill = replace(profile.prefill, attention_flops=1e9, link_latency_seconds=5e-3, rank_overhead_seconds=0.0)
    path.write_text(json.dumps(asdict(replace(profile, prefill=prefill))))
    return path


@pytest.fixture(scope="module")
def pools(ringserve: Ringserve, model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    profile = slow_hardware(tmp_path_factory.mktemp("profile") / "slow.json")
    values = (
        *("prefill.cp=1", "prefill.pools.long.cp=2", "decode.cp=1", "decode.pools.wide.cp=2"),
        *("prefill.chunk_tokens=512", f"router.profile={profile}"),
    )
    options = [word for value in values for word in ("--set", value)]
    with running_cluster(ringserve, "pools", model_path, *options) as cluster:
        yield cluster


@pytest.fixture
def door(pools: Cluster) -> Iterator[Inference]:
    door = Inference(pools.gateway)
    yield door
    try:
        wait_until(door.is_idle, f"the cluster is not idle: {door.info()}", REBUILD_SECONDS)
    finally:
        door.channel.close()


def ring(door: Inference, name: str) -> inference_pb2.GroupInfo:
    return next(group for group in door.info().groups if group.name == name)


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    return random_tokens(num_tokens, seed=seed)


def test_every_ring_is_shown_with_its_size_and_serves_its_metrics(pools: Cluster, door: Inference) -> None:
    assert {group.name: group.num_ranks for group in door.info().groups} == RINGS
    shown = pools.ringserve.run("status", "--name", pools.name)
    assert shown.returncode == 0, shown.stderr
    assert "prefill rings: 1 of cp 2, 1 of cp 1; decode rings: 1 of cp 2, 1 of cp 1" in shown.stdout
    with urllib.request.urlopen(f"http://{pools.metrics}/targets", timeout=20) as answer:
        targets = {each["labels"]["ringserve_group"]: each["targets"][0] for each in json.load(answer)}
    assert set(RINGS) < set(targets)
    for name in RINGS:
        with urllib.request.urlopen(f"http://{targets[name]}/metrics", timeout=20) as page:
            assert f'group="{name}"' in page.read().decode()


def test_short_prompts_go_to_the_small_ring_and_long_ones_to_the_large(door: Inference, stock: StockModel) -> None:
    for seed in range(3):
        for num_tokens, name in ((SHORT, "prefill-0"), (LONG, "prefill-long-0")):
            prompt = prompt_of(num_tokens, seed)
            answer = door.answer(ids(prompt))
            assert list(answer.output_ids) == stock.greedy(prompt, 6).token_ids
            plan = answer.plan
            assert (plan.prefill_ring, plan.prefill_ranks) == (name, RINGS[name])
            compared = {each.ring: (each.num_ranks, each.tp) for each in plan.ring_alternatives}
            assert compared == {"prefill-0": (1, 1), "prefill-long-0": (2, 1)}
            assert f"ring {name} takes" in plan.reason


def test_the_command_shows_the_rings_that_were_compared(pools: Cluster) -> None:
    said = pools.ringserve.run("generate", "--target", pools.gateway, "--prompt", "Once", "--max-tokens", "2")
    assert said.returncode == 0, said.stderr
    (own,) = (line.split() for line in said.stderr.splitlines() if line.strip().startswith("*"))
    assert own[:4] == ["*", "prefill-0", "1", "1"]
    machine = pools.ringserve.run("generate", "--target", pools.gateway, "--prompt", "Once", "--json")
    listed = json.loads(machine.stdout)["plan"]["ring_alternatives"]
    assert {each["ring"]: each["num_ranks"] for each in listed} == {"prefill-0": 1, "prefill-long-0": 2}


def test_a_conversation_goes_to_the_ring_that_each_of_its_turns_is_worth(door: Inference, stock: StockModel) -> None:
    history: list[int] = []
    turns = ((SHORT, "prefill-0"), (LONG, "prefill-long-0"), (3, "prefill-long-0"))
    for number, (num_tokens, name) in enumerate(turns):
        new = prompt_of(num_tokens, number)
        cached = max(0, len(history) - 1)
        answer = door.answer(ids([*history, *new], conversation="wanders"))
        assert list(answer.output_ids) == stock.greedy([*history, *new], 6).token_ids
        assert answer.plan.prefill_ring == name
        # A ring that it comes to fetches what is worth it from the decode ring.
        assert answer.plan.cached_tokens in ({cached} if number != 1 else {0, cached})
        history += [*new, *answer.output_ids]
        kept = {place.group: place.num_tokens for place in door.conversation("wanders").placements}
        assert kept == {name: len(history) - 6, answer.plan.decode_ring: len(history) - 1}
    door.delete("wanders")


def test_while_a_ring_is_gone_the_others_serve_on(door: Inference, stock: StockModel) -> None:
    short, long = prompt_of(SHORT, 7), prompt_of(LONG, 8)
    expected = {len(prompt): stock.greedy(prompt, 6).token_ids for prompt in (short, long)}
    lost = ring(door, "prefill-long-0")
    with door.running(ids(short, max_tokens=NUM_TOKENS)) as call:
        kill(lost.rank_pids[1])
        wait_until(lambda: ring(door, lost.name).state != "ready", "the loss is noticed")
        for prompt in (short, long):
            answer = door.answer(ids(prompt))
            assert list(answer.output_ids) == expected[len(prompt)]
            assert answer.plan.prefill_ring == "prefill-0", answer.plan.reason
        *_, last = call
        assert last.complete.usage.completion_tokens == NUM_TOKENS, "a turn on other rings notices nothing"
    wait_until(lambda: ring(door, lost.name).state == "ready", "the ring is rebuilt", REBUILD_SECONDS)
    answer = door.answer(ids(long))
    assert (answer.plan.prefill_ring, list(answer.output_ids)) == (lost.name, expected[LONG])
    assert ring(door, lost.name).rebuilds == lost.rebuilds + 1
