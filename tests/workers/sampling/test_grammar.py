"""Grammars of answers: which tokens they allow, and that the state follows from the answer's tokens alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from llguidance import grammar_from

from ringserve.cp_core.errors import InvalidRequest
from ringserve.workers.sampling import grammar
from ringserve.workers.sampling.grammar import MAX_GRAMMAR_CHARACTERS, AnswerGrammar, Grammars
from ringserve.workers.sampling.parameters import OUTSIDE_GRAMMAR, Sampled, SamplingParameters, TokenBias, TokenHistory
from ringserve.workers.sampling.sampler import RowSampler, are_greedy, prepare_masks, sample_rows
from tests.workers.sampling.grammars import ENDS, byte_grammars
from tests.workers.sampling.one_row import Row

VOCAB_SIZE = 300
COLOURS = grammar_from("choice", json.dumps(["red", "green", "red ink"]))


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    return byte_grammars(tmp_path_factory.mktemp("grammars"), VOCAB_SIZE)


def allowed(answer: AnswerGrammar) -> set[int]:
    mask = answer.mask()
    assert mask is not None
    assert mask.shape == (VOCAB_SIZE,)
    return set(np.flatnonzero(mask).tolist())


def test_only_tokens_that_go_on_with_a_choice_are_allowed(grammars: Grammars) -> None:
    assert allowed(grammars.begin(COLOURS)) == {*b"rg"}
    assert allowed(grammars.begin(COLOURS, b"re")) == {*b"d"}
    assert allowed(grammars.begin(COLOURS, b"red")) == {*b" ", *ENDS}
    assert allowed(grammars.begin(COLOURS, b"green")) == set(ENDS)


def test_the_state_is_that_of_the_tokens_however_they_came(grammars: Grammars) -> None:
    """Compare an answer that any rank takes up at any token with one that was pushed token by token."""
    whole, text = grammars.begin(COLOURS), b"red ink"
    for count, token in enumerate(text):
        assert allowed(whole) == allowed(grammars.begin(COLOURS, text[:count]))
        whole.push(token)
    unasked = grammars.begin(COLOURS, b"r")
    for token in b"ed":
        unasked.push(token)
        unasked.prepare()
    assert allowed(unasked) == {*b" ", *ENDS}


def test_an_answer_outside_its_grammar_has_no_mask(grammars: Grammars) -> None:
    assert grammars.begin(COLOURS, b"rot").mask() is None


def sampled(grammars: Grammars, logits: torch.Tensor, answer: bytes = b"", **options: object) -> Sampled:
    sampling = SamplingParameters(grammar=COLOURS, **options)  # type: ignore[arg-type]
    row = Row(RowSampler(sampling, TokenHistory.of(sampling, (), list(answer)), grammars), len(answer))
    prepare_masks([row])
    return sample_rows([row], logits[None])[0]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_forbidden_token_is_not_sampled_however_likely(grammars: Grammars, temperature: float) -> None:
    logits = torch.zeros(VOCAB_SIZE)
    logits[ord("x")] = 50.0
    logits[ord("g")] = 20.0
    assert sampled(grammars, logits, temperature=temperature).token_id == ord("g")
    bias = (TokenBias(ord("g"), -100.0),)
    assert sampled(grammars, logits, temperature=temperature, logit_bias=bias).token_id == ord("r")
    assert sampled(grammars, logits, b"re", temperature=temperature, top_k=1).token_id == ord("d")


def test_penalties_count_the_answer_and_grammars_hold_it(grammars: Grammars) -> None:
    logits = torch.zeros(VOCAB_SIZE)
    logits[ENDS[0]], logits[ord(" ")] = 1.0, 1.5
    assert sampled(grammars, logits, b"red").token_id == ord(" ")
    assert sampled(grammars, logits, b"red", repetition_penalty=3.0).token_id == ord(" ")
    assert sampled(grammars, logits, b"red ink", presence_penalty=2.0).token_id == ENDS[0]


def test_a_row_whose_grammar_allows_nothing_has_no_token_and_others_have(grammars: Grammars) -> None:
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[1, 7] = 1.0
    sampling = SamplingParameters(grammar=COLOURS)
    broken = Row(RowSampler(sampling, TokenHistory.of(sampling, (), list(b"rx")), grammars), 2)
    plain = Row(RowSampler(SamplingParameters(), grammars=grammars), 2)
    assert sample_rows([broken, plain], logits) == [OUTSIDE_GRAMMAR, Sampled(7)]


def test_rows_without_a_grammar_have_nothing_of_it(grammars: Grammars) -> None:
    row = Row(RowSampler(SamplingParameters(), grammars=grammars), 0)
    assert row.sampler.grammar is None
    assert are_greedy([row])
    assert "_tokenizer" not in vars(Grammars(lambda: pytest.fail("read"), VOCAB_SIZE, ENDS))


def test_faults_of_a_grammar_are_told_in_one_line(
    grammars: Grammars, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(text: str, of: Grammars = grammars) -> str:
        with pytest.raises(InvalidRequest) as caught:
            of.check(text)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    grammars.check(COLOURS)
    assert fault('start: "a" b') == 'it is not a valid grammar: at 1(8): unknown name: "b"'
    assert "unclosed character class" in fault(grammar_from("regex", "[0-9"))
    assert fault(" " * (MAX_GRAMMAR_CHARACTERS + 1)).startswith("65537 characters are too many")
    endless = byte_grammars(tmp_path, VOCAB_SIZE, ends=())
    assert fault(COLOURS, endless).startswith("the model has no end-of-sequence token")
    assert "llguidance does not support" in fault(COLOURS, byte_grammars(tmp_path, 100, ends=(5,)))
    monkeypatch.setattr(grammar, "MAX_COMPILE_SECONDS", -1)
    assert fault(COLOURS).startswith("it takes 0.")
