"""OpenAI's responses, as its own client asks for them and reads them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict

from ringserve.services.gateway.text import TextCodec
from tests.services.gateway.openai.test_tools import Paint
from tests.services.local_gateway import MODEL, LocalGateway
from tests.workers.models import Oracle

ASKED: dict[str, Any] = {"model": MODEL, "input": "Paint it.", "max_output_tokens": 300}
TOOLS: list[Any] = [
    {"type": "function", "name": "paint", "parameters": Paint.model_json_schema(), "strict": True},
    {"type": "function", "name": "stop", "parameters": None, "strict": False},
]


class Seat(BaseModel):
    """Answer whose few words a random model fills soon."""

    model_config = ConfigDict(extra="forbid")
    row: Literal["front", "back"]


@pytest.fixture
async def gateway(hermes_path: Path) -> AsyncIterator[LocalGateway]:
    async with LocalGateway(hermes_path, TextCodec(hermes_path)) as gateway:
        yield gateway
        await gateway.wait_idle()


async def test_a_text_is_answered_as_a_chat_is_whole_and_streamed(gateway: LocalGateway, hermes_path: Path) -> None:
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    prompt = gateway.codec.encode_chat([("system", "Be brief."), ("user", "Hi")]).tolist()
    expected = Oracle(hermes_path).greedy(prompt, 7)
    asked: dict[str, Any] = {"model": MODEL, "instructions": "Be brief.", "max_output_tokens": 7, "temperature": 0}
    async with gateway.openai() as client:
        text = await client.responses.create(**asked, input="Hi")
        items = await client.responses.create(
            model=MODEL,
            input=[messages[0], {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
            max_output_tokens=7,
            temperature=0,
        )
        async with client.responses.stream(**asked, input="Hi") as stream:
            events = [event async for event in stream]
    assert text.output_text == items.output_text == gateway.codec.decode(expected)
    assert (text.status, text.model, text.instructions, text.max_output_tokens) == ("incomplete", MODEL, "Be brief.", 7)
    assert text.incomplete_details
    assert text.incomplete_details.reason == "max_output_tokens"
    assert text.usage
    assert (text.usage.output_tokens, text.usage.total_tokens) == (7, text.usage.input_tokens + 7)
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added")
    ]
    assert kinds[-4:] == [
        *("response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete")
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_an_answer_is_parsed_into_its_class(gateway: LocalGateway) -> None:
    async with gateway.openai() as client:
        answer = await client.responses.parse(**ASKED, text_format=Seat)
        assert isinstance(answer.output_parsed, Seat)
        assert answer.status == "completed"
        async with client.responses.stream(**ASKED, text_format=Seat) as stream:
            assert isinstance((await stream.get_final_response()).output_parsed, Seat)


async def test_a_call_and_its_output_are_items(gateway: LocalGateway) -> None:
    asked: dict[str, Any] = ASKED | {"tools": TOOLS, "seed": 5}
    choice: Any = {"type": "function", "name": "paint"}
    async with gateway.openai() as client:
        extra = {"seed": asked.pop("seed")}
        answer = await client.responses.create(**asked, tool_choice=choice, extra_body=extra)
        (call,) = answer.output
        assert call.type == "function_call"
        assert call.name == "paint"
        assert Paint.model_validate_json(call.arguments)
        async with client.responses.stream(**asked, tool_choice=choice, extra_body=extra) as stream:
            streamed = (await stream.get_final_response()).output[0]
        assert streamed.type == "function_call"
        assert streamed.arguments == call.arguments
        history: list[Any] = [
            {"role": "user", "content": "Paint it."},
            call.model_dump(),
            {"type": "function_call_output", "call_id": call.call_id, "output": "done"},
        ]
        after = await client.responses.create(
            model=MODEL, input=history, tools=TOOLS, max_output_tokens=3, tool_choice="none", temperature=0
        )
        assert after.usage
        arguments = json.loads(call.arguments)
        called = [{"id": call.call_id, "type": "function", "function": {"name": "paint", "arguments": arguments}}]
        messages: list[Any] = [
            {"role": "user", "content": "Paint it."},
            {"role": "assistant", "content": "", "tool_calls": called},
            {"role": "tool", "tool_call_id": call.call_id, "content": "done"},
        ]
        assert after.usage.input_tokens == len(gateway.codec.encode_template(messages, ()))
