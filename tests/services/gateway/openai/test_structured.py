"""Structured answers as OpenAI's and vLLM's clients ask for them, by this project's client and over gRPC."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict

from ringserve.client import AsyncClient, Sampling
from ringserve.services.gateway.text import TextCodec
from tests.services.local_gateway import MODEL, LocalGateway
from tests.workers.models import add_text, save_model

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 200}


class Seat(BaseModel):
    """Answer that the tests ask for: a random model fills its few words soon."""

    model_config = ConfigDict(extra="forbid")
    row: Literal["front", "back"]
    aisle: bool


SEAT = Seat.model_json_schema()


@pytest.fixture(scope="module")
def text_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_text(save_model("llama_gqa", tmp_path_factory.mktemp("text")))


@pytest.fixture
async def gateway(text_path: Path, codec: TextCodec) -> AsyncIterator[LocalGateway]:
    async with LocalGateway(text_path, codec) as gateway:
        yield gateway
        await gateway.wait_idle()


async def test_openais_client_parses_an_answer_into_its_class(gateway: LocalGateway) -> None:
    async with gateway.openai() as client:
        answer = await client.chat.completions.parse(**CHAT, response_format=Seat)
        assert isinstance(answer.choices[0].message.parsed, Seat)
        assert answer.choices[0].finish_reason == "stop"
        async with client.chat.completions.stream(**CHAT, response_format=Seat) as stream:
            whole = await stream.get_final_completion()
        assert isinstance(whole.choices[0].message.parsed, Seat)
        several = await client.chat.completions.parse(**CHAT, response_format=Seat, n=3, seed=1)
        assert len({choice.message.content for choice in several.choices}) > 1
        assert all(isinstance(choice.message.parsed, Seat) for choice in several.choices)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"json": SEAT}, r"\{\s*\"row\".*\}"),
        ({"json": json.dumps(SEAT)}, r"\{\s*\"row\".*\}"),
        ({"regex": "[a-c]{3}-[0-9]"}, r"[a-c]{3}-[0-9]"),
        ({"choice": ["yes", "no"], "regex": None}, "yes|no"),
        ({"grammar": 'start: "x" | "(" start ")"'}, r"\(*x\)*"),
    ],
    ids=["schema", "schema text", "regex", "choice", "grammar"],
)
async def test_vllms_field_holds_chats_and_completions(
    gateway: LocalGateway, form: dict[str, Any], pattern: str
) -> None:
    body = {"structured_outputs": form}
    async with gateway.openai() as client:
        chat = await client.chat.completions.create(**CHAT, extra_body=body)
        text = await client.completions.create(model=MODEL, prompt="Hi", max_tokens=200, extra_body=body)
    for answer in (chat.choices[0].message.content, text.choices[0].text):
        assert re.fullmatch(pattern, answer or "", re.DOTALL), answer
    assert (chat.choices[0].finish_reason, text.choices[0].finish_reason) == ("stop", "stop")


async def test_a_schema_beside_json_object_holds_as_llama_cpps_clients_send_it(gateway: LocalGateway) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form: Any = {"type": "json_object", "schema": schema}
    async with gateway.openai() as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], response_format=form, max_tokens=200
        )
    assert json.loads(answer.choices[0].message.content or "") in ({"a": 1}, {"a": 2})


async def test_a_wish_has_no_other_properties_than_it_names(gateway: LocalGateway) -> None:
    """A model could add properties up to max_tokens."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    async with gateway.openai() as client:
        answers = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], response_format=form, max_tokens=200, n=4
        )
    for choice in answers.choices:
        assert json.loads(choice.message.content or "") in ({"a": 1}, {"a": 2})


async def test_a_stop_string_ends_a_structured_answer_too(gateway: LocalGateway) -> None:
    async with gateway.openai() as client:
        answer = await client.chat.completions.create(
            **CHAT, stop="-", extra_body={"structured_outputs": {"regex": "[a-c]{3}-[0-9]{50}"}}
        )
    assert re.fullmatch("[a-c]{3}", answer.choices[0].message.content or "")


async def test_this_projects_client_asks_over_grpc(gateway: LocalGateway) -> None:
    async with AsyncClient(gateway.target) as client:
        one = await client.ask("Hi", sampling=Sampling(max_tokens=200, choice=["red", "green"]))
        other = await client.ask("Hi", sampling=Sampling(max_tokens=200, json_schema=SEAT))
        plain = await client.ask("Hi", sampling=Sampling(max_tokens=3))
    assert one.text in ("red", "green")
    assert Seat.model_validate_json(other.text)
    assert len(plain.token_ids) == 3


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objct"}}}},
            "json_schema",
            "it is not a valid grammar: Invalid type: objct",
        ),
        ({"structured_outputs": {"choice": []}}, "choice", "0 choices are given; allowed are 1 to 4096"),
        ({"structured_outputs": {"regex": "["}}, "regex", "unclosed character class"),
    ],
)
async def test_other_forms_are_refused_before_anything_is_reserved(
    gateway: LocalGateway, fields: dict[str, Any], param: str, words: str
) -> None:
    begun = gateway.service.router.num_running
    async with gateway.openai() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**CHAT, extra_body=fields)
    assert words in str(caught.value)
    assert caught.value.param == param
    assert gateway.service.router.num_running == begun
