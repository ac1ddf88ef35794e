"""Prompts and parameters as users of OpenAI's and vLLM's clients write them, and the request made of them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from ringserve import views
from ringserve.client import Message, Sampling, results
from ringserve.client.errors import InvalidRequest
from ringserve.client.requests import RENAMED, RequestOptions, make_request
from ringserve.client.results import MAPPER
from ringserve.v1 import inference_pb2

OWN = {"timeout"}
"""Options that the client keeps to itself."""
BY_ITSELF = {"resume"}
"""Fields that the client sets where it needs them."""


def fields_of(message: Any) -> set[str]:
    return {field.name for field in message.DESCRIPTOR.fields}


def test_every_field_of_a_request_can_be_set_by_an_option_of_a_turn() -> None:
    """A field that is added to the contract fails here until the client has it."""
    options = {RENAMED.get(name, name) for name in RequestOptions.__annotations__} - OWN
    prompt = {field.name for field in inference_pb2.GenerateRequest.DESCRIPTOR.oneofs_by_name["input"].fields}
    assert fields_of(inference_pb2.GenerateRequest) == options | prompt | BY_ITSELF


def test_every_sampling_parameter_of_the_contract_is_one_of_the_client() -> None:
    assert {field.name for field in fields(Sampling)} == fields_of(inference_pb2.SamplingParams)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"priority": -3, "wait": True}, inference_pb2.GenerateRequest(priority=-3, wait=True)),
        ({"conversation_ttl_seconds": 0}, inference_pb2.GenerateRequest(conversation_ttl_seconds=0)),
        ({"conversation_ttl_seconds": None}, inference_pb2.GenerateRequest()),
        ({"algorithm": "pass_q"}, inference_pb2.GenerateRequest(algorithm=inference_pb2.ALGORITHM_PASS_Q)),
        ({"algorithm": ""}, inference_pb2.GenerateRequest()),
        ({"model": "m"}, inference_pb2.GenerateRequest(model="m")),
        ({"expected_tokens": 0}, inference_pb2.GenerateRequest(expected_tokens=0)),
        ({"no_cache": True, "cache_key": "ada"}, inference_pb2.GenerateRequest(no_cache=True, cache_key="ada")),
        ({"prediction": "abc"}, inference_pb2.GenerateRequest(prediction="abc")),
        ({"mode": "append"}, inference_pb2.GenerateRequest(prompt_mode=inference_pb2.PROMPT_MODE_APPEND)),
    ],
)
def test_options_of_a_turn_are_fields_of_its_request(
    options: RequestOptions, expected: inference_pb2.GenerateRequest
) -> None:
    request = make_request("x", options)
    for name in ("request_id", "sampling_params", "text"):
        request.ClearField(name)
    assert request == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"stop": "x"}, inference_pb2.SamplingParams(stop=["x"])),
        ({"stop": ("x", "y"), "n": 3}, inference_pb2.SamplingParams(stop=["x", "y"], n=3)),
        ({"stop_token_ids": 2}, inference_pb2.SamplingParams(stop_token_ids=[2])),
        ({"logit_bias": {50256: -100}}, inference_pb2.SamplingParams(logit_bias={50256: -100.0})),
        ({"logit_bias": {"50256": -100}}, inference_pb2.SamplingParams(logit_bias={50256: -100.0})),
        ({"logprobs": 0, "prompt_logprobs": 5}, inference_pb2.SamplingParams(logprobs=0, prompt_logprobs=5)),
    ],
)
def test_sampling_is_taken_as_a_dict_or_by_its_own_name(
    given: dict[str, Any], expected: inference_pb2.SamplingParams
) -> None:
    assert Sampling(**given).to_message() == expected
    request = make_request("x", {"sampling": {**given, "seed": 7}})
    request.sampling_params.ClearField("seed")
    assert request.sampling_params == expected


@pytest.mark.parametrize(
    "prompt",
    [
        [{"role": "user", "content": "Hello"}],
        {"role": "user", "content": "Hello"},
        Message(role="user", content="Hello"),
        (Message(role="user", content="Hello"),),
        [{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}],
    ],
)
def test_messages_are_taken_as_dicts_too(prompt: Any) -> None:
    (message,) = make_request(prompt, {}).chat.messages
    assert (message.role, message.content) == ("user", "Hello")


@pytest.mark.parametrize("prompt", [[1, 2], (1, 2), range(1, 3), np.array([1, 2])])
def test_token_ids_are_taken_in_any_sequence(prompt: Any) -> None:
    request = make_request(prompt, {})
    assert (list(request.tokenized.input_ids), request.WhichOneof("input")) == ([1, 2], "tokenized")


@pytest.mark.parametrize(
    ("prompt", "options", "said"),
    [
        ([{"role": "user"}], {}, r"prompt\[0\]: \{'role': 'user'\} is not allowed; a message is"),
        ([{"role": "user", "content": "x", "nam": 1}], {}, r"prompt\[0\]: .* is not allowed"),
        ([{"role": "user", "content": None}], {}, r"prompt\[0\]: role and content must be texts"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            {},
            r"prompt\[0\].content: the part .* is not allowed",
        ),
        ([Message(role="user", content="x"), 3], {}, r"prompt\[1\]: 3 is not allowed"),
        (3, {}, "prompt: give a text"),
        (None, {}, "prompt: give a text"),
        ("x", {"sampling": {"max_token": 5}}, "sampling_params.max_token: there is no such parameter; known are temp"),
        ("x", {"sampling": {"logit_bias": {"a": 1}}}, "sampling_params.logit_bias: {'a': 1} is not allowed"),
        ("x", {"sampling": {"logit_bias": [1]}}, r"sampling_params.logit_bias: \[1\] is not allowed"),
        ("x", {"sampling": {"stop": 5}}, "sampling_params.stop: 5 is not allowed; give a text or a list of them"),
        ("x", {"sampling": {"max_tokens": -1}}, "sampling_params.max_tokens: -1 is not allowed; give a whole number"),
        ("x", {"sampling": {"temperature": "hot"}}, "temperature: 'hot' is not allowed; give a number"),
        ("half \udcff", {}, r"prompt: '\\udcff' is a lone surrogate; decode the text as UTF-8"),
        ([{"role": "user", "content": "\udcff"}], {}, r"prompt: '\\udcff' is a lone surrogate"),
        ("x", {"priority": "high"}, "priority: 'high' is not allowed"),
        ("x", {"wait": "yes"}, "wait: 'yes' is not allowed"),
        ("x", {"request_id": 7}, "request_id: 7 is not allowed"),
        (
            "x",
            {"algorithm": "passq"},
            "algorithm: 'passq' is not allowed; use one of pass_kv, pass_q,",
        ),
        ([1, -2], {}, "prompt: .* -2"),
        ([1, 2**32], {}, "prompt: .* 4294967296"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_sentence(prompt: Any, options: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        make_request(prompt, options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_tokens": 5}, "'max_tokens' is a sampling parameter: pass it as sampling=Sampling(max_tokens=5)"),
        ({"max_words": 5}, "'max_words' is no option of a turn; allowed are algorithm, "),
    ],
)
def test_an_option_that_a_turn_has_not_is_refused_with_its_place(options: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError) as refused:
        make_request("x", options)
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (views.ServerInfo, inference_pb2.GetServerInfoResponse),
        (views.ModelInfo, inference_pb2.GetModelInfoResponse),
        (views.ConversationInfo, inference_pb2.GetConversationResponse),
        (views.ConversationSummary, inference_pb2.ConversationSummary),
        (results.Plan, inference_pb2.Plan),
    ],
)
def test_what_clients_are_told_has_every_field_of_the_contract(kind: type[Any], message: type[Any]) -> None:
    """A field that one side lacks is a TypeError of the mapper, of nested messages too."""
    assert MAPPER.from_message(kind, message()) == kind()
