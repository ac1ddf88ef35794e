"""Sampling and ends of answers, as OpenAI's client asks for them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from ringserve.services.gateway.text import TextCodec
from tests.services.local_gateway import MODEL, LocalGateway
from tests.workers.models import Oracle, random_tokens

PROMPT = random_tokens(40)
ASKED: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6}


def extra(answer: Any) -> dict[str, Any]:
    fields: dict[str, Any] = answer.model_extra["ringserve"]
    return fields


@pytest.mark.parametrize(
    "fields",
    [{"top_p": 1e-9}, {"extra_body": {"top_k": 1}}, {"extra_body": {"min_p": 1.0}}],
    ids=["top_p", "top_k", "min_p"],
)
async def test_a_filter_that_leaves_one_token_is_greedy(
    gateway: LocalGateway, oracle: Oracle, fields: dict[str, Any]
) -> None:
    async with gateway.openai() as client:
        answer = await client.completions.create(**ASKED, temperature=1.5, **fields)
    assert extra(answer)["token_ids"] == oracle.greedy(PROMPT, 8)


async def test_penalties_and_biases_change_what_is_drawn(gateway: LocalGateway, oracle: Oracle) -> None:
    first = oracle.greedy(PROMPT, 1)[0]
    async with gateway.openai() as client:
        biased = await client.completions.create(**ASKED, temperature=0, logit_bias={"7": 100})
        banned = await client.completions.create(**ASKED, temperature=0, logit_bias={str(first): -100})
        penalised = await client.completions.create(
            **ASKED | {"max_tokens": 40}, temperature=0, logit_bias={"7": 20}, presence_penalty=2, frequency_penalty=2
        )
    assert extra(biased)["token_ids"] == [7] * 8
    assert extra(banned)["token_ids"][0] != first
    assert extra(penalised)["token_ids"].count(7) < 30  # each costs the next one 2, of a lead of about 20


async def test_an_answer_has_allowed_tokens_and_no_bad_words(gateway: LocalGateway, oracle: Oracle) -> None:
    first, second = oracle.greedy(PROMPT, 2)
    async with gateway.openai() as client:
        held = await client.completions.create(**ASKED, temperature=1, extra_body={"allowed_token_ids": [97, 98]})
        free = await client.completions.create(**ASKED, temperature=0, extra_body={"bad_words": [chr(second) + "~"]})
        bad = chr(first) + chr(second)
        banned = await client.completions.create(**ASKED, temperature=0, extra_body={"bad_words": [bad]})
    assert set(extra(held)["token_ids"]) <= {97, 98}
    assert extra(free)["token_ids"][:2] == [first, second]
    assert (extra(banned)["token_ids"][0], bad in banned.choices[0].text) == (first, False)


async def test_a_truncated_prompt_is_answered_by_its_end(gateway: LocalGateway, oracle: Oracle) -> None:
    asked = ASKED | {"temperature": 0, "prompt": PROMPT, "extra_body": {"truncate_prompt_tokens": 9}}
    async with gateway.openai() as client:
        answer = await client.completions.create(**asked)
        scored = await client.completions.create(**asked, echo=True, logprobs=0)
    assert (answer.usage.prompt_tokens, extra(answer)["token_ids"]) == (9, oracle.greedy(PROMPT[-9:], 8))
    assert len(scored.choices[0].logprobs.tokens) == 9 + 8


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_stop_string_ends_the_answer_before_it(gateway: LocalGateway, stream: bool) -> None:
    """The letter `a` is drawn for ever; the string that ends it is never sent."""
    asked = ASKED | {"temperature": 0, "logit_bias": {str(ord("a")): 100}, "max_tokens": 20}
    async with gateway.openai() as client:
        for stop in ("aaa", ["zzz", "aaa"]):
            if stream:
                events = [event async for event in await client.completions.create(**asked, stop=stop, stream=True)]
                text, reason = "".join(event.choices[0].text for event in events), events[-1].choices[0].finish_reason
            else:
                choice = (await client.completions.create(**asked, stop=stop)).choices[0]
                text, reason = choice.text, choice.finish_reason
            assert (text, reason) == ("", "stop")
        shown = await client.completions.create(
            **asked, stop="aaa", extra_body={"include_stop_str_in_output": True, "min_tokens": 5}
        )
        assert shown.choices[0].text.endswith("aaa")
        assert extra(shown)["token_ids"] == [ord("a")] * len(shown.choices[0].text)
        assert len(extra(shown)["token_ids"]) > 5


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_several_answers_differ_and_are_counted_together(gateway: LocalGateway, stream: bool) -> None:
    asked = CHAT | {"n": 3, "seed": 5}
    async with gateway.openai() as client:
        whole = await client.chat.completions.create(**asked)
        assert [choice.index for choice in whole.choices] == [0, 1, 2]
        assert len({choice.message.content for choice in whole.choices}) == 3
        assert whole.usage is not None
        assert (whole.usage.completion_tokens, whole.usage.total_tokens) == (18, 18 + whole.usage.prompt_tokens)
        answers = extra(whole)["answers"]
        assert [len(answer["token_ids"]) for answer in answers] == [6, 6, 6]
        alone = await client.chat.completions.create(**CHAT, seed=answers[2]["seed"])
        assert extra(alone)["token_ids"] == answers[2]["token_ids"]
        if stream:
            options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
            events = [event async for event in await client.chat.completions.create(**asked, **options)]
            texts, ends = {0: "", 1: "", 2: ""}, []
            for event in events[:-1]:
                choice = event.choices[0]
                texts[choice.index] += choice.delta.content or ""
                ends += [choice.finish_reason] if choice.finish_reason else []
            assert list(texts.values()) == [choice.message.content for choice in whole.choices]
            assert ends == ["length"] * 3
            assert events[-1].usage == whole.usage


def log_softmax(oracle: Oracle, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """[len(answer), vocabulary] before each token of the answer."""
    logits = oracle.logits([*prompt, *answer])[len(prompt) - 1 : -1]
    return torch.log_softmax(logits.double(), dim=-1)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_log_probabilities_of_a_chat_are_the_models(
    gateway: LocalGateway, codec: TextCodec, oracle: Oracle, stream: bool
) -> None:
    asked = CHAT | {"logprobs": True, "top_logprobs": 3, "temperature": 0}
    async with gateway.openai() as client:
        if stream:
            events = [event async for event in await client.chat.completions.create(**asked, stream=True)]
            found = [
                token
                for event in events
                if event.choices[0].logprobs is not None
                for token in event.choices[0].logprobs.content or []
            ]
            answer = extra(events[-1])["token_ids"]
        else:
            whole = await client.chat.completions.create(**asked)
            assert whole.choices[0].logprobs is not None
            found, answer = whole.choices[0].logprobs.content or [], extra(whole)["token_ids"]
    expected = log_softmax(oracle, codec.encode_chat([("user", "Hello")]).tolist(), answer)
    assert [token.token for token in found] == [codec.decode([token_id]) for token_id in answer]
    for place, token in enumerate(found):
        assert token.logprob == pytest.approx(float(expected[place, answer[place]]), abs=1e-4)
        top = torch.topk(expected[place], 3).values.tolist()
        assert [each.logprob for each in token.top_logprobs] == pytest.approx(top, abs=1e-4)
        assert token.bytes is not None
        assert len(token.top_logprobs) == 3
    joined = b"".join(bytes(token.bytes or []) for token in found)
    assert joined.decode(errors="replace") == codec.decode(answer)


async def test_log_probabilities_of_a_completion_have_its_shape(gateway: LocalGateway, oracle: Oracle) -> None:
    async with gateway.openai() as client:
        answer = await client.completions.create(**ASKED, temperature=0, logprobs=2)
        plain = await client.completions.create(**ASKED, temperature=0)
        none = await client.completions.create(**ASKED, temperature=0, logprobs=0)
    found = answer.choices[0].logprobs
    assert found is not None
    expected = log_softmax(oracle, PROMPT, extra(answer)["token_ids"])
    assert found.token_logprobs == pytest.approx(expected.max(dim=-1).values.tolist(), abs=1e-4)
    assert found.tokens is not None
    assert found.top_logprobs is not None
    assert all(2 <= len(top) <= 3 and all(math.isfinite(value) for value in top.values()) for top in found.top_logprobs)
    assert all(name in top for name, top in zip(found.tokens, found.top_logprobs, strict=True))
    assert found.text_offset is not None
    assert found.text_offset[0] == 0
    assert len(found.tokens) == len(found.text_offset) == 8
    assert plain.choices[0].logprobs is None
    assert none.choices[0].logprobs is not None


async def test_parts_of_a_character_have_their_bytes_and_one_place_in_the_text(hermes_path: Path) -> None:
    text = "😀 hi"
    asked: dict[str, Any] = {"temperature": 0, "extra_body": {"structured_outputs": {"choice": [text]}}}
    async with LocalGateway(hermes_path, TextCodec(hermes_path)) as gateway, gateway.openai() as client:
        chat = await client.chat.completions.create(
            model=MODEL, messages=CHAT["messages"], max_tokens=20, logprobs=True, top_logprobs=1, **asked
        )
        whole = await client.completions.create(model=MODEL, prompt="Write:", max_tokens=20, logprobs=1, **asked)
        events = [
            event
            async for event in await client.completions.create(
                model=MODEL, prompt="Write:", max_tokens=20, logprobs=1, stream=True, **asked
            )
        ]
    assert chat.choices[0].logprobs is not None
    tokens = chat.choices[0].logprobs.content or []
    assert b"".join(bytes(token.bytes or []) for token in tokens) == text.encode() + b"<|eos|>"
    assert all(token.top_logprobs[0].bytes for token in tokens)
    found = whole.choices[0].logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.text_offset is not None
    assert (found.tokens[:4], found.text_offset[:6]) == (
        ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "bytes:\\x80"],
        [0, 0, 0, 0, 1, 2],
    )
    streamed = [each.choices[0].logprobs for each in events if each.choices and each.choices[0].logprobs]
    assert [place for each in streamed for place in each.text_offset or ()] == found.text_offset


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "top_p": ({"top_p": 0}, "top_p: 0.0 is out of range"),
    "n": ({"n": 17}, "n: 17 is out of range"),
    "n in a conversation": ({"n": 2, "extra_body": {"conversation_id": "c"}}, "n: 2 answers cannot all continue"),
    "empty stop": ({"stop": ""}, "stop[0]: 0 characters are out of range"),
    "bias beyond": ({"logit_bias": {"300": 1}}, "logit_bias: token 300 is outside the vocabulary"),
    "logprobs": ({"logprobs": 21}, "logprobs: 21 is out of range"),
    "penalty": ({"presence_penalty": 3}, "presence_penalty: 3.0 is out of range"),
}


@pytest.mark.parametrize(("fields", "said"), BAD.values(), ids=BAD.keys())
async def test_a_bad_value_is_refused_by_name(gateway: LocalGateway, fields: dict[str, Any], said: str) -> None:
    async with gateway.openai() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(**ASKED, **fields)
    assert said in str(caught.value)
