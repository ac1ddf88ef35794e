"""Random plays of admissions, growths, removals and ends: tokens and KV are those of steps that wait."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from ringserve.workers.protocol.steps import DecodeEvent, GrowSequence
from ringserve.workers.sampling.parameters import SamplingParameters
from tests.workers.decode.lazy_device import lazy_devices
from tests.workers.decode.recording import KeptFunctions, compile_ranks, recording
from tests.workers.decode.test_steps_ahead import ring_of
from tests.workers.models import Oracle, random_tokens
from tests.workers.rings import BLOCK_TOKENS, LocalRing, Turn

Models = Mapping[str, Path]
Oracles = Mapping[str, Oracle]


@dataclass
class Plan:
    """Sequence of a random play: it leaves by its tokens or, after so many of them, by an order."""

    prompt: list[int]
    sampling: SamplingParameters
    removed_after: int


def plans_of(draws: random.Random) -> dict[str, Plan]:
    return {
        name: Plan(
            random_tokens(draws.randint(1, 20), seed=draws.randint(0, 99)),
            SamplingParameters(
                max_tokens=draws.randint(2, 50),
                temperature=draws.choice([0.0, 0.0, 0.8]),
                top_p=draws.choice([1.0, 0.9]),
                seed=draws.randint(0, 99),
                logprobs=1 if draws.random() < 0.1 else None,
            ),
            draws.choice([99, 99, 99, 12]),
        )
        for name in "abcdefgh"
    }


def stop_somewhere(ring: LocalRing, plans: Mapping[str, Plan], draws: random.Random) -> dict[str, list[int]]:
    """Decode each sequence alone, and let half of them stop at a token that comes -> all tokens of each."""
    answers = {}
    conversations = {name: ring.open(name, 80) for name in plans}
    firsts = ring.prefill([Turn(conversations[name], plan.prompt, plan.sampling) for name, plan in plans.items()])
    ring.start_decode()
    for name, plan in plans.items():
        answer = [firsts[name], *ring.decode(conversations[name], firsts[name], plan.sampling)]
        later = [token for token in answer[1:] if token != answer[0]]
        if later and draws.random() < 0.5:
            stop = draws.choice(later)
            plan.sampling = replace(plan.sampling, stop_token_ids=(stop,))
            answer = answer[: answer.index(stop) + 1]
        answers[name] = answer
    return answers


class Play:
    """Leader of one ring that admits, grows, removes and admits again in random order."""

    def __init__(self, ring: LocalRing, plans: Mapping[str, Plan], draws: random.Random) -> None:
        self._ring, self._plans, self._draws = ring, plans, draws
        self.conversations = {name: ring.open(name, 80) for name in plans}
        self.told: dict[str, list[int]] = {}
        self._events: dict[str, list[DecodeEvent]] = {}
        self._num_blocks: dict[str, int] = {}
        self._waiting, self._running, self.removed = list(plans), set[str](), set[str]()

    def run(self) -> None:
        """Play until all sequences have left."""
        turns = [Turn(self.conversations[name], plan.prompt, plan.sampling) for name, plan in self._plans.items()]
        self.told = {name: [first] for name, first in self._ring.prefill(turns).items()}
        self._ring.start_decode()
        self._join()
        while self._running:
            for event in self._ring.next_events():
                self._follow(event)
                if not self._running or self._draws.random() < 0.1:
                    self._join()
        self._ring.stop_decode()

    def _join(self) -> None:
        if self._waiting:
            self._admit(self._waiting.pop())

    def _admit(self, name: str) -> None:
        conversation, told = self.conversations[name], self.told[name]
        num_ranks = self._ring.num_ranks
        self._num_blocks[name] = count = max(conversation.held) // BLOCK_TOKENS + self._draws.randint(1, 9 // num_ranks)
        admitted = replace(conversation, blocks=tuple(table[:count] for table in conversation.blocks))
        self._ring.admit(admitted, told[-1], self._plans[name].sampling, num_generated=len(told))
        self._events[name] = []
        self._running.add(name)

    def _follow(self, event: DecodeEvent) -> None:
        name = event.sequence_id
        events, told, conversation = self._events[name], self.told[name], self.conversations[name]
        events.append(event)
        if event.token_id is not None:
            told.append(event.token_id)
        if event.has_left:
            self._running.remove(name)
            num_tokens = sum(each.token_id is not None for each in events)
            self._ring.note_decoded(conversation, told[-1 - num_tokens], events)
            if event.is_starved and name not in self.removed:
                self._admit(name)
        elif len(told) >= self._plans[name].removed_after and name not in self.removed:
            self.removed.add(name)
            self._ring.remove(name)
        elif (
            self._num_blocks[name] * BLOCK_TOKENS < event.kv_tokens / self._ring.num_ranks + 3
            and self._draws.random() < 0.6
        ):
            count = self._num_blocks[name]
            self._num_blocks[name] += 1
            blocks = tuple(table[count : count + 1] for table in conversation.blocks)
            self._ring.workers[0].submit([GrowSequence(sequence_id=name, blocks=blocks)])


@pytest.mark.parametrize(
    ("seed", "num_ranks", "is_recorded"),
    [(seed, seed // 2 + 1, False) for seed in range(6)] + [(9, 2, True), (10, 3, True)],
)
def test_any_admissions_growths_and_ends_leave_the_tokens_and_the_kv_of_steps_that_wait(
    seed: int,
    num_ranks: int,
    is_recorded: bool,
    model_paths: Models,
    oracles: Oracles,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight sequences, and the token after a question upon the KV that each of them has left."""
    draws, path = random.Random(seed), model_paths["llama_gqa"]
    plans = plans_of(draws)
    with LocalRing(path, 1, attention_backend="reference") as ring:
        answers = stop_somewhere(ring, plans, draws)
    question, sampling = random_tokens(5, seed=77), SamplingParameters()
    with (
        lazy_devices(monkeypatch, num_ranks) as streams,
        recording(KeptFunctions(), monkeypatch, is_whole=True),
        ring_of(path, num_ranks) as ring,
    ):
        if is_recorded:
            compile_ranks(ring)
        play = Play(ring, plans, draws)
        play.run()
        turns = [Turn(each, question, sampling) for each in play.conversations.values()]
        following = ring.prefill(turns)
    assert all(2 in stream.left for stream in streams), "some steps were read while the next was under way"
    for name, told in play.told.items():
        assert told == answers[name][: len(told)], name
        assert len(told) == len(answers[name]) or name in play.removed, name
        tokens = play.conversations[name].tokens
        assert tokens == [*plans[name].prompt, *answers[name], *question][: len(tokens) - 5] + question
        assert following[name] == oracles["llama_gqa"].greedy(tokens, 1)[0], name
