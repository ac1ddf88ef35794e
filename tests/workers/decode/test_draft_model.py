"""A draft model on the first rank: what it guesses, and that whatever it guesses the tokens stay the same."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ringserve.cp_core.attention.backends import select_backend
from ringserve.cp_core.cost.decode import GATHER, MAX_DRAFTS, VARIANTS
from ringserve.workers.decode import draft_model as module
from ringserve.workers.decode.draft_model import DraftModel
from ringserve.workers.decode.drafts import Acceptance, TextDrafter
from ringserve.workers.decode.step import DoneStep
from ringserve.workers.model.loading import load_model
from ringserve.workers.rank import parts as rank_parts
from ringserve.workers.sampling.parameters import SamplingParameters
from tests.workers.decode.recording import KeptFunctions, compile_ranks, recording
from tests.workers.decode.test_variants import ENDS, PROMPTS, greedy, serve_all
from tests.workers.models import ALL_WINDOWED, VOCAB_SIZE, WINDOWED, Oracle, random_tokens
from tests.workers.rings import LocalRing
from tests.workers.sampling.one_row import choose_token

Models = Mapping[str, Path]
Oracles = Mapping[str, Oracle]

GREEDY = SamplingParameters()
CONTEXT = 64
SAMPLINGS = {
    "a": SamplingParameters(max_tokens=24, temperature=0.8, seed=3),
    "b": SamplingParameters(max_tokens=3, temperature=0.7, seed=1, logprobs=2),
    "c": SamplingParameters(max_tokens=12, temperature=1.2, top_k=20, top_p=0.9, min_p=0.01, seed=9),
    "d": SamplingParameters(max_tokens=19, temperature=1.1, seed=5, repetition_penalty=1.3),
    "e": SamplingParameters(max_tokens=2, max_drafts=0),
}


def make(path: Path, backend: str = "auto", context: int = CONTEXT, vocab_size: int = VOCAB_SIZE) -> DraftModel:
    model = load_model(path, "float32", "cpu")
    chosen = select_backend(backend, "cpu", torch.float32)
    return DraftModel(model, chosen, vocab_size=vocab_size, max_batch=3, context=context, block_tokens=4, poisoned=True)


def texts_of(known: Mapping[str, list[int]]) -> dict[str, np.ndarray]:
    return {name: np.array(text, np.int32) for name, text in known.items()}


@pytest.fixture
def without_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is drafted from the text, and as many guesses are wanted as a coin says."""
    chance = random.Random(1)
    monkeypatch.setattr(TextDrafter, "propose", lambda *_: ())
    monkeypatch.setattr(Acceptance, "limit", lambda *_: chance.randint(0, MAX_DRAFTS))


@pytest.mark.usefixtures("without_texts")
@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_guesses_of_the_same_model_are_right(
    variant: str, num_ranks: int, backend: str, model_paths: Models, oracles: Oracles
) -> None:
    """Sequences join and leave, and two share the place of one that has left."""
    path = model_paths["llama_gqa"]
    with LocalRing(
        path, num_ranks, max_batch=3, decode_variant=variant, attention_backend=backend, draft_model=path
    ) as ring:
        answers = serve_all(ring, greedy())
        status = ring.workers[0].status()
    assert answers == {name: oracles["llama_gqa"].greedy(PROMPTS[name], end) for name, end in ENDS.items()}
    assert sum(status.checked_drafts) > 5
    # Both compute the same numbers in another order, and the longest text does not fit.
    assert sum(status.accepted_drafts) > 0.8 * sum(status.checked_drafts)


@pytest.mark.usefixtures("without_texts")
@pytest.mark.parametrize("kind", ["llama_mha", WINDOWED, ALL_WINDOWED])
@pytest.mark.parametrize("packs_weights", [False, True])
def test_whatever_another_model_guesses_the_tokens_are_the_same(
    kind: str, packs_weights: bool, model_paths: Models, oracles: Oracles, monkeypatch: pytest.MonkeyPatch
) -> None:
    if packs_weights:  # which would change a model that other tests share
        monkeypatch.setattr(rank_parts, "load_model", load_model)
    with LocalRing(
        model_paths["llama_gqa"],
        2,
        decode_variant=GATHER,
        draft_model=model_paths[kind],
        packs_weights=packs_weights,
    ) as ring:
        answers = serve_all(ring, greedy())
        status = ring.workers[0].status()
    assert answers == {name: oracles["llama_gqa"].greedy(PROMPTS[name], end) for name, end in ENDS.items()}
    assert sum(status.accepted_drafts) < sum(status.checked_drafts)


@pytest.mark.usefixtures("without_texts")
def test_draws_are_guessed_with_the_sequences_own_random_numbers(model_paths: Models) -> None:
    """So the same model draws the same tokens: nearly all are accepted, at any temperature."""
    path = model_paths["llama_gqa"]
    with LocalRing(path, 2, decode_variant=GATHER) as ring:
        right = serve_all(ring, SAMPLINGS)
    with LocalRing(path, 2, decode_variant=GATHER, draft_model=path) as ring:
        assert serve_all(ring, SAMPLINGS) == right
        status = ring.workers[0].status()
    assert sum(status.checked_drafts) > 5
    assert sum(status.accepted_drafts) > 0.5 * sum(status.checked_drafts)


@pytest.mark.usefixtures("without_texts")
def test_a_ring_that_is_built_again_keeps_its_draft_model(model_paths: Models, oracles: Oracles) -> None:
    path = model_paths["llama_gqa"]
    with LocalRing(path, 2, max_batch=3, decode_variant=GATHER, draft_model=path) as ring:
        conversation = ring.open("a", 64)
        ring.start_decode()
        ring.admit(conversation, 5, SamplingParameters(max_tokens=1000))
        ring.next_events()
        ring.rebuild(None)
        assert serve_all(ring, greedy()) == {
            name: oracles["llama_gqa"].greedy(PROMPTS[name], end) for name, end in ENDS.items()
        }
        assert sum(ring.workers[0].status().accepted_drafts)


@pytest.mark.usefixtures("without_texts")
@pytest.mark.parametrize("is_whole", [False, True])
def test_a_draft_model_is_compiled_and_recorded_where_its_ring_is(
    is_whole: bool, model_paths: Models, oracles: Oracles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of several lengths fill buckets of their own; those after the first tokens are replayed."""
    path, recorders = model_paths["llama_gqa"], [KeptFunctions() for _ in range(3)]
    with (
        recording(recorders, monkeypatch, is_whole=is_whole),
        LocalRing(path, 2, decode_variant=GATHER, draft_model=path, is_on_stream=True) as ring,
    ):
        compile_ranks(ring)
        answers = serve_all(ring, greedy())
        status = ring.workers[0].status()
    assert answers == {name: oracles["llama_gqa"].greedy(PROMPTS[name], end) for name, end in ENDS.items()}
    assert sum(status.accepted_drafts) > 0.8 * sum(status.checked_drafts) > 4
    assert recorders[0].num_replayed > recorders[0].num_recorded, "the first rank's draft model is made first"


@pytest.fixture(scope="module")
def drafting(model_paths: Models) -> dict[str, DraftModel]:
    return {
        kind: make(model_paths[kind], backend)
        for kind, backend in (("llama_gqa", "auto"), ("qwen2", "reference"), (ALL_WINDOWED, "auto"))
    }


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_guesses_are_what_the_model_would_answer(
    data: st.DataObject, drafting: dict[str, DraftModel], oracles: Oracles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever became of the last guesses: texts go on with any of them, with other tokens, or with many at once."""
    monkeypatch.setattr(module, "READ_TOKENS", 8)
    kind = data.draw(st.sampled_from(sorted(drafting)))
    model, oracle = drafting[kind], oracles[kind]
    known = {name: random_tokens(data.draw(st.integers(1, 40)), seed=place) for place, name in enumerate("abc")}
    for name in known:
        model.begin(name, GREEDY, shift=7)
    try:
        for _ in range(data.draw(st.integers(1, 5))):
            limits = data.draw(st.dictionaries(st.sampled_from("abc"), st.integers(1, MAX_DRAFTS), min_size=1))
            guesses = model.guess(texts_of(known), limits)
            for name, drafts in guesses.drafts.items():
                assert list(drafts) == oracle.greedy(known[name], limits[name]), "each as long as is wanted"
            unread = set(limits) - set(guesses.drafts)
            assert all(len(known[name]) > 1 + MAX_DRAFTS for name in unread)
            for name in known:
                drafts = guesses.drafts.get(name, ())
                accepted = drafts[: data.draw(st.integers(0, len(drafts)))]
                others = random_tokens(data.draw(st.integers(0, 4)), seed=data.draw(st.integers(0, 9)))
                if len(known[name]) + len(accepted) + len(others) + MAX_DRAFTS <= CONTEXT:
                    known[name] = [*known[name], *accepted, *others]
    finally:
        model.end_all()
    assert len(model._free) == 3


def test_a_text_without_room_is_read_anew_from_its_middle(model_paths: Models, oracles: Oracles) -> None:
    model, oracle = make(model_paths["llama_gqa"]), oracles["llama_gqa"]
    text = random_tokens(500, seed=4)
    model.begin("a", GREEDY, shift=0)
    known, first, lengths = text[:100], 100 - CONTEXT // 2, []
    for _ in range(40):
        if len(known) - first + MAX_DRAFTS > CONTEXT:
            first = len(known) - CONTEXT // 2
        guessed = model.guess(texts_of({"a": known}), {"a": 3}).drafts
        if "a" in guessed:
            assert list(guessed["a"]) == oracle.greedy(known[first:], 3)
            known = [*known, guessed["a"][0], text[len(known)]]
        lengths.append(len(known))
    assert lengths[-1] > 160, "it was read again twice"


def test_long_texts_are_read_a_part_at_a_time(model_paths: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READ_TOKENS", 8)
    model = make(model_paths["llama_gqa"])
    texts = texts_of({"a": random_tokens(30, seed=1), "b": random_tokens(30, seed=2), "c": random_tokens(2, seed=3)})
    for name in texts:
        model.begin(name, GREEDY, shift=0)
    limits = dict.fromkeys(texts, 2)
    told = [set(model.guess(texts, limits).drafts) for _ in range(7)]
    assert told == [{"c"}, {"c"}, {"c"}, {"a", "c"}, {"a", "c"}, {"a", "c"}, {"a", "b", "c"}]


def test_tokens_that_it_does_not_know_are_not_read(model_paths: Models) -> None:
    """Requests may bring ids that no text gives, as far as the large model has rows for them."""
    model = make(model_paths["llama_gqa"])
    for name in "ab":
        model.begin(name, GREEDY, shift=0)
    texts = texts_of({"a": [1, VOCAB_SIZE, 2], "b": [1, 2, VOCAB_SIZE, *random_tokens(30, seed=1)]})
    for _ in range(3):
        assert model.guess(texts, {"a": 2, "b": 2}).drafts == {}


def test_a_guess_is_drawn_at_its_place_in_the_sequence(model_paths: Models, oracles: Oracles) -> None:
    """Its text may begin later than the sequence, and what is read of it later still."""
    model, oracle = make(model_paths["llama_gqa"], context=32), oracles["llama_gqa"]
    sampling = SamplingParameters(temperature=1.3, seed=11, top_p=0.95, frequency_penalty=1.5, min_tokens=9)
    plain = SamplingParameters(temperature=1.3, seed=11, top_p=0.95)
    text, shift = random_tokens(30, seed=4), 1000
    model.begin("a", sampling, shift)
    while not (drafts := model.guess(texts_of({"a": text}), {"a": 4}).drafts):
        pass
    seen, drawn = text[-16:], list[int]()
    for place in range(30, 34):
        token = choose_token(oracle.logits([*seen, *drawn])[-1], plain, place + shift)
        assert token is not None
        drawn.append(token)
    assert list(drafts["a"]) == drawn


def test_tokens_are_computed_once_as_long_as_guesses_are_right(
    model_paths: Models, oracles: Oracles, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, text = make(model_paths["llama_gqa"]), random_tokens(5, seed=4)
    sizes, run = list[int](), model._step.run

    def counted(variant: str) -> Iterator[DoneStep]:
        sizes.append(sum(1 + len(row.drafts) for row in model._batch.rows))
        return run(variant)

    monkeypatch.setattr(model._step, "run", counted)
    model.begin("a", GREEDY, shift=0)
    for limit in (3, 2):
        (drafts,) = model.guess(texts_of({"a": text}), {"a": limit}).drafts.values()
        text = [*text, *drafts, oracles["llama_gqa"].greedy([*text, *drafts], 1)[0]]
    assert sizes == [5, 1, 1, 2, 1], "the text; then the last guess, which nothing has followed, and the newest token"


def test_nothing_is_guessed_that_the_large_model_does_not_know(model_paths: Models, oracles: Oracles) -> None:
    text = [3, 1, 4, 1, 5]
    right = oracles["llama_gqa"].greedy(text, MAX_DRAFTS)
    largest = max(right)
    model = make(model_paths["llama_gqa"], vocab_size=largest)
    model.begin("a", GREEDY, shift=0)
    (drafts,) = model.guess(texts_of({"a": text}), {"a": MAX_DRAFTS}).drafts.values()
    assert list(drafts) == right[: right.index(largest)]
