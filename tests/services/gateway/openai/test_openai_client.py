"""OpenAI's own client against the HTTP endpoint: each side understands the other."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from ringserve.cp_core.errors import CapacityExceeded, NotBegun, RingserveError
from ringserve.orchestration.protocol.turns import BegunTurn, TurnRequest
from ringserve.services.gateway.text import TextCodec
from tests.orchestration.service import Service
from tests.services.local_gateway import MODEL, LocalGateway
from tests.waiting import eventually
from tests.workers.models import Oracle, random_tokens

HELLO: list[ChatCompletionMessageParam] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
]
AS_ENCODED = [("system", "Be brief."), ("user", "Hello")]


def extra(answer: Any) -> dict[str, Any]:
    """Return the field that OpenAI's types do not know."""
    fields: dict[str, Any] = answer.model_extra["ringserve"]
    return fields


async def test_a_chat_is_answered_exactly_and_accounted_for(
    gateway: LocalGateway, codec: TextCodec, oracle: Oracle
) -> None:
    async with gateway.openai() as client:
        answer = await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=7, temperature=0)
    prompt = codec.encode_chat(AS_ENCODED).tolist()
    expected = oracle.greedy(prompt, 7)
    assert extra(answer)["token_ids"] == expected
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", codec.decode(expected))
    assert (choice.finish_reason, answer.model, answer.object) == ("length", MODEL, "chat.completion")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 7)
    assert answer.usage.total_tokens == len(prompt) + 7
    plan = extra(answer)["plan"]
    assert (plan["new_tokens"], plan["prefill_ranks"], plan["decode_ranks"]) == (len(prompt), 2, 1)
    assert plan["reason"]


async def test_a_chat_of_the_plain_client_and_a_document_asked_about_again_get_cached_tokens(
    codec: TextCodec, oracle: Oracle, model_path: Path
) -> None:
    """The client names no conversation, and sends the whole history each time."""
    service = Service(model_path, 2, 3, retain_prompts=True)
    question: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What does this say? " + "no " * 40}]
    async with LocalGateway(model_path, codec, service=service) as gateway, gateway.openai() as client:

        async def ask(
            messages: list[ChatCompletionMessageParam], body: dict[str, Any] | None = None
        ) -> tuple[str, int, int]:
            answer = await client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=7, temperature=0, extra_body=body
            )
            usage = answer.usage
            assert usage is not None
            assert usage.prompt_tokens_details is not None
            prompt = codec.encode_chat([(each["role"], str(each["content"])) for each in messages]).tolist()
            assert extra(answer)["token_ids"] == oracle.greedy(prompt, 7)
            return (
                answer.choices[0].message.content or "",
                usage.prompt_tokens,
                usage.prompt_tokens_details.cached_tokens or 0,
            )

        said, length, cached = await ask(question)
        assert cached == 0
        _, _, again = await ask(question)
        assert again == length - 1, "all but the last token, whose logits give the first new one"
        _, _, without = await ask(question, {"no_cache": True})
        assert without == 0
        follow_up = [*question, {"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]
        _, _, in_chat = await ask(follow_up)  # type: ignore[arg-type]
        assert in_chat >= length


async def test_a_streamed_chat_is_the_same_answer_in_pieces(gateway: LocalGateway) -> None:
    async with gateway.openai() as client:
        whole = await client.chat.completions.create(
            model=MODEL, messages=HELLO, max_completion_tokens=9, temperature=0
        )
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            max_completion_tokens=9,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        events = [event async for event in stream]
    *pieces, last, usage = events
    assert {event.id for event in events} == {events[0].id}
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(event.choices[0].delta.content or "" for event in pieces) == whole.choices[0].message.content
    assert [event.choices[0].finish_reason for event in (*pieces, last)] == [None] * len(pieces) + ["length"]
    assert extra(pieces[0])["plan"]["algorithm"] == extra(whole)["plan"]["algorithm"]
    assert extra(last)["token_ids"] == extra(whole)["token_ids"]
    assert usage.choices == []
    assert usage.usage == whole.usage
    assert all(event.usage is None for event in events[:-1])


async def test_a_stream_carries_usage_only_where_it_is_asked_for(gateway: LocalGateway) -> None:
    async with gateway.openai() as client:
        stream = await client.completions.create(model=MODEL, prompt="Once", max_tokens=3, stream=True)
        events = [event async for event in stream]
    assert all(event.choices for event in events)
    assert all("usage" not in event.model_fields_set for event in events)


@pytest.mark.parametrize("form", ["text", "list of one text", "token ids", "list of one list"])
async def test_a_completion_takes_a_prompt_in_every_form(gateway: LocalGateway, oracle: Oracle, form: str) -> None:
    ids = list(b"Once upon a time")
    prompts: dict[str, Any] = {
        "text": "Once upon a time",
        "list of one text": ["Once upon a time"],
        "token ids": ids,
        "list of one list": [ids],
    }
    async with gateway.openai() as client:
        answer = await client.completions.create(model=MODEL, prompt=prompts[form], max_tokens=5, temperature=0)
    assert extra(answer)["token_ids"] == oracle.greedy(ids, 5)
    assert answer.object == "text_completion"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids)


async def test_a_streamed_completion_is_the_whole_one_in_pieces(gateway: LocalGateway) -> None:
    async with gateway.openai() as client:
        whole = await client.completions.create(model=MODEL, prompt="Once", max_tokens=12, temperature=0)
        stream = await client.completions.create(model=MODEL, prompt="Once", max_tokens=12, temperature=0, stream=True)
        events = [event async for event in stream]
    assert "".join(event.choices[0].text for event in events) == whole.choices[0].text
    assert events[-1].choices[0].finish_reason == "length"


async def test_the_same_seed_gives_the_same_answer_and_no_temperature_means_openais(gateway: LocalGateway) -> None:
    async with gateway.openai() as client:
        first, second, other = [
            await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=12, seed=seed)
            for seed in (5, 5, 6)
        ]
    assert extra(first)["token_ids"] == extra(second)["token_ids"] != extra(other)["token_ids"]
    assert (extra(first)["seed"], extra(other)["seed"]) == (5, 6)


async def test_a_conversation_goes_on_by_its_id_and_computes_only_what_is_new(
    gateway: LocalGateway, codec: TextCodec, oracle: Oracle
) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Tell me of rings. " * 20}]
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 6, "temperature": 0}
    more: dict[str, Any] = {"extra_body": {"conversation_id": "rings"}}
    async with gateway.openai() as client:
        first = await client.chat.completions.create(messages=messages, **asked, **more)
        content = first.choices[0].message.content
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "And?"}]
        second = await client.chat.completions.create(messages=messages, **asked, **more)
    assert extra(first)["conversation_id"] == extra(second)["conversation_id"] == "rings"
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens is not None
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens
    assert extra(second)["plan"]["cached_tokens"] == second.usage.prompt_tokens_details.cached_tokens
    roles = [("user", "Tell me of rings. " * 20), ("assistant", content or ""), ("user", "And?")]
    assert extra(second)["token_ids"] == oracle.greedy(codec.encode_chat(roles).tolist(), 6)


async def test_a_conversation_can_be_looked_at_and_forgotten(gateway: LocalGateway) -> None:
    free = gateway.service.free_blocks()
    async with gateway.openai() as client:
        name = "of rings/1 ü"
        await client.completions.create(
            model=MODEL, prompt="x" * 40, max_tokens=4, extra_body={"conversation_id": name}
        )
        seen = await client.conversations.retrieve(name)
        known = extra(seen)
        assert (seen.id, seen.object) == (name, "conversation")
        assert (known["num_turns"], known["num_tokens"], known["running_request_id"]) == (1, 44, "")
        assert {place["role"] for place in known["placements"]} == {"prefill", "decode"}
        gone = await client.conversations.delete(name)
        assert (gone.id, gone.deleted) == (name, True)
        for call in (client.conversations.retrieve(name), client.conversations.delete(name)):
            with pytest.raises(openai.NotFoundError, match="there is no conversation 'of rings/1 ü'"):
                await call
    assert gateway.service.free_blocks() == free


async def test_a_completion_may_send_only_what_is_new(gateway: LocalGateway, oracle: Oracle) -> None:
    ids = random_tokens(40)
    async with gateway.openai() as client:
        first = await client.completions.create(
            model=MODEL, prompt=ids, max_tokens=4, temperature=0, extra_body={"conversation_id": "c"}
        )
        second = await client.completions.create(
            model=MODEL,
            prompt=[1, 2, 3],
            max_tokens=4,
            temperature=0,
            extra_body={"conversation_id": "c", "prompt_mode": "append"},
        )
    history = ids + extra(first)["token_ids"] + [1, 2, 3]
    assert extra(second)["token_ids"] == oracle.greedy(history, 4)
    assert extra(second)["plan"]["prompt_mode"] == "append"


async def test_a_stop_token_ends_the_answer_as_stop(gateway: LocalGateway, oracle: Oracle) -> None:
    ids = random_tokens(30)
    expected = oracle.greedy(ids, 8)
    stop = expected[3]
    async with gateway.openai() as client:
        answer = await client.completions.create(
            model=MODEL, prompt=ids, max_tokens=8, temperature=0, extra_body={"stop_token_ids": [stop]}
        )
    assert extra(answer)["token_ids"] == expected[: expected.index(stop) + 1]
    assert answer.choices[0].finish_reason == "stop"


async def test_the_served_model_is_listed_and_no_other_is_there(gateway: LocalGateway) -> None:
    async with gateway.openai() as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).owned_by == "ringserve"
        with pytest.raises(openai.NotFoundError, match=f"there is no model 'gpt'; served is '{MODEL}'"):
            await client.models.retrieve("gpt")
        with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'"):
            await client.completions.create(model="gpt", prompt="x")


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "an unserved field": ({"extra_body": {"images": ["x"]}}, "images", "at most 0 are allowed"),
    "temperature": ({"temperature": -1}, "temperature", "temperature: -1.0 is out of range; allowed are 0 to 100"),
    "max_tokens": ({"max_tokens": 0}, "max_tokens", "max_tokens: 0 is out of range"),
    "max_tokens beyond the model": ({"max_tokens": 9000}, "max_tokens", "allowed are 1 to 8192"),
    "a tool": (
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        "tools",
        "the chat template of this model takes no tools",
    ),
    "role": ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "'wizard' is not allowed"),
    "no message": ({"messages": []}, "messages", "messages: none given"),
    "conversation": ({"extra_body": {"conversation_id": "x" * 300}}, "conversation_id", "300 characters are too many"),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("fields", "param", "said"), BAD.values(), ids=BAD.keys())
async def test_a_bad_field_is_refused_by_name(
    gateway: LocalGateway, fields: dict[str, Any], param: str, said: str, stream: bool
) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "stream": stream} | fields
    async with gateway.openai() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**asked)
    assert caught.value.status_code == 400
    assert (caught.value.type, caught.value.param) == ("invalid_request_error", param)
    assert said in str(caught.value)


async def test_fields_that_ask_for_what_is_done_anyway_are_fine(gateway: LocalGateway) -> None:
    async with gateway.openai() as client:
        await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "x", "name": "ada"}, {"role": "assistant", "content": "y"}],
            max_tokens=1,
            n=1,
            top_p=1.0,
            presence_penalty=0,
            frequency_penalty=0.0,
            logprobs=False,
            stop=None,
            user="ada",
            response_format={"type": "text"},
        )


class Refusing:
    """A router's one verb, replaced by what it may answer."""

    def __init__(self, error: RingserveError) -> None:
        self._error = error

    async def __call__(self, request: TurnRequest) -> BegunTurn:
        raise self._error


@pytest.mark.parametrize(
    ("error", "status", "kind", "retry"),
    [
        (CapacityExceeded("no room: 0 blocks free of 64"), 429, "rate_limit_error", "1"),
        (NotBegun("the ring is being rebuilt"), 503, "service_unavailable_error", "1"),
        (RingserveError("odd"), 500, "server_error", None),
    ],
)
async def test_what_the_router_refuses_has_its_status(
    gateway: LocalGateway,
    monkeypatch: pytest.MonkeyPatch,
    error: RingserveError,
    status: int,
    kind: str,
    retry: str | None,
) -> None:
    monkeypatch.setattr(gateway.service.router, "begin_turn", Refusing(error))
    async with gateway.openai() as client:
        with pytest.raises(openai.APIStatusError) as caught:
            await client.completions.create(model=MODEL, prompt="x", stream=True)
    assert caught.value.status_code == status
    assert caught.value.type == kind
    assert caught.value.response.headers.get("retry-after") == retry
    assert (str(error) in str(caught.value)) == (status != 500)


async def test_a_conversation_that_is_not_there_is_not_found(gateway: LocalGateway) -> None:
    async with gateway.openai() as client:
        with pytest.raises(openai.NotFoundError, match="conversation"):
            await client.completions.create(
                model=MODEL, prompt="x", extra_body={"conversation_id": "nobody", "prompt_mode": "append"}
            )
        body = {"conversation_id": "nobody", "expected_tokens": 9}
        with pytest.raises(openai.APIStatusError, match="was to remember 9 tokens, and it has 0: it is not kn") as lost:
            await client.completions.create(model=MODEL, prompt="x", extra_body=body)
        error = lost.value
        assert (error.status_code, error.code, error.param) == (412, "conversation_lost", "expected_tokens")


async def test_a_busy_conversation_is_a_conflict_and_an_abort_ends_its_stream_as_an_error(
    gateway: LocalGateway,
) -> None:
    more: dict[str, Any] = {"extra_body": {"conversation_id": "busy", "request_id": "first"}}
    async with gateway.openai() as client:
        stream = await client.completions.create(model=MODEL, prompt="x", max_tokens=4000, stream=True, **more)
        async for event in stream:
            if event.choices[0].text:
                break
        with pytest.raises(openai.ConflictError, match="busy with request 'first'"):
            await client.completions.create(model=MODEL, prompt="x", extra_body={"conversation_id": "busy"})
        assert await gateway.service.router.abort_requests(["first"]) == (["first"], [])
        with pytest.raises(openai.APIError, match="the request was aborted"):
            async for _ in stream:
                pass


async def test_a_gateway_that_stops_says_so_to_whoever_still_reads(gateway: LocalGateway) -> None:
    async with gateway.openai() as client:
        stream = await client.completions.create(model=MODEL, prompt="x", max_tokens=8000, stream=True)
        await anext(stream)
        await gateway.servicer.end_turns(0.0, asyncio.Event())
        with pytest.raises(openai.APIError, match="the gateway is stopping; retry at another"):
            async for _ in stream:
                pass


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_hanging_up_ends_the_turn_and_frees_its_memory(gateway: LocalGateway, stream: bool) -> None:
    free = gateway.service.free_blocks()
    async with gateway.openai() as client:
        if stream:
            answer = await client.completions.create(model=MODEL, prompt="x", max_tokens=8000, stream=True)
            async for event in answer:
                if event.choices[0].text:
                    break
            await answer.close()
        else:
            impatient = client.with_options(timeout=0.5)
            with pytest.raises(openai.APITimeoutError):
                await impatient.completions.create(model=MODEL, prompt="x", max_tokens=8000)
    await gateway.wait_idle()
    # The rings free their blocks when the router has told them what to keep.
    await eventually(lambda: gateway.service.free_blocks() == free)
