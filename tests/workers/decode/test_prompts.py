"""Prompts on a decode ring, between two steps of its batch; caches are poisoned."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from ringserve.cp_core.cost.decode import GATHER, HELIX, VARIANTS
from ringserve.cp_core.errors import Unavailable
from ringserve.workers.decode.loop import DecodeMailbox
from ringserve.workers.protocol.steps import DecodeEvent, FinishReason
from ringserve.workers.sampling.parameters import SamplingParameters, TokenHistory
from tests.workers.models import ALL_WINDOWED, KINDS, WINDOWED, Oracle, random_tokens
from tests.workers.rings import LocalRing, Turn

RING_SIZES = (1, 2, 3)
# (cached tokens, new tokens): empty and uneven shards, empty and uneven chunks.
LENGTHS = ((1, 1), (1, 2), (2, 5), (33, 1), (33, 7), (40, 29))
GREEDY = SamplingParameters(max_tokens=6)

Models = Mapping[str, Path]
Oracles = Mapping[str, Oracle]


def prompt_event(ring: LocalRing, name: str) -> DecodeEvent:
    """Wait for the next event of this sequence; other events may come before."""
    while True:
        for event in ring.next_events():
            if event.sequence_id == name:
                return event


IN_GATHER = [(GATHER, size) for size in RING_SIZES]
IN_HELIX = [(HELIX, size) for size in (2, 3, 4)]


@pytest.mark.parametrize(
    ("kind", "variant", "num_ranks"),
    [
        *((KINDS[0], *how) for how in IN_GATHER + IN_HELIX),
        # What other models add lies in their layers.
        *((kind, *how) for kind in (*KINDS[1:], ALL_WINDOWED) for how in (IN_GATHER[2], IN_HELIX[1])),
        *((WINDOWED, *how) for how in IN_GATHER),
    ],
)
def test_a_prompt_computed_where_it_decodes_gives_the_tokens_of_one_process(
    kind: str, variant: str, num_ranks: int, model_paths: Models, oracles: Oracles
) -> None:
    with LocalRing(model_paths[kind], num_ranks, decode_variant=variant) as ring:
        conversations = [(ring.open(f"{cached}+{new}", 128), cached, new) for cached, new in LENGTHS]
        ring.prefill([Turn(each, random_tokens(cached)) for each, cached, _ in conversations])
        ring.start_decode()
        for conversation, cached, new in conversations:
            ring.compute(conversation, random_tokens(new, seed=new), GREEDY)
            event = prompt_event(ring, conversation.name)
            assert event.token_id is not None
            assert event.kv_tokens == cached + new
            assert event.prompt_seconds is not None
            assert not event.has_left
            following = ring.decode(conversation, event.token_id, GREEDY)
            prompt = random_tokens(cached) + random_tokens(new, seed=new)
            assert [event.token_id, *following] == oracles[kind].greedy(prompt, 6), conversation.name


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_prompts_come_one_at_a_time_between_the_steps_of_a_running_batch(
    num_ranks: int, variant: str, model_paths: Models, oracles: Oracles
) -> None:
    """Compute five waiting prompts: the batch has a step between any two of them."""
    oracle, sampling = oracles["llama_gqa"], SamplingParameters(max_tokens=40)
    with LocalRing(model_paths["llama_gqa"], num_ranks, decode_variant=variant) as ring:
        running, others = ring.open("running", 128), [ring.open(f"other-{number}", 64) for number in range(5)]
        turns = [Turn(running, random_tokens(9), sampling)]
        turns += [Turn(other, random_tokens(20, seed=number)) for number, other in enumerate(others)]
        first = ring.prefill(turns)["running"]
        # All prompts wait before the first step.
        ring.admit(running, first, sampling)
        for number, other in enumerate(others):
            ring.compute(other, random_tokens(3, seed=100 + number), GREEDY)
        ring.start_decode()
        events: list[DecodeEvent] = []
        while not events or events[-1].finish_reason is None:
            events += ring.next_events()
    order = [event.sequence_id for event in events]
    between = [name for name in order[: 2 * len(others)] if name == "running"]
    assert len(between) == len(others), f"a step of the batch follows every prompt: {order}"
    assert order[: 2 * len(others) : 2] == [other.name for other in others]
    told = {event.sequence_id: event.token_id for event in events if event.prompt_seconds is not None}
    for number, other in enumerate(others):
        prompt = random_tokens(20, seed=number) + random_tokens(3, seed=100 + number)
        assert told[other.name] == oracle.greedy(prompt, 1)[0]
    tokens = [event.token_id for event in events if event.sequence_id == "running"]
    assert [first, *tokens] == oracle.greedy(random_tokens(9), 40)


def test_tensor_parallel_processes_compute_a_prompt_together(model_paths: Models, oracles: Oracles) -> None:
    prompt, more = random_tokens(21), random_tokens(5, seed=1)
    with LocalRing(model_paths["llama_gqa"], 2, tp=2) as ring:
        conversation = ring.open("a", 64)
        ring.prefill([Turn(conversation, prompt)])
        ring.start_decode()
        ring.compute(conversation, more, GREEDY)
        event = prompt_event(ring, "a")
        assert event.token_id is not None
        following = ring.decode(conversation, event.token_id, GREEDY)
    assert [event.token_id, *following] == oracles["llama_gqa"].greedy([*prompt, *more], 6)


@pytest.mark.parametrize(("variant", "num_ranks"), [*((GATHER, size) for size in RING_SIZES), (HELIX, 2), (HELIX, 3)])
def test_the_token_is_drawn_as_a_prefill_ring_draws_it(variant: str, num_ranks: int, model_paths: Models) -> None:
    """Draw with a seed, a penalty on the prompt and log-probabilities, with the last token on every rank in turn."""
    sampling = SamplingParameters(temperature=1.2, seed=7, repetition_penalty=1.3, logprobs=2, max_tokens=4)
    for new in (1, 2, 3, 8):
        prompt, more = random_tokens(13), random_tokens(new, seed=new)
        history = TokenHistory.of(sampling, sorted({*prompt, *more}))
        with LocalRing(model_paths["llama_gqa"], num_ranks, decode_variant=variant) as ring:
            conversation = ring.open("a", 64)
            ring.prefill([Turn(conversation, prompt)])
            ring.start_decode()
            ring.compute(conversation, more, sampling, history)
            event = prompt_event(ring, "a")
        with LocalRing(model_paths["llama_gqa"], 1) as alone:
            whole = alone.open("a", 64)
            alone.start_decode()
            alone.compute(whole, [*prompt, *more], sampling, history)
            expected = prompt_event(alone, "a")
        assert event.token_id == expected.token_id
        assert event.logprobs is not None
        assert expected.logprobs is not None
        assert event.logprobs.top_ids == expected.logprobs.top_ids
        assert event.logprobs.logprob == pytest.approx(expected.logprobs.logprob, abs=1e-4)


def test_a_prompt_removed_before_its_turn_is_answered_and_never_computed(model_paths: Models, oracles: Oracles) -> None:
    with LocalRing(model_paths["llama_gqa"], 2) as ring:
        gone, stays = ring.open("gone", 64), ring.open("stays", 64)
        ring.prefill([Turn(gone, random_tokens(10)), Turn(stays, random_tokens(12))])
        ring.compute(gone, random_tokens(4, seed=1), GREEDY)
        ring.remove("gone")
        ring.compute(stays, random_tokens(4, seed=2), GREEDY)
        ring.start_decode()
        left = prompt_event(ring, "gone")
        told = prompt_event(ring, "stays")
        ring.remove("stays")  # too late: the prompt is computed, and no event follows
        ring.compute(ring.open("next", 16), random_tokens(3), GREEDY)
        assert prompt_event(ring, "next").token_id == oracles["llama_gqa"].greedy(random_tokens(3), 1)[0]
    assert (left.token_id, left.finish_reason, left.kv_tokens) == (None, FinishReason.ABORT, 10)
    assert told.token_id == oracles["llama_gqa"].greedy(random_tokens(12) + random_tokens(4, seed=2), 1)[0]


@pytest.mark.parametrize("variant", [GATHER, HELIX])
def test_nan_in_kv_ends_its_prompt_and_no_token_of_it_leaves_the_ring(variant: str, model_paths: Models) -> None:
    """Claim more stored tokens than were written: the ranks read the poison."""
    with LocalRing(model_paths["llama_gqa"], 2, decode_variant=variant) as ring:
        conversation = ring.open("a", 64)
        ring.prefill([Turn(conversation, random_tokens(8))])
        poisoned = ring.open("b", 64)
        poisoned.shards = conversation.shards
        ring.start_decode()
        ring.compute(poisoned, [5, 6], GREEDY)
        broken = prompt_event(ring, "b")
        ring.compute(conversation, [5, 6], GREEDY)
        assert prompt_event(ring, "a").token_id is not None
    assert (broken.token_id, broken.is_broken) == (None, True)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_ring_measures_itself_between_two_steps_and_goes_on(
    num_ranks: int, model_paths: Models, oracles: Oracles
) -> None:
    sampling = SamplingParameters(max_tokens=60)
    with LocalRing(model_paths["llama_gqa"], num_ranks) as ring:
        conversation = ring.open("a", 128)
        first = ring.prefill([Turn(conversation, random_tokens(9), sampling)])["a"]
        ring.start_decode()
        idle = ring.workers[0].probe_between_steps(60.0)
        ring.admit(conversation, first, sampling)
        events = list(ring.next_events())
        busy = ring.workers[0].probe_between_steps(60.0)
        while events[-1].finish_reason is None:
            events += ring.next_events()
        ring.stop_decode()
        with pytest.raises(Unavailable, match="the test ended the loop"):
            ring.workers[0].probe_between_steps(60.0)
    for rates in (idle, busy):
        assert min(rates.gemm_flops, rates.attention_flops, rates.link_bytes_per_second) > 0
    assert [first, *(event.token_id for event in events)] == oracles["llama_gqa"].greedy(random_tokens(9), 60)


def test_rates_that_are_not_measured_in_time_are_an_error() -> None:
    with pytest.raises(Unavailable, match=r"measured nothing within 0\.0 s"):
        DecodeMailbox(1).ask_rates(0.01)
