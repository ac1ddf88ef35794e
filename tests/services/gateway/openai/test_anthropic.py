"""Anthropic's own client against /v1/messages: each side understands the other."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from ringserve.cp_core.errors import InvalidRequest
from ringserve.services.auth.authenticator import Authenticator, TokenFile
from ringserve.services.auth.tenants import hash_token
from ringserve.services.config.sections import HttpConfig
from ringserve.services.gateway.openai.anthropic import CountRequest, MessageAnswer, MessagesRequest, chat_body
from ringserve.services.gateway.openai.tools import HERMES, AnswerForm
from ringserve.services.gateway.text import TextCodec
from ringserve.v1 import inference_pb2
from tests.services.local_gateway import MODEL, LocalGateway
from tests.workers.models import Oracle

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
PAINT: Any = {
    "name": "paint",
    "description": "Paint a wall.",
    "input_schema": {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green"]}, "coats": {"enum": [1, 2, 3]}},
        "required": ["colour", "coats"],
        "additionalProperties": False,
    },
}
ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": 300, "messages": [{"role": "user", "content": "Paint it."}]}


@pytest.fixture
async def hermes(hermes_path: Path) -> AsyncIterator[LocalGateway]:
    async with LocalGateway(hermes_path, TextCodec(hermes_path)) as gateway:
        yield gateway
        await gateway.wait_idle()


async def test_messages_are_answered_exactly_whole_and_streamed(
    gateway: LocalGateway, codec: TextCodec, oracle: Oracle
) -> None:
    prompt = codec.encode_chat([("system", "Be\nbrief."), ("user", "Hello")]).tolist()
    system: list[Any] = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]
    asked: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 7,
        "messages": HELLO,
        "system": system,
        "extra_body": {"temperature": 0.0},
    }
    async with gateway.anthropic() as client:
        answer = await client.messages.create(**asked)
        counted = await client.messages.count_tokens(model=MODEL, messages=HELLO, system=system)
        events = [event async for event in await client.messages.create(**asked, stream=True)]
        async with client.messages.stream(**asked) as stream:
            streamed = await stream.get_final_message()
    text = codec.decode(oracle.greedy(prompt, 7))
    for message in (answer, streamed):
        (block,) = message.content
        assert block.type == "text"
        assert (block.to_dict()["text"], message.stop_reason, message.stop_sequence) == (text, "max_tokens", None)
        usage = message.usage
        assert (usage.input_tokens, usage.output_tokens) == (len(prompt) - (usage.cache_read_input_tokens or 0), 7)
    assert counted.input_tokens == len(prompt)
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


async def test_a_second_turn_of_the_clients_own_answer_finds_the_first_ones_tokens(
    model_path: Path, codec: TextCodec
) -> None:
    from tests.orchestration.service import Service

    service = Service(model_path, 2, 3, retain_prompts=True)
    async with LocalGateway(model_path, codec, service=service) as gateway, gateway.anthropic() as client:
        question: list[Any] = [{"role": "user", "content": "What does this say? " + "no " * 40}]
        greedy = {"temperature": 0.0}
        first = await client.messages.create(model=MODEL, max_tokens=4, messages=question, extra_body=greedy)
        again = [*question, {"role": "assistant", "content": first.content}, {"role": "user", "content": "And?"}]
        second = await client.messages.create(model=MODEL, max_tokens=4, messages=again, extra_body=greedy)
        await gateway.wait_idle()
    assert (second.usage.cache_read_input_tokens or 0) >= first.usage.input_tokens - 1


async def test_a_stop_sequence_is_named(gateway: LocalGateway, codec: TextCodec, oracle: Oracle) -> None:
    expected = codec.decode(oracle.greedy(codec.encode_chat([("user", "Hello")]).tolist(), 20))
    stop = next(
        pair for pair in (expected[at : at + 2] for at in range(1, 20)) if pair.isascii() and pair.isprintable()
    )
    async with gateway.anthropic() as client:
        answer = await client.messages.create(
            model=MODEL, max_tokens=20, messages=HELLO, stop_sequences=[stop], extra_body={"temperature": 0.0}
        )
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    (block,) = answer.content
    assert block.type == "text"
    assert block.text == expected[: expected.index(stop)]


async def test_a_tool_loop_of_the_client_whole_and_streamed(hermes: LocalGateway) -> None:
    asked = ASKED | {"tools": [PAINT], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    async with hermes.anthropic() as client:
        whole = await client.messages.create(**asked, extra_body={"temperature": 0.0})
        async with client.messages.stream(**asked, extra_body={"temperature": 0.0}) as stream:
            streamed = await stream.get_final_message()
        for message in (whole, streamed):
            assert message.stop_reason == "tool_use"
            for call in message.content:
                assert call.type == "tool_use"
                assert call.name == "paint"
                assert isinstance(call.input, dict)
                assert call.input["colour"] in ("red", "green")
        call = whole.content[0]
        assert call.type == "tool_use"
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "done"}]}
        history = [
            *ASKED["messages"],
            {"role": "assistant", "content": whole.content},
            {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
        ]
        after = await client.messages.create(model=MODEL, max_tokens=5, messages=history, tools=[PAINT])
        counted = await client.messages.count_tokens(model=MODEL, messages=history, tools=[PAINT])
        assert after.usage.input_tokens + (after.usage.cache_read_input_tokens or 0) == counted.input_tokens


@pytest.mark.parametrize("field", ["output_config", "output_format"])
async def test_an_answer_keeps_to_the_schema_of_its_output(hermes: LocalGateway, field: str) -> None:
    form = {"type": "json_schema", "schema": PAINT["input_schema"]}
    body = ASKED | {field: {"format": form, "effort": "low"} if field == "output_config" else form}
    async with hermes.anthropic() as client:
        answer = await client.post("/v1/messages", cast_to=dict[str, Any], body=body)
    (block,) = answer["content"]
    assert json.loads(block["text"])["colour"] in ("red", "green")


REFUSED: dict[str, tuple[dict[str, Any], int, str, str]] = {
    "field": ({"max_tokens": "7"}, 400, "invalid_request_error", "max_tokens: '7' is not allowed"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        400,
        "invalid_request_error",
        "messages[0].content[0].type: 'image' is not allowed",
    ),
    "model": ({"model": "other"}, 404, "not_found_error", "there is no model 'other'"),
    "long": (
        {"messages": [{"role": "user", "content": "long " * 60_000}]},
        400,
        "invalid_request_error",
        "prompt is too long: ",
    ),
    "tool": (
        {"tools": [PAINT], "tool_choice": {"type": "tool"}},
        400,
        "invalid_request_error",
        "tool_choice.name: none",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_refusal_has_anthropics_shape(gateway: LocalGateway, name: str) -> None:
    from anthropic import APIStatusError  # here, as in `LocalGateway.anthropic`

    change, status, kind, sentence = REFUSED[name]
    async with gateway.anthropic() as client:
        with pytest.raises(APIStatusError) as caught:
            await client.post("/v1/messages", cast_to=dict[str, Any], body=ASKED | change)
    assert caught.value.status_code == status
    body: Any = caught.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == kind
    assert sentence in body["error"]["message"]
    assert "\n" not in body["error"]["message"]


async def test_the_clients_key_is_a_token(model_path: Path, codec: TextCodec, tmp_path: Path) -> None:
    from anthropic import AuthenticationError

    tokens = tmp_path / "tokens.yaml"
    tenants = [{"name": "ann", "tokens": [{"sha256": hash_token("secret")}]}]
    tokens.write_text(json.dumps({"tenants": tenants}))
    async with LocalGateway(model_path, codec, Authenticator(TokenFile(tokens))) as gateway:
        async with gateway.anthropic(api_key="secret") as client:
            answer = await client.messages.create(model=MODEL, max_tokens=1, messages=HELLO)
            assert answer.usage.output_tokens == 1
        async with gateway.anthropic(api_key="wrong") as client:
            with pytest.raises(AuthenticationError):
                await client.messages.create(model=MODEL, max_tokens=1, messages=HELLO)


async def test_what_agents_send_besides_is_ignored(model_path: Path, codec: TextCodec) -> None:
    """Fields, tools and blocks that only Anthropic's own service has a use for."""
    body = ASKED | {
        "max_tokens": 1,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]},
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "Ho"}],
            },
            {"role": "user", "content": "More"},
        ],
        "metadata": {"user_id": "user_1_session_2"},
        "thinking": {"type": "disabled"},
        "context_management": {"edits": []},
        "betas": ["some-beta"],
    }
    config = HttpConfig(unknown_fields="ignore")
    async with LocalGateway(model_path, codec, http=config) as gateway, httpx2.AsyncClient() as http:
        answer = await http.post(f"{gateway.url}/v1/messages?beta=true", json=body, timeout=60.0)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["output_tokens"] == 1
        metrics = await http.get(f"{gateway.url}/metrics", timeout=60.0)
        assert "ringserve_ignored_fields_total 1.0" in metrics.text


def test_blocks_become_chat_messages_in_the_order_that_templates_take() -> None:
    content = [
        {"type": "text", "text": "both"},
        {"type": "tool_result", "tool_use_id": "a", "content": "1"},
        {"type": "tool_result", "tool_use_id": "b", "is_error": True},
    ]
    calls = [
        {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}},
        {"type": "tool_use", "id": "b", "name": "f", "input": {}},
    ]
    asked = MessagesRequest.read(
        {
            "model": MODEL,
            "max_tokens": 1,
            "system": "S",
            "messages": [{"role": "assistant", "content": calls}, {"role": "user", "content": content}],
            "tools": [PAINT],
            "tool_choice": {"type": "tool", "name": "paint", "disable_parallel_tool_use": True},
        }
    )
    body = chat_body(asked)
    assert [message["role"] for message in body["messages"]] == ["system", "assistant", "tool", "tool", "user"]
    assert [call["function"]["arguments"] for call in body["messages"][1]["tool_calls"]] == [{"x": 1}, {}]
    assert body["messages"][3]["content"] == ""
    assert body["tool_choice"] == {"type": "function", "function": {"name": "paint"}}
    assert body["parallel_tool_calls"] is False
    assert body["tools"][0]["function"]["parameters"] == PAINT["input_schema"]


def test_a_call_that_was_cut_has_arguments_that_are_an_object() -> None:
    answer = MessageAnswer(MODEL, AnswerForm(calls=HERMES))
    start = inference_pb2.GenerateStart(request_id="r", prompt_tokens=9, cached_tokens=4)
    text = 'Yes.<tool_call>\n{"name": "paint", "arguments": {"colour": "re'
    usage = inference_pb2.Usage(prompt_tokens=9, cached_tokens=4, completion_tokens=20)
    complete = inference_pb2.GenerateComplete(text=text, finish_reason=inference_pb2.FINISH_REASON_LENGTH, usage=usage)
    answer.events(0, inference_pb2.GenerateResponse(start=start))
    events = answer.events(0, inference_pb2.GenerateResponse(complete=complete))
    assert json.loads(json.dumps(events))
    whole = answer.whole()
    assert [block["type"] for block in whole["content"]] == ["text", "tool_use"]
    assert whole["content"][1]["input"] == {}
    assert whole["stop_reason"] == "max_tokens"
    assert whole["usage"]["input_tokens"] == 5


def test_a_count_needs_no_max_tokens_and_messages_do() -> None:
    body = {"model": MODEL, "messages": HELLO}
    assert CountRequest.read(body)
    with pytest.raises(InvalidRequest, match="max_tokens: null is not allowed; give a whole number"):
        MessagesRequest.read(body)
