"""Every decode variant, and changes between them, against transformers' greedy tokens; caches are poisoned."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ringserve.cp_core.attention import native
from ringserve.cp_core.cost.decode import GATHER, HELIX, VARIANTS, DecodeRates, StartChoice
from ringserve.cp_core.cost.model import PASS_Q
from ringserve.cp_core.errors import ConfigError
from ringserve.cp_core.transport.inprocess import InProcessRing
from ringserve.views import RingRates
from ringserve.workers.decode.messages import Header, HeaderChannel, HeaderKind
from ringserve.workers.decode.step import DecodeChoice
from ringserve.workers.model.loading import DTYPES, load_model
from ringserve.workers.protocol.steps import Algorithm
from ringserve.workers.rank import parts as rank_parts
from ringserve.workers.sampling.parameters import SamplingParameters
from tests.gloo import gloo_as_nccl
from tests.workers.models import ALL_WINDOWED, KINDS, Oracle, random_tokens
from tests.workers.rings import LocalRing, Turn

Models = Mapping[str, Path]
Oracles = Mapping[str, Oracle]

CHOOSE_AT_START = "ringserve.workers.decode.step.choose_at_start"
ENDS = {"a": 24, "b": 3, "c": 12, "d": 19, "e": 2}
PROMPTS = {name: random_tokens(count, seed=count) for name, count in zip(ENDS, (5, 40, 1, 17, 64), strict=True)}


def serve_all(ring: LocalRing, samplings: Mapping[str, SamplingParameters]) -> dict[str, list[int]]:
    """Decode five sequences, of which two join as others leave -> all tokens of each."""
    conversations = {name: ring.open(name, 128) for name in ENDS}
    turns = [Turn(conversations[name], PROMPTS[name], samplings[name]) for name in ENDS]
    answers = {name: [first] for name, first in ring.prefill(turns).items()}
    ring.start_decode()
    waiting, left = ["d", "e"], set(ENDS)

    def admit(name: str) -> None:
        ring.admit(conversations[name], answers[name][0], samplings[name])

    for name in "abc":
        admit(name)
    while left:
        for event in ring.next_events():
            assert event.token_id is not None
            answers[event.sequence_id].append(event.token_id)
            if event.finish_reason is not None:
                left.remove(event.sequence_id)
                if waiting:
                    admit(waiting.pop())
    return answers


def greedy() -> dict[str, SamplingParameters]:
    return {name: SamplingParameters(max_tokens=end) for name, end in ENDS.items()}


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_sequences_that_join_and_leave_get_the_tokens_of_one_process(
    variant: str, num_ranks: int, model_paths: Models, oracles: Oracles
) -> None:
    """Decode batches smaller than the ring: ranks without a row of their own take part."""
    with LocalRing(model_paths["llama_gqa"], num_ranks, decode_variant=variant) as ring:
        answers = serve_all(ring, greedy())
        assert [worker.status().decode_variant for worker in ring.workers] == [variant] * num_ranks
    assert answers == {name: oracles["llama_gqa"].greedy(PROMPTS[name], end) for name, end in ENDS.items()}


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_kernel_that_follows_block_tables_gives_the_same_tokens(
    variant: str, num_ranks: int, model_paths: Models, oracles: Oracles
) -> None:
    """Decode with the reference, which follows block tables; blocks are scattered and unwritten slots are NaN."""
    with LocalRing(model_paths["llama_gqa"], num_ranks, decode_variant=variant, attention_backend="reference") as ring:
        answers = serve_all(ring, greedy())
    assert answers == {name: oracles["llama_gqa"].greedy(PROMPTS[name], end) for name, end in ENDS.items()}


@pytest.mark.parametrize("variant", [PASS_Q, HELIX])
@pytest.mark.parametrize("kind", [*KINDS, ALL_WINDOWED])
def test_every_model_decodes_the_same(kind: str, variant: str, model_paths: Models, oracles: Oracles) -> None:
    prompt, sampling = random_tokens(33), SamplingParameters(max_tokens=16)
    with LocalRing(model_paths[kind], 2, decode_variant=variant) as ring:
        conversation = ring.open("a", 64)
        first = ring.prefill([Turn(conversation, prompt, sampling)])["a"]
        ring.start_decode()
        following = ring.decode(conversation, first, sampling)
    assert [first, *following] == oracles[kind].greedy(prompt, 16)


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, ALL_WINDOWED])
def test_a_lone_rank_of_packed_weights_takes_one_call_a_layer_and_decodes_the_same(
    kind: str, drafts: bool, model_paths: Models, oracles: Oracles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless all its layers have a window. Sequences join and leave; blocks are scattered."""
    calls = []

    def whole_layer(*given: Any) -> torch.Tensor:
        calls.append(given)
        return native_whole_layer(*given)

    native_whole_layer = native.whole_layer
    monkeypatch.setattr(native, "whole_layer", whole_layer)
    with LocalRing(model_paths[kind], 1, packs_weights=True, drafts=drafts) as ring:
        answers = serve_all(ring, greedy())
    assert answers == {name: oracles[kind].greedy(PROMPTS[name], end) for name, end in ENDS.items()}
    decoded = [rows for _, rows, *_ in calls if isinstance(rows, native.PagedRows)]
    assert bool(decoded) == (native.library() is not None and kind != ALL_WINDOWED)


@pytest.mark.parametrize("variant", [PASS_Q, HELIX])
@pytest.mark.parametrize("ring_transport", ["sockets", "nccl"])
def test_variants_decode_over_real_transports(
    ring_transport: str, variant: str, model_paths: Models, oracles: Oracles
) -> None:
    """Decode two sequences on three ranks: messages of every length, also empty, in both directions."""
    prompts = {"a": random_tokens(9, seed=1), "b": random_tokens(26, seed=2)}
    sampling = SamplingParameters(max_tokens=10)
    with (
        gloo_as_nccl(),
        LocalRing(model_paths["llama_gqa"], 3, ring_transport=ring_transport, decode_variant=variant) as ring,
    ):
        conversations = {name: ring.open(name, 64) for name in prompts}
        firsts = ring.prefill([Turn(conversations[name], prompts[name], sampling) for name in prompts])
        ring.start_decode()
        for name in prompts:
            ring.admit(conversations[name], firsts[name], sampling)
        events = ring.events_until_finished(list(prompts))
    for name, prompt in prompts.items():
        tokens = [firsts[name], *(event.token_id for event in events[name])]
        assert tokens == oracles["llama_gqa"].greedy(prompt, 10), name


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_variant_may_change_at_every_step(
    num_ranks: int, model_paths: Models, oracles: Oracles, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = itertools.cycle([GATHER, PASS_Q, PASS_Q])
    used: list[str] = []

    def alternate(_: DecodeChoice, num_sequences: int, stored_tokens: int) -> str:
        assert num_sequences <= stored_tokens
        used.append(next(turns))
        return used[-1]

    monkeypatch.setattr(DecodeChoice, "__call__", alternate)
    with LocalRing(model_paths["llama_gqa"], num_ranks) as ring:
        answers = serve_all(ring, greedy())
    assert {GATHER, PASS_Q} == set(used)
    assert answers == {name: oracles["llama_gqa"].greedy(PROMPTS[name], end) for name, end in ENDS.items()}


def test_tokens_are_drawn_alike_whichever_rank_draws_them(model_paths: Models) -> None:
    samplings = {
        name: SamplingParameters(temperature=0.8, seed=(1 << 63) + place, max_tokens=end)
        for place, (name, end) in enumerate(ENDS.items())
    }
    answers = []
    for variant, num_ranks in ((GATHER, 1), (GATHER, 2), (PASS_Q, 2), (PASS_Q, 3), (HELIX, 1), (HELIX, 3)):
        with LocalRing(model_paths["llama_gqa"], num_ranks, decode_variant=variant) as ring:
            answers.append(serve_all(ring, samplings))
    assert all(each == answers[0] for each in answers)
    assert len(set(answers[0]["a"])) > 5


def test_the_next_turn_prefills_upon_what_pass_q_stored(model_paths: Models, oracles: Oracles) -> None:
    prompt, question, sampling = random_tokens(21), random_tokens(9, seed=2), SamplingParameters(max_tokens=14)
    with LocalRing(model_paths["qwen3"], 3, decode_variant=PASS_Q) as ring:
        conversation = ring.open("a", 128)
        first = ring.prefill([Turn(conversation, prompt, sampling)])["a"]
        ring.start_decode()
        answer = [first, *ring.decode(conversation, first, sampling)]
        ring.stop_decode()
        assert max(conversation.held) - min(conversation.held) <= 1
        second = ring.prefill([Turn(conversation, [answer[-1], *question], sampling)], Algorithm.PASS_KV)["a"]
    assert second == oracles["qwen3"].greedy([*prompt, *answer, *question], 1)[0]


def test_a_short_prompt_on_one_rank_decodes_beside_a_spread_one(model_paths: Models, oracles: Oracles) -> None:
    """Decode a sequence of one token, stored on one of three ranks, beside one stored on all."""
    prompts = {"short": random_tokens(1, seed=3), "long": random_tokens(50, seed=4)}
    sampling = SamplingParameters(max_tokens=8)
    for variant in VARIANTS:
        with LocalRing(model_paths["llama_gqa"], 3, decode_variant=variant) as ring:
            conversations = {name: ring.open(name, 64) for name in prompts}
            firsts = ring.prefill([Turn(conversations[name], prompts[name], sampling) for name in prompts])
            assert sorted(conversations["short"].held) == [0, 0, 1]
            ring.start_decode()
            for name in prompts:
                ring.admit(conversations[name], firsts[name], sampling)
            events = ring.events_until_finished(list(prompts))
        for name, prompt in prompts.items():
            tokens = [firsts[name], *(event.token_id for event in events[name])]
            assert tokens == oracles["llama_gqa"].greedy(prompt, 8), (variant, name)


def test_a_pass_q_step_takes_its_ring_once_a_layer_and_brings_its_tokens_once(model_paths: Models) -> None:
    sampling = SamplingParameters(max_tokens=11)
    with LocalRing(model_paths["llama_gqa"], 3, decode_variant=PASS_Q) as ring:
        conversation = ring.open("a", 64)
        first = ring.prefill([Turn(conversation, random_tokens(9), sampling)])["a"]
        before = [(each.stats.exchanges, each.stats.all_to_alls) for each in ring.transports]
        ring.start_decode()
        assert len(ring.decode(conversation, first, sampling)) == 10
        ring.stop_decode()
        num_layers = ring.infos[0].model.num_layers
        for (exchanges, all_to_alls), transport in zip(before, ring.transports, strict=True):
            assert transport.stats.exchanges - exchanges == 10 * num_layers * 2
            assert transport.stats.all_to_alls - all_to_alls == 10 * (num_layers + 1)
            assert transport.stats.gathers == 0


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_greedy_helix_step_takes_three_messages_a_layer_and_one_for_its_tokens(
    num_ranks: int, model_paths: Models
) -> None:
    sampling = SamplingParameters(max_tokens=11)
    with LocalRing(model_paths["llama_gqa"], num_ranks, decode_variant=HELIX) as ring:
        conversation = ring.open("a", 64)
        first = ring.prefill([Turn(conversation, random_tokens(9), sampling)])["a"]
        before = [(each.stats.gathers, each.stats.all_to_alls) for each in ring.transports]
        ring.start_decode()
        assert len(ring.decode(conversation, first, sampling)) == 10
        ring.stop_decode()
        num_layers = ring.infos[0].model.num_layers
        for (gathers, all_to_alls), transport in zip(before, ring.transports, strict=True):
            assert transport.stats.all_to_alls - all_to_alls == 10 * num_layers
            assert transport.stats.gathers - gathers == 10 * (2 * num_layers + 1)
            assert transport.stats.exchanges == 0


def test_a_rank_that_draws_from_nan_ends_its_row_and_no_token_of_it_leaves_the_ring(model_paths: Models) -> None:
    """Damage the model of a follower after the prefill; the first row is its row."""
    with LocalRing(model_paths["llama_gqa"], 2, decode_variant=PASS_Q) as ring:
        conversation = ring.open("a", 64)
        first = ring.prefill([Turn(conversation, random_tokens(9), SamplingParameters())])["a"]
        owner = min(range(2), key=lambda rank: (conversation.held[rank], rank))
        assert owner == 1, "nine tokens lie as five and four"
        head = ring.workers[1].parts.model.head.weight
        assert isinstance(head, torch.Tensor)
        head.fill_(torch.nan)
        ring.start_decode()
        ring.admit(conversation, first, SamplingParameters(max_tokens=5))
        (event,) = ring.next_events()
        assert (event.token_id, event.is_broken, event.has_left) == (None, True, True)
        ring.stop_decode()


@given(
    kind=st.sampled_from(list(HeaderKind)),
    variant=st.sampled_from(VARIANTS),
    tokens=st.lists(st.integers(0, 1 << 20), max_size=8).map(tuple),
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
def test_a_header_arrives_with_its_variant(kind: HeaderKind, variant: str, tokens: tuple[int, ...]) -> None:
    leader, follower = (HeaderChannel([each], 8) for each in InProcessRing(2).transports)
    header = Header(kind, tokens, variant=variant)
    leader.send(header)
    assert follower.receive() == header


def test_an_unknown_variant_keeps_a_rank_from_starting(model_paths: Models) -> None:
    with pytest.raises(
        ConfigError, match=r"decode\.variant: 'pass_kv' is not allowed; use one of auto, gather, pass_q, helix"
    ):
        LocalRing(model_paths["llama_gqa"], 1, decode_variant="pass_kv")


def test_auto_gathers_until_the_ring_has_measured_itself(model_paths: Models) -> None:
    with LocalRing(model_paths["llama_gqa"], 2) as ring:
        shape = ring.infos[0].model.shape
    choice = DecodeChoice("auto", shape, 2)
    assert choice(8, 1000) == GATHER
    link = RingRates(gemm_flops=1e9, attention_flops=1e9, link_bytes_per_second=1e15, link_latency_seconds=0.0)
    free_messages = DecodeRates(
        ring=link,
        weight_bytes_per_second=1e12,
        lone_weight_bytes_per_second=1e12,
        kv_bytes_per_second=1e12,
        busy_message_seconds=0.0,
    )
    assert choice.predicted(8, 1000) == []
    choice.measured(free_messages)
    assert [variant for variant, _ in choice.predicted(8, 1000)] == [GATHER, PASS_Q]
    assert choice(8, 1000) == PASS_Q


@pytest.mark.parametrize(("dtype", "packs"), [("float32", False), ("float32", True), ("bfloat16", True)])
def test_a_ring_that_chooses_helix_at_its_start_shares_its_weights_and_says_why(
    dtype: str, packs: bool, model_paths: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut weights that are in place already, then pack them; a later measurement changes nothing."""
    monkeypatch.setattr(rank_parts, "load_model", load_model)
    monkeypatch.setattr(CHOOSE_AT_START, lambda *_: StartChoice(is_helix=True, reason="as it is faster"))
    oracle = Oracle(model_paths["llama_gqa"], DTYPES[dtype])
    prompt, sampling = random_tokens(21), SamplingParameters(max_tokens=8)
    with LocalRing(model_paths["llama_gqa"], 3, dtype=dtype, packs_weights=packs) as ring:
        before = {worker.parts.model.is_helix for worker in ring.workers}
        for _ in range(2):
            ring.probe()
        conversation = ring.open("a", 64)
        first = ring.prefill([Turn(conversation, prompt, sampling)])["a"]
        ring.start_decode()
        decoded = [first, *ring.decode(conversation, first, sampling)]
        statuses = {(each.decode_variant, each.decode_reason) for each in (w.status() for w in ring.workers)}
        heads = [worker.parts.model.head.out_features for worker in ring.workers]
    assert before == {packs}, "a ring that packs its weights measures itself first"
    assert decoded == oracle.greedy(prompt, 8)
    assert statuses == {(HELIX, "as it is faster")}
    assert heads == [100] * 3


def test_a_ring_that_shares_its_weights_is_formed_anew_with_the_shares_of_those_that_live(
    model_paths: Models, oracles: Oracles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_parts, "load_model", load_model)
    monkeypatch.setattr(CHOOSE_AT_START, lambda *_: StartChoice(is_helix=True, reason="as it is faster"))
    prompt, sampling = random_tokens(21), SamplingParameters(max_tokens=8)
    with LocalRing(model_paths["llama_gqa"], 3, packs_weights=True) as ring:
        before = [worker.parts.model.model for worker in ring.workers]
        for lost in (1, 2):
            ring.start_decode()
            ring.rebuild(lost)
        after = [worker.parts.model.model for worker in ring.workers]
        conversation = ring.open("a", 64)
        first = ring.prefill([Turn(conversation, prompt, sampling)])["a"]
        ring.start_decode()
        decoded = [first, *ring.decode(conversation, first, sampling)]
        variants = {worker.status().decode_variant for worker in ring.workers}
    assert [model is old for model, old in zip(after, before, strict=True)] == [True, False, False]
    assert decoded == oracles["llama_gqa"].greedy(prompt, 8)
    assert variants == {HELIX}


@pytest.mark.parametrize("is_helix", [False, True])
def test_a_ring_that_lost_its_leader_decodes_as_before_without_being_measured_again(
    is_helix: bool, model_paths: Models, oracles: Oracles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_parts, "load_model", load_model)
    monkeypatch.setattr(CHOOSE_AT_START, lambda *_: StartChoice(is_helix=is_helix, reason="as it is faster"))
    prompt, sampling = random_tokens(21), SamplingParameters(max_tokens=8)
    with LocalRing(model_paths["llama_gqa"], 3, packs_weights=True) as ring:
        before = [(worker.parts.model.model, worker.parts.choose_variant.rates) for worker in ring.workers]
        lost, endless = ring.open("lost", 200), SamplingParameters(max_tokens=100)
        begun = ring.prefill([Turn(lost, random_tokens(30), endless)])["lost"]
        ring.start_decode()
        ring.admit(lost, begun, endless)
        ring.next_events()
        ring.rebuild(lost=None)
        conversation = ring.open("a", 64)
        first = ring.prefill([Turn(conversation, prompt, sampling)])["a"]
        ring.start_decode()
        decoded = [first, *ring.decode(conversation, first, sampling)]
        after = [(worker.parts.model.model, worker.parts.choose_variant.rates) for worker in ring.workers]
    assert after == before
    assert all(rates is not None for _, rates in after)
    assert decoded == oracles["llama_gqa"].greedy(prompt, 8)


def test_a_ring_with_a_rank_that_outlived_another_one_decodes_with_whole_weights(
    model_paths: Models, oracles: Oracles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last rank's weights are packed whole, the others' are new: all ranks agree that none is cut."""
    monkeypatch.setattr(rank_parts, "load_model", load_model)
    monkeypatch.setattr(CHOOSE_AT_START, lambda *_: StartChoice(is_helix=True, reason="as it is faster"))
    prompt, sampling = random_tokens(21), SamplingParameters(max_tokens=8)
    with LocalRing(model_paths["llama_gqa"], 3) as ring:
        ring.workers[2].parts.model.pack_weights(with_head=True)
        ring.probe()
        conversation = ring.open("a", 64)
        first = ring.prefill([Turn(conversation, prompt, sampling)])["a"]
        ring.start_decode()
        decoded = [first, *ring.decode(conversation, first, sampling)]
        assert not any(worker.parts.model.is_helix for worker in ring.workers)
    assert decoded == oracles["llama_gqa"].greedy(prompt, 8)


def test_probing_lets_auto_choose_by_what_was_measured(model_paths: Models) -> None:
    with LocalRing(model_paths["llama_gqa"], 2) as ring:
        ring.probe()
        assert all(worker.parts.choose_variant.rates is not None for worker in ring.workers)
        choice = ring.workers[0].parts.choose_variant
        for batch in (1, 64):
            seconds = dict(choice.predicted(batch, 100 * batch))
            assert choice(batch, 100 * batch) == (PASS_Q if seconds[PASS_Q] < 0.95 * seconds[GATHER] else GATHER)
