"""Every verb of both endpoints, called by a tenant on the ids of another: nothing changes, nothing is told."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
import httpx2
import pytest
from grpc_status import rpc_status

from ringserve.client import AsyncClient, Sampling
from ringserve.client.retries import NO_RETRIES
from ringserve.cp_core.errors import InvalidRequest
from ringserve.services.rpc.errors import DETAILS_KEY
from ringserve.v1 import inference_pb2, inference_pb2_grpc
from tests.services.auth.test_isolation import LONG, guarded
from tests.services.local_gateway import CALL_SECONDS, MODEL, LocalGateway
from tests.workers.models import random_tokens

__all__ = ["guarded"]

THREE = Sampling(max_tokens=3, temperature=0.0)
OWNED, NEVER = "diary", "unheard-of"
Answer = tuple[object, str]
"""Status and sentence."""


def appended(name: str) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        tokenized=inference_pb2.TokenizedInput(input_ids=[1]),
        conversation_id=name,
        prompt_mode=inference_pb2.PROMPT_MODE_APPEND,
    )


GRPC: Mapping[str, Callable[[Any, str, dict[str, Any]], Awaitable[object]]] = {
    "Generate": lambda stub, name, more: stub.Generate(appended(name), **more).read(),
    "GetConversation": lambda stub, name, more: stub.GetConversation(
        inference_pb2.GetConversationRequest(conversation_id=name), **more
    ),
    "ForkConversation": lambda stub, name, more: stub.ForkConversation(
        inference_pb2.ForkConversationRequest(source_id=name, new_id="mine"), **more
    ),
    "DeleteConversation": lambda stub, name, more: stub.DeleteConversation(
        inference_pb2.DeleteConversationRequest(conversation_id=name), **more
    ),
}
WITHOUT_ONE = {"Abort", "CountTokens", "ListConversations", "GetModelInfo", "GetServerInfo"}
"""Verbs that name no conversation; the first two are tested below by what they give."""
HTTP: Mapping[str, Callable[[httpx2.AsyncClient, str], Awaitable[httpx2.Response]]] = {
    "continue": lambda http, name: http.post(
        "/v1/completions", json={"model": MODEL, "prompt": [1], "conversation_id": name, "prompt_mode": "append"}
    ),
    "continue in a stream": lambda http, name: http.post(
        "/v1/completions",
        json={"model": MODEL, "prompt": [1], "conversation_id": name, "prompt_mode": "append", "stream": True},
    ),
    "read": lambda http, name: http.get(f"/v1/conversations/{name}"),
    "delete": lambda http, name: http.delete(f"/v1/conversations/{name}"),
}
RESPONSES: Mapping[str, Callable[[httpx2.AsyncClient, str], Awaitable[httpx2.Response]]] = {
    "follow a response": lambda http, name: http.post(
        "/v1/responses", json={"model": MODEL, "input": "x", "previous_response_id": name}
    ),
    "delete a response": lambda http, name: http.delete(f"/v1/responses/{name}"),
}


async def begin(gateway: LocalGateway) -> None:
    async with AsyncClient(gateway.target, token="a-token", retry=NO_RETRIES) as acme:
        await acme.ask(random_tokens(40), conversation_id=OWNED, sampling=THREE)


async def check_untouched(gateway: LocalGateway) -> None:
    view = await gateway.service.router.get_conversation(f"acme/{OWNED}")
    assert (view.num_tokens, view.num_turns, view.retained_on("decode")) == (43, 1, 42)
    listed = await gateway.service.router.list_conversations("", "", 100)
    assert [each.conversation_id for each in listed.conversations] == [f"acme/{OWNED}"]


def test_every_method_of_the_contract_is_tested_here() -> None:
    methods = {method.name for method in inference_pb2.DESCRIPTOR.services_by_name["Inference"].methods}
    assert methods == GRPC.keys() | WITHOUT_ONE


@pytest.mark.parametrize("verb", GRPC)
async def test_over_grpc_anothers_conversation_is_as_one_that_never_was(guarded: LocalGateway, verb: str) -> None:
    await begin(guarded)
    more: dict[str, Any] = {"metadata": (("authorization", "Bearer b-token"),), "timeout": CALL_SECONDS}
    async with guarded.channel() as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)

        async def answer(name: str) -> Answer:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await GRPC[verb](stub, name, more)
            error: Any = caught.value  # also a grpc.Call, which its type does not say
            status = rpc_status.from_call(error)
            assert status is not None
            told = [(key, value) for key, value in error.trailing_metadata() or () if key != DETAILS_KEY]
            return (error.code(), told, list(status.details)), (error.details() or "").replace(name, "NAME")

        never = await answer(NEVER)
        assert never[0][0] is grpc.StatusCode.NOT_FOUND  # type: ignore[index]
        for name in (OWNED, f"acme/{OWNED}", f"/acme/{OWNED}", f"beta/../acme/{OWNED}"):
            assert await answer(name) == never
    await check_untouched(guarded)


@pytest.mark.parametrize("verb", HTTP)
async def test_over_http_anothers_conversation_is_as_one_that_never_was(guarded: LocalGateway, verb: str) -> None:
    await begin(guarded)
    headers = {"authorization": "Bearer b-token"}
    async with httpx2.AsyncClient(base_url=guarded.url, headers=headers, timeout=CALL_SECONDS) as http:

        async def answer(name: str) -> Answer:
            got = await HTTP[verb](http, name)
            return got.status_code, json.dumps(got.json()).replace(name, "NAME")

        never = await answer(NEVER)
        assert never[0] == 404
        for name in (OWNED, f"acme/{OWNED}", f"beta/acme/{OWNED}"):
            assert await answer(name) == never
    await check_untouched(guarded)


@pytest.mark.parametrize("verb", RESPONSES)
async def test_anothers_response_is_as_one_that_never_was(guarded: LocalGateway, verb: str) -> None:
    async with guarded.openai(api_key="a-token") as acme:
        asked: dict[str, Any] = {"model": MODEL, "max_output_tokens": 3}
        first = await acme.responses.create(**asked, input="x")
        async with httpx2.AsyncClient(
            base_url=guarded.url, headers={"authorization": "Bearer b-token"}, timeout=CALL_SECONDS
        ) as http:
            refused = [await RESPONSES[verb](http, name) for name in (first.id, "0".join(first.id.rsplit("1", 1)))]
        assert [each.status_code for each in refused] == [404, 404]
        assert "is not stored" in refused[0].text
        await acme.responses.create(**asked, input="y", previous_response_id=first.id)


async def test_a_chat_over_http_begins_a_conversation_of_its_own(guarded: LocalGateway) -> None:
    await begin(guarded)
    async with guarded.openai(api_key="b-token") as beta:
        said = await beta.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "x"}],
            max_tokens=3,
            extra_body={"conversation_id": OWNED},
        )
        assert (said.model_extra or {})["ringserve"]["plan"]["cached_tokens"] == 0
        await beta.conversations.delete(OWNED)
    await check_untouched(guarded)


async def test_lists_and_aborts_reach_nothing_of_anothers_and_do_not_tell_that_it_is_there(
    guarded: LocalGateway,
) -> None:
    await begin(guarded)
    async with (
        AsyncClient(guarded.target, token="a-token", retry=NO_RETRIES) as acme,
        AsyncClient(guarded.target, token="b-token", retry=NO_RETRIES) as beta,
        acme.stream("x", request_id="mine", sampling=LONG) as stream,
    ):
        await anext(stream)
        for prefix in ("", "d", OWNED, "acme", "acme/", "/", "a"):
            assert [each async for each in beta.list_conversations(prefix)] == []
        answer = await beta.abort(["mine", NEVER])
        assert (list(answer.aborted), list(answer.unknown)) == ([], ["mine", NEVER])
        assert await anext(stream)  # goes on


async def test_more_than_a_call_may_name_is_refused(guarded: LocalGateway) -> None:
    async with AsyncClient(guarded.target, token="b-token", retry=NO_RETRIES) as beta:
        with pytest.raises(InvalidRequest, match="request_ids: 1025 are too many; at most 1024 are allowed"):
            await beta.abort(["x"] * 1025)
        long = "x" * 257
        said = "257 characters are too many; at most 256 are allowed"
        for call in (
            beta.abort(["x", long]),
            beta.conversation(long),
            beta.delete_conversation(long),
            beta.fork_conversation(long, "x"),
            beta.fork_conversation("x", long),
            anext(beta.list_conversations(long)),
        ):
            with pytest.raises(InvalidRequest, match=said):
                await call
    headers = {"authorization": "Bearer b-token"}
    async with httpx2.AsyncClient(base_url=guarded.url, headers=headers, timeout=CALL_SECONDS) as http:
        for method in ("GET", "DELETE"):
            answer = await http.request(method, f"/v1/conversations/{long}")
            assert (answer.status_code, said in answer.text) == (400, True)
