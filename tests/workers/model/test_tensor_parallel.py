"""Context parallel rings with tensor parallelism, against transformers on one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ringserve.cp_core.cost.decode import GATHER, STEP_VARIANTS
from ringserve.cp_core.cost.model import PASS_Q
from ringserve.cp_core.errors import ConfigError, Unavailable
from ringserve.workers.decode.step import DecodeChoice
from ringserve.workers.model.info import read_model_info, tensor_share
from ringserve.workers.model.loading import load_model
from ringserve.workers.protocol.ranks import RankSettings, RankSpec
from ringserve.workers.protocol.steps import RING_ALGORITHMS, Algorithm
from ringserve.workers.rank.worker import RankWorker
from ringserve.workers.sampling.parameters import SamplingParameters
from tests.gloo import gloo_as_nccl
from tests.workers.models import KINDS, VOCAB_SIZE, WINDOWED, Oracle, random_tokens
from tests.workers.rings import LocalRing, Turn

TOLERANCE = 2e-5
"""Logits, absolute, fp32."""


@pytest.mark.parametrize("algorithm", RING_ALGORITHMS)
@pytest.mark.parametrize("kind", KINDS)
def test_cp2_tp2_gives_the_logits_of_transformers(
    kind: str, algorithm: Algorithm, model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    tokens, more = random_tokens(37), random_tokens(11, seed=1)
    with LocalRing(model_paths[kind], 2, tp=2) as ring:
        conversation = ring.open("c", 64)
        (first,) = ring.prefill_logits([Turn(conversation, tokens)], algorithm)
        (second,) = ring.prefill_logits([Turn(conversation, more)], algorithm)
    expected = oracles[kind].logits([*tokens, *more])
    assert (torch.cat([first, second]) - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("variant", STEP_VARIANTS)
# Numbers of ranks differ alike for all models.
@pytest.mark.parametrize(
    ("kind", "num_ranks"), [*((KINDS[0], size) for size in (1, 2, 3)), *((kind, 3) for kind in KINDS[1:])]
)
def test_tensor_parallel_rings_decode_the_tokens_of_transformers(
    kind: str, num_ranks: int, variant: str, model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    """Decode on three ranks, of which one has no row to compute and no logits to make."""
    prompts = {"a": random_tokens(29), "b": random_tokens(1, seed=2)}
    sampling = SamplingParameters(max_tokens=12)
    with LocalRing(model_paths[kind], num_ranks, tp=2, decode_variant=variant) as ring:
        conversations = {name: ring.open(name, 64) for name in prompts}
        turns = [Turn(conversations[name], prompt, sampling) for name, prompt in prompts.items()]
        firsts = ring.prefill(turns)
        ring.start_decode()
        for name, conversation in conversations.items():
            ring.admit(conversation, firsts[name], sampling)
        events = ring.events_until_finished(list(prompts))
        ring.stop_decode()
        assert {worker.status().decode_variant for worker in ring.workers} == {variant}
    for name, prompt in prompts.items():
        decoded = [firsts[name], *(event.token_id for event in events[name] if event.token_id is not None)]
        assert decoded == oracles[kind].greedy(prompt, 12), name


def test_tensor_parallel_rings_draw_as_one_process_and_may_change_the_variant_at_every_step(
    model_paths: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let the first process choose the variant for all: the choices of the others would not fit."""
    prompts = {"a": random_tokens(29), "b": random_tokens(12, seed=2)}
    samplings = {
        name: SamplingParameters(temperature=0.8, seed=seed, max_tokens=16) for seed, name in enumerate(prompts)
    }
    turns = itertools.cycle([GATHER, PASS_Q, PASS_Q])
    monkeypatch.setattr(DecodeChoice, "__call__", lambda *_: next(turns))
    answers = []
    for num_ranks, tp in ((1, 1), (2, 2)):
        with LocalRing(model_paths["llama_gqa"], num_ranks, tp=tp) as ring:
            conversations = {name: ring.open(name, 64) for name in prompts}
            firsts = ring.prefill([Turn(conversations[name], prompts[name], samplings[name]) for name in prompts])
            ring.start_decode()
            for name, conversation in conversations.items():
                ring.admit(conversation, firsts[name], samplings[name])
            events = ring.events_until_finished(list(prompts))
        answers.append({name: [firsts[name], *(event.token_id for event in events[name])] for name in prompts})
    assert answers[0] == answers[1]
    assert len(set(answers[0]["a"])) > 5


def test_the_choice_of_variant_reckons_with_the_share_of_a_process(model_paths: Mapping[str, Path]) -> None:
    with LocalRing(model_paths["llama_gqa"], 2, tp=2) as ring:
        ring.probe()
        for worker in ring.workers:
            assert worker.parts.choose_variant._shape == tensor_share(ring.infos[0].model, 2).shape
            assert worker.parts.choose_variant._num_ranks == 2
            assert worker.parts.choose_variant.rates is not None


def test_four_tensor_parallel_ranks_share_four_heads(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    tokens = random_tokens(400)  # sums above one round's bytes
    with LocalRing(model_paths["llama_mha"], 1, tp=4) as ring:
        (logits,) = ring.prefill_logits([Turn(ring.open("c", 512), tokens)])
    assert (logits - oracles["llama_mha"].logits(tokens)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "llama_mha"])
def test_two_processes_for_each_kv_head_give_the_logits_of_transformers(
    kind: str, num_ranks: int, model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    """Four processes share two KV heads and four query heads, over cached tokens and new ones, biases and norms too."""
    tokens, more = random_tokens(37), random_tokens(11, seed=1)
    with LocalRing(model_paths[kind], num_ranks, tp=4, replicates_kv=True) as ring:
        conversation = ring.open("c", 64)
        (first,) = ring.prefill_logits([Turn(conversation, tokens)])
        (second,) = ring.prefill_logits([Turn(conversation, more)])
        assert [worker.parts.model.head_start for worker in ring.workers[:4]] == [0, 0, 1, 1]
    expected = oracles[kind].logits([*tokens, *more])
    assert (torch.cat([first, second]) - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize(("num_ranks", "tp"), [(1, 2), (1, 4), (2, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_cut_over_processes_that_share_the_weights_give_the_logits_of_transformers(
    kind: str, num_ranks: int, tp: int, model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    """Rows do not divide evenly, and of one token all processes but one have none."""
    parts = [random_tokens(37), random_tokens(11, seed=1), random_tokens(1, seed=2)]
    with LocalRing(model_paths[kind], num_ranks, tp=tp, replicates_kv=True, scatters_rows=True) as ring:
        conversation = ring.open("c", 64)
        logits = [ring.prefill_logits([Turn(conversation, tokens)])[0] for tokens in parts]
    expected = oracles[kind].logits([token for tokens in parts for token in tokens])
    assert (torch.cat(logits) - expected).abs().max() <= TOLERANCE


def test_more_processes_than_kv_heads_are_refused_unless_replicas_are_wanted(
    model_paths: Mapping[str, Path],
) -> None:
    info = read_model_info(model_paths["llama_gqa"])
    with pytest.raises(ConfigError, match=r"tp: 4 does not divide the 2 KV heads of .*; allowed are 1, 2$"):
        tensor_share(info, 4)
    share = tensor_share(info, 4, replicates_kv=True)
    assert (share.num_heads, share.num_kv_heads) == (1, 1)
    with pytest.raises(ConfigError, match=r"allowed are 1, 2, 4$"):
        tensor_share(info, 3, replicates_kv=True)


def test_heads_with_sinks_are_not_spread(model_paths: Mapping[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"tp: 2 is not allowed for .*, which has attention sinks; allowed is 1$"):
        load_model(model_paths[WINDOWED], "float32", "cpu", tp=2)


def test_a_cp_rank_without_tokens_leaves_the_others_their_answer(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    with LocalRing(model_paths["qwen3"], 2, tp=2) as ring:
        (logits,) = ring.prefill_logits([Turn(ring.open("c", 8), [7])])
    assert (logits - oracles["qwen3"].logits([7])).abs().max() <= TOLERANCE


@pytest.mark.parametrize("variant", STEP_VARIANTS)
@pytest.mark.parametrize("ring_transport", ["nccl", "sockets"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_rings_and_rings_meet_in_one_store(
    num_ranks: int, ring_transport: str, variant: str, model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    prompt, sampling = random_tokens(29), SamplingParameters(max_tokens=6)
    with (
        gloo_as_nccl(),
        LocalRing(
            model_paths["llama_gqa"], num_ranks, tp=2, ring_transport=ring_transport, decode_variant=variant
        ) as ring,
    ):
        conversation = ring.open("c", 64)
        first = ring.prefill([Turn(conversation, prompt, sampling)])["c"]
        ring.start_decode()
        decoded = [first, *ring.decode(conversation, first, sampling)]
        ring.stop_decode()
    assert decoded == oracles["llama_gqa"].greedy(prompt, 6)


def test_tied_embeddings_stay_one_share(edited_config: Callable[..., Path]) -> None:
    path = edited_config("qwen2", tie_word_embeddings=True)
    weights = load_file(path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    oracle = Oracle(path)
    model = load_model(path, "float32", "cpu", tp_rank=1, tp=2).model
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    assert head.weight is embedding.weight
    assert head.weight.shape == (VOCAB_SIZE // 2, 64)
    with LocalRing(path, 2, tp=2) as ring:
        (logits,) = ring.prefill_logits([Turn(ring.open("c", 32), random_tokens(21))])
    assert (logits - oracle.logits(random_tokens(21))).abs().max() <= TOLERANCE


@pytest.mark.parametrize("tp", [2, 4])
def test_a_rank_holds_its_share_of_every_matrix(tp: int, model_paths: Mapping[str, Path]) -> None:
    whole = load_model(model_paths["llama_mha"], "float32", "cpu")
    shares = [load_model(model_paths["llama_mha"], "float32", "cpu", tp_rank=rank, tp=tp) for rank in range(tp)]
    matrices = [parameter for parameter in whole.model.parameters() if parameter.ndim == 2]
    for share in shares:
        held = sum(parameter.numel() for parameter in share.model.parameters() if parameter.ndim == 2)
        assert held * tp == sum(parameter.numel() for parameter in matrices)
    assert [share.head_start for share in shares] == [rank * 4 // tp for rank in range(tp)]


@pytest.mark.parametrize(
    ("kind", "tp", "sentence"),
    [
        ("llama_gqa", 3, "tp: 3 does not divide the 2 KV heads of model; allowed are 1, 2"),
        ("llama_gqa", 4, "tp: 4 does not divide the 2 KV heads of model; allowed are 1, 2"),
        ("llama_mha", 3, "tp: 3 does not divide the 4 KV heads of model; allowed are 1, 2, 4"),
    ],
)
def test_heads_that_do_not_divide_are_refused_at_start(
    kind: str, tp: int, sentence: str, model_paths: Mapping[str, Path]
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_model(model_paths[kind], "float32", "cpu", "model", tp=tp)
    assert str(refused.value) == sentence
    spec = RankSpec(
        ring="test-0",
        rank=0,
        num_ranks=tp,
        incarnation="test",
        settings=RankSettings(
            tp=tp,
            model_path=str(model_paths[kind]),
            num_blocks=4,
            block_tokens=4,
        ),
    )
    with pytest.raises(ConfigError, match=f"tp: {tp} does not divide"):
        RankWorker().start(spec)


@pytest.mark.parametrize("variant", STEP_VARIANTS)
@pytest.mark.parametrize("ring_transport", ["nccl", "sockets"])
@pytest.mark.parametrize("lost", [0, 1, 2, 3])
def test_the_loss_of_any_rank_ends_the_loops_of_all(
    lost: int, ring_transport: str, variant: str, model_paths: Mapping[str, Path]
) -> None:
    with (
        gloo_as_nccl(),
        LocalRing(model_paths["llama_gqa"], 2, tp=2, ring_transport=ring_transport, decode_variant=variant) as ring,
    ):
        ring.start_decode()
        conversation = ring.open("c", 256)
        ring.admit(conversation, 5, SamplingParameters(max_tokens=250))
        ring.next_events()
        for each in ring.workers[lost]._transports:
            each.close()
        ended = ring.decode_ended()
    assert all(isinstance(error, Unavailable) for error in ended), ended
