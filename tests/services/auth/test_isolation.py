"""Two tenants at both endpoints: what is one's does not exist for the other, and strangers get nothing."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx2
import openai
import pytest
import yaml

from ringserve.client import AsyncClient, Sampling
from ringserve.client.retries import NO_RETRIES
from ringserve.cp_core.errors import Busy, CapacityExceeded, Forbidden, NotFound, RingserveError, Unauthenticated
from ringserve.services.auth.authenticator import Authenticator, TokenFile
from ringserve.services.auth.tenants import hash_token
from ringserve.services.gateway.text import TextCodec
from ringserve.v1 import inference_pb2, inference_pb2_grpc
from tests.services.local_gateway import CALL_SECONDS, MODEL, LocalGateway
from tests.waiting import WAIT_SECONDS
from tests.workers.models import random_tokens

THREE = Sampling(max_tokens=3, temperature=0.0)
LONG = Sampling(max_tokens=4000)
TOKENS = {
    "tenants": [
        {"name": "acme", "tokens": [{"sha256": hash_token("a-token")}], "max_concurrent_turns": 2},
        {"name": "beta", "tokens": [{"sha256": hash_token("b-token")}]},
        {"name": "ops", "tokens": [{"sha256": hash_token("o-token")}], "operator": True},
        {"name": "gone", "tokens": [{"sha256": hash_token("old-token"), "expires": "2020-01-01T00:00:00Z"}]},
    ]
}


@pytest.fixture
async def guarded(model_path: Path, codec: TextCodec, tmp_path: Path) -> AsyncIterator[LocalGateway]:
    file = tmp_path / "tokens.yaml"
    file.write_text(yaml.safe_dump(TOKENS).replace("'2020-01-01T00:00:00Z'", "2020-01-01T00:00:00Z"))
    async with LocalGateway(model_path, codec, Authenticator(TokenFile(file))) as gateway:
        yield gateway
        await gateway.wait_idle()
        gateway.service.check_integrity()


def client_of(gateway: LocalGateway, token: str) -> AsyncClient:
    return AsyncClient(gateway.target, token=token, retry=NO_RETRIES)


async def test_a_conversation_is_its_tenants_alone(guarded: LocalGateway) -> None:
    prompt = random_tokens(40)
    async with client_of(guarded, "a-token") as acme, client_of(guarded, "b-token") as beta:
        first = await acme.ask(prompt, conversation_id="diary", sampling=THREE)
        assert (first.conversation_id, first.plan.cached_tokens) == ("diary", 0)
        with pytest.raises(NotFound) as unread:
            await beta.conversation("diary")
        with pytest.raises(NotFound) as unknown:
            await beta.conversation("never")
        # The sentence is that of any other name: no hint.
        assert str(unread.value).replace("diary", "never") == str(unknown.value)
        assert "acme" not in str(unread.value)
        with pytest.raises(NotFound):
            await beta.delete_conversation("diary")
        with pytest.raises(NotFound):
            await beta.ask([1], conversation_id="diary", mode="append", sampling=THREE)

        # The same name is another conversation: nothing of the first one's KV serves it.
        other = await beta.ask(prompt, conversation_id="diary", sampling=THREE)
        assert (other.plan.cached_tokens, other.plan.prompt_mode) == (0, "new")
        mine = await acme.conversation("diary")
        assert (mine.conversation_id, mine.num_turns, mine.num_tokens) == ("diary", 1, 43)
        await beta.delete_conversation("diary")
        second = await acme.ask([5, 6], conversation_id="diary", mode="append", sampling=THREE)
        assert second.plan.cached_tokens == 42  # the last token's KV is made by the next turn
        await acme.delete_conversation("diary")


async def test_a_running_turn_is_its_tenants_alone_to_see_and_to_abort(guarded: LocalGateway) -> None:
    async with client_of(guarded, "a-token") as acme, client_of(guarded, "b-token") as beta:
        stream = acme.stream("x", conversation_id="c", request_id="r", sampling=LONG)
        await anext(stream)
        with pytest.raises(NotFound):
            await beta.conversation("c")
        answer = await beta.abort(["r", "acme/r", "/r", ""])
        assert list(answer.aborted) == []
        assert list(answer.unknown) == ["r", "acme/r", "/r", ""]
        # The same request id and the same conversation are free for another tenant.
        assert (await beta.ask("x", conversation_id="c", request_id="r", sampling=THREE)).request_id == "r"
        await beta.delete_conversation("c")

        assert (await acme.conversation("c")).running_request_id == "r"
        with pytest.raises(Busy) as busy:
            await acme.ask("y", conversation_id="c", sampling=THREE)
        assert "'c' is busy with request 'r'" in str(busy.value)
        assert list((await acme.abort(["r"])).aborted) == ["r"]
        with pytest.raises(RingserveError, match="aborted"):
            await stream.answer()


async def test_a_tenant_lists_and_forks_its_own_conversations_only(guarded: LocalGateway) -> None:
    async with client_of(guarded, "a-token") as acme, client_of(guarded, "b-token") as beta:
        for client, names in ((acme, ("one", "two", "three")), (beta, ("one",))):
            for name in names:
                await client.ask(random_tokens(20), conversation_id=name, sampling=THREE)
        listed = [each.conversation_id async for each in acme.list_conversations(page_size=2)]
        assert sorted(listed) == ["one", "three", "two"]
        assert [each.conversation_id async for each in acme.list_conversations("t")] == ["three", "two"]
        assert [each.conversation_id async for each in beta.list_conversations()] == ["one"]
        assert [each.conversation_id async for each in beta.list_conversations("acme/")] == []
        with pytest.raises(NotFound) as caught:
            await beta.fork_conversation("two", "mine")
        assert "acme" not in str(caught.value)
        for source in ("acme/two", "/two", "../acme/two"):
            with pytest.raises(NotFound):
                await beta.fork_conversation(source, "mine")
        fork = await acme.fork_conversation("two", "mine")
        assert (fork.conversation_id, fork.num_tokens) == ("mine", 23)
        for name in ("one", "two", "three", "mine"):
            await acme.delete_conversation(name)
        await beta.delete_conversation("one")


async def test_over_http_it_is_the_same(guarded: LocalGateway) -> None:
    extra: dict[str, Any] = {"extra_body": {"conversation_id": "web", "request_id": "web-1"}}
    asked: dict[str, Any] = {"model": MODEL, "prompt": random_tokens(40), "max_tokens": 3, "temperature": 0}
    append: dict[str, Any] = {"extra_body": {"conversation_id": "web", "prompt_mode": "append"}}
    async with guarded.openai(api_key="a-token") as acme, guarded.openai(api_key="b-token") as beta:
        first = await acme.completions.create(**asked, **extra)
        assert (first.model_extra or {})["ringserve"]["conversation_id"] == "web"
        with pytest.raises(openai.NotFoundError) as caught:
            await beta.completions.create(**asked | {"prompt": [1]}, **append)
        assert "acme" not in str(caught.value)
        for call in (beta.conversations.retrieve("web"), beta.conversations.delete("web")):
            with pytest.raises(openai.NotFoundError, match="there is no conversation 'web'"):
                await call
        other = await beta.completions.create(**asked, **extra)
        assert (other.model_extra or {})["ringserve"]["plan"]["cached_tokens"] == 0
        second = await acme.completions.create(**asked | {"prompt": [1]}, **append)
        assert (second.model_extra or {})["ringserve"]["plan"]["cached_tokens"] == 42

        stream = await acme.completions.create(**asked | {"max_tokens": 4000}, **extra, stream=True)
        await anext(stream)
        async with client_of(guarded, "b-token") as by_grpc:
            assert list((await by_grpc.abort(["web-1"])).unknown) == ["web-1"]
        with pytest.raises(openai.ConflictError, match="'web' is busy with request 'web-1'"):
            await acme.completions.create(**asked, extra_body={"conversation_id": "web"})
        await stream.close()


WRONG = {
    "none": (None, "none given"),
    "unknown": ("Bearer c-token", "not known"),
    "expired": ("Bearer old-token", "has expired"),
    "another scheme": ("Basic YTpiCg==", "only 'Bearer TOKEN' is allowed"),
}


@pytest.mark.parametrize(("sent", "said"), WRONG.values(), ids=WRONG.keys())
async def test_strangers_get_nothing_over_grpc(guarded: LocalGateway, sent: str | None, said: str) -> None:
    metadata = (("authorization", sent),) if sent else ()
    async with guarded.channel() as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        requests = {
            "Abort": inference_pb2.AbortRequest(request_ids=["r"]),
            "CountTokens": inference_pb2.CountTokensRequest(text="x"),
            "GetModelInfo": inference_pb2.GetModelInfoRequest(),
            "GetServerInfo": inference_pb2.GetServerInfoRequest(),
            "GetConversation": inference_pb2.GetConversationRequest(conversation_id="c"),
            "ListConversations": inference_pb2.ListConversationsRequest(),
            "ForkConversation": inference_pb2.ForkConversationRequest(source_id="c", new_id="d"),
            "DeleteConversation": inference_pb2.DeleteConversationRequest(conversation_id="c"),
        }
        calls = [
            getattr(stub, name)(request, metadata=metadata, timeout=WAIT_SECONDS) for name, request in requests.items()
        ]
        calls.append(
            stub.Generate(inference_pb2.GenerateRequest(text="x"), metadata=metadata, timeout=WAIT_SECONDS).read()
        )
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert said in (caught.value.details() or "")
    assert len(calls) == len(inference_pb2.DESCRIPTOR.services_by_name["Inference"].methods)


@pytest.mark.parametrize(("sent", "said"), WRONG.values(), ids=WRONG.keys())
async def test_strangers_get_nothing_over_http(guarded: LocalGateway, sent: str | None, said: str) -> None:
    headers = {"authorization": sent} if sent else {}
    async with httpx2.AsyncClient(base_url=guarded.url, headers=headers, timeout=CALL_SECONDS) as http:
        for method, path in (
            ("POST", "/v1/chat/completions"),
            ("POST", "/v1/completions"),
            ("GET", "/v1/models"),
            ("GET", f"/v1/models/{MODEL}"),
            ("GET", "/v1/conversations/c"),
            ("DELETE", "/v1/conversations/c"),
        ):
            answer = await http.request(method, path, content=b"not even JSON" if method == "POST" else None)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
            assert said in error["message"]
        assert (await http.get("/health")).status_code == 200  # probes have no token


async def test_the_state_of_the_service_is_for_operators(guarded: LocalGateway) -> None:
    async with client_of(guarded, "o-token") as ops, client_of(guarded, "a-token") as acme:
        assert len((await ops.server_info()).rings) == 2
        with pytest.raises(Forbidden, match="'acme' is no operator"):
            await acme.server_info()
        assert (await acme.model_info()).vocab_size == 300


async def test_a_tenants_limit_holds_over_both_endpoints_and_touches_no_other(guarded: LocalGateway) -> None:
    async with client_of(guarded, "a-token") as acme, client_of(guarded, "b-token") as beta:
        async with acme.stream("x", sampling=LONG) as one, acme.stream("x", sampling=LONG) as two:
            await anext(one)
            await anext(two)
            with pytest.raises(CapacityExceeded, match="'acme' runs 2 turns, asks for 1 and may run 2") as caught:
                await acme.ask("x", sampling=THREE)
            assert caught.value.retry_after_seconds == 1.0
            async with guarded.openai(api_key="a-token") as http:
                with pytest.raises(openai.RateLimitError) as refused:
                    await http.completions.create(model=MODEL, prompt="x")
            assert refused.value.response.headers["retry-after"] == "1"
            await beta.ask("x", sampling=THREE)
        await guarded.wait_idle()
        await acme.ask("x", sampling=THREE)


async def test_no_secret_is_ever_logged(guarded: LocalGateway, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    async with client_of(guarded, "a-token") as acme, client_of(guarded, "stolen-token") as thief:
        await acme.ask("x", sampling=THREE)
        with pytest.raises(Unauthenticated):
            await thief.ask("x")
    async with guarded.openai(api_key="stolen-token") as http:
        with pytest.raises(openai.AuthenticationError) as caught:
            await http.completions.create(model=MODEL, prompt="x")
    ours = "\n".join(
        record.getMessage() for record in caplog.records if record.name.startswith(("ringserve", "uvicorn"))
    )
    assert "acme/req-" in ours  # operators see whose turn it was
    for secret in ("a-token", "stolen-token", hash_token("a-token")):
        assert secret not in ours
        assert secret not in str(caught.value)


async def test_refused_credentials_are_counted_at_each_endpoint(guarded: LocalGateway) -> None:
    async with (
        client_of(guarded, "no-token") as stranger,
        client_of(guarded, "a-token") as acme,
        httpx2.AsyncClient(base_url=guarded.url, timeout=CALL_SECONDS) as http,
    ):
        with pytest.raises(Unauthenticated):
            await stranger.ask("x", sampling=THREE)
        with pytest.raises(Forbidden):
            await acme.server_info()
        for _ in range(2):
            assert (await http.post("/v1/completions", json={})).status_code == 401
        assert (await http.get("/metrics", headers={"authorization": "Bearer a-token"})).status_code == 403
        shown = (await http.get("/metrics", headers={"authorization": "Bearer o-token"})).text
    found = dict(re.findall(r'ringserve_calls_refused_total\{endpoint="(\w+",reason="\w+)"\} ([\d.]+)', shown))
    assert found == {
        'grpc",reason="unauthenticated': "1.0",
        'grpc",reason="permission_denied': "1.0",
        'http",reason="unauthenticated': "2.0",
        'http",reason="permission_denied': "1.0",
    }


async def test_every_request_has_one_line_that_says_how_it_ended(
    guarded: LocalGateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with client_of(guarded, "a-token") as acme:
        await acme.ask(random_tokens(9), request_id="mine", sampling=THREE)
        with pytest.raises(RingserveError):
            await acme.ask(random_tokens(9), sampling=Sampling(max_tokens=0))
        async with acme.stream("x", request_id="left", sampling=LONG) as stream:
            await anext(stream)
        await guarded.wait_idle()
    ended = [
        vars(each)["figures"] | {"id": vars(each)["request_id"]} for each in caplog.records if hasattr(each, "figures")
    ]
    assert [(each["id"], each["outcome"], each["tenant"]) for each in ended] == [
        ("acme/mine", "length", "acme"),
        ("", "invalid_argument", "acme"),
        ("acme/left", "cancelled", "acme"),
    ]
    assert (ended[0]["prompt_tokens"], ended[0]["completion_tokens"]) == (9, 3)
    assert 0 < ended[0]["ttft_seconds"] <= ended[0]["total_seconds"]
