"""Models of the HTTP API's requests: what they refuse and how they say so, and the document that is made of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from ringserve.cp_core.errors import InvalidRequest, NotFound
from ringserve.services.gateway.openai.errors import error_body
from ringserve.services.gateway.openai.models import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Fields,
    ForkRequest,
    ResponseRequest,
    SchemaMaker,
    TokenizeRequest,
)
from ringserve.services.gateway.openai.requests import HttpRequestReader
from ringserve.services.gateway.requests import make_grammar
from ringserve.services.gateway.text import TextCodec
from ringserve.workers.sampling.grammar import Grammars
from tests.services.local_gateway import MODEL

CHAT = [{"role": "user", "content": "Hello"}]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "paint"}},
    {"type": "function", "function": {"name": "stop"}},
]
NAME = "a string that matches ^[a-zA-Z0-9_.:-]{1,128}$"
FORMS = "'text', 'json_object' or 'json_schema'"
UNKNOWN = "there is no such field; leave it out"
LISTED = "there is no such field; allowed are"

Read = Callable[[HttpRequestReader, Any], object]
READ: dict[type[Fields], tuple[Read, dict[str, Any]]] = {
    ChatRequest: (HttpRequestReader.chat, {"model": MODEL, "messages": CHAT}),
    CompletionRequest: (HttpRequestReader.completion, {"model": MODEL, "prompt": "x"}),
    ResponseRequest: (HttpRequestReader.response, {"model": MODEL, "input": "x"}),
    TokenizeRequest: (HttpRequestReader.tokenization, {"prompt": "x"}),
    DetokenizeRequest: (HttpRequestReader.tokens, {"tokens": [1]}),
    ForkRequest: (lambda reader, body: ForkRequest.read(body), {"forked_from": "a", "id": "b"}),
}


def refusal(model: type[Fields], fields: dict[str, Any]) -> dict[str, Any]:
    read, least = READ[model]
    with pytest.raises(InvalidRequest) as caught:
        read(HttpRequestReader(MODEL), least | fields)
    found: dict[str, Any] = error_body(caught.value)["error"]
    return found


@pytest.mark.parametrize(
    ("model", "fields", "param", "words"),
    [
        # A value of another type, or out of the range of its type.
        (CompletionRequest, {"model": 7}, "model", "7 is not allowed; give a string"),
        (CompletionRequest, {"max_tokens": "many"}, "max_tokens", "'many' is not allowed; give a whole number"),
        (CompletionRequest, {"seed": -1}, "seed", "-1 is not allowed; give 0 or more"),
        (CompletionRequest, {"priority": 101}, "priority", "101 is not allowed; give 100 or less"),
        (CompletionRequest, {"temperature": True}, "temperature", "true is not allowed; give a number"),
        (
            CompletionRequest,
            {"temperature": 10**400},
            "temperature",
            f"1{'0' * 55} ... is not allowed; give a number that fits in 64 bits",
        ),
        (CompletionRequest, {"stream": "yes"}, "stream", "'yes' is not allowed; give true or false"),
        (CompletionRequest, {"echo": 1}, "echo", "1 is not allowed; give true or false"),
        (CompletionRequest, {"stream_options": 1}, "stream_options", "1 is not allowed; give an object"),
        (CompletionRequest, {"user": ["ada"]}, "user", '["ada"] is not allowed; give a string'),
        (ChatRequest, {"messages": 7}, "messages", "7 is not allowed; give a list"),
        (ChatRequest, {"logprobs": 1}, "logprobs", "1 is not allowed; give true or false"),
        (CompletionRequest, {"logprobs": True}, "logprobs", "true is not allowed; give a whole number"),
        (DetokenizeRequest, {"tokens": "a"}, "tokens", "'a' is not allowed; give a list"),
        (ResponseRequest, {"previous_response_id": 1}, "previous_response_id", "1 is not allowed; give a string"),
        (ResponseRequest, {"store": "yes"}, "store", "'yes' is not allowed; give true or false"),
        (ForkRequest, {"at_token": -1}, "at_token", "-1 is not allowed; give 0 or more"),
        # A field that must be given.
        (CompletionRequest, {"prompt": None}, "prompt", "null is not allowed; give a string or a list"),
        (ForkRequest, {"id": None}, "id", "null is not allowed; give a string"),
        # The innermost place, by the way the client wrote it.
        (CompletionRequest, {"prompt": {}}, "prompt", "{} is not allowed; give a string or a list"),
        (CompletionRequest, {"prompt": ["a", 1]}, "prompt[1]", "1 is not allowed; give a string or a list"),
        (CompletionRequest, {"prompt": [1, -1]}, "prompt[1]", "-1 is not allowed; give 0 or more"),
        (CompletionRequest, {"prompt": [[1], ["x"]]}, "prompt[1][0]", "'x' is not allowed; give a whole number"),
        (CompletionRequest, {"stop": 7}, "stop", "7 is not allowed; give a string or a list"),
        (CompletionRequest, {"stop": ["a", 7]}, "stop[1]", "7 is not allowed; give a string"),
        (
            CompletionRequest,
            {"logit_bias": {"x": 1}},
            "logit_bias.x",
            "'x' is not allowed; give a string that matches ^[0-9]{1,9}$",
        ),
        (CompletionRequest, {"logit_bias": {"1": "x"}}, "logit_bias[1]", "'x' is not allowed; give a number"),
        (ChatRequest, {"messages": [{"content": "x"}]}, "messages[0].role", "none given; it is required"),
        (
            ChatRequest,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
            "'image_url' is not allowed; give 'text'",
        ),
        (
            ChatRequest,
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "a"}]}]},
            "messages[0].tool_calls[0].function",
            "none given; it is required",
        ),
        (ChatRequest, {"structured_outputs": {"choice": [3]}}, "structured_outputs.choice[0]", "3 is not allowed; "),
        (ResponseRequest, {"input": 3}, "input", "3 is not allowed; give a string or a list"),
        (
            ResponseRequest,
            {"input": [{"type": "item_reference"}]},
            "input[0].type",
            "'item_reference' is not allowed; give one of 'message', ",
        ),
        (
            ResponseRequest,
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
            "'input_image' is not allowed; give 'input_text', 'output_text' or 'text'",
        ),
        # One of several values.
        (CompletionRequest, {"prompt_mode": []}, "prompt_mode", "[] is not allowed; give 'auto', 'append' or "),
        (
            ChatRequest,
            {"response_format": {"type": "xml"}},
            "response_format.type",
            f"'xml' is not allowed; give {FORMS}",
        ),
        (
            ChatRequest,
            {"response_format": "json"},
            "response_format",
            "'json' is not allowed; give an object",
        ),
        (
            ResponseRequest,
            {"text": {"format": {"type": "xml"}}},
            "text.format.type",
            f"'xml' is not allowed; give {FORMS}",
        ),
        (
            ChatRequest,
            {"tools": TOOLS, "tool_choice": "some"},
            "tool_choice",
            "'some' is not allowed; give 'none', 'auto' or 'required' or an object",
        ),
        (ChatRequest, {"tools": [{"type": "custom"}]}, "tools[0].type", "'custom' is not allowed; give 'function'"),
        (ResponseRequest, {"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search' is not allowed; give 'f"),
        (
            ChatRequest,
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].function.name",
            f"'a b' is not allowed; give {NAME}",
        ),
        # The one value that changes nothing.
        (CompletionRequest, {"best_of": 2}, "best_of", "2 is not allowed; give 1"),
        (CompletionRequest, {"best_of": True}, "best_of", "true is not allowed; give 1"),
        (ChatRequest, {"store": 0}, "store", "0 is not allowed; give false"),
        (ChatRequest, {"audio": {"voice": "x"}}, "audio", '{"voice": "x"} is not supported; leave it out'),
        (ChatRequest, {"functions": [1]}, "functions", "1 are too many; at most 0 are allowed"),
        (ResponseRequest, {"background": True}, "background", "true is not allowed; give false"),
        (ChatRequest, {"images": ["x"]}, "images", "1 are too many; at most 0 are allowed"),
        (ResponseRequest, {"truncate_prompt_tokens": 3}, "truncate_prompt_tokens", "3 is not supported; leave it out"),
        # Too many, too few.
        (CompletionRequest, {"prompt": ["a"] * 129}, "prompt", "129 are too many; at most 128 are allowed"),
        (ResponseRequest, {"input": []}, "input", "[] is not allowed; give a string or a list of at least 1 item"),
        (CompletionRequest, {"modalities": ["x"] * 9}, "modalities[0]", "'x' is not allowed; give 'text'"),
        *(
            (
                CompletionRequest,
                {name: dict.fromkeys(map(str, range(5000)))},
                name,
                "5000 fields are too many; at most 4096",
            )
            for name in ("logit_bias", "stream_options")
        ),
        # Text that no tokenizer takes.
        (
            CompletionRequest,
            {"prompt": "\ud800"},
            "prompt",
            "'\\ud800' is not allowed; give valid Unicode text, without a lone surrogate or a list",
        ),
        # Unknown fields.
        (CompletionRequest, {"magic": 1}, "magic", UNKNOWN),
        (ResponseRequest, {"messages": []}, "messages", UNKNOWN),
        (ResponseRequest, {"n": 2}, "n", UNKNOWN),
        (TokenizeRequest, {"magic": 1}, "magic", f"{LISTED} chat_template_kwargs, add_gen"),
        (ForkRequest, {"copies": 2}, "copies", f"{LISTED} forked_from, id, at_token"),
        (
            ChatRequest,
            {"stream": True, "stream_options": {"usage": True}},
            "stream_options.usage",
            UNKNOWN,
        ),
        (
            ChatRequest,
            {"structured_outputs": {"tag": 1}},
            "structured_outputs",
            '["tag"] is not allowed; give one of json, regex,',
        ),
        # Fields that do not go together.
        (ChatRequest, {"top_logprobs": 2}, "top_logprobs", "only allowed with logprobs: true"),
        (ChatRequest, {"stream_options": {"include_usage": True}}, "stream_options", "only allowed with stream: tr"),
        (ChatRequest, {"messages": [{"role": "user"}]}, "messages[0].content", "null is not allowed; give a string or"),
        (ChatRequest, {"tools": [TOOLS[1]] * 2}, "tools", '["stop", "stop"] names a function twice; names must differ'),
        (ChatRequest, {"tool_choice": "required"}, "tool_choice", "'required' is not allowed without tools"),
        (
            ChatRequest,
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "dig"}}},
            "tool_choice",
            "there is no function 'dig' among the tools",
        ),
        (
            ChatRequest,
            {"response_format": {"type": "json_schema"}},
            "response_format.schema",
            "null is not allowed; give a JSON schema",
        ),
        (
            ChatRequest,
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "not allowed with response_format; leave one out",
        ),
        *(
            (
                ChatRequest,
                {"structured_outputs": given},
                "structured_outputs",
                f"{names} is not allowed; give one of json",
            )
            for given, names in (({}, "[]"), ({"regex": "a", "choice": ["b"]}, '["regex", "choice"]'))
        ),
    ],
)
def test_a_field_is_refused_with_its_path_its_value_and_what_is_allowed(
    model: type[Fields], fields: dict[str, Any], param: str, words: str
) -> None:
    error = refusal(model, fields)
    assert error["message"].startswith(f"{param}: {words}")
    assert (error["param"], error["type"]) == (param, "invalid_request_error")


def test_names_of_fields_are_text_and_bodies_are_objects() -> None:
    assert "give valid Unicode text, without a lone surrogate" in refusal(CompletionRequest, {"\ud800": 1})["message"]
    with pytest.raises(InvalidRequest, match="the body must be a JSON object"):
        HttpRequestReader(MODEL).completion([])
    assert "5002 fields are too many" in refusal(CompletionRequest, dict.fromkeys(map(str, range(5000))))["message"]


def test_values_that_change_nothing_are_taken() -> None:
    """Clients send them back from answers, or by default."""
    plain = HttpRequestReader(MODEL).chat(READ[ChatRequest][1])
    neutral = {"best_of": 1, "store": False, "modalities": ["text"], "functions": [], "suffix": "", "audio": None}
    more = {"magic": None, "metadata": {"a": 1}, "service_tier": "auto", "parallel_tool_calls": True, "logprobs": False}
    sent_back: dict[str, Any] = {
        "messages": [CHAT[0] | {"refusal": None, "annotations": [], "audio": {}, "tool_calls": []}]
    }
    assert HttpRequestReader(MODEL).chat(READ[ChatRequest][1] | neutral | more | sent_back) == plain


def test_ignored_fields_have_no_effect_whatever_other_requests_mean_by_them() -> None:
    reader = HttpRequestReader(MODEL, ignores_unknown=True)
    for model, ignored in (
        (ChatRequest, {"max_output_tokens": {}, "input": 3, "prompt_mode": "append", "text": "x"}),
        (CompletionRequest, {"max_output_tokens": 3, "messages": CHAT, "tools": TOOLS}),
        (ResponseRequest, {"n": 2, "max_tokens": 1, "response_format": {"type": "json_object"}, "best_of": 3}),
    ):
        read, least = READ[model]
        found, plain = read(reader, least | ignored), read(HttpRequestReader(MODEL), least)
        assert found == plain


def test_messages_of_other_servers_answers_are_taken_without_what_they_lack_here() -> None:
    """LiteLLM, Crush and others send the whole object of an answer back."""
    reader = HttpRequestReader(MODEL, ignores_unknown=True)
    extra = {"provider_specific_fields": {"refusal": None}, "reasoning_content": "hm", "id": "x", "timestamp": 3}
    answer = {"role": "assistant", "content": "x"}
    found = reader.chat({"model": MODEL, "messages": [CHAT[0], answer | extra, CHAT[0]]})
    assert found == reader.chat({"model": MODEL, "messages": [CHAT[0], answer, CHAT[0]]})
    with pytest.raises(InvalidRequest, match=r"messages\[0\]\.images: .* is not supported"):
        reader.chat({"model": MODEL, "messages": [CHAT[0] | {"images": ["x"]}]})
    with pytest.raises(InvalidRequest, match=r"messages\[0\]\.id: 'x' is not supported"):
        HttpRequestReader(MODEL).chat({"model": MODEL, "messages": [answer | {"id": "x"}]})


@pytest.mark.parametrize("arguments", ['{\n    "', "null", "[]", '{"a": 1} {"b": 2}'])
def test_a_call_whose_arguments_are_no_object_comes_back_as_its_text(arguments: str) -> None:
    """`max_tokens` cut it: what the service said itself is no reason to refuse the next turn."""
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    turn = HttpRequestReader(MODEL).chat({"model": MODEL, "messages": [{"role": "assistant", "tool_calls": [call]}]})
    assert turn.template is not None
    assert turn.template.messages[0]["tool_calls"][0]["function"]["arguments"] == arguments


def test_codex_asks_for_a_response() -> None:
    """Its fields and tools, beside functions; and thoughts of an earlier answer."""
    body = {
        "model": MODEL,
        "input": [{"role": "user", "content": "x"}, {"type": "reasoning", "id": "r", "summary": []}],
        "client_metadata": {"a": "b"},
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "low", "summary": "auto"},
        "tools": [{"type": "function", "name": "f", "strict": False}, {"type": "web_search"}, {"type": "namespace"}],
        "truncation": "auto",
    }
    turn = HttpRequestReader(MODEL, ignores_unknown=True).response(body)
    assert turn.template is not None
    assert [each["function"]["name"] for each in turn.template.tools] == ["f"]
    assert turn.template.values == {"reasoning_effort": "low"}
    assert [message["role"] for message in turn.template.messages] == ["user"]
    with pytest.raises(InvalidRequest, match=r"tools\[1\]\.type: 'web_search' is not allowed; give 'function'"):
        HttpRequestReader(MODEL).response({name: body[name] for name in ("model", "input", "tools")})


def test_older_names_of_vllm_hold_the_answer_too() -> None:
    for name, value in (("json", {"type": "object"}), ("regex", "a+"), ("choice", ["a", "b"]), ("grammar", "start: x")):
        body = {"model": MODEL, "messages": CHAT}
        older = HttpRequestReader(MODEL).chat(body | {f"guided_{name}": value})
        assert older == HttpRequestReader(MODEL).chat(body | {"structured_outputs": {name: value}})
        assert older.request.sampling_params.WhichOneof("constraint")


UNHELD: tuple[dict[str, Any], ...] = (
    {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True},
    {"type": "string", "format": "path"},
    {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}},
    {"type": "object", "properties": {"email": {"type": "string", "pattern": r"^(?!\.)[a-z@.]+$"}}},
    {
        "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
        "$defs": {
            kind: {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]}
            for kind in ("Cat", "Dog")
        },
    },
)
"""Schemas of pydantic, zod and tools that people have, with keywords that no grammar holds."""


@pytest.mark.parametrize("schema", UNHELD)
def test_a_schema_without_strict_is_a_wish(schema: dict[str, Any], byte_codec: TextCodec) -> None:
    grammars = Grammars(byte_codec.to_json, 261, (257,))
    body = {"model": MODEL, "messages": CHAT}
    for strict in (None, False, True):
        described = {"schema": schema, "name": "x", "strict": strict}
        asked = {"response_format": {"type": "json_schema", "json_schema": described}}
        params = HttpRequestReader(MODEL).chat(body | asked).request.sampling_params
        if strict:
            with pytest.raises(InvalidRequest, match=r"sampling_params\.json_schema: "):
                make_grammar(params, grammars)
        else:
            assert make_grammar(params, grammars)


# --- the document ----------------------------------------------------------------------------------------------------

SAMPLES: tuple[object, ...] = (
    *(None, True, False, 0, 1, 7, -1, -101, 2**32, 2**64, 0.5, "", "x", "auto", "medium", "none", MODEL),
    *([], ["x"], [1], [-1], [[1]], [["x"]], [None], ["x", 1], {}, {"7": 0.5}, {"x": 1}, {"type": "text"}, ["text"]),
    *({"include_usage": True}, {"include_usage": 1}, CHAT, [{"role": "user"}], [{"role": 1, "content": "x"}]),
    [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
    [{"role": "user", "content": [{"type": "image_url"}]}],
)
NEEDED: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "continue_final_message": {"messages": [{"role": "assistant", "content": "x"}]},
}
"""Fields that some fields are only taken with."""


def is_read(read: Read, body: dict[str, Any]) -> bool:
    try:
        read(HttpRequestReader(MODEL), body)
    except NotFound:
        return True  # another model or response: a name all the same
    except InvalidRequest:
        return False
    return True


@pytest.mark.parametrize("model", READ)
def test_the_document_takes_the_same_values_of_each_field_as_the_reader(model: type[Fields]) -> None:
    read, least = READ[model]
    schema: Any = model.model_json_schema(schema_generator=SchemaMaker)
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    assert is_read(read, least)
    for name, value in itertools.product(schema["properties"], SAMPLES):
        body = least | NEEDED.get(name, {}) | {name: value}
        if "messages" in body and model is TokenizeRequest:
            del body["prompt"]
        has_input = model is not TokenizeRequest or body.get("prompt") is not None or body.get("messages") is not None
        assert is_read(read, body) == (validator.is_valid(body) and has_input), (name, value)
