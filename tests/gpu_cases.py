"""Cases for one NVIDIA GPU, which `make gpu` alone runs, beside tests/cp_core/attention/triton_cases.py.

They compare what only a GPU can do with the same on the CPU: kernels of packages, a captured graph, buffers that are
copied, sampling, a ring of one rank, recorded decode steps, and 8-bit floats.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Linear
from transformers import LlamaConfig, LlamaForCausalLM

from ringserve.cp_core.attention import triton_kernels
from ringserve.cp_core.attention.backends import BACKENDS, select_backend
from ringserve.cp_core.attention.partial import Partial, merge, merge_in_kernel
from ringserve.cp_core.attention.triton_kernels import attend_pages
from ringserve.cp_core.errors import ConfigError
from ringserve.workers.decode.graphs import RECORDING, RECORDING_FAILED, CudaRecorder, InputBuffers
from ringserve.workers.decode.loop import BATCH_CHANGES
from ringserve.workers.decode.step import DRAFTS, DecodePass
from ringserve.workers.model.info import read_model_info
from ringserve.workers.model.layers import Fp8Linear, scaled_rows
from ringserve.workers.protocol.ranks import RankSettings
from ringserve.workers.rank import worker as rank_worker
from ringserve.workers.rank.parts import FP8_CAPABILITY, check_quantization
from ringserve.workers.sampling.parameters import SamplingParameters
from ringserve.workers.sampling.sampler import RowSampler, sample_rows
from tests.cp_core.attention.triton_cases import check, paged
from tests.oracles import largest, oracle_partial, random_tokens
from tests.workers.decode.test_drafts import foretell_seldom
from tests.workers.decode.test_variants import ENDS, greedy, serve_all
from tests.workers.models import FAMILY_SWITCHES, SHAPE, save_family, save_model
from tests.workers.models import random_tokens as random_ids
from tests.workers.rings import LocalRing, Turn
from tests.workers.sampling.one_row import Row

GPU = torch.device("cuda", 0)
NAMES = [kind.name for kind in BACKENDS if kind.is_fast and kind.supports(GPU, torch.bfloat16)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("num_tokens", "num_stored", "causal"), [(1, 300, False), (700, 700, True), (700, 33, False)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_backend_matches_the_oracle(
    name: str, num_tokens: int, num_stored: int, causal: bool, head_dim: int
) -> None:
    """Out within three roundings of bfloat16, LSE within 1e-5."""
    tokens = random_tokens(
        max(num_tokens, num_stored), num_heads=32, num_kv_heads=8, head_dim=head_dim, dtype=torch.bfloat16
    )
    q, k, v, scale = tokens.q[:num_tokens], tokens.k[:num_stored], tokens.v[:num_stored], head_dim**-0.5
    backend = select_backend(name, GPU, torch.bfloat16)
    part = backend.partial_attention(q.to(GPU), k.to(GPU), v.to(GPU), causal=causal, scale=scale)
    right = oracle_partial(q, k, v, causal=causal, scale=scale)
    assert largest(part.out.cpu().double() - right.out) <= 3 * torch.finfo(torch.bfloat16).eps * largest(v.float())
    assert largest(part.lse.cpu().double() - right.lse) <= 1e-5 * max(1.0, largest(right.lse))


@pytest.mark.parametrize("name", NAMES)
def test_several_sequences_in_one_call_match_the_oracle(name: str) -> None:
    backend = select_backend(name, GPU, torch.bfloat16)
    lengths = [3, 200, 1]
    sequences = [random_tokens(each, num_heads=8, dtype=torch.bfloat16, seed=each) for each in lengths]
    q, k, v = (torch.cat([getattr(each, kind) for each in sequences]).to(GPU) for kind in "qkv")
    assert hasattr(backend, "attend_many")
    part = backend.attend_many(q, k, v, lengths, lengths, causal=True, scale=0.125)
    outs = part.out.cpu().split(lengths)
    for tokens, out in zip(sequences, outs, strict=True):
        right = oracle_partial(tokens.q, tokens.k, tokens.v, causal=True, scale=0.125)
        assert largest(out.double() - right.out) <= 3 * torch.finfo(torch.bfloat16).eps * largest(tokens.v.float())


def test_a_captured_graph_attends_and_merges_what_its_buffers_hold_when_it_is_replayed() -> None:
    sequences = [random_tokens(length, dtype=torch.bfloat16, seed=length) for length in (100, 33)]
    shards = paged(sequences, 16)
    q = random_tokens(2, seed=9, dtype=torch.bfloat16).q
    given = torch.zeros_like(q, device=GPU)
    lengths = torch.zeros_like(shards.lengths)

    def compute() -> Partial:
        part = Partial(*attend_pages(given, shards.k, shards.v, shards.table, lengths, 0.125))
        nothing = Partial(torch.full_like(part.out, torch.nan), torch.full_like(part.lse, -torch.inf))
        return merge_in_kernel(triton_kernels, [part, nothing])

    compute()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = compute()
    given.copy_(q)
    lengths.copy_(shards.lengths)
    graph.replay()
    check(q, sequences, captured)


def test_recorded_steps_give_the_tokens_of_the_same_kernels_when_they_are_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled layers, batches that grow and shrink; launched where a recording is made to fail."""
    torch.manual_seed(7)
    LlamaForCausalLM(LlamaConfig(**SHAPE | {"head_dim": 64})).save_pretrained(tmp_path)

    def fail(*_: object) -> None:
        raise RuntimeError("not recorded")

    answers, counts = [], []
    for record in (CudaRecorder.record, fail):
        monkeypatch.setattr(CudaRecorder, "record", record)
        with LocalRing(tmp_path, 1, dtype="bfloat16", device="cuda", compile="auto", packs_weights=True) as ring:
            answers.append(serve_all(ring, greedy()))
            counts.append(dict(ring.workers[0].status().eager_steps))
    assert answers[0] == answers[1]
    assert set(counts[0]) == {RECORDING}
    assert set(counts[1]) == {RECORDING, RECORDING_FAILED}


def test_a_recorder_records_again_after_all_its_graphs_are_gone() -> None:
    """The workspace of products stays in their pool, which torch refuses where no graph uses it."""
    recorder = CudaRecorder(GPU)
    left = torch.randn(64, 64, device=GPU)
    for _ in range(3):
        expected = left @ left
        recorded = recorder.record(lambda: left @ left)
        recorded.replay()
        torch.testing.assert_close(recorded.results, expected)
        del recorded


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_steps_that_are_issued_ahead_give_the_tokens_of_steps_that_wait(
    temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded steps of sequences that join and leave."""
    torch.manual_seed(7)
    LlamaForCausalLM(LlamaConfig(**SHAPE | {"head_dim": 64})).save_pretrained(tmp_path)
    samplings = {name: replace(each, temperature=temperature, seed=5) for name, each in greedy().items()}
    answers, counts = [], []
    for is_asynchronous in (None, False):
        monkeypatch.setattr(rank_worker, "DecodePass", partial(DecodePass, is_asynchronous=is_asynchronous))
        with LocalRing(tmp_path, 1, dtype="bfloat16", device="cuda", compile="auto", packs_weights=True) as ring:
            answers.append(serve_all(ring, samplings))
            counts.append(dict(ring.workers[0].status().waited_steps))
    assert answers[0] == answers[1]
    assert 0 < counts[0][BATCH_CHANGES] < 20, "most steps are issued ahead"
    assert counts[1] == {}


WINDOWS: dict[str, Any] = {"mistral": {"sliding_window": 11}, "gpt_oss": FAMILY_SWITCHES["gpt_oss"][0]}


@pytest.mark.parametrize("family", WINDOWS)
def test_layers_with_windows_have_the_logits_of_plain_tensors_and_their_steps_are_recorded(
    family: str, tmp_path: Path
) -> None:
    """By kernels of the GPU and by the host's reference, in bfloat16; a long prompt, a short one, a follow-up."""
    save_family(family, WINDOWS[family] | {"head_dim": 64}, tmp_path)
    texts = [random_ids(count, seed=count) for count in (300, 40, 45, 50)]
    answers = []
    for settings in ({"device": "cuda", "compile": "auto", "packs_weights": True}, {"attention_backend": "reference"}):
        with LocalRing(tmp_path, 1, num_blocks=1024, dtype="bfloat16", **settings) as ring:
            parts = []
            for number, text in enumerate(texts):
                conversation = ring.open(str(number), 400)
                parts += [ring.prefill_logits([Turn(conversation, each)])[0] for each in (text, text[:30])]
            answers.append(torch.cat([part.cpu().float() for part in parts]))
            if "device" in settings:
                assert len(serve_all(ring, greedy())["a"]) == ENDS["a"]
                reasons = set(dict(ring.workers[0].status().eager_steps))
                # The host reads which experts a step has: such steps cannot be recorded.
                assert reasons == {RECORDING} or family == "gpt_oss", reasons
    difference = (answers[0] - answers[1]).abs()
    assert float(difference.mean()) <= 0.1 * float(answers[1].std()), "bfloat16 rounds; a wrong window gives 1"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_steps_with_drafts_give_the_tokens_of_steps_without(
    temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded steps of two buckets, beside steps that are issued ahead; fp16 rounds alike in both nearly always."""
    torch.manual_seed(7)
    LlamaForCausalLM(LlamaConfig(**SHAPE | {"head_dim": 64})).save_pretrained(tmp_path)
    samplings = {name: replace(each, temperature=temperature, seed=5) for name, each in greedy().items()}
    with LocalRing(tmp_path, 1, dtype="float16", device="cuda", compile="auto", packs_weights=True) as ring:
        right = serve_all(ring, samplings)
    foretell_seldom(monkeypatch, right)
    with LocalRing(
        tmp_path, 1, dtype="float16", device="cuda", compile="auto", packs_weights=True, drafts=True
    ) as ring:
        assert serve_all(ring, samplings) == right
        status = ring.workers[0].status()
    assert 0 < sum(status.accepted_drafts) < sum(status.checked_drafts)
    assert dict(status.waited_steps)[DRAFTS] >= 2
    assert set(dict(status.eager_steps)) == {RECORDING}


def test_layers_of_8_bit_floats_multiply_as_those_of_the_host_do_or_the_gpu_is_refused(tmp_path: Path) -> None:
    if torch.cuda.get_device_capability(GPU) < FP8_CAPABILITY:
        settings = RankSettings(model_path="", num_blocks=1, device="cuda:0", quantization="fp8")
        with pytest.raises(ConfigError, match=r"model\.quantization: 'fp8' needs a GPU of compute capability 8\.9"):
            check_quantization(settings, read_model_info(save_model("llama_gqa", tmp_path)))
        return
    linear: Any = Linear(256, 128, bias=True, dtype=torch.bfloat16).requires_grad_(False)
    rows = torch.randn(33, 256, dtype=torch.bfloat16)
    Fp8Linear.quantize(linear)
    quantized, scales = scaled_rows(rows)
    weight = linear.quantized.double() * linear.scales.double().t()
    expected = ((quantized.double() * scales) @ weight.t() + linear.bias.double()).bfloat16()
    # Tensor cores round product and bias to bfloat16 one after the other, so the error is one of the product's size.
    rounding = 2**-7 * largest(expected.float())
    torch.testing.assert_close(linear.to(GPU)(rows.to(GPU)).cpu(), expected, rtol=2**-7, atol=rounding)


def test_merge_on_the_gpu_is_merge_on_the_host() -> None:
    parts = [Partial(torch.randn(50, 8, 128), torch.randn(50, 8)) for _ in range(5)]
    parts[2].lse[7:20] = -torch.inf
    merged = merge([Partial(each.out.to(GPU), each.lse.to(GPU)) for each in parts])
    right = merge(parts)
    assert largest(merged.out.cpu() - right.out) <= 2e-6
    assert largest(merged.lse.cpu() - right.lse) <= 2e-6


def test_buffers_of_a_step_arrive_while_the_next_are_filled() -> None:
    buffers, seen = InputBuffers(GPU), []
    for number in range(50):
        inputs = buffers.fill([number] * 3, [number] * 3, [number], [0], [[number] * 9] * 3, [number] * 3)
        seen.append(torch.cat([inputs.token_ids, inputs.lengths.long(), inputs.table[:, :9].reshape(-1).long()]))
    assert [each.unique().tolist() for each in seen] == [[number] for number in range(50)]


def test_tokens_are_those_that_the_host_draws() -> None:
    logits = 3 * torch.randn(8, 32_000, generator=torch.Generator().manual_seed(1))
    logits[3, 5] = torch.nan
    for sampling in (
        SamplingParameters(),
        SamplingParameters(temperature=0.9, seed=3),
        SamplingParameters(temperature=0.9, top_k=40, top_p=0.9, min_p=0.01, seed=3),
        SamplingParameters(temperature=0.9, presence_penalty=1.0, seed=3, logprobs=2),
    ):
        rows = [Row(RowSampler(sampling), position) for position in range(8)]
        assert sample_rows(rows, logits.to(GPU)) == sample_rows(rows, logits)
