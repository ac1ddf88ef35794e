"""Responses that follow others by their ids, as OpenAI's client asks for them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from ringserve.cp_core.errors import NotFound
from ringserve.services.auth.tenants import ANYBODY
from ringserve.services.gateway.openai.stored import KeptAnswers, ResponseName
from ringserve.services.gateway.text import TextCodec
from ringserve.workers.model.builtin import END_TOKEN_ID
from tests.services.gateway.openai.test_responses import TOOLS
from tests.services.local_gateway import MODEL, LocalGateway
from tests.workers.models import Oracle

LENGTH = 7
ASKED: dict[str, Any] = {"model": MODEL, "max_output_tokens": LENGTH, "temperature": 0}


@pytest.fixture
async def gateway(hermes_path: Path) -> AsyncIterator[LocalGateway]:
    async with LocalGateway(hermes_path, TextCodec(hermes_path)) as gateway:
        yield gateway
        await gateway.wait_idle()
        gateway.service.check_integrity()


def follow_up(gateway: LocalGateway, text: str) -> list[int]:
    """Return the tokens of a message behind an answer that was cut."""
    ids: list[int] = gateway.codec.encode(f"<|end|><|user|>{text}<|end|><|assistant|>", adds_special=False).tolist()
    return ids


async def test_a_response_goes_on_where_the_one_before_ended_and_computes_what_is_new(
    gateway: LocalGateway, hermes_path: Path
) -> None:
    prompt = gateway.codec.encode_chat([("system", "Be brief."), ("user", "Hi")]).tolist()
    oracle = Oracle(hermes_path)
    history = [*prompt, *oracle.greedy(prompt, LENGTH)]
    async with gateway.openai() as client:
        answer = await client.responses.create(**ASKED, input="Hi", instructions="Be brief.")
        for text in ("And?", "Then?", "So?"):
            history += follow_up(gateway, text)
            expected = oracle.greedy(history, LENGTH)
            before = answer
            # Instructions may be repeated, and need not be.
            more = {"instructions": "Be brief."} if text == "Then?" else {}
            answer = await client.responses.create(**ASKED, input=text, previous_response_id=before.id, **more)
            assert answer.output_text == gateway.codec.decode(expected)
            assert answer.usage
            assert answer.usage.input_tokens == len(history)
            assert answer.usage.input_tokens_details.cached_tokens >= len(history) - len(follow_up(gateway, text)) - 1
            assert answer.previous_response_id == before.id
            history += expected
    assert gateway.service.router.num_conversations == 1


async def test_several_follow_the_same_response_in_forks_even_at_once(gateway: LocalGateway) -> None:
    async with gateway.openai() as client:
        first = await client.responses.create(**ASKED, input="Hi")
        asked = {**ASKED, "input": "And?", "previous_response_id": first.id}
        both = await asyncio.gather(*(client.responses.create(**asked) for _ in range(2)))
        later = await client.responses.create(**asked)
        async with client.responses.stream(**asked) as stream:
            (streamed,) = [event.response async for event in stream if event.type == "response.incomplete"]
        answers = [*both, later, streamed]
        assert len({each.output_text for each in answers}) == 1
        assert len({each.id for each in answers}) == 4
        assert gateway.service.router.num_conversations == 4
        for each in answers:
            last = await client.responses.create(**ASKED, input="So?", previous_response_id=each.id)
            assert last.usage
            assert last.usage.input_tokens_details.cached_tokens > 0


async def test_what_is_not_stored_leaves_no_conversation_and_is_not_followed(gateway: LocalGateway) -> None:
    async with gateway.openai() as client:
        lone = await client.responses.create(**ASKED, input="Hi", store=False)
        assert (lone.model_extra or {})["store"] is False
        assert gateway.service.router.num_conversations == 0
        first = await client.responses.create(**ASKED, input="Hi")
        aside = await client.responses.create(**ASKED, input="And?", previous_response_id=first.id, store=False)
        assert aside.usage
        assert aside.usage.input_tokens_details.cached_tokens > 0
        assert gateway.service.router.num_conversations == 1
        for response in (lone, aside):
            with pytest.raises(openai.NotFoundError, match=f"response '{response.id}' is not stored"):
                await client.responses.create(**ASKED, input="So?", previous_response_id=response.id)


async def test_a_deleted_response_is_not_held_any_more(gateway: LocalGateway) -> None:
    async with gateway.openai() as client:
        first = await client.responses.create(**ASKED, input="Hi")
        await client.responses.delete(first.id)
        assert gateway.service.router.num_conversations == 0
        with pytest.raises(openai.NotFoundError, match="is no longer stored; send the history in input"):
            await client.responses.create(**ASKED, input="And?", previous_response_id=first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.delete(first.id)


async def test_an_answer_is_fetched_again_as_it_was_until_it_is_deleted(gateway: LocalGateway) -> None:
    choice: Any = {"type": "function", "name": "paint"}
    async with gateway.openai() as client:
        first = await client.responses.create(**ASKED, input="Hi", metadata={"for": "me"})
        called = await client.responses.create(
            model=MODEL, tools=TOOLS, input="Paint it.", tool_choice=choice, max_output_tokens=300
        )
        async with client.responses.stream(**ASKED, input="And?", previous_response_id=first.id) as stream:
            (streamed,) = [event.response async for event in stream if event.type == "response.incomplete"]
        for answer in (first, called, streamed):
            assert (await client.responses.retrieve(answer.id)).to_dict() == answer.to_dict()
        unstored = await client.responses.create(**ASKED, input="Hi", store=False)
        for response_id in (unstored.id, first.id.removesuffix("1") + "9"):
            with pytest.raises(openai.NotFoundError, match="is not stored, or is no longer stored"):
                await client.responses.retrieve(response_id)
        with pytest.raises(openai.BadRequestError, match="stream: a kept answer is sent only as a whole"):
            await client.get(f"/responses/{first.id}?stream=true", cast_to=object)
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError, match="is not stored, or is no longer stored"):
            await client.responses.retrieve(first.id)


async def test_the_oldest_answers_make_room_for_new_ones_and_tenants_see_their_own(gateway: LocalGateway) -> None:
    router = gateway.servicer.router_for(ANYBODY)
    async with gateway.openai() as client:
        held = [(await client.responses.create(**ASKED, input=text)).id for text in "abcd"]
    names = [name for each in held if (name := ResponseName.read(each))]
    size = len(json.dumps({"id": held[0], "store": True}))
    kept = KeptAnswers(3 * size)
    for each in (*held, held[-1]):
        kept.keep("a", {"id": each, "store": True})
    kept.keep("a", {"id": "large", "store": True, "text": "x" * 4 * size})
    for name in names[1:]:
        assert json.loads(await kept.fetch("a", name, router))["id"] == name.response_id
    for tenant, name in (("a", names[0]), ("b", names[1])):
        with pytest.raises(NotFound, match="can be followed, but its answer is no longer kept"):
            await kept.fetch(tenant, name, router)


async def test_an_answer_that_did_not_end_is_followed_by_none(gateway: LocalGateway) -> None:
    async with gateway.openai() as client:
        first = await client.responses.create(**ASKED, input="Hi")
        unborn = first.id.removesuffix("1") + "2"
        with pytest.raises(openai.NotFoundError, match=f"'{unborn}' is not stored"):
            await client.responses.create(**ASKED, input="And?", previous_response_id=unborn)


async def test_a_fork_that_gets_no_answer_is_not_left_behind(gateway: LocalGateway) -> None:
    async with gateway.openai() as client:
        first = await client.responses.create(**ASKED, input="Hi")
        await client.responses.create(**ASKED, input="And?", previous_response_id=first.id)
        with pytest.raises(openai.BadRequestError, match="at most"):
            await client.responses.create(**ASKED, input="x" * 1_000_000, previous_response_id=first.id)
        assert gateway.service.router.num_conversations == 1


async def test_an_earlier_response_is_told_so_where_the_router_has_forgotten_its_end(gateway: LocalGateway) -> None:
    async with gateway.openai() as client:
        first = await client.responses.create(**ASKED, input="Hi")
        second = await client.responses.create(**ASKED, input="And?", previous_response_id=first.id)
        (known,) = gateway.service.router._conversations._known.values()
        known.turn_ends.clear()  # as after a restart
        with pytest.raises(openai.NotFoundError, match="is not the latest of its conversation"):
            await client.responses.create(**ASKED, input="So?", previous_response_id=first.id)
        third = await client.responses.create(**ASKED, input="So?", previous_response_id=second.id)
        assert third.usage


async def test_the_output_of_a_tool_follows_its_call(gateway: LocalGateway) -> None:
    choice: Any = {"type": "function", "name": "paint"}
    asked: dict[str, Any] = {"model": MODEL, "tools": TOOLS, "extra_body": {"seed": 5}}
    async with gateway.openai() as client:
        answer = await client.responses.create(**asked, input="Paint it.", tool_choice=choice, max_output_tokens=300)
        (call,) = answer.output
        assert call.type == "function_call"
        output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
        after = await client.responses.create(
            **asked, input=[output], previous_response_id=answer.id, tool_choice="none", max_output_tokens=3
        )
        assert answer.usage
        assert after.usage
        told = gateway.codec.encode("<|end|><|user|>done<|end|><|assistant|>", adds_special=False)
        history = answer.usage.total_tokens + len(told)
        assert history - 1 <= after.usage.input_tokens <= history, "one less where the answer has its own end"
        assert json.loads(call.arguments)["colour"] in ("red", "green")


@pytest.mark.parametrize("fields", [{"instructions": "Be long."}, {"tools": TOOLS}])
async def test_what_the_model_has_not_read_is_refused(gateway: LocalGateway, fields: dict[str, Any]) -> None:
    async with gateway.openai() as client:
        first = await client.responses.create(**ASKED, input="Hi", instructions="Be brief.")
        (name,) = fields
        with pytest.raises(openai.BadRequestError, match=f"{name}: differ from the {name} that the conversation"):
            await client.responses.create(**ASKED, input="And?", previous_response_id=first.id, **fields)


async def test_a_named_conversation_is_not_followed_by_an_id(gateway: LocalGateway) -> None:
    async with gateway.openai() as client:
        first = await client.responses.create(**ASKED, input="Hi")
        named = {"conversation_id": "mine"}
        mine = await client.responses.create(**ASKED, input="Hi", extra_body=named)
        assert (mine.model_extra or {})["store"] is False
        with pytest.raises(openai.BadRequestError, match="not allowed with a conversation_id; leave one out"):
            await client.responses.create(**ASKED, input="x", previous_response_id=first.id, extra_body=named)


def test_the_end_of_an_answer_is_written_once(hermes_path: Path) -> None:
    codec = TextCodec(hermes_path)
    message = {"role": "user", "content": "And?"}
    rest = codec.encode("<|user|>And?<|end|><|assistant|>", adds_special=False).tolist()
    ends = (1, END_TOKEN_ID)
    assert codec.encode_following([message], (), END_TOKEN_ID, ends).tolist() == rest
    assert codec.encode_following([message], (), 65, ends).tolist() == [END_TOKEN_ID, *rest]
    assert codec.encode_following([message], (), 65, ()).tolist() == [END_TOKEN_ID, *rest]
