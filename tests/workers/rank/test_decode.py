"""Decode loop on a ring of ranks against transformers' greedy tokens, with poisoned caches."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from ringserve.cp_core.errors import Unavailable
from ringserve.workers.decode import messages
from ringserve.workers.decode.messages import Header, HeaderChannel
from ringserve.workers.protocol.steps import Algorithm, DecodeEvent, FinishReason, GrowSequence
from ringserve.workers.sampling.parameters import SamplingParameters
from tests.waiting import WAIT_SECONDS
from tests.workers.models import KINDS, Oracle, random_tokens
from tests.workers.rings import BLOCK_TOKENS, Conversation, LocalRing, Turn

RING_SIZES = (1, 2, 3)

Models = Mapping[str, Path]
Oracles = Mapping[str, Oracle]


def start_turn(ring: LocalRing, conversation: Conversation, tokens: list[int], sampling: SamplingParameters) -> int:
    """Prefill a prompt -> the first token."""
    return ring.prefill([Turn(conversation, tokens, sampling)])[conversation.name]


def tokens_of(events: list[DecodeEvent]) -> list[int]:
    return [event.token_id for event in events if event.token_id is not None]


@pytest.mark.parametrize("num_ranks", RING_SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_decoded_tokens_are_those_of_one_process(
    kind: str, num_ranks: int, model_paths: Models, oracles: Oracles
) -> None:
    prompt, sampling = random_tokens(33), SamplingParameters(max_tokens=24)
    with LocalRing(model_paths[kind], num_ranks) as ring:
        conversation = ring.open("a", 64)
        first = start_turn(ring, conversation, prompt, sampling)
        ring.start_decode()
        following = ring.decode(conversation, first, sampling)
    assert [first, *following] == oracles[kind].greedy(prompt, 24)


@pytest.mark.parametrize("num_ranks", RING_SIZES)
def test_sequences_join_and_leave_a_running_batch(num_ranks: int, model_paths: Models, oracles: Oracles) -> None:
    """Decode five sequences of different lengths and ends; two join once the first of the others has finished."""
    lengths = {"a": 5, "b": 40, "c": 1, "d": 17, "e": 64}
    ends = {"a": 30, "b": 3, "c": 12, "d": 25, "e": 2}
    prompts = {name: random_tokens(count, seed=count) for name, count in lengths.items()}
    events: dict[str, list[DecodeEvent]] = {name: [] for name in lengths}
    with LocalRing(model_paths["llama_gqa"], num_ranks) as ring:
        conversations = {name: ring.open(name, 128) for name in lengths}
        samplings = {name: SamplingParameters(max_tokens=end) for name, end in ends.items()}
        firsts = ring.prefill([Turn(conversations[name], prompts[name], samplings[name]) for name in lengths])
        ring.start_decode()
        for name in "abc":
            ring.admit(conversations[name], firsts[name], samplings[name])
        waiting, left = ["d", "e"], set(lengths)
        while left:
            for event in ring.next_events():
                events[event.sequence_id].append(event)
                if event.finish_reason is not None:
                    left.remove(event.sequence_id)
                    if waiting:
                        name = waiting.pop()
                        ring.admit(conversations[name], firsts[name], samplings[name])
    for name, end in ends.items():
        assert [firsts[name], *tokens_of(events[name])] == oracles["llama_gqa"].greedy(prompts[name], end), name
        assert events[name][-1].finish_reason is FinishReason.LENGTH
        assert [event.kv_tokens for event in events[name]] == list(range(lengths[name] + 1, lengths[name] + end))


@pytest.mark.parametrize("num_ranks", RING_SIZES)
def test_the_next_turn_prefills_upon_what_decoding_stored(
    num_ranks: int, model_paths: Models, oracles: Oracles
) -> None:
    """Run turn 2 on the KV of turn 1's prompt and answer, whose tokens lie one by one on the ranks."""
    prompt, question, sampling = random_tokens(21), random_tokens(9, seed=2), SamplingParameters(max_tokens=14)
    with LocalRing(model_paths["qwen3"], num_ranks) as ring:
        conversation = ring.open("a", 128)
        first = start_turn(ring, conversation, prompt, sampling)
        ring.start_decode()
        answer = [first, *ring.decode(conversation, first, sampling)]
        ring.stop_decode()
        # The last token's KV was never computed: it is new in the next turn.
        assert sum(conversation.held) == len(prompt) + len(answer) - 1
        assert max(conversation.held) - min(conversation.held) <= 1
        turn = Turn(conversation, [answer[-1], *question], sampling)
        second = ring.prefill([turn], Algorithm.PASS_Q)["a"]
    assert second == oracles["qwen3"].greedy([*prompt, *answer, *question], 1)[0]


def test_sampled_tokens_are_the_same_for_every_ring_and_batch(model_paths: Models) -> None:
    prompt = random_tokens(30)
    sampling = SamplingParameters(temperature=0.8, seed=42, max_tokens=20)
    answers = []
    for num_ranks in RING_SIZES:
        with LocalRing(model_paths["llama_gqa"], num_ranks) as ring:
            wanted, others = ring.open("a", 64), [ring.open(f"other-{i}", 64) for i in range(num_ranks - 1)]
            first = start_turn(ring, wanted, prompt, sampling)
            for other in others:
                start_turn(ring, other, prompt[:7], sampling)
            ring.start_decode()
            for other in others:
                ring.admit(other, 5, SamplingParameters(max_tokens=30))
            answers.append([first, *ring.decode(wanted, first, sampling)])
    assert answers[0] == answers[1] == answers[2]
    assert len(set(answers[0])) > 5


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_stop_token_ends_a_sequence_and_is_reported(num_ranks: int, model_paths: Models, oracles: Oracles) -> None:
    prompt = random_tokens(12)
    wanted = oracles["mistral"].greedy(prompt, 20)
    stop = next(token for place, token in enumerate(wanted) if place >= 4 and token not in wanted[:place])
    sampling = SamplingParameters(max_tokens=20, stop_token_ids=(stop,))
    with LocalRing(model_paths["mistral"], num_ranks) as ring:
        conversation = ring.open("a", 64)
        first = start_turn(ring, conversation, prompt, sampling)
        ring.start_decode()
        ring.admit(conversation, first, sampling)
        events = ring.events_until_finished(["a"])["a"]
    assert [first, *tokens_of(events)] == wanted[: wanted.index(stop) + 1]
    assert events[-1].finish_reason is FinishReason.STOP
    assert events[-1].kv_tokens == len(prompt) + wanted.index(stop)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_removed_sequence_leaves_and_the_others_go_on(num_ranks: int, model_paths: Models, oracles: Oracles) -> None:
    prompt = random_tokens(10)
    with LocalRing(model_paths["llama_gqa"], num_ranks) as ring:
        gone, stays = ring.open("gone", 1900), ring.open("stays", 64)
        first = ring.prefill([Turn(gone, prompt, SamplingParameters()), Turn(stays, prompt, SamplingParameters())])[
            "stays"
        ]
        ring.start_decode()
        ring.admit(gone, first, SamplingParameters(max_tokens=1800))
        ring.admit(stays, first, SamplingParameters(max_tokens=40))
        while all(event.sequence_id != "gone" for event in ring.next_events()):
            pass
        ring.remove("gone")
        ring.remove("never was there")
        events = ring.events_until_finished(["gone", "stays"])
        last = events["gone"][-1]
        assert (last.token_id, last.finish_reason) == (None, FinishReason.ABORT)
        told = tokens_of(events["gone"])
        assert last.kv_tokens >= len(prompt) + len(told)
        stays_events = events["stays"]
    assert stays_events[-1].kv_tokens == len(prompt) + 39
    assert tokens_of(stays_events)[-5:] == oracles["llama_gqa"].greedy(prompt, 40)[-5:]


def test_a_sequence_removed_before_it_ran_is_answered_too(model_paths: Models) -> None:
    with LocalRing(model_paths["llama_gqa"], 2) as ring:
        conversation = ring.open("a", 64)
        first = start_turn(ring, conversation, random_tokens(10), SamplingParameters())
        ring.admit(conversation, first, SamplingParameters(max_tokens=9))
        ring.remove("a")
        ring.start_decode()
        (event,) = ring.next_events()
        # The batch serves the next one.
        answer = ring.decode(conversation, first, SamplingParameters(max_tokens=3))
    assert (event.finish_reason, event.kv_tokens) == (FinishReason.ABORT, 10)
    assert len(answer) == 2


def test_an_idle_ring_keeps_its_followers_waiting_beyond_their_patience(
    model_paths: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A follower's patience begins anew with every header, and the leader of an idle ring goes on sending them."""
    assert 10 * messages.HEARTBEAT_SECONDS < messages.SILENCE_SECONDS
    monkeypatch.setattr("ringserve.workers.decode.loop.HEARTBEAT_SECONDS", 0.01)
    headers, receive, all_came = itertools.count(1), HeaderChannel.receive, threading.Event()

    def receive_and_count(self: HeaderChannel) -> Header:
        header = receive(self)
        if next(headers) == 20:
            all_came.set()
        return header

    monkeypatch.setattr(HeaderChannel, "receive", receive_and_count)
    with LocalRing(model_paths["llama_gqa"], 2) as ring:
        conversation = ring.open("a", 64)
        first = start_turn(ring, conversation, random_tokens(10), SamplingParameters())
        moved = ring.workers[1]._progress._moved
        ring.start_decode()
        assert all_came.wait(WAIT_SECONDS)
        assert ring.workers[1]._progress._moved > moved, "a follower that hears its leader is not stuck"
        assert ring.workers[0].poll(0, 0.0).events == ()
        assert len(ring.decode(conversation, first, SamplingParameters(max_tokens=5))) == 4


def test_a_follower_without_headers_ends_with_an_error(model_paths: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringserve.workers.decode.messages.SILENCE_SECONDS", 0.2)
    with LocalRing(model_paths["llama_gqa"], 2) as ring, pytest.raises(Unavailable, match="waited too long"):
        ring.workers[1].run_decode()


def test_a_ring_that_breaks_fails_waiting_polls(model_paths: Models) -> None:
    with LocalRing(model_paths["llama_gqa"], 3) as ring:
        conversation = ring.open("a", 1900)
        first = start_turn(ring, conversation, random_tokens(10), SamplingParameters())
        ring.start_decode()
        ring.admit(conversation, first, SamplingParameters(max_tokens=1800))
        ring.next_events()
        ring.leave(rank=2)
        with pytest.raises(Unavailable, match="the decode loop of test-0 broke"):
            ring.events_until_finished(["a"])
        assert all(isinstance(error, Unavailable) for error in ring.decode_ended())
        with pytest.raises(Unavailable):
            ring.admit(conversation, first, SamplingParameters(max_tokens=1800))


def test_stopping_ends_every_rank_without_an_error(model_paths: Models) -> None:
    before = threading.active_count()
    sampling = SamplingParameters(max_tokens=2)
    with LocalRing(model_paths["llama_gqa"], 3) as ring:
        conversation = ring.open("a", 64)
        first = ring.prefill([Turn(conversation, random_tokens(7), sampling)])["a"]
        ring.start_decode()
        ring.decode(conversation, first, sampling)  # all loops have begun: one that begins after the stop would fail
    assert ring.decode_ended() == [None, None, None]
    assert threading.active_count() <= before
    with pytest.raises(Unavailable, match="the ring is being stopped"):
        ring.workers[0].submit([])


def test_a_sequence_without_room_for_its_next_token_leaves_and_resumes_where_it_was(
    model_paths: Models, oracles: Oracles
) -> None:
    """Decode with tables that end after 17 + 7 tokens, then after 16 more, then never: the tokens are the same."""
    prompt, sampling = random_tokens(17), SamplingParameters(max_tokens=30)
    with LocalRing(model_paths["llama_gqa"], 2) as ring:
        conversation = ring.open("a", 64)
        first = start_turn(ring, conversation, prompt, sampling)
        tables = conversation.blocks
        ring.start_decode()
        told = [first]
        for num_blocks in (3, 5, 16):
            conversation.blocks = tuple(table[:num_blocks] for table in tables)
            ring.admit(conversation, told[-1], sampling, num_generated=len(told))
            events: list[DecodeEvent] = []
            while not (events and events[-1].has_left):
                events += ring.next_events()
            ring.note_decoded(conversation, told[-1], events)
            told += tokens_of(events)
            assert events[-1].kv_tokens == len(prompt) + len(told) - 1
            if num_blocks < 16:
                assert (events[-1].is_starved, events[-1].finish_reason, events[-1].token_id) == (True, None, None)
                assert conversation.held == (num_blocks * BLOCK_TOKENS,) * 2, "all slots are used first"
    assert events[-1].finish_reason is FinishReason.LENGTH
    assert told == oracles["llama_gqa"].greedy(prompt, 30)


@pytest.mark.parametrize("num_ranks", RING_SIZES)
@pytest.mark.parametrize("variant", ["gather", "pass_q"])
def test_tables_grow_under_a_running_sequence(
    variant: str, num_ranks: int, model_paths: Models, oracles: Oracles
) -> None:
    """Grow tables at the sequence's own step boundary and at later ones, and for a sequence that has left."""
    prompt, sampling = random_tokens(9), SamplingParameters(max_tokens=40)
    with LocalRing(model_paths["llama_gqa"], num_ranks, decode_variant=variant) as ring:
        conversation, other = ring.open("a", 64), ring.open("b", 64)
        first = start_turn(ring, conversation, prompt, sampling)
        start_turn(ring, other, prompt, sampling)
        tables = conversation.blocks
        conversation.blocks = tuple(table[:3] for table in tables)
        commands = [
            GrowSequence(sequence_id="a", blocks=tuple(table[known : known + 1] for table in tables))
            for known in range(3, 16)
        ]
        ring.admit(conversation, first, sampling)
        ring.admit(other, 5, SamplingParameters(max_tokens=2))
        ring.workers[0].submit(commands[:7])
        ring.start_decode()
        events: list[DecodeEvent] = []
        for command in commands[7:]:
            events += ring.next_events()
            ring.workers[0].submit([command, GrowSequence(sequence_id="b", blocks=((),) * num_ranks)])
        while not any(event.sequence_id == "a" and event.has_left for event in events):
            events += ring.next_events()
        told = [first, *tokens_of([event for event in events if event.sequence_id == "a"])]
        if events[-1].is_starved:  # on a busy machine the loop may be faster than the later commands
            ring.note_decoded(conversation, first, [event for event in events if event.sequence_id == "a"])
            conversation.blocks = tables
            ring.admit(conversation, told[-1], sampling, num_generated=len(told))
            told += tokens_of(ring.events_until_finished(["a"])["a"])
    assert told == oracles["llama_gqa"].greedy(prompt, 40)
