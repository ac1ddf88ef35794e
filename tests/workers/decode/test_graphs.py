"""Recorded decode steps against transformers' greedy tokens: their control flow on a CPU, with NaN in all padding."""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from ringserve.cp_core.cost.decode import GATHER, HELIX
from ringserve.cp_core.cost.model import PASS_Q
from ringserve.cp_core.errors import Unavailable
from ringserve.cp_core.transport.collectives import PointToPointRing
from ringserve.cp_core.transport.interface import TransportStats
from ringserve.workers.decode import step as decode_step
from ringserve.workers.decode.graphs import (
    NOT_COMPILED,
    RECORDING,
    RECORDING_FAILED,
    GraphRunner,
    InputBuffers,
    PromptRunner,
    Recorded,
    bucket_of,
    prompt_bucket,
    try_record,
)
from ringserve.workers.decode.step import DecodeChoice
from ringserve.workers.kv.cache import KvCache
from ringserve.workers.model import pieces as compiler
from ringserve.workers.model.loading import AttentionStep, LoadedModel
from ringserve.workers.protocol.steps import Algorithm
from ringserve.workers.sampling.parameters import Sampled, SamplingParameters
from ringserve.workers.sampling.sampler import SampledRow, sample_rows
from tests.workers.decode.recording import KeptFunctions, compile_ranks, recording
from tests.workers.decode.test_variants import ENDS, PROMPTS, greedy, serve_all
from tests.workers.models import ALL_WINDOWED, WINDOWED, Oracle, random_tokens
from tests.workers.rings import LocalRing, Turn

CPU = torch.device("cpu")
Models = Mapping[str, Path]
Oracles = Mapping[str, Oracle]


def eager_steps(ring: LocalRing) -> list[Counter[str]]:
    """End decoding, since ranks may be behind the first, and return the counts of each."""
    ring.stop_decode()
    return [Counter(dict(worker.status().eager_steps)) for worker in ring.workers]


def right(oracles: Oracles, kind: str = "llama_gqa") -> dict[str, list[int]]:
    return {name: oracles[kind].greedy(PROMPTS[name], end) for name, end in ENDS.items()}


def test_a_bucket_has_room_for_its_rows() -> None:
    assert [bucket_of(rows) for rows in (1, 2, 3, 4, 5, 8, 9, 32, 33)] == [1, 2, 4, 4, 8, 8, 16, 32, 64]


@pytest.mark.parametrize(("variant", "num_ranks"), [(GATHER, 1), (GATHER, 2), (PASS_Q, 3)])
def test_recorded_pieces_give_the_tokens_of_one_process(
    variant: str, num_ranks: int, model_paths: Models, oracles: Oracles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five sequences of three buckets that join and leave; by pass-Q some ranks have no row in a step."""
    recorder = KeptFunctions()
    with (
        recording(recorder, monkeypatch),
        LocalRing(model_paths["llama_gqa"], num_ranks, decode_variant=variant) as ring,
    ):
        compile_ranks(ring)
        assert serve_all(ring, greedy()) == right(oracles)
        counts = eager_steps(ring)
    assert all(set(each) == {RECORDING} for each in counts)
    assert all(1 <= each[RECORDING] <= 3 for each in counts), "a bucket is recorded once"
    assert recorder.num_replayed > 5 * recorder.num_recorded, "most steps are replayed"


def on_stream(path: Path, num_ranks: int, variant: str = GATHER) -> LocalRing:
    return LocalRing(path, num_ranks, decode_variant=variant, is_on_stream=num_ranks > 1)


@pytest.mark.parametrize(
    ("kind", "num_ranks"),
    [("qwen3", 1), ("llama_gqa", 2), ("qwen3", 3), (WINDOWED, 1), (WINDOWED, 2), (ALL_WINDOWED, 3)],
)
def test_whole_steps_are_recorded_with_their_attention_and_their_messages(
    kind: str, num_ranks: int, model_paths: Models, oracles: Oracles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rows fill a bucket of four: what is stored of the fourth is read by none, and its attention is NaN.

    So is that of rows of which a rank holds nothing, as of a prompt of one token on three ranks.
    """
    recorders = [KeptFunctions() for _ in range(num_ranks)]
    with recording(recorders, monkeypatch, is_whole=True), on_stream(model_paths[kind], num_ranks) as ring:
        compile_ranks(ring)
        assert serve_all(ring, greedy()) == right(oracles, kind)
        counts = eager_steps(ring)
        gc.collect()
        assert not any(recorder.kept for recorder in recorders), "a ring ends when its recordings are gone"
    assert counts == [{RECORDING: recorder.num_recorded} for recorder in recorders]
    assert recorders[0].num_recorded <= 6, "one for a whole step, of three buckets and of two widths of a table"
    assert [recorder.num_replayed for recorder in recorders] == [recorders[0].num_replayed] * num_ranks
    assert recorders[0].num_replayed >= max(ENDS.values()) - 1 - 6, "the first token is not of a step"


def test_all_ranks_record_a_step_anew_when_the_tables_of_one_have_outgrown_their_memory(
    model_paths: Models, oracles: Oracles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second rank's tables have room in the buffers of 16 blocks."""
    recorders, prompt, sampling = (
        [KeptFunctions(), KeptFunctions()],
        random_tokens(50),
        SamplingParameters(max_tokens=12),
    )
    with recording(recorders, monkeypatch, is_whole=True), on_stream(model_paths["llama_gqa"], 2) as ring:
        compile_ranks(ring)
        conversations = [ring.open("short", 64), ring.open("long", 128)]
        firsts = ring.prefill([Turn(conversation, prompt, sampling) for conversation in conversations])
        conversations[1].blocks = (conversations[1].blocks[0], conversations[1].blocks[1][:12])
        ring.start_decode()
        for conversation in conversations:
            first = firsts[conversation.name]
            answer = [first, *ring.decode(conversation, first, sampling)]
            assert answer == oracles["llama_gqa"].greedy(prompt, 12)
    assert [(each.num_recorded, each.num_replayed) for each in recorders] == [(2, 20)] * 2


@pytest.mark.parametrize("fault", [1, 2])
def test_a_step_that_one_rank_cannot_record_is_recorded_whole_by_none(
    fault: int, model_paths: Models, oracles: Oracles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of three ranks records no more from some step on; the others go on in pieces, and messages fit."""
    recorders = [KeptFunctions(), KeptFunctions(), KeptFunctions(fault)]
    with recording(recorders, monkeypatch, is_whole=True), on_stream(model_paths["llama_gqa"], 3) as ring:
        compile_ranks(ring)
        assert serve_all(ring, greedy()) == right(oracles)
        first, second, last = eager_steps(ring)
    assert first == second
    assert 0 < first[RECORDING_FAILED] <= 3, "each bucket that is not recorded whole is counted once"
    assert last[RECORDING_FAILED] > first[RECORDING_FAILED]
    assert recorders[0].num_replayed > 20


def test_a_rank_whose_layers_are_not_compiled_has_the_messages_of_the_others(
    model_paths: Models, oracles: Oracles, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = KeptFunctions()
    with recording(recorder, monkeypatch, is_whole=True), on_stream(model_paths["llama_gqa"], 2) as ring:
        compile_ranks(ring)
        parts = ring.workers[1].parts
        ring.workers[1]._started = replace(parts, model=replace(parts.model, pieces=None))
        assert serve_all(ring, greedy()) == right(oracles)
        first, second = eager_steps(ring)
    assert set(second) == {NOT_COMPILED}
    assert 0 < first[RECORDING] <= first[RECORDING_FAILED], "once whole, then in pieces, if the bucket comes again"
    assert second[NOT_COMPILED] > 20


def test_recorded_steps_of_both_variants_alternate(
    model_paths: Models, oracles: Oracles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gather records whole steps, pass-Q pieces with messages between them."""
    turns = itertools.cycle([GATHER, PASS_Q, PASS_Q])
    with recording(KeptFunctions(), monkeypatch, is_whole=True) as patch:
        patch.setattr(DecodeChoice, "__call__", lambda *_: next(turns))
        with on_stream(model_paths["llama_gqa"], 3) as ring:
            compile_ranks(ring)
            assert serve_all(ring, greedy()) == right(oracles)
            counts = eager_steps(ring)
    assert {reason for each in counts for reason in each} == {RECORDING}


def test_a_recorded_step_is_waited_for_by_a_deadline_before_the_host_samples_its_rows(
    model_paths: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else has a deadline for its messages; the ring is then broken for all."""
    recorders, sampling = [KeptFunctions(), KeptFunctions()], SamplingParameters(max_tokens=9, logprobs=1)
    sampled: list[int] = []

    def sample(rows: Sequence[SampledRow], logits: Tensor) -> list[Sampled]:
        sampled.append(recorders[0].num_replayed)
        return sample_rows(rows, logits)

    def wait(ring: PointToPointRing, event: object) -> None:
        if ring.rank == 0 and recorders[0].num_replayed:
            raise Unavailable("the step is late")

    with recording(recorders, monkeypatch, is_whole=True) as patch, on_stream(model_paths["llama_gqa"], 2) as ring:
        compile_ranks(ring)
        conversation = ring.open("a", 64)
        first = ring.prefill([Turn(conversation, random_tokens(9), sampling)])["a"]
        patch.setattr(decode_step, "sample_checked", sample)
        patch.setattr(KvCache, "fence", lambda _: object())
        patch.setattr(PointToPointRing, "await_event", wait)
        ring.start_decode()
        ring.admit(conversation, first, sampling)
        assert [type(fault) for fault in ring.decode_ended()] == [Unavailable] * 2
    assert sampled == [0], "the first step is computed, the second replayed"


def test_a_replayed_step_counts_the_messages_that_it_sends() -> None:
    """A device that records computes nothing; here it does, and its messages are those of a recording."""
    stats, device = TransportStats(), torch.device("cpu")

    class Model:
        pieces = "compiled"

        def hidden_states(self, *_: object) -> Tensor:
            stats.gathers += 2
            stats.bytes_sent += 100
            return torch.zeros(1, 4)

    class Device:
        def record(self, compute: Callable[[], Any]) -> Recorded:
            return Recorded(lambda: None, compute())

    runner = GraphRunner(cast("LoadedModel", Model()), Device(), device, stats)
    inputs = InputBuffers(device).fill([1], [2], [3], [])
    for number in (1, 2, 3):
        runner.run_step(inputs, cast("AttentionStep", None))
        assert (stats.gathers, stats.bytes_sent) == (2 * number, 100 * number)
    assert runner.eager_steps == {RECORDING: 1}


def test_a_step_is_recorded_anew_when_its_inputs_have_outgrown_their_memory(
    model_paths: Models, oracles: Oracles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of four tokens: the buffers have room for tables of 16 blocks at first."""
    recorder, prompt, sampling = KeptFunctions(), random_tokens(50), SamplingParameters(max_tokens=12)
    with recording(recorder, monkeypatch, is_whole=True), LocalRing(model_paths["llama_gqa"], 1) as ring:
        compile_ranks(ring)
        conversations = [ring.open("short", 64), ring.open("long", 128)]
        firsts = ring.prefill([Turn(conversation, prompt, sampling) for conversation in conversations])
        ring.start_decode()
        for conversation in conversations:
            first = firsts[conversation.name]
            answer = [first, *ring.decode(conversation, first, sampling)]
            assert answer == oracles["llama_gqa"].greedy(prompt, 12)
    assert recorder.num_recorded == 2, "one recording for each width of the tables"
    assert recorder.num_replayed == 2 * 10


@pytest.mark.parametrize(("fault", "is_whole"), [(1, True), (2, False)])
def test_a_step_that_cannot_be_recorded_goes_on_and_later_ones_are_counted(
    fault: int, is_whole: bool, model_paths: Models, oracles: Oracles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks fail in the middle of a step, when the first layer's messages are sent; none is sent twice."""
    with (
        recording(KeptFunctions(fault), monkeypatch, is_whole=is_whole),
        LocalRing(model_paths["llama_gqa"], 1 if is_whole else 2, decode_variant=GATHER) as ring,
    ):
        compile_ranks(ring)
        assert serve_all(ring, greedy()) == right(oracles)
        counts = eager_steps(ring)
    assert all(each[RECORDING_FAILED] > 0 for each in counts)


def test_layers_that_cannot_be_compiled_run_as_they_are_and_are_counted(
    model_paths: Models, oracles: Oracles, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the compiler has no backend here")

    prompt, sampling = random_tokens(9), SamplingParameters(max_tokens=5)
    with recording(KeptFunctions(), monkeypatch) as patch, LocalRing(model_paths["llama_gqa"], 1) as ring:
        patch.setattr(compiler, "trace", fail)
        ring.probe()
        conversation = ring.open("a", 64)
        first = ring.prefill([Turn(conversation, prompt, sampling)])["a"]
        ring.start_decode()
        assert [first, *ring.decode(conversation, first, sampling)] == oracles["llama_gqa"].greedy(prompt, 5)
        assert eager_steps(ring) == [Counter({NOT_COMPILED: 4})]
    assert "the layers are not compiled: the compiler has no backend here" in caplog.text


@pytest.mark.parametrize(("num_ranks", "tp", "variant"), [(1, 2, GATHER), (2, 1, HELIX)])
def test_sums_over_ranks_run_between_recorded_pieces(
    num_ranks: int,
    tp: int,
    variant: str,
    model_paths: Models,
    oracles: Oracles,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = KeptFunctions()
    with (
        recording(recorder, monkeypatch),
        LocalRing(model_paths["llama_gqa"], num_ranks, tp=tp, decode_variant=variant) as ring,
    ):
        compile_ranks(ring)
        assert serve_all(ring, greedy()) == right(oracles)
        counts = eager_steps(ring)
    assert {reason for each in counts for reason in each} == {RECORDING}
    assert recorder.num_replayed > 5 * recorder.num_recorded


def test_a_prompt_has_the_bucket_that_holds_it() -> None:
    assert [prompt_bucket(tokens) for tokens in (1, 32, 33, 64, 65, 128, 129, 1024)] == [32, 32, 64, 64] + [128] * 2 + [
        256,
        1024,
    ]


@pytest.mark.parametrize(
    ("kind", "num_ranks", "tp", "algorithm"),
    [
        ("llama_gqa", 1, 1, Algorithm.PASS_KV),
        ("qwen3", 1, 2, Algorithm.PASS_KV),
        (WINDOWED, 2, 1, Algorithm.PASS_Q),
        (ALL_WINDOWED, 3, 1, Algorithm.PASS_KV),
    ],
)
def test_short_prompts_are_recorded_at_their_second_time(
    kind: str,
    num_ranks: int,
    tp: int,
    algorithm: Algorithm,
    model_paths: Models,
    oracles: Oracles,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts of other lengths in one bucket, follow-ups, two in a step. Attention of padding is NaN."""
    recorder = KeptFunctions()
    with recording(recorder, monkeypatch), LocalRing(model_paths[kind], num_ranks, tp=tp) as ring:
        compile_ranks(ring)
        texts = {name: random_tokens(length, seed=length) for name, length in (("a", 61), ("b", 40), ("c", 64))}
        conversations = {name: ring.open(name, 192) for name in texts}
        counts = []
        for name, text in texts.items():
            (logits,) = ring.prefill_logits([Turn(conversations[name], text)], algorithm)
            torch.testing.assert_close(logits, oracles[kind].logits(text), rtol=1e-4, atol=1e-4)
            counts.append((recorder.num_recorded, recorder.num_replayed))
        assert counts[0] == (0, 0)
        assert counts[1][0] == counts[2][0] > 0, "a bucket is recorded once"
        assert counts[2][1] > counts[1][1]
        turns = [
            Turn(conversations["a"], random_tokens(20, seed=5)),
            Turn(conversations["b"], random_tokens(9, seed=6)),
        ]
        for turn, logits in zip(turns, ring.prefill_logits(turns, algorithm), strict=True):
            text = [*texts[turn.conversation.name], *turn.token_ids]
            right_logits = oracles[kind].logits(text)[-len(turn.token_ids) :]
            torch.testing.assert_close(logits, right_logits, rtol=1e-4, atol=1e-4)


def test_a_prompt_inside_another_leaves_the_recordings_to_it() -> None:
    """The outer one's rows lie in the memory of its recording while the inner one is computed."""

    class Inside:
        pieces, total, inner = object(), None, ""

        def hidden_states(self, *_: object) -> str:
            return "computed"

    class Recorded:
        fault = None

        def __init__(self, *_: object) -> None: ...

        def run(self, token_ids: Tensor, *_: object) -> str:
            model.inner = str(runner.hidden_states(token_ids, token_ids, cast(Any, None)))
            return "replayed"

    model = Inside()
    runner = PromptRunner(cast(Any, model), KeptFunctions(), CPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ringserve.workers.decode.graphs.RecordedPieces", Recorded)
        answers = [runner.hidden_states(torch.zeros(40), torch.zeros(40), cast(Any, None)) for _ in range(3)]
    assert answers == ["computed", "replayed", "replayed"]
    assert model.inner == "computed"


def test_a_ring_that_breaks_while_a_step_is_recorded_is_no_fault_of_the_recording() -> None:
    class Breaking:
        def record(self, compute: object) -> Recorded:
            raise Unavailable("a peer is lost")

    with pytest.raises(Unavailable):
        try_record(Breaking(), lambda: None)


def test_a_row_that_is_not_finite_fails_alone_in_a_replayed_step(
    model_paths: Models, oracles: Oracles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broken row comes first in its batch; its KV is NaN from the start."""
    prompts = {name: random_tokens(20, seed=seed) for seed, name in enumerate(("broken", "whole"))}
    sampling = SamplingParameters(max_tokens=9)
    with recording(KeptFunctions(), monkeypatch), LocalRing(model_paths["llama_gqa"], 2, decode_variant=PASS_Q) as ring:
        compile_ranks(ring)
        conversations = {name: ring.open(name, 64) for name in prompts}
        firsts = ring.prefill([Turn(conversations[name], prompts[name], sampling) for name in prompts])
        block = conversations["broken"].blocks[0][0]
        ring.workers[0].parts.cache.k_layers[0][4 * block] = torch.nan
        ring.start_decode()
        for name, conversation in conversations.items():
            ring.admit(conversation, firsts[name], sampling)
        answers: dict[str, list[int | None]] = {name: [] for name in prompts}
        while len(answers["whole"]) < 8 or not answers["broken"]:
            for event in ring.next_events():
                answers[event.sequence_id].append(event.token_id)
    assert answers["broken"] == [None]
    assert [firsts["whole"], *answers["whole"]] == oracles["llama_gqa"].greedy(prompts["whole"], 9)
