"""Steps that are issued before the tokens of the last are read: the events are those of steps that wait.

Rings of several ranks have messages on the streams of their devices, as NCCL's are, and headers beside them.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from ringserve.cp_core.cost.decode import GATHER, HELIX
from ringserve.cp_core.cost.model import PASS_Q
from ringserve.cp_core.errors import Unavailable
from ringserve.cp_core.transport.interface import RingTransport
from ringserve.views import RingRates
from ringserve.workers.decode.loop import BATCH_CHANGES, VARIANT_CHANGES, DecodeMailbox
from ringserve.workers.decode.step import (
    DRAFTS,
    HOST_MESSAGES,
    SAMPLED_ON_HOST,
    TENSOR_PARALLEL,
    DecodeChoice,
    DecodePass,
)
from ringserve.workers.protocol.steps import DecodeEvent, FinishReason, GrowSequence
from ringserve.workers.rank import parts as rank_parts
from ringserve.workers.rank import worker as rank_worker
from ringserve.workers.rank.worker import RankWorker
from ringserve.workers.sampling.parameters import SamplingParameters, TokenBias
from tests.waiting import WAIT_SECONDS
from tests.workers.decode.lazy_device import LazyStream, lazy_devices
from tests.workers.decode.recording import RATES, KeptFunctions, TabledAttention, compile_ranks, recording
from tests.workers.decode.test_drafts import foretell_seldom
from tests.workers.decode.test_variants import ENDS, PROMPTS, greedy, serve_all
from tests.workers.models import ALL_WINDOWED, WINDOWED, Oracle, random_tokens
from tests.workers.rings import BLOCK_TOKENS, LocalRing, Turn

Models = Mapping[str, Path]
Oracles = Mapping[str, Oracle]


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LazyStream]]:
    """Let up to three ranks of a test decode on lazy devices, whose attention follows the tables that they have."""
    monkeypatch.setattr(rank_parts, "select_backend", lambda *_: TabledAttention())
    with lazy_devices(monkeypatch, 3) as streams:
        yield streams


@pytest.fixture
def stream(streams: list[LazyStream]) -> LazyStream:
    """Return the device of the first rank."""
    return streams[0]


def ring_of(path: Path, num_ranks: int, **settings: Any) -> LocalRing:
    return LocalRing(path, num_ranks, decode_variant=GATHER, is_on_stream=num_ranks > 1, **settings)


def events_of(
    path: Path, samplings: Mapping[str, SamplingParameters], num_ranks: int = 1, room: int = 64, broken: str = ""
) -> dict[str, list[DecodeEvent]]:
    """Decode a sequence for each of these samplings together, to the end of all. `room` is that of each table.

    A row that is in one more step may change which rank stores another's token: owners are left out.
    """
    with ring_of(path, num_ranks, attention_backend="reference") as ring:
        conversations = {name: ring.open(name, room) for name in samplings}
        turns = [
            Turn(conversations[name], random_tokens(20, seed=seed), sampling)
            for seed, (name, sampling) in enumerate(samplings.items())
        ]
        firsts = ring.prefill(turns)
        if broken:
            slot = 4 * conversations[broken].blocks[0][0]
            ring.workers[0].parts.cache.k_layers[0][slot] = torch.nan
        for name, sampling in samplings.items():
            ring.admit(conversations[name], firsts[name], sampling)
        ring.start_decode()
        events: dict[str, list[DecodeEvent]] = {name: [] for name in samplings}
        left = set(samplings)
        while left:
            for event in ring.next_events():
                events[event.sequence_id].append(replace(event, owner=None))
                if event.has_left:
                    left.discard(event.sequence_id)
        return events


@pytest.mark.parametrize(("is_recorded", "num_ranks"), [(False, 1), (True, 1), (False, 2), (True, 2), (False, 3)])
def test_sequences_that_join_and_leave_get_the_tokens_of_one_process(
    is_recorded: bool,
    num_ranks: int,
    model_paths: Models,
    oracles: Oracles,
    streams: list[LazyStream],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Recorded steps are whole ones with NaN in their padding. A prompt of one token leaves ranks without KV."""
    recorder, path = KeptFunctions(), model_paths["llama_gqa"]
    if is_recorded:
        with recording(recorder, monkeypatch, is_whole=True), ring_of(path, num_ranks) as ring:
            compile_ranks(ring)
            answers = serve_all(ring, greedy())
        assert recorder.num_replayed > 10
    else:
        with ring_of(path, num_ranks) as ring:
            answers = serve_all(ring, greedy())
    assert answers == {name: oracles["llama_gqa"].greedy(PROMPTS[name], end) for name, end in ENDS.items()}
    for stream in streams[:num_ranks]:
        assert stream.num_steps > 20
        assert stream.left.count(2) > 10, "the next step's copy and its work were under way"
        assert stream.is_idle


def test_the_host_waits_once_a_step_for_that_step_alone(model_paths: Models, stream: LazyStream) -> None:
    """Twelve steps: while each but the last is read, the next one's copy and its work are under way."""
    (events,) = events_of(model_paths["llama_gqa"], {"a": SamplingParameters(max_tokens=13)}).values()
    assert len(events) == stream.num_steps == 12
    assert stream.left == [2] * 11 + [0]


@pytest.mark.parametrize(
    ("stop_after", "temperature", "num_ranks"),
    [*itertools.product([1, 2, 7], [0.0, 0.9], [1]), (1, 0.0, 2), (2, 0.9, 2), (7, 0.0, 3)],
)
def test_an_end_that_is_found_a_step_late_is_told_as_one_found_in_time(
    stop_after: int, temperature: float, num_ranks: int, model_paths: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other sequence goes on to its last token; both have the KV and the reasons of steps that wait."""
    path, sampling = model_paths["llama_gqa"], SamplingParameters(max_tokens=14, temperature=temperature, seed=5)
    samplings = {"a": sampling, "b": sampling}
    token = events_of(path, samplings, num_ranks)["a"][stop_after - 1].token_id
    assert token is not None
    samplings["a"] = replace(sampling, stop_token_ids=(token,))
    expected = events_of(path, samplings, num_ranks)
    assert expected["a"][-1].finish_reason is FinishReason.STOP
    with lazy_devices(monkeypatch, num_ranks) as streams:
        assert events_of(path, samplings, num_ranks) == expected
    assert [max(stream.left) for stream in streams] == [2] * num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_row_that_is_not_finite_fails_alone_though_it_is_in_one_more_step(
    num_ranks: int, model_paths: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drawn row, too: a draw from NaN gives no token of the vocabulary, and the next step looks it up."""
    plain = SamplingParameters(max_tokens=9)
    samplings = {"a": replace(plain, temperature=0.7, seed=3), "b": plain}
    expected = events_of(model_paths["llama_gqa"], samplings, num_ranks, broken="a")
    assert [event.is_broken for event in expected["a"]] == [True]
    with lazy_devices(monkeypatch, num_ranks) as streams:
        assert events_of(model_paths["llama_gqa"], samplings, num_ranks, broken="a") == expected
    assert streams[0].num_steps > 2


@pytest.mark.parametrize(
    ("kind", "is_recorded", "num_ranks"),
    [
        ("llama_gqa", False, 1),
        ("llama_gqa", True, 1),
        (WINDOWED, True, 1),
        (ALL_WINDOWED, True, 2),
        (WINDOWED, True, 3),
    ],
)
def test_steps_with_drafts_wait_and_others_are_issued_ahead(
    kind: str,
    is_recorded: bool,
    num_ranks: int,
    model_paths: Models,
    oracles: Oracles,
    streams: list[LazyStream],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sequences join and leave; a third of the drafts is wrong, and in most steps no sequence has any."""
    recorder, path = KeptFunctions(), model_paths[kind]
    right = {name: oracles[kind].greedy(PROMPTS[name], end) for name, end in ENDS.items()}
    foretell_seldom(monkeypatch, right)
    with recording(recorder, monkeypatch, is_whole=True), ring_of(path, num_ranks, drafts=True) as ring:
        if is_recorded:
            compile_ranks(ring)
        assert serve_all(ring, greedy()) == right
        status = ring.workers[0].status()
    assert 0 < sum(status.accepted_drafts) < sum(status.checked_drafts)
    assert dict(status.waited_steps)[DRAFTS] >= 2
    assert streams[0].left.count(2) >= 2, "the next step was under way"
    assert bool(recorder.num_replayed) == is_recorded


@pytest.mark.parametrize(("num_ranks", "room"), [(1, 28), (3, 12)])
def test_a_sequence_without_room_leaves_before_the_step_that_would_not_fit(
    num_ranks: int, room: int, model_paths: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    samplings = {"a": SamplingParameters(max_tokens=30), "b": SamplingParameters(max_tokens=4)}
    expected = events_of(model_paths["llama_gqa"], samplings, num_ranks, room)
    assert expected["a"][-1].is_starved
    with lazy_devices(monkeypatch, num_ranks) as streams:
        assert events_of(model_paths["llama_gqa"], samplings, num_ranks, room) == expected
    assert [max(stream.left) for stream in streams] == [2] * num_ranks


@pytest.mark.parametrize("prompt", [random_tokens(1), random_tokens(40)])
def test_a_recorded_step_serves_shards_that_were_empty_when_it_was_recorded(
    prompt: list[int],
    model_paths: Models,
    oracles: Oracles,
    streams: list[LazyStream],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks record what they are, a rank without KV among them, and who stores a token changes in each step."""
    recorders, sampling = [KeptFunctions() for _ in range(3)], SamplingParameters(max_tokens=20)
    with recording(recorders, monkeypatch, is_whole=True), ring_of(model_paths["llama_gqa"], 3) as ring:
        compile_ranks(ring)
        conversation = ring.open("a", 64)
        first = ring.prefill([Turn(conversation, prompt, sampling)])["a"]
        ring.start_decode()
        assert [first, *ring.decode(conversation, first, sampling)] == oracles["llama_gqa"].greedy(prompt, 20)
    assert [(each.num_recorded, each.num_replayed) for each in recorders] == [(1, 18)] * 3


@pytest.mark.parametrize("is_recorded", [False, True])
def test_tables_grow_while_a_step_is_under_way(
    is_recorded: bool, model_paths: Models, oracles: Oracles, stream: LazyStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block for every four tokens, which come just in time; the inputs outgrow their memory on the way."""
    path, prompt, sampling = model_paths["llama_gqa"], random_tokens(50), SamplingParameters(max_tokens=31)
    post = DecodeMailbox.post

    with recording(KeptFunctions(), monkeypatch, is_whole=True) as patch, LocalRing(path, 1) as ring:
        if is_recorded:
            compile_ranks(ring)
        conversation = ring.open("a", 84)
        first = ring.prefill([Turn(conversation, prompt, sampling)])["a"]
        (table,) = conversation.blocks

        def post_and_grow(self: DecodeMailbox, events: Sequence[DecodeEvent]) -> None:
            post(self, events)
            (event,) = events
            count, rest = divmod(event.kv_tokens + 1, BLOCK_TOKENS)
            if rest == 0:
                self.submit([GrowSequence(sequence_id="a", blocks=(table[count : count + 1],))])

        patch.setattr(DecodeMailbox, "post", post_and_grow)
        conversation.blocks = (table[:13],)
        ring.start_decode()
        assert [first, *ring.decode(conversation, first, sampling)] == oracles["llama_gqa"].greedy(prompt, 31)
        assert dict(ring.workers[0].status().waited_steps) == {BATCH_CHANGES: 1}, "the last step has no other behind it"
    assert stream.left.count(2) == 29


def test_steps_with_rows_that_the_host_samples_are_waited_for_and_counted(
    model_paths: Models, stream: LazyStream
) -> None:
    samplings = {
        "a": SamplingParameters(max_tokens=4, logprobs=2),
        "b": SamplingParameters(max_tokens=6, logit_bias=(TokenBias(3, 1.0),)),
        "c": SamplingParameters(max_tokens=9),
    }
    with LocalRing(model_paths["llama_gqa"], 1) as ring:
        conversations = {name: ring.open(name, 64) for name in samplings}
        firsts = ring.prefill([Turn(each, random_tokens(9), samplings[name]) for name, each in conversations.items()])
        for name, conversation in conversations.items():
            ring.admit(conversation, firsts[name], samplings[name])
        ring.start_decode()
        ring.events_until_finished(list(samplings))
        assert dict(ring.workers[0].status().waited_steps) == {SAMPLED_ON_HOST: 5, BATCH_CHANGES: 1}
    assert stream.num_steps == 3, "the last sequence is alone from its sixth step on"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, HOST_MESSAGES),
        ({"is_on_stream": True, "decode_variant": PASS_Q}, PASS_Q),
        ({"is_on_stream": True, "decode_variant": HELIX}, HELIX),
        ({"tp": 2}, TENSOR_PARALLEL),
    ],
)
def test_rings_whose_next_step_cannot_be_issued_ahead_wait_and_count_why(
    settings: dict[str, Any], reason: str, model_paths: Models, oracles: Oracles, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling, prompt = SamplingParameters(max_tokens=5), random_tokens(9)
    monkeypatch.setattr(rank_worker, "DecodePass", partial(DecodePass, is_asynchronous=True))
    with LocalRing(model_paths["llama_gqa"], 3 - settings.get("tp", 1), **settings) as ring:
        conversation = ring.open("a", 64)
        first = ring.prefill([Turn(conversation, prompt, sampling)])["a"]
        ring.start_decode()
        assert [first, *ring.decode(conversation, first, sampling)] == oracles["llama_gqa"].greedy(prompt, 5)
        assert [dict(worker.status().waited_steps) for worker in ring.workers] == [{reason: 4}, {}]


def test_a_step_of_another_variant_waits_for_the_tokens_before_it(
    model_paths: Models, oracles: Oracles, streams: list[LazyStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten steps of one sequence: two by pass-Q, in the place of the fourth and the fifth."""

    def choose(_: DecodeChoice, num_sequences: int, stored_tokens: int) -> str:
        return PASS_Q if stored_tokens in (12, 13) else GATHER

    monkeypatch.setattr(DecodeChoice, "__call__", choose)
    sampling, prompt = SamplingParameters(max_tokens=11), random_tokens(8)
    with LocalRing(model_paths["llama_gqa"], 2, is_on_stream=True) as ring:
        conversation = ring.open("a", 64)
        first = ring.prefill([Turn(conversation, prompt, sampling)])["a"]
        ring.start_decode()
        assert [first, *ring.decode(conversation, first, sampling)] == oracles["llama_gqa"].greedy(prompt, 11)
        waited = dict(ring.workers[0].status().waited_steps)
    assert waited == {VARIANT_CHANGES: 1, PASS_Q: 2, BATCH_CHANGES: 1}
    assert [stream.num_steps for stream in streams] == [8, 8, 0]


def test_prompts_and_measurements_of_a_ring_come_between_steps_that_are_done(
    model_paths: Models, oracles: Oracles, streams: list[LazyStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = dict[int, list[int]]()

    def measured(worker: RankWorker, ring: RingTransport) -> Generator[None, None, RingRates]:
        for _ in range(3):
            assert streams[ring.rank].is_idle
            steps.setdefault(ring.rank, []).append(worker._progress.steps)
            yield
        return RATES

    monkeypatch.setattr(RankWorker, "_probe", measured)
    prompts = {"a": random_tokens(9), "b": random_tokens(14, seed=3)}
    sampling = SamplingParameters(max_tokens=30)
    with ring_of(model_paths["llama_gqa"], 2) as ring:
        conversations = {name: ring.open(name, 64) for name in prompts}
        told = {"a": [ring.prefill([Turn(conversations["a"], prompts["a"], sampling)])["a"]], "b": list[int]()}
        ring.start_decode()
        ring.admit(conversations["a"], told["a"][0], sampling)
        ring.compute(conversations["b"], prompts["b"], sampling)
        while any(len(tokens) < 30 for tokens in told.values()):
            for event in ring.next_events():
                assert event.token_id is not None
                told[event.sequence_id].append(event.token_id)
                if event.prompt_seconds is not None:
                    ring.admit(conversations["b"], event.token_id, sampling)
                    assert ring.workers[0].probe_between_steps(WAIT_SECONDS) == RATES
    assert told == {name: oracles["llama_gqa"].greedy(prompt, 30) for name, prompt in prompts.items()}
    assert all(stream.left.count(2) > 10 for stream in streams[:2])
    for counts in steps.values():
        assert len(counts) == 3
        assert all(later > earlier for earlier, later in pairwise(counts)), "a measurement lets steps between its parts"
    assert steps.keys() == {0, 1}


def test_a_sequence_that_comes_to_an_idle_ring_waits_for_a_part_of_a_measurement_at_most(
    model_paths: Models, oracles: Oracles, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, has_come = threading.Event(), threading.Event()
    steps = list[int]()

    def measured(worker: RankWorker, _: RingTransport) -> Generator[None, None, RingRates]:
        has_begun.set()
        assert has_come.wait(WAIT_SECONDS)
        before = worker._progress.steps
        yield
        steps.append(worker._progress.steps - before)
        return RATES

    monkeypatch.setattr(RankWorker, "_probe", measured)
    prompt, sampling = random_tokens(9), SamplingParameters(max_tokens=6)
    with ring_of(model_paths["llama_gqa"], 1) as ring, ThreadPoolExecutor(1) as threads:
        conversation = ring.open("a", 32)
        told = [ring.prefill([Turn(conversation, prompt, sampling)])["a"]]
        ring.start_decode()
        rates = threads.submit(ring.workers[0].probe_between_steps, WAIT_SECONDS)
        assert has_begun.wait(WAIT_SECONDS)
        ring.admit(conversation, told[0], sampling)
        has_come.set()
        while len(told) < 6:
            told += [event.token_id for event in ring.next_events() if event.token_id is not None]
        assert rates.result(WAIT_SECONDS) == RATES
    assert steps == [1]
    assert told == oracles["llama_gqa"].greedy(prompt, 6)


def tokens_of(ring: LocalRing) -> list[int | None]:
    return [event.token_id for event in ring.next_events()]


@pytest.mark.parametrize(("num_ranks", "failing"), [(1, 0), (2, 0), (3, 2)])
def test_a_device_that_fails_breaks_the_ring_after_the_tokens_that_it_gave(
    num_ranks: int, failing: int, model_paths: Models, oracles: Oracles, streams: list[LazyStream]
) -> None:
    """No rank waits for what does not come: each has issued a step, and the leader perhaps one more."""
    sampling, prompt = SamplingParameters(max_tokens=1000), random_tokens(9)
    with ring_of(model_paths["llama_gqa"], num_ranks) as ring:
        conversation = ring.open("a", 1024)
        first = ring.prefill([Turn(conversation, prompt, sampling)])["a"]
        ring.start_decode()
        ring.admit(conversation, first, sampling)
        told = tokens_of(ring)
        streams[failing].fault = RuntimeError("an illegal address")
        faults = ring.decode_ended()
        assert faults.pop(failing) is streams[failing].fault
        assert [type(fault) for fault in faults] == [Unavailable] * (num_ranks - 1)
        with pytest.raises(Unavailable, match=r"the decode loop of test-0 broke: (an illegal address|rank \d left)"):
            told += itertools.chain.from_iterable(iter(partial(tokens_of, ring), []))
    assert [first, *told] == oracles["llama_gqa"].greedy(prompt, 1 + len(told))
