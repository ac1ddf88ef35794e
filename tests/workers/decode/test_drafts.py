"""Drafts of next tokens: whatever is drafted, tokens, events and KV are those of steps without drafts."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringserve.cp_core.cost.decode import GATHER, HELIX, MAX_DRAFTS, VARIANTS
from ringserve.cp_core.cost.model import PASS_Q
from ringserve.cp_core.layout.shards import ShardMap, TokenRange
from ringserve.workers.decode import drafts as drafts_module
from ringserve.workers.decode import loop
from ringserve.workers.decode.batch import BatchState
from ringserve.workers.decode.drafts import LONGEST_MATCH, Acceptance, DraftCosts, TextDrafter
from ringserve.workers.decode.messages import BatchChange
from ringserve.workers.kv.cache import runs
from ringserve.workers.sampling.parameters import SamplingParameters, TokenBias, TokenSequence
from tests.workers.decode.admissions import admission
from tests.workers.decode.test_batch import BLOCK_TOKENS
from tests.workers.decode.test_variants import ENDS, PROMPTS, greedy, serve_all
from tests.workers.models import ALL_WINDOWED, WINDOWED, Oracle
from tests.workers.rings import LocalRing, Turn

Models = Mapping[str, Path]
Oracles = Mapping[str, Oracle]


class Foretold:
    """Drafter that knows the answers, and spoils some of its drafts at random."""

    def __init__(self, answers: Mapping[str, list[int]], seed: int) -> None:
        self._answers = answers
        self._random = random.Random(seed)

    def __call__(self, text: np.ndarray) -> Foretold.Sequence:
        told = text.tolist()
        (name,) = [name for name, prompt in PROMPTS.items() if told[: len(prompt)] == list(prompt)]
        return self.sequence_of(name, len(told) - len(PROMPTS[name]))

    def sequence_of(self, name: str, num_known: int) -> Foretold.Sequence:
        return Foretold.Sequence(self._answers[name], num_known, self._random)

    class Sequence:
        """Drafts of one sequence."""

        def __init__(self, answer: list[int], num_known: int, spoils: random.Random) -> None:
            self._answer, self._num_known, self._random = answer, num_known, spoils

        def push(self, token_id: int) -> None:
            assert token_id == self._answer[self._num_known]
            self._num_known += 1

        def checked(self, num_drafts: int, num_accepted: int) -> None:
            assert 0 <= num_accepted <= num_drafts

        def limit(self, least_share: float) -> int:
            return self._random.randint(0, MAX_DRAFTS)

        def propose(self, limit: int) -> tuple[int, ...]:
            following = self._answer[self._num_known : self._num_known + max(limit, 0)]
            return tuple(token if self._random.random() < 0.75 else (token + 1) % 100 for token in following)


class SeldomForetold(Foretold):
    """Drafter of sequence "a" alone, behind two of eight tokens: two right drafts and a wrong one.

    What it says depends on nothing but the text: it may be asked twice, and sequences may join at any time.
    """

    def sequence_of(self, name: str, num_known: int) -> Foretold.Sequence:
        return SeldomForetold.Sequence(self._answers[name] if name == "a" else [], num_known, self._random)

    class Sequence(Foretold.Sequence):
        def push(self, token_id: int) -> None:
            self._num_known += 1

        def limit(self, least_share: float) -> int:
            return 3 * (self._num_known % 8 in (2, 3))

        def propose(self, limit: int) -> tuple[int, ...]:
            following = self._answer[self._num_known : self._num_known + limit]
            return (*following[:2], *[(token + 1) % 100 for token in following[2:]])


def foretell(monkeypatch: pytest.MonkeyPatch, answers: Mapping[str, list[int]], seed: int = 0) -> None:
    monkeypatch.setattr(loop, "TextDrafter", Foretold(answers, seed))


def foretell_seldom(monkeypatch: pytest.MonkeyPatch, answers: Mapping[str, list[int]]) -> None:
    monkeypatch.setattr(loop, "TextDrafter", SeldomForetold(answers, 0))


@pytest.mark.parametrize(("num_ranks", "backend"), [(1, "auto"), (2, "reference"), (3, "auto"), (4, "reference")])
@pytest.mark.parametrize(
    ("kind", "variant"),
    [
        *(("llama_gqa", variant) for variant in VARIANTS),
        (WINDOWED, GATHER),
        (WINDOWED, PASS_Q),
        (ALL_WINDOWED, HELIX),
    ],
)
def test_any_drafts_give_the_tokens_of_one_process(
    kind: str,
    variant: str,
    num_ranks: int,
    backend: str,
    model_paths: Models,
    oracles: Oracles,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By runs and by block tables; sequences join and leave, ranks hold nothing, unwritten slots are NaN."""
    right = {name: oracles[kind].greedy(PROMPTS[name], end) for name, end in ENDS.items()}
    foretell(monkeypatch, right)
    with LocalRing(
        model_paths[kind], num_ranks, decode_variant=variant, attention_backend=backend, drafts=True
    ) as ring:
        answers = serve_all(ring, greedy())
        status = ring.workers[0].status()
    assert answers == right
    assert 0 < sum(status.accepted_drafts) < sum(status.checked_drafts)


SAMPLINGS = {
    # Of five tokens, so that each is counted many times.
    "a": SamplingParameters(
        max_tokens=24,
        temperature=1.5,
        seed=3,
        frequency_penalty=0.3,
        logit_bias=tuple(TokenBias(token, 50.0) for token in range(40, 45)),
    ),
    "b": SamplingParameters(max_tokens=3, temperature=0.7, seed=1, logprobs=2),
    "c": SamplingParameters(max_tokens=12, frequency_penalty=0.8, presence_penalty=0.4, logprobs=1),
    "d": SamplingParameters(
        max_tokens=19,
        repetition_penalty=1.3,
        temperature=1.1,
        seed=5,
        allowed_ids=(3, 5, 9),
        banned=(TokenSequence((3, 5)), TokenSequence((5, 9, 9))),
    ),
    "e": SamplingParameters(max_tokens=2, logit_bias=(TokenBias(7, 4.0),), min_tokens=2, stop_token_ids=(7,)),
}


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_draws_penalties_bias_and_masks_are_those_of_steps_without_drafts(
    variant: str, num_ranks: int, model_paths: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalRing(model_paths["llama_gqa"], num_ranks, decode_variant=variant) as ring:
        right = serve_all(ring, SAMPLINGS)
    for seed in range(2):
        foretell(monkeypatch, right, seed)
        with LocalRing(model_paths["llama_gqa"], num_ranks, decode_variant=variant, drafts=True) as ring:
            assert serve_all(ring, SAMPLINGS) == right
            assert sum(ring.workers[0].status().accepted_drafts)


@pytest.mark.parametrize("variant", [PASS_Q, HELIX])
def test_heads_may_be_shared_too(
    variant: str, model_paths: Models, oracles: Oracles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks of two processes each; helix needs all heads in each."""
    right = {name: oracles["llama_gqa"].greedy(PROMPTS[name], end) for name, end in ENDS.items()}
    foretell(monkeypatch, right)
    tp = 1 if variant == HELIX else 2
    with LocalRing(model_paths["llama_gqa"], 2, tp=tp, decode_variant=variant, drafts=True) as ring:
        assert serve_all(ring, greedy()) == right


def test_events_count_every_token_with_its_kv_and_owner(
    model_paths: Models, oracles: Oracles, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = {name: oracles["llama_gqa"].greedy(PROMPTS[name], end) for name, end in ENDS.items()}
    foretell(monkeypatch, right)
    sampling = SamplingParameters(max_tokens=ENDS["a"])
    with LocalRing(model_paths["llama_gqa"], 3, drafts=True) as ring:
        conversation = ring.open("a", 64)
        (first,) = ring.prefill([Turn(conversation, PROMPTS["a"], sampling)]).values()
        ring.start_decode()
        ring.admit(conversation, first, sampling)
        (events,) = ring.events_until_finished(["a"]).values()
    assert [event.token_id for event in events] == right["a"][1:]
    assert [event.kv_tokens for event in events] == list(range(len(PROMPTS["a"]) + 1, len(PROMPTS["a"]) + ENDS["a"]))
    assert {event.owner for event in events} == {0, 1, 2}
    assert any(event.is_draft for event in events)
    assert not all(event.is_draft for event in events)


def test_a_stop_token_that_was_drafted_ends_the_answer(
    model_paths: Models, oracles: Oracles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was drafted behind it is not told."""
    right = oracles["llama_gqa"].greedy(PROMPTS["a"], 24)
    stop = next(token for place, token in enumerate(right) if place > 5 and token not in right[:place])
    foretell(monkeypatch, {"a": right})
    monkeypatch.setattr(Foretold.Sequence, "limit", lambda *_: MAX_DRAFTS)
    sampling = SamplingParameters(max_tokens=24, stop_token_ids=(stop,))
    with LocalRing(model_paths["llama_gqa"], 2, drafts=True) as ring:
        conversation = ring.open("a", 64)
        (first,) = ring.prefill([Turn(conversation, PROMPTS["a"], sampling)]).values()
        ring.start_decode()
        ring.admit(conversation, first, sampling)
        (events,) = ring.events_until_finished(["a"]).values()
    assert [first, *(event.token_id for event in events)] == right[: right.index(stop) + 1]
    assert events[-1].finish_reason == "stop"


@settings(max_examples=60)
@given(st.data())
def test_what_is_taken_back_is_as_if_it_had_never_been(data: st.DataObject) -> None:
    """Batches of every rank, with random drafts and accepted counts, beside a list of who stores which token."""
    num_ranks = data.draw(st.integers(1, 4))
    held = tuple(data.draw(st.lists(st.integers(0, 5), min_size=num_ranks, max_size=num_ranks)))
    batches = [BatchState(rank, num_ranks, BLOCK_TOKENS) for rank in range(num_ranks)]
    blocks = tuple(tuple(range(9 * rank, 9 * rank + 4)) for rank in range(num_ranks))
    starts = accumulate(held, initial=0)
    tail = ShardMap.of([TokenRange(start, start + count)] for start, count in zip(starts, held, strict=False))
    change = BatchChange(admitted=(admission("a", held=held, blocks=blocks, tail=tail),))
    stored = list(held)
    places = [[position for each in ranges for position in range(each.start, each.stop)] for ranges in tail.ranks]
    token_ids: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    for step in range(data.draw(st.integers(1, 12))):
        drafts = tuple(data.draw(st.lists(st.integers(0, 9), max_size=MAX_DRAFTS)))
        for batch in batches:
            batch.advance(token_ids, change, accepted)
            batch.draft([drafts])
            batch.append()
        (row,) = batches[0].rows
        assert all(count <= room for count, room in zip(row.held, row.room, strict=True)), "each token has a slot"
        plans = [batch.plan() for batch in batches]
        assert all(plan == plans[0] for plan in plans)
        (owner,) = set(plans[0].owners)
        assert plans[0].held == tuple(
            tuple(count + (number + 1) * (rank == owner) for rank, count in enumerate(stored))
            for number in range(1 + len(row.drafts))
        )
        change, token_ids = BatchChange(), (step,)
        accepted = (data.draw(st.integers(0, len(row.drafts))),)
        places[owner] += range(sum(stored), sum(stored) + 1 + accepted[0])
        stored[owner] += 1 + accepted[0]
        if sum(stored) >= sum(row.room) - 1:
            break
    for rank, batch in enumerate(batches):
        batch.settle(accepted)
        (row,) = batch.rows
        assert row.held == stored
        assert row.recent == places[rank]
        batch.forget(window := 4)
        assert row.recent == [position for position in places[rank] if position > row.position - window]
        assert row.runs == list(runs(row.blocks, stored[rank], BLOCK_TOKENS))


def test_drafts_are_what_followed_the_longest_and_latest_occurrence() -> None:
    drafter = TextDrafter(np.array([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3]))
    assert drafter.propose(2) == (4, 9), "three tokens match at the first place, two at the second"
    drafter.push(5)
    assert drafter.propose(3) == (1, 2, 3)
    drafter.push(77)
    assert drafter.propose(3) == ()
    assert TextDrafter(np.array([], dtype=np.int64)).propose(3) == ()
    assert drafter.propose(0) == ()


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 5))
def test_drafts_are_those_of_a_plain_search(text: list[int], limit: int) -> None:
    right: tuple[int, ...] = ()
    for length in range(min(LONGEST_MATCH, len(text) - 1), 1, -1):
        ends = [end for end in range(length, len(text)) if text[end - length : end] == text[-length:]]
        if ends:
            right = tuple(text[ends[-1] : ends[-1] + limit])
            break
    drafter = TextDrafter(np.array(text[: len(text) // 2], dtype=np.int64))
    for token in text[len(text) // 2 :]:
        drafter.push(token)
    assert drafter.propose(limit) == right


def test_wrong_drafts_end_and_are_tried_again_later() -> None:
    source = Acceptance()
    assert source.limit(0.1) > 1
    while source.limit(0.1) > 1:
        source.checked(4, 0)
    for _ in range(4):
        source.checked(1, 0)
    tried = 0
    for _ in range(3 * drafts_module.PROBE_TOKENS):
        source.pushed()
        if source.limit(0.3):
            assert source.limit(0.3) == 1, "to be asked twice changes nothing"
            source.checked(1, 0)
            tried += 1
    assert tried == 3
    for _ in range(20):
        source.checked(8, 8)
    assert source.limit(0.1) == MAX_DRAFTS


def test_what_follows_a_long_match_is_trusted_more_and_counted_apart() -> None:
    long, short = list(range(LONGEST_MATCH)), [97, 98]
    drafter = TextDrafter(np.array([*long, 50, 51, 52, *short, 60, 61, 62]))

    def say(tokens: Sequence[int]) -> None:
        for token in tokens:
            drafter.push(token)

    say(long)
    assert drafter.propose(2) == (50, 51)
    assert drafter.limit(0.7) == 6, "0.95 to the sixth power is 0.73"
    assert drafter.limit(0.96) == 0, "as in large batches"
    say(short)
    assert drafter.propose(2) == (60, 61)
    assert drafter.limit(0.7) == 0
    before = drafter.limit(0.1)
    say(long)
    for _ in range(9):
        drafter.checked(4, 0)
    assert drafter.limit(0.7) == 0
    say([70, *short])
    assert drafter.limit(0.1) == before
    drafter.checked(3, 3)
    assert drafter.limit(0.1) > before
    say([77])
    assert drafter.limit(0.1) == 0, "nothing is drafted there"


def test_a_draft_must_gain_more_than_it_costs() -> None:
    costs = DraftCosts()
    assert costs.least_share(1) == math.inf, "nothing is known before a step without drafts"
    costs.note(4, 0, 0.1)
    assert costs.least_share(1) < costs.least_share(4) < 1.0
    for _ in range(50):
        costs.note(4, 4, 0.12)
    assert costs.least_share(4) == pytest.approx(4 * 0.005 / 0.1, rel=0.05)
    assert costs.least_share(5) == pytest.approx(5 * 0.005 / 0.1, rel=0.05), "by the nearest size that was timed"
    costs.note(1, 0, 0.05)
    assert costs.least_share(1) == pytest.approx(0.005 / 0.05, rel=0.05)
