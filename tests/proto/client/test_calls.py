"""Calls beside turns, and what an answer holds, of both Python clients against a whole service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from ringserve.client import AsyncClient, Sampling
from ringserve.client.errors import InvalidRequest, NotFound
from tests.proto.client.both import client
from tests.workers.models import Oracle, random_tokens

__all__ = ["client"]
FIVE = Sampling(max_tokens=5, temperature=0.0)


async def test_the_other_calls_answer_in_types_of_the_client(client: AsyncClient) -> None:
    await client.ask(random_tokens(20), sampling=FIVE, conversation_id="c")
    fork = await client.fork_conversation("c", "c-2", 10)
    view = await client.conversation("c")
    listed = client.list_conversations("c", page_size=1)
    results: list[Any] = [
        model := await client.model_info(),
        server := await client.server_info(),
        aborted := await client.abort("nobody"),
        *(fork, view, *[each async for each in _items(listed)]),
    ]
    assert model.vocab_size == 300
    assert {ring.role for ring in server.rings} == {"prefill", "decode"}
    assert (aborted.aborted, aborted.unknown) == ((), ("nobody",))
    assert (fork.conversation_id, fork.num_tokens, view.num_tokens) == ("c-2", 10, 25)
    assert sum(shard.num_tokens for shard in view.placements[0].ranks) == view.placements[0].num_tokens
    assert [each.conversation_id for each in results[-2:]] == ["c", "c-2"]
    for each in results:
        hash(each)  # frozen all through, and no message of protobuf inside


async def _items(source: Any) -> AsyncIterator[Any]:
    """Yield the items of an iterator of either client."""
    if isinstance(source, AsyncIterator):
        async for item in source:
            yield item
        return
    for item in await asyncio.to_thread(list, await source):
        yield item


async def test_tokens_of_a_prompt_are_counted_as_a_turn_counts_them(client: AsyncClient) -> None:
    prompts: list[Any] = ["Once upon a time", [1, 2, 3], [{"role": "user", "content": "Hello"}]]
    for prompt in prompts:
        counted = await client.count_tokens(prompt)
        assert counted == (await client.ask(prompt, sampling=FIVE, no_cache=True)).usage.prompt_tokens
    with pytest.raises(InvalidRequest, match="the prompt has 0 tokens"):
        await client.count_tokens("")


async def test_a_request_for_another_model_is_refused_with_the_name_of_the_served_one(client: AsyncClient) -> None:
    name = (await client.model_info()).model_name
    assert (await client.ask("x", model=name, sampling=FIVE)).finish_reason == "length"
    for ask in (client.ask, client.count_tokens):
        with pytest.raises(NotFound, match=f"model: there is no model 'gpt-9'; served is '{name}'"):
            await ask("x", model="gpt-9")


async def test_all_answers_of_a_request_are_the_choices_of_its_answer(client: AsyncClient, oracle: Oracle) -> None:
    prompt = random_tokens(30)
    one = await client.ask(prompt, sampling=Sampling(max_tokens=5, logprobs=2, prompt_logprobs=0))
    assert one.choices == (one,)
    assert [each.token_id for each in one.logprobs] == list(one.token_ids)
    assert [len(each.top_token_ids) for each in one.logprobs] == [2] * 5
    assert [each.token_id for each in one.prompt_logprobs] == prompt[1:]
    sampling = Sampling(max_tokens=5, n=3, seed=1, temperature=1.0)
    pieces: dict[int, tuple[int, ...]] = {}
    async with client.stream(prompt, sampling=sampling) as stream:
        async for piece in stream:
            pieces[piece.index] = pieces.get(piece.index, ()) + piece.token_ids
        answer = await stream.answer()
    assert [each.index for each in answer.choices] == [0, 1, 2]
    assert [each.token_ids for each in answer.choices] == [pieces[index] for index in range(3)]
    assert len({each.seed for each in answer.choices}) == 3
    assert all(each.usage.completion_tokens == 5 for each in answer.choices)
