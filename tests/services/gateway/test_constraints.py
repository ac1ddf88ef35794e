"""Constraints that a client may ask for, and the error message for every other."""

from __future__ import annotations

import json

import pytest

from ringserve.cp_core.errors import InvalidRequest
from ringserve.services.gateway.requests import make_grammar
from ringserve.services.gateway.text import TextCodec
from ringserve.v1 import inference_pb2
from ringserve.workers.sampling.grammar import Grammars

Params = inference_pb2.SamplingParams
SCHEMA = json.dumps({"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]})


@pytest.fixture(scope="module")
def grammars(byte_codec: TextCodec) -> Grammars:
    return Grammars(byte_codec.to_json, 261, (257, 260))


def choice(*items: str) -> inference_pb2.SamplingParams:
    return Params(choice=inference_pb2.Choices(items=items))


@pytest.mark.parametrize(
    ("params", "fits", "breaks"),
    [
        (Params(json_schema=SCHEMA), ['{"age":3}', '{ "age": 41 }'], ['{"age":"3"}', "[]", '{"age":' + " " * 30]),
        (Params(json_object=True), ["{}", '{"a": [1, null]}'], ["[]", "3"]),
        (Params(regex="[a-z]/{2,3}"), ["a//", "z///"], ["a/x", "A//"]),
        (choice('say "no"', "é", "😀"), ['say "no"', "é", "😀"], ["say no", "e"]),
        (Params(grammar='start: "a" | "(" start ")"'), ["a", "((a))"], ["(a))", "()"]),
        (Params(grammar='root ::= "a" | "(" root ")"'), ["a", "((a))"], ["(a))", "()"]),
    ],
    ids=["schema", "object", "regex", "choice", "lark", "gbnf"],
)
def test_answers_of_the_form_fit_and_others_do_not(
    grammars: Grammars, params: inference_pb2.SamplingParams, fits: list[str], breaks: list[str]
) -> None:
    grammar = make_grammar(params, grammars)
    for text in fits:
        mask = grammars.begin(grammar, text.encode()).mask()
        assert mask is not None
        assert mask[257], text
    for text in breaks:
        mask = grammars.begin(grammar, text.encode()).mask()
        assert mask is None or not mask[257], text


def test_without_a_constraint_there_is_no_grammar(grammars: Grammars) -> None:
    assert make_grammar(Params(stop=["x"], min_tokens=3), grammars) == ""


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (Params(json_schema='{"type": "objct"}'), "json_schema: it is not a valid grammar: Invalid type: objct"),
        (Params(json_schema='{"not": {}}'), "json_schema: it is not a valid grammar: Unimplemented keys"),
        (Params(json_schema='{"x-guidance": {"lenient": true}, "not": {}}'), "json_schema: .* Unimplemented keys"),
        (Params(json_schema="{"), "json_schema: it is not JSON; give a schema as JSON"),
        (Params(json_schema="[" * 9000), "json_schema: it is not JSON"),
        (Params(json_schema="3"), "json_schema: a schema is a JSON object"),
        (Params(json_schema=" " * 70_000), "json_schema: 70000 characters are too many; at most 65536"),
        (Params(json_schema=""), "json_schema: it is not JSON"),
        (Params(json_object=False), "json_object: false is not allowed; leave it out"),
        (choice(), "choice: 0 choices are given; allowed are 1 to 4096"),
        (choice(*map(str, range(5000))), "choice: 5000 choices are given"),
        (Params(regex=""), "regex: '' is not allowed; leave it out"),
        (Params(regex="[0-9"), "regex: it is not a valid grammar: .*unclosed character class"),
        (Params(grammar="root ::= " + "(" * 20_000), "grammar: it is not a valid grammar: .*recursion"),
        (Params(grammar='start: "a" b'), "grammar: it is not a valid grammar: .*unknown name"),
        (Params(regex="a", ignore_eos=True), "ignore_eos: not allowed with regex, which says where the answer ends"),
        (Params(regex="a", min_tokens=2), "min_tokens: not allowed with regex"),
    ],
)
def test_others_are_refused_in_one_sentence(
    grammars: Grammars, params: inference_pb2.SamplingParams, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=rf"^sampling_params\.{words}") as caught:
        make_grammar(params, grammars)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
