"""Several answers to one prompt are turns with seeds of their own, whose streams become one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringserve.cp_core.errors import Unavailable
from ringserve.orchestration.protocol.plans import PromptMode
from ringserve.orchestration.protocol.turns import TurnRequest
from ringserve.services.gateway.turn_stream import Responses, derive_seed, merge_answers, split_answers
from ringserve.v1 import inference_pb2
from ringserve.workers.sampling.parameters import SamplingParameters

Response = inference_pb2.GenerateResponse


def request() -> TurnRequest:
    return TurnRequest(
        request_id="r",
        conversation_id="",
        prompt_mode=PromptMode.AUTO,
        token_ids=np.arange(3),
        sampling=SamplingParameters(seed=5, temperature=1.0, logprobs=1, prompt_logprobs=2),
        deadline_seconds=5.0,
    )


@given(st.integers(0, 2**64 - 1))
def test_every_answer_has_a_seed_of_its_own_and_the_first_the_requests(seed: int) -> None:
    seeds = [derive_seed(seed, index) for index in range(16)]
    assert seeds[0] == seed
    assert len(set(seeds)) == 16
    assert all(0 <= each < 2**64 for each in seeds)
    assert seeds == [derive_seed(seed, index) for index in range(16)]


def test_the_first_turn_is_the_request_and_the_others_ask_for_answers_only() -> None:
    first, second, third = split_answers(request(), 3)
    assert first.sampling == request().sampling
    assert [turn.request_id for turn in (first, second, third)] == ["r", "r/1", "r/2"]
    assert [turn.follows for turn in (first, second, third)] == ["", "r", "r"], "they share the KV of the prompt"
    assert second.sampling.seed == derive_seed(5, 1) != third.sampling.seed
    assert (second.sampling.logprobs, second.sampling.prompt_logprobs) == (1, None)


class Stream:
    """A turn's responses: its start, chunks when it may go on, its completion."""

    def __init__(self, index: int, failure: Exception | None = None) -> None:
        self.index = index
        self.may_go_on = asyncio.Event()
        self.is_closed = False
        self._failure = failure

    async def responses(self) -> Responses:
        try:
            yield Response(start=inference_pb2.GenerateStart(request_id=f"r/{self.index}"))
            await self.may_go_on.wait()
            if self._failure is not None:
                raise self._failure
            yield Response(chunk=inference_pb2.GenerateStreamChunk(index=self.index))
            yield Response(complete=inference_pb2.GenerateComplete(index=self.index))
        finally:
            self.is_closed = True


async def test_one_start_then_chunks_and_completions_as_they_come() -> None:
    streams = [Stream(0), Stream(1)]
    responses = merge_answers([aclosing(stream.responses()) for stream in streams])
    assert (await anext(responses)).start.request_id == "r/0"
    streams[1].may_go_on.set()
    assert (await anext(responses)).chunk.index == 1
    assert (await anext(responses)).complete.index == 1
    streams[0].may_go_on.set()
    assert [response.WhichOneof("response") async for response in responses] == ["chunk", "complete"]
    assert all(stream.is_closed for stream in streams)


async def test_a_failure_ends_every_answer() -> None:
    streams = [Stream(0), Stream(1, Unavailable("gone")), Stream(2)]
    responses = merge_answers([aclosing(stream.responses()) for stream in streams])
    await anext(responses)
    streams[1].may_go_on.set()
    with pytest.raises(Unavailable, match="gone"):
        await anext(responses)
    assert all(stream.is_closed for stream in streams)


async def test_leaving_early_closes_every_answer() -> None:
    streams = [Stream(0), Stream(1)]
    responses = merge_answers([aclosing(stream.responses()) for stream in streams])
    await anext(responses)
    streams[0].may_go_on.set()
    await anext(responses)
    await responses.aclose()
    assert all(stream.is_closed for stream in streams)


class Account:
    """Account of one turn: when its context was left, and with which error."""

    def __init__(self) -> None:
        self.is_left = False
        self.error: BaseException | None = None

    @asynccontextmanager
    async def of(self, stream: Stream) -> AsyncIterator[Responses]:
        try:
            async with aclosing(stream.responses()) as responses:
                yield responses
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.is_left = True


async def test_each_answer_is_accounted_for_when_it_ends_by_itself() -> None:
    streams, accounts = [Stream(0), Stream(1)], [Account(), Account()]
    responses = merge_answers([account.of(stream) for account, stream in zip(accounts, streams, strict=True)])
    await anext(responses)
    streams[0].may_go_on.set()
    assert [(await anext(responses)).WhichOneof("response") for _ in range(2)] == ["chunk", "complete"]
    await asyncio.sleep(0)
    assert [account.is_left for account in accounts] == [True, False]
    await responses.aclose()
    assert accounts[0].error is None


async def test_a_failure_is_accounted_to_its_own_answer_and_the_others_are_cancelled() -> None:
    streams, accounts = [Stream(0), Stream(1, Unavailable("gone"))], [Account(), Account()]
    responses = merge_answers([account.of(stream) for account, stream in zip(accounts, streams, strict=True)])
    await anext(responses)
    streams[1].may_go_on.set()
    with pytest.raises(Unavailable, match="gone"):
        await anext(responses)
    assert isinstance(accounts[1].error, Unavailable)
    assert isinstance(accounts[0].error, asyncio.CancelledError)
