"""Tools as OpenAI's client offers them, over models of each form of calls."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from openai.types.chat import ChatCompletionMessageToolCall
from pydantic import BaseModel, ConfigDict
from tokenizers import AddedToken, Tokenizer

from ringserve.services.gateway.openai.tools import close_objects
from ringserve.services.gateway.text import TextCodec
from tests.services.local_gateway import MODEL, LocalGateway
from tests.workers.models import add_text, save_model

TEMPLATE = (
    "{% if tools %}<|user|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ 'assistant' if message.role == 'assistant' else 'user' }}|>"
    "{{ message.content }}{% for call in message.tool_calls or [] %}CALL{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CALLS = {
    "hermes": '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>",
    "mistral": '[TOOL_CALLS] [{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}]',
    "llama": '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}{# ipython #}',
}
ASKED: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Paint it."}], "max_tokens": 300}


class Paint(BaseModel):
    """Paint a wall."""

    model_config = ConfigDict(extra="forbid")
    colour: Literal["red", "green"]
    coats: Literal[1, 2, 3]


TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "paint", "parameters": Paint.model_json_schema()}},
    {"type": "function", "function": {"name": "stop"}},
]


def model_of(form: str, directory: Path) -> Path:
    """Write a random model whose template and tokens are those of a form of calls."""
    path = add_text(save_model("llama_gqa", directory))
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_tokens(
        [AddedToken(sign, special=False, normalized=False) for sign in ("<tool_call>", "</tool_call>")]
    )
    tokenizer.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True, normalized=False)])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings["chat_template"] = TEMPLATE.replace("CALL", CALLS[form])
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.fixture(scope="module", params=CALLS)
def form_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_of(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
async def gateway(form_path: Path) -> AsyncIterator[LocalGateway]:
    async with LocalGateway(form_path, TextCodec(form_path)) as gateway:
        yield gateway
        await gateway.wait_idle()


async def test_a_required_call_keeps_to_a_functions_schema_whole_and_streamed(gateway: LocalGateway) -> None:
    asked = ASKED | {"tools": TOOLS, "tool_choice": "required", "seed": 3, "parallel_tool_calls": False}
    async with gateway.openai() as client:
        answer = (await client.chat.completions.create(**asked)).choices[0]
        assert answer.finish_reason == "tool_calls"
        assert answer.message.content is None
        assert answer.message.tool_calls
        for call in answer.message.tool_calls:
            assert isinstance(call, ChatCompletionMessageToolCall)
            assert call.function.name in ("paint", "stop")
            if call.function.name == "paint":
                Paint.model_validate_json(call.function.arguments)
        async with client.chat.completions.stream(**asked) as stream:
            streamed = (await stream.get_final_completion()).choices[0]
        assert streamed.finish_reason == "tool_calls"
        assert streamed.message.tool_calls
        pairs = zip(streamed.message.tool_calls, answer.message.tool_calls, strict=True)
        for one, other in pairs:
            assert isinstance(other, ChatCompletionMessageToolCall)
            assert (one.function.name, one.function.arguments) == (other.function.name, other.function.arguments)


async def test_a_named_function_is_called_once_and_its_answer_goes_on(gateway: LocalGateway) -> None:
    choice: Any = {"type": "function", "function": {"name": "paint"}}
    async with gateway.openai() as client:
        answer = (await client.chat.completions.create(**ASKED, tools=TOOLS, tool_choice=choice)).choices[0].message
        assert answer.tool_calls
        (call,) = answer.tool_calls
        assert isinstance(call, ChatCompletionMessageToolCall)
        assert call.function.name == "paint"
        history = [
            *ASKED["messages"],
            answer.model_dump(),
            {"role": "tool", "tool_call_id": call.id, "content": "done"},
        ]
        prompt = await client.post("/../tokenize", cast_to=dict[str, Any], body={"messages": history, "tools": TOOLS})
        text = await client.post("/../detokenize", cast_to=dict[str, Any], body={"tokens": prompt["tokens"]})
        assert '"name": "paint"' in text["prompt"]
        assert text["prompt"].endswith("<|user|>done<|end|><|assistant|>")
        after = await client.chat.completions.create(
            model=MODEL, messages=history, tools=TOOLS, max_tokens=5, temperature=0
        )
        assert after.usage is not None
        assert after.usage.prompt_tokens == prompt["count"]
        none = await client.chat.completions.create(
            model=MODEL, messages=history, tools=TOOLS, tool_choice="none", max_tokens=5, temperature=0
        )
        assert none.usage is not None
        assert none.usage.prompt_tokens < prompt["count"]  # tools that must not be called are not shown


async def test_only_allowed_tools_are_called_and_any_is_required(gateway: LocalGateway) -> None:
    named = {"type": "function", "function": {"name": "stop"}}
    allowed: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    items = [{"type": "function", **tool["function"]} for tool in TOOLS]
    item: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "stop"}]}
    other: Any = {"type": "function", "function": {"name": "other"}}
    asked = ASKED | {"parallel_tool_calls": False, "tools": TOOLS}
    async with gateway.openai() as client:
        choices: list[tuple[Any, set[str]]] = [(allowed, {"stop"}), ("any", {"stop", "paint"})]
        for choice, names in choices:
            answer = (await client.chat.completions.create(**asked, tool_choice=choice)).choices[0].message
            assert answer.tool_calls
            (call,) = answer.tool_calls
            assert isinstance(call, ChatCompletionMessageToolCall)
            assert call.function.name in names
        response = await client.responses.create(
            model=MODEL, input="Paint it.", tools=items, tool_choice=item, parallel_tool_calls=False
        )
        assert [each.name for each in response.output if each.type == "function_call"] == ["stop"]
        allowed["allowed_tools"]["tools"] = [other]
        with pytest.raises(openai.BadRequestError, match="tool_choice: there is no function 'other' among the tools"):
            await client.chat.completions.create(**asked, tool_choice=allowed)


async def test_text_besides_tools_is_text(gateway: LocalGateway) -> None:
    """A random model calls nothing; strict tools and parallel calls bring grammars that allow text."""
    async with gateway.openai() as client:
        for options in ({}, {"parallel_tool_calls": False}, {"n": 2, "logprobs": True}):
            asked = ASKED | {"max_tokens": 6, "tools": TOOLS, "temperature": 0} | options
            answer = await client.chat.completions.create(**asked)
            assert answer.choices[0].finish_reason == "length"
            assert not answer.choices[0].message.tool_calls
            events = [event async for event in await client.chat.completions.create(**asked, stream=True)]
            pieces = [each.choices[0].delta.content or "" for each in events if each.choices[0].index == 0]
            assert "".join(pieces) == answer.choices[0].message.content


async def test_openais_client_parses_calls_into_their_class(gateway: LocalGateway) -> None:
    tool = openai.pydantic_function_tool(Paint)
    async with gateway.openai() as client:
        answer = await client.chat.completions.parse(
            **ASKED, tools=[tool], tool_choice="required", parallel_tool_calls=False
        )
    assert answer.choices[0].message.tool_calls
    assert all(isinstance(call.function.parsed_arguments, Paint) for call in answer.choices[0].message.tool_calls)


def test_arguments_have_no_properties_that_their_schema_does_not_name() -> None:
    inner = {"type": "object", "properties": {"properties": {"type": "string"}}}
    nested = {"type": "object", "properties": {"a": inner, "b": {"type": "array", "items": inner}}, "required": ["a"]}
    shut = inner | {"additionalProperties": False}
    wanted = {"a": shut, "b": {"type": "array", "items": shut}}
    assert close_objects(nested) == nested | {"properties": wanted, "additionalProperties": False}
    free = inner | {"additionalProperties": True}
    assert close_objects({"anyOf": [free, inner]}) == {"anyOf": [free, shut]}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}]},
            "tools",
            "it is not a valid grammar: ",
        ),
        ({"tools": TOOLS, "structured_outputs": {"regex": "a"}}, "structured_outputs", "regex is not allowed with"),
    ],
)
async def test_other_tools_are_refused_in_a_sentence(
    gateway: LocalGateway, fields: dict[str, Any], param: str, words: str
) -> None:
    async with gateway.openai() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**ASKED | {"extra_body": fields})
    assert words in str(caught.value)
    assert caught.value.param == param


async def test_a_model_without_tools_in_its_template_refuses_them(tmp_path: Path) -> None:
    path = add_text(save_model("llama_gqa", tmp_path))
    async with LocalGateway(path, TextCodec(path)) as gateway, gateway.openai() as client:
        with pytest.raises(openai.BadRequestError, match="the chat template of this model takes no tools"):
            await client.chat.completions.create(**ASKED, tools=TOOLS)
        answer = await client.chat.completions.create(**ASKED | {"max_tokens": 2}, tools=TOOLS, tool_choice="none")
        assert answer.choices[0].finish_reason == "length"
