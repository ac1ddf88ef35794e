"""Several prompts in one request for completions, and prompts that come back before their answers."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
import torch
from openai.types import Completion

from ringserve.services.gateway.openai import app
from ringserve.services.gateway.text import TextCodec
from tests.services.gateway.openai.test_openai_client import extra
from tests.services.local_gateway import MODEL, LocalGateway
from tests.waiting import WAIT_SECONDS
from tests.workers.models import Oracle

TEXTS = ["Once", "A ring of ranks", "Twice upon a time"]
ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": 6, "temperature": 0}


def texts_of(events: list[Completion]) -> dict[int, str]:
    """Return the text of each choice of a stream."""
    found: dict[int, str] = {}
    for choice in (choice for event in events for choice in event.choices):
        found[choice.index] = found.get(choice.index, "") + choice.text
    return found


@pytest.mark.parametrize("form", ["texts", "token ids"])
async def test_each_of_several_prompts_is_answered_as_it_is_alone(
    gateway: LocalGateway, codec: TextCodec, oracle: Oracle, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "AT_ONCE", 2)
    ids = [codec.encode(text).tolist() for text in TEXTS]
    expected = [oracle.greedy(each, 6) for each in ids]
    given: Any = TEXTS if form == "texts" else ids
    async with gateway.openai() as client:
        whole = await client.completions.create(prompt=given, **ASKED)
        stream = await client.completions.create(
            prompt=given, stream=True, stream_options={"include_usage": True}, **ASKED
        )
        events = [event async for event in stream]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert [choice.text for choice in whole.choices] == [codec.decode(each) for each in expected]
    assert [each["token_ids"] for each in extra(whole)["prompts"]] == expected
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == sum(map(len, ids))
    assert whole.usage.completion_tokens == sum(map(len, expected))
    assert texts_of(events) == {choice.index: choice.text for choice in whole.choices}
    assert len({event.id for event in events}) == 1
    assert [event.usage for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1].usage is not None
    assert events[-1].usage.total_tokens == whole.usage.total_tokens


async def test_each_prompt_has_its_own_answers_in_its_order(gateway: LocalGateway) -> None:
    asked = ASKED | {"temperature": 1.0, "seed": 5, "n": 2}
    async with gateway.openai() as client:
        alone = [await client.completions.create(prompt=text, **asked) for text in TEXTS]
        together = await client.completions.create(prompt=TEXTS, extra_body={"request_id": "mine"}, **asked)
    assert [choice.text for choice in together.choices] == [choice.text for each in alone for choice in each.choices]
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3, 4, 5]
    assert [each["request_id"] for each in extra(together)["prompts"]] == ["mine", "mine#1", "mine#2"]


async def test_a_prompt_that_is_refused_ends_the_others(gateway: LocalGateway) -> None:
    async with gateway.openai() as client:
        with pytest.raises(openai.BadRequestError, match="prompt: the prompt has 0 tokens"):
            await client.completions.create(prompt=["x", ""], **ASKED | {"max_tokens": 8000})
    await gateway.wait_idle()


async def test_hanging_up_ends_all_prompts(gateway: LocalGateway) -> None:
    async with gateway.openai() as client:
        stream = await client.completions.create(prompt=TEXTS, stream=True, **ASKED | {"max_tokens": 8000})
        seen: set[int] = set()
        async with asyncio.timeout(WAIT_SECONDS):
            async for event in stream:
                seen |= {choice.index for choice in event.choices if choice.text}
                if len(seen) == len(TEXTS):
                    break
        await stream.close()
    await gateway.wait_idle()


@pytest.mark.parametrize("form", ["text", "token ids"])
async def test_an_echo_puts_the_prompt_before_each_answer(
    gateway: LocalGateway, codec: TextCodec, oracle: Oracle, form: str
) -> None:
    ids = codec.encode(TEXTS[1]).tolist()
    answer = codec.decode(oracle.greedy(ids, 6))
    prompt: Any = TEXTS[1] if form == "text" else ids
    async with gateway.openai() as client:
        whole = await client.completions.create(prompt=prompt, echo=True, **ASKED)
        stream = await client.completions.create(prompt=prompt, echo=True, stream=True, **ASKED | {"n": 2})
        events = [event async for event in stream]
    assert whole.choices[0].text == TEXTS[1] + answer
    assert whole.choices[0].logprobs is None
    assert texts_of(events) == {0: TEXTS[1] + answer, 1: TEXTS[1] + answer}


async def test_a_prompt_is_scored_without_an_answer(gateway: LocalGateway, codec: TextCodec) -> None:
    """Clients that evaluate ask for no token at all."""
    num_tokens = len(codec.encode(TEXTS[1]))
    asked = ASKED | {"max_tokens": 0, "prompt": TEXTS[1], "echo": True}
    async with gateway.openai() as client:
        whole = await client.completions.create(logprobs=1, **asked)
        one = await client.completions.create(logprobs=1, **asked | {"max_tokens": 1})
        events = [event async for event in await client.completions.create(stream=True, **asked)]
        with pytest.raises(openai.BadRequestError, match="max_tokens: 0 is out of range"):
            await client.completions.create(**ASKED | {"max_tokens": 0, "prompt": "x"})
    (choice,) = whole.choices
    assert (choice.text, choice.finish_reason) == (TEXTS[1], "length")
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (num_tokens, 0)
    assert choice.logprobs is not None
    assert one.choices[0].logprobs is not None
    scores = choice.logprobs.token_logprobs or []
    assert len(scores) == num_tokens
    assert scores[1:] == pytest.approx((one.choices[0].logprobs.token_logprobs or [])[1:num_tokens], abs=1e-4)
    assert texts_of(events) == {0: TEXTS[1]}


async def test_the_log_probabilities_of_an_echo_begin_with_the_prompts(
    gateway: LocalGateway, codec: TextCodec, oracle: Oracle
) -> None:
    """Evaluations read the score of a given text so, with one token of an answer."""
    ids = codec.encode(TEXTS[1]).tolist()
    async with gateway.openai() as client:
        whole = await client.completions.create(prompt=[TEXTS[1], ids], echo=True, logprobs=1, **ASKED)
    for choice, part in zip(whole.choices, extra(whole)["prompts"], strict=True):
        found, tokens = choice.logprobs, [*ids, *part["token_ids"]]
        assert found is not None
        names = [codec.decode([token]) for token in tokens]
        assert found.tokens is not None
        assert len(found.tokens) == len(names)
        assert all(
            name in (found, "\N{REPLACEMENT CHARACTER}") for name, found in zip(names, found.tokens, strict=True)
        )
        scores = torch.log_softmax(oracle.logits(tokens)[:-1].double(), dim=-1)
        expected = scores[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])].tolist()
        assert found.token_logprobs is not None
        assert found.token_logprobs[0] is None
        assert found.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)
        assert found.top_logprobs is not None
        assert found.top_logprobs[0] is None
        assert len(found.top_logprobs) == len(tokens)
        assert found.text_offset is not None
        assert len(found.text_offset) == len(tokens)
        for offset, token in zip(found.text_offset[: len(ids)], found.tokens, strict=False):
            assert choice.text[offset:].startswith(token)
