"""Thoughts of a model whose chat template opens them: a part of the answer in each API, and left out on request."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from ringserve.services.gateway.text import TextCodec
from tests.services.local_gateway import MODEL, LocalGateway
from tests.workers.models import Oracle, add_text, save_model

TEMPLATE = (
    "{% for message in messages %}<|user|>{{ message.content.split('</think>')[-1] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is not defined or enable_thinking %}<think>\n"
    "{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
ASKED: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 9,
    "messages": [{"role": "user", "content": "Hello"}],
    "temperature": 0,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = add_text(save_model("llama_gqa", tmp_path_factory.mktemp("thinking")))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    return path


@pytest.fixture
async def thinking(path: Path) -> AsyncIterator[LocalGateway]:
    async with LocalGateway(path, TextCodec(path)) as gateway:
        yield gateway
        await gateway.wait_idle()


@pytest.fixture(scope="module")
def text(path: Path) -> str:
    """Return the answer as the model writes it, without an end of its thoughts."""
    codec = TextCodec(path)
    prompt = codec.encode_chat([("user", "Hello")]).tolist()
    text = codec.decode(Oracle(path).greedy(prompt, 9))
    assert text.strip() == text
    return text


async def test_thoughts_of_a_chat_are_its_reasoning_content(thinking: LocalGateway, text: str) -> None:
    async with thinking.openai() as client:
        whole = (await client.chat.completions.create(**ASKED)).choices[0].message
        chunks = [chunk async for chunk in await client.chat.completions.create(**ASKED, stream=True)]
        raw = (await client.chat.completions.create(**ASKED, extra_body={"separate_reasoning": False})).choices[0]
        hidden = (await client.chat.completions.create(**ASKED, extra_body={"include_reasoning": False})).choices[0]
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        answered = (await client.chat.completions.create(**ASKED, extra_body=off)).choices[0].message
    assert (whole.content, (whole.model_extra or {})["reasoning_content"]) == ("", text)
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join((delta.model_extra or {}).get("reasoning_content", "") for delta in deltas) == text
    assert not any(delta.content for delta in deltas)
    assert raw.message.content == text
    assert (hidden.message.content, "reasoning_content" in (hidden.message.model_extra or {})) == ("", False)
    assert answered.content
    assert "reasoning_content" not in (answered.model_extra or {})


async def test_thoughts_are_an_item_of_a_response_and_a_block_of_a_message(thinking: LocalGateway, text: str) -> None:
    async with thinking.openai() as client:
        asked: dict[str, Any] = {"model": MODEL, "input": "Hello", "max_output_tokens": 9, "temperature": 0}
        response = await client.responses.create(**asked)
        kinds = [event.type async for event in await client.responses.create(**asked, stream=True)]
    reasoning, message = response.output
    assert reasoning.type == "reasoning"
    assert reasoning.content
    assert reasoning.content[0].text == text
    assert message.type == "message"
    assert response.output_text == ""
    assert "response.reasoning_text.delta" in kinds
    async with thinking.anthropic() as client_of_messages:
        body = {name: value for name, value in ASKED.items() if name != "temperature"}
        answer = await client_of_messages.messages.create(**body, extra_body={"temperature": 0.0})
        async with client_of_messages.messages.stream(**body, extra_body={"temperature": 0.0}) as stream:
            streamed = await stream.get_final_message()
        off = await client_of_messages.messages.create(
            **body, thinking={"type": "disabled"}, extra_body={"temperature": 0.0}
        )
    for each in (answer, streamed):
        (block,) = each.content
        assert block.type == "thinking"
        assert block.to_dict()["thinking"] == text
    assert [block.type for block in off.content] == ["text"]
