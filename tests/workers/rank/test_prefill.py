"""Prefill on a ring of ranks against transformers on one process: whole-model logits within 2e-5, in fp32.

Caches are poisoned with NaN, so that a read of an unwritten slot shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from ringserve.cp_core.attention import native
from ringserve.cp_core.attention.partial import Partial
from ringserve.cp_core.errors import Unavailable
from ringserve.workers.kv import cache
from ringserve.workers.model.layers import FusedNorm, GatedMlp, PackedLinear
from ringserve.workers.model.loading import DTYPES, load_model
from ringserve.workers.prefill import step as prefill_step
from ringserve.workers.protocol.steps import RING_ALGORITHMS, Algorithm, PrefillOutput, PrefillStep
from ringserve.workers.rank import parts as rank_parts
from ringserve.workers.rank.worker import RankWorker
from ringserve.workers.sampling.parameters import SamplingParameters
from tests.waiting import WAIT_SECONDS
from tests.workers.models import KINDS, Oracle, random_tokens
from tests.workers.rings import LocalRing, Turn, run_in_thread

TOLERANCE = 2e-5
ALGORITHMS = list(RING_ALGORITHMS)
RING_SIZES = (1, 2, 3)

Models = Mapping[str, Path]
Oracles = Mapping[str, Oracle]


def assert_same(logits: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(logits, wanted, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("num_ranks", RING_SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_three_turns_have_the_logits_of_one_process(
    kind: str, num_ranks: int, algorithm: Algorithm, model_paths: Models, oracles: Oracles
) -> None:
    """Prefill 65 tokens, then 7 and 31 more: no cached count is divisible by 2N for N > 1."""
    tokens = random_tokens(103)
    with LocalRing(model_paths[kind], num_ranks) as ring:
        conversation = ring.open("a", 103)
        parts = [
            ring.prefill_logits([Turn(conversation, tokens[start:stop])], algorithm)[0]
            for start, stop in ((0, 65), (65, 72), (72, 103))
        ]
    assert_same(torch.cat(parts), oracles[kind].logits(tokens))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_cache_in_many_runs_is_read_as_one_where_a_gpu_has_it(
    num_ranks: int, algorithm: Algorithm, model_paths: Models, oracles: Oracles
) -> None:
    """Each block is a run of its own, and there are more than are written one by one."""
    tokens = random_tokens(150)
    with LocalRing(model_paths["llama_gqa"], num_ranks) as ring:
        for worker in ring.workers:
            worker.parts.cache.joins_runs = True
        conversation = ring.open("a", 150)
        parts = [
            ring.prefill_logits([Turn(conversation, tokens[start:stop])], algorithm)[0]
            for start, stop in ((0, 97), (97, 150))
        ]
    assert_same(torch.cat(parts), oracles["llama_gqa"].logits(tokens))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 63, 64])
def test_short_prompts_leave_ranks_without_tokens(
    num_tokens: int, algorithm: Algorithm, model_paths: Models, oracles: Oracles
) -> None:
    """Prefill prompts of 1 and 2 tokens on 3 ranks: ranks without tokens take part."""
    tokens = random_tokens(num_tokens, seed=num_tokens)
    with LocalRing(model_paths["llama_gqa"], 3) as ring:
        logits = ring.prefill_logits([Turn(ring.open("a", num_tokens), tokens)], algorithm)[0]
    assert_same(logits, oracles["llama_gqa"].logits(tokens))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("num_ranks", RING_SIZES)
def test_sequences_of_any_length_share_a_step(
    num_ranks: int, algorithm: Algorithm, model_paths: Models, oracles: Oracles
) -> None:
    """Prefill a new prompt, a continued one, one of a single token, and one with cached but no new tokens."""
    first, second, third, idle = (random_tokens(count, seed=count) for count in (40, 29, 1, 12))
    with LocalRing(model_paths["qwen3"], num_ranks) as ring:
        a, b, c, d = (ring.open(name, 64) for name in "abcd")
        ring.prefill([Turn(b, second[:18]), Turn(d, idle)], algorithm)
        fused = ring.prefill_logits([Turn(a, first), Turn(b, second[18:]), Turn(d, []), Turn(c, third)], algorithm)
    oracle = oracles["qwen3"]
    assert_same(fused[0], oracle.logits(first))
    assert_same(fused[1], oracle.logits(second)[18:])
    assert fused[2].shape[0] == 0
    assert_same(fused[3], oracle.logits(third))


@pytest.mark.parametrize("num_ranks", RING_SIZES)
def test_many_small_chunks_equal_one_large_one(num_ranks: int, model_paths: Models, oracles: Oracles) -> None:
    """Prefill chunks of 1 to 9 tokens with the algorithms in turn, over stored orders that differ from positions."""
    tokens = random_tokens(45)
    with LocalRing(model_paths["mistral"], num_ranks) as ring:
        conversation = ring.open("a", 64)
        parts, start = [], 0
        for size in range(1, 10):
            turn = Turn(conversation, tokens[start : start + size])
            parts.append(ring.prefill_logits([turn], ALGORITHMS[size % 2])[0])
            start += size
    assert_same(torch.cat(parts), oracles["mistral"].logits(tokens))


@pytest.mark.parametrize("num_ranks", RING_SIZES)
def test_the_rank_of_the_last_position_samples_and_no_other(
    num_ranks: int, model_paths: Models, oracles: Oracles
) -> None:
    tokens = random_tokens(50)
    with LocalRing(model_paths["llama_mha"], num_ranks) as ring:
        a, b = ring.open("a", 64), ring.open("b", 64)
        sampled = ring.prefill([Turn(a, tokens, SamplingParameters()), Turn(b, tokens[:33])])
    assert sampled == {"a": oracles["llama_mha"].greedy(tokens, 1)[0]}


def test_sampled_first_tokens_are_the_same_on_rings_of_any_size(model_paths: Models) -> None:
    tokens = random_tokens(50)
    sampled = []
    for num_ranks in RING_SIZES:
        with LocalRing(model_paths["llama_gqa"], num_ranks) as ring:
            turns = [
                Turn(ring.open(str(seed), 64), tokens, SamplingParameters(temperature=1.0, seed=seed))
                for seed in range(8)
            ]
            sampled.append(ring.prefill(turns))
    assert sampled[0] == sampled[1] == sampled[2]
    assert len(set(sampled[0].values())) > 2, "eight seeds drew the same token"


@pytest.mark.parametrize(
    ("tp", "algorithm"), [(1, Algorithm.PASS_KV), (2, Algorithm.PASS_KV), (1, Algorithm.CHAIN), (2, Algorithm.CHAIN)]
)
@pytest.mark.parametrize("num_ranks", RING_SIZES)
def test_a_step_between_the_layers_of_another_changes_no_token_and_no_kv_of_either(
    num_ranks: int,
    tp: int,
    algorithm: Algorithm,
    model_paths: Models,
    oracles: Oracles,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compute a turn with cached tokens and one of a single token, which leaves ranks empty, within a longer step.

    In a chain the longer step lets it run before the second layer.
    """
    monkeypatch.setattr(prefill_step, "CHAIN_LAYERS", 1)
    first, second, third = (random_tokens(count, seed=count) for count in (61, 33, 1))
    oracle = oracles["llama_gqa"]
    with LocalRing(model_paths["llama_gqa"], num_ranks, tp=tp) as ring:
        a, b, c = (ring.open(name, 80) for name in "abc")
        ring.prefill([Turn(a, first[:5]), Turn(b, second[:9])])
        outer = ring.steps([Turn(a, first[5:], SamplingParameters())], algorithm)
        inner = ring.steps([Turn(b, second[9:], SamplingParameters()), Turn(c, third)], Algorithm.PASS_Q)
        asked = ring.asked_within(inner, 7)
        done = ring.together(lambda worker, rank: worker.prefill(replace(outer[rank], number=7, yields=True)))
        answers = [each.result(WAIT_SECONDS) for each in asked]
        assert {name: token for output in done for name, token in output.tokens.items()} == {
            "a": oracle.greedy(first, 1)[0]
        }
        sampled = {name: token for answer in answers if answer is not None for name, token in answer.tokens.items()}
        assert sampled == {"b": oracle.greedy(second, 1)[0]}
        more = random_tokens(6)
        for conversation, tokens in ((a, first), (b, second), (c, third)):
            logits = ring.prefill_logits([Turn(conversation, more)])[0]
            assert_same(logits, oracle.logits([*tokens, *more])[len(tokens) :])


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", ["llama_gqa", "qwen2"])
def test_packed_weights_give_the_logits_of_one_process(
    kind: str, tp: int, model_paths: Models, oracles: Oracles, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other tests share loaded models, which packing would change.
    monkeypatch.setattr(rank_parts, "load_model", load_model)
    tokens = random_tokens(77)
    with LocalRing(model_paths[kind], 2, tp=tp, packs_weights=True, decode_variant="gather") as ring:
        assert all(is_packed(worker) for worker in ring.workers)
        conversation = ring.open("a", 80)
        parts = [ring.prefill_logits([Turn(conversation, tokens[a:b])])[0] for a, b in ((0, 1), (1, 4), (4, 77))]
    assert_same(torch.cat(parts), oracles[kind].logits(tokens))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("copied_bytes", [0, 1 << 20], ids=["runs", "copies"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_lone_rank_of_packed_weights_takes_one_call_a_layer_with_the_bits_of_several(
    kind: str, copied_bytes: int, dtype: str, model_paths: Models, oracles: Oracles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill two conversations together. Their blocks are scattered: read in place, or copied first."""
    monkeypatch.setattr(rank_parts, "load_model", load_model)
    monkeypatch.setattr(cache, "COPIED_BYTES", copied_bytes)
    rows: list[object] = []

    def whole_layer(layer: native.Layer, own: native.OwnRows, *others: Any) -> torch.Tensor:
        rows.append(own)
        return native_whole_layer(layer, own, *others)

    native_whole_layer = native.whole_layer
    monkeypatch.setattr(native, "whole_layer", whole_layer)
    first, second = random_tokens(70, seed=1), random_tokens(66, seed=2)
    answers = []
    for in_one_call in (True, False):
        if not in_one_call:
            monkeypatch.setattr(native, "attends", lambda _: False)
        with LocalRing(model_paths[kind], 1, packs_weights=True, dtype=dtype) as ring:
            a, b = ring.open("a", 80), ring.open("b", 80)
            parts = [
                ring.prefill_logits([Turn(a, first[:33])]),
                ring.prefill_logits([Turn(a, first[33:61]), Turn(b, second[:45])]),
                ring.prefill_logits([Turn(b, second[45:]), Turn(a, first[61:])]),
            ]
        answers.append([torch.cat([parts[0][0], parts[1][0], parts[2][1]]), torch.cat([parts[1][1], parts[2][0]])])
        assert bool(rows) == (in_one_call and native.multiplies(DTYPES[dtype]))
        assert all(isinstance(each, native.PromptRows) for each in rows)
        rows.clear()
    assert all(map(torch.equal, *answers))
    for found, tokens in zip(answers[0], (first, second), strict=True) if dtype == "float32" else ():
        assert_same(found, oracles[kind].logits(tokens))


def is_packed(worker: RankWorker) -> bool:
    linears = [module for module in worker.parts.model.body.modules() if isinstance(module, torch.nn.Linear)]
    mlps = [module for module in worker.parts.model.body.modules() if hasattr(module, "gate_proj")]
    assert mlps
    assert all(isinstance(module.forward, GatedMlp) for module in mlps), "a plain MLP"
    norms = [module for module in worker.parts.model.body.modules() if type(module).__name__.endswith("RMSNorm")]
    assert native.library() is None or all(isinstance(module.forward, FusedNorm) for module in norms), "a plain norm"
    return bool(linears) and all(isinstance(module, PackedLinear) for module in linears)


@pytest.mark.parametrize("num_asked", [0, 1, 2])
def test_a_step_of_which_a_rank_does_not_know_in_time_is_computed_by_no_rank(
    num_asked: int, model_paths: Models, oracles: Oracles
) -> None:
    tokens = random_tokens(30)
    with LocalRing(model_paths["llama_gqa"], 3) as ring:
        outer = ring.steps([Turn(ring.open("a", 64), tokens, SamplingParameters())], Algorithm.PASS_KV)
        inner = ring.steps([Turn(ring.open("b", 64), tokens)], Algorithm.PASS_KV)
        in_time = ring.asked_within(inner[:num_asked], 3)
        done = ring.together(lambda worker, rank: worker.prefill(replace(outer[rank], number=3, yields=True)))
        assert [each.result(WAIT_SECONDS) for each in in_time] == [None] * num_asked
        assert [worker.prefill_within(replace(inner[0], within=3), 20.0) for worker in ring.workers] == [None] * 3
    assert [token for output in done for token in output.tokens.values()] == oracles["llama_gqa"].greedy(tokens, 1)


@pytest.mark.parametrize("algorithm", [Algorithm.PASS_KV, Algorithm.CHAIN])
@pytest.mark.parametrize("num_ranks", RING_SIZES)
def test_a_step_that_is_ended_between_two_layers_leaves_the_ring_as_it_was(
    num_ranks: int, algorithm: Algorithm, model_paths: Models, oracles: Oracles
) -> None:
    tokens = random_tokens(30)
    with LocalRing(model_paths["llama_gqa"], num_ranks) as ring:
        outer = ring.steps([Turn(ring.open("a", 64), tokens, SamplingParameters())], algorithm)
        end = PrefillStep(algorithm=Algorithm.PASS_KV, sequences=())
        asked = ring.asked_within([end] * num_ranks, 3)
        done = ring.together(lambda worker, rank: worker.prefill(replace(outer[rank], number=3, yields=True)))
        assert [each.result(WAIT_SECONDS) for each in asked] == done == [PrefillOutput()] * num_ranks
        assert ring.prefill([Turn(ring.open("b", 64), tokens, SamplingParameters())]) == {
            "b": oracles["llama_gqa"].greedy(tokens, 1)[0]
        }


def test_a_rank_that_fails_between_two_layers_ends_both_steps_at_every_rank(model_paths: Models) -> None:
    with LocalRing(model_paths["llama_gqa"], 2) as ring:
        outer = ring.steps([Turn(ring.open("a", 64), random_tokens(20))], Algorithm.PASS_KV)
        inner = ring.steps([Turn(ring.open("b", 64), random_tokens(9))], Algorithm.PASS_KV)
        broken = replace(inner[1], sequences=(replace(inner[1].sequences[0], blocks=()),))
        asked = ring.asked_within([inner[0], broken], 1)
        steps = [replace(step, number=1, yields=True) for step in outer]
        runs = [run_in_thread(partial(worker.prefill, step)) for worker, step in zip(ring.workers, steps, strict=True)]
        errors = [*(run.exception(WAIT_SECONDS) for run in runs), *(each.exception(WAIT_SECONDS) for each in asked)]
    assert [type(error) for error in errors] == [Unavailable, AssertionError] * 2


class FailingBackend:
    """Attention kernel that runs out of memory."""

    name: ClassVar[str] = "failing"

    def partial_attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
    ) -> Partial:
        raise MemoryError("no memory")


def test_a_rank_that_fails_takes_its_peers_out_of_the_step_at_once(model_paths: Models) -> None:
    with LocalRing(model_paths["llama_gqa"], 3) as ring:
        failing = ring.workers[1]
        failing._started = replace(failing.parts, backend=FailingBackend())
        steps = ring.steps([Turn(ring.open("a", 64), random_tokens(20))], Algorithm.PASS_KV)
        runs = [run_in_thread(partial(worker.prefill, step)) for worker, step in zip(ring.workers, steps, strict=True)]
        errors = [run.exception(WAIT_SECONDS) for run in runs]
    assert [type(error) for error in errors] == [Unavailable, MemoryError, Unavailable]


def test_progress_is_seen_from_outside(model_paths: Models) -> None:
    with LocalRing(model_paths["llama_gqa"], 1) as ring:
        assert ring.workers[0].status().steps == 0
        ring.prefill([Turn(ring.open("a", 8), [1, 2, 3])])
        status = ring.workers[0].status()
    assert (status.steps, status.running, status.open_transfers) == (1, 0, 0)
    assert status.seconds_since_step < 30


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_ring_measures_finite_rates(num_ranks: int, model_paths: Models) -> None:
    with LocalRing(model_paths["llama_gqa"], num_ranks) as ring:
        for rates in ring.probe():
            assert 1e6 < rates.gemm_flops < 1e15
            assert 1e6 < rates.attention_flops < 1e15
            assert 1e3 < rates.link_bytes_per_second <= 1e15
            assert 0 <= rates.link_latency_seconds < 1


def test_stopping_is_possible_at_any_time_and_again(model_paths: Models) -> None:
    ring = LocalRing(model_paths["llama_gqa"], 1)
    ring.workers[0].stop()
    ring.workers[0].stop()
    with pytest.raises(Unavailable):
        ring.workers[0].submit([])
