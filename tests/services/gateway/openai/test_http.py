"""Requests of any HTTP client: malformed ones are refused in the shape of OpenAI, and the server goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import httpx2
import openai
import pytest
from starlette.types import Message

from ringserve.cp_core.errors import ConfigError, NotFinite, RingserveError, Unavailable
from ringserve.orchestration.protocol.turns import BegunTurn, TurnRequest
from ringserve.services.auth.tls import ServerTls
from ringserve.services.gateway import turn_stream
from ringserve.services.gateway.openai import app, server
from ringserve.services.gateway.openai.server import KEEP_ALIVE, MAX_HEADER_BYTES, EventStream, HttpServer
from ringserve.views import ServerInfo
from tests.rings import LLAMA_8B
from tests.services.auth.certificates import Authority
from tests.services.local_gateway import CALL_SECONDS, MODEL, LocalGateway
from tests.waiting import WAIT_SECONDS


@pytest.fixture
async def http(gateway: LocalGateway) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=gateway.url, timeout=CALL_SECONDS) as client:
        yield client


async def is_served(http: httpx2.AsyncClient) -> bool:
    answer = await http.post("/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 1})
    return answer.status_code == 200


def refusal(answer: httpx2.Response, status: int) -> str:
    """Return the sentence of a refusal that has OpenAI's shape."""
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    message: str = error["message"]
    assert "\n" not in message
    assert "Traceback" not in message
    return message


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
async def test_a_prompt_cache_key_or_else_the_user_is_the_cache_key(
    route: str, gateway: LocalGateway, http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = list[str]()
    begin_turn = gateway.service.router.begin_turn

    async def begin(request: TurnRequest) -> BegunTurn:
        keys.append(request.cache_key)
        return await begin_turn(request)

    monkeypatch.setattr(gateway.service.router, "begin_turn", begin)
    prompt = {"prompt": "x"} if route == "completions" else {"messages": [{"role": "user", "content": "x"}]}
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 1, **prompt}
    fields: list[dict[str, Any]] = [{}, {"user": "ada"}, {"prompt_cache_key": "ada"}]
    fields += [{"prompt_cache_key": "ada", "user": "bob"}, {"prompt_cache_key": "", "user": "bob"}]
    fields += [{"prompt_cache_key": None, "user": "x" * 9000}]
    for each in fields:
        answer = await http.post(f"/v1/{route}", json=asked | each)
        assert answer.status_code == 200, answer.text
    none, ada, also_ada, still_ada, bob, long = keys
    assert none == ""
    assert ada == also_ada == still_ada
    assert len({none, ada, bob, long}) == 4
    assert len(long) == len(ada)
    refused = await http.post(f"/v1/{route}", json=asked | {"user": ["ada"]})
    assert refusal(refused, 400).startswith('user: ["ada"] is not allowed; give a string')


async def test_a_prediction_is_drafted_from_and_is_no_part_of_the_prompt(
    gateway: LocalGateway, http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = list[TurnRequest]()
    begin_turn = gateway.service.router.begin_turn

    async def begin(request: TurnRequest) -> BegunTurn:
        begun.append(request)
        return await begin_turn(request)

    monkeypatch.setattr(gateway.service.router, "begin_turn", begin)
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    for content in ("abc", [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}], None):
        prediction = None if content is None else {"type": "content", "content": content}
        answer = await http.post("/v1/chat/completions", json=asked | {"prediction": prediction})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens_details"] == {"accepted_prediction_tokens": 0}
    assert [request.prediction.tolist() for request in begun] == [[97, 98, 99], [97, 98, 99], []]
    assert len({len(request.token_ids) for request in begun}) == 1
    refused = await http.post("/v1/chat/completions", json=asked | {"prediction": {"type": "text", "content": "a"}})
    assert refusal(refused, 400).startswith("prediction.type: 'text' is not allowed")


MALFORMED = {
    "nothing": (b"", "the body is not valid JSON"),
    "half an object": (b'{"model": ', "the body is not valid JSON"),
    "no UTF-8": (b"\xff\xfe\xfd", "the body is not UTF-8 text: invalid byte 1"),
    "too deep": (b"[" * 200_000, "the body is not valid JSON"),
    "a number too long": (b'{"model": ' + b"9" * 10_000 + b"}", "the body is not valid JSON"),
    "a list": (b"[]", "the body must be a JSON object"),
    "no model": (b"{}", "model: none given; served is 'tiny-model'"),
    "no prompt": (b'{"model": "tiny-model"}', "prompt: null is not allowed"),
    "an empty prompt": (b'{"model": "tiny-model", "prompt": ""}', "prompt: the prompt has 0 tokens"),
    "no token": (b'{"model": "tiny-model", "prompt": []}', "prompt: the prompt has 0 tokens"),
    "prompts of one conversation": (
        b'{"model": "tiny-model", "prompt": ["a", "b"], "conversation_id": "c"}',
        "prompt: 2 prompts cannot all continue one conversation",
    ),
    "an echo of a conversation": (
        b'{"model": "tiny-model", "prompt": "a", "echo": true, "conversation_id": "c"}',
        "echo: true is not allowed with a conversation_id",
    ),
    "scores of an echo in a stream": (
        b'{"model": "tiny-model", "prompt": "a", "echo": true, "logprobs": 1, "stream": true}',
        "echo: true is not allowed with logprobs in a stream",
    ),
    "an unknown token in an echo": (
        b'{"model": "tiny-model", "prompt": [[1], [1, 300]], "echo": true}',
        "prompt[1]: token 300 is outside",
    ),
    "an unknown token": (b'{"model": "tiny-model", "prompt": [1, 300]}', "prompt[1]: token 300 is outside"),
    "no finite number": (b'{"model": "tiny-model", "prompt": "a", "temperature": NaN}', "temperature: nan is out of"),
    "a line in an id": (
        b'{"model": "tiny-model", "prompt": "a", "conversation_id": "a\\nb"}',
        "conversation_id: 'a\\nb' holds characters that cannot be printed",
    ),
}


@pytest.mark.parametrize(("body", "said"), MALFORMED.values(), ids=MALFORMED.keys())
async def test_a_malformed_body_is_refused_with_a_sentence(http: httpx2.AsyncClient, body: bytes, said: str) -> None:
    assert said in refusal(await http.post("/v1/completions", content=body), 400)
    assert await is_served(http)


async def test_a_body_that_is_too_large_is_refused_declared_or_not(
    http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "MAX_MESSAGE_BYTES", 1000)

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 100

    for content in (b" " * 1001, pieces()):
        assert "larger than 1000 bytes" in refusal(await http.post("/v1/completions", content=content), 413)
    assert await is_served(http)


async def test_headers_that_are_too_large_are_refused_and_harm_nothing(http: httpx2.AsyncClient) -> None:
    long = "x" * MAX_HEADER_BYTES
    for refused in (http.get("/v1/models", headers={"x-long": long}), http.get(f"/v1/models/{long}")):
        assert "larger than 32768 bytes" in refusal(await refused, 431)
    assert (await http.get("/v1/models", headers={"x-long": long[::2]})).status_code == 200
    huge = {f"x-{number}": long for number in range(40)}  # more than the server reads at a time
    with contextlib.suppress(httpx2.TransportError):  # it may hang up while we still send
        assert (await http.get("/v1/models", headers=huge)).status_code in (400, 431)
    assert await is_served(http)


async def test_a_chat_of_too_many_messages_is_refused(http: httpx2.AsyncClient) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": ""}] * 4097}
    said = refusal(await http.post("/v1/chat/completions", json=body), 400)
    assert said == "messages: 4097 are too many; at most 4096 are allowed"


async def test_a_body_that_does_not_come_is_given_up(gateway: LocalGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_SECONDS", 0.2)
    host, _, port = gateway.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
    async with asyncio.timeout(WAIT_SECONDS):
        assert b" 408 " in await reader.readline()
    writer.close()
    await writer.wait_closed()


async def connect(url: str, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    return reader, writer


GET = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n"
WHOLE = GET + b"\r\n"


@pytest.mark.parametrize(("whole", "data"), [(b"", b""), (b"", GET), (WHOLE, GET)], ids=["silent", "half", "later"])
async def test_a_connection_whose_headers_do_not_come_is_closed(
    whole: bytes, data: bytes, gateway: LocalGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not whole:
        monkeypatch.setattr(server, "HEADER_SECONDS", 0.1)
    reader, writer = await connect(gateway.url, whole)
    async with asyncio.timeout(WAIT_SECONDS):
        if whole:
            assert b" 200 " in await reader.readline()
            await reader.readuntil(b"]}")  # the answer's last bytes
            monkeypatch.setattr(server, "HEADER_SECONDS", 0.1)
        writer.write(data)
        assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()


async def test_half_a_header_that_came_with_another_request_is_given_up(
    gateway: LocalGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "IDLE_SECONDS", 10 * WAIT_SECONDS)
    monkeypatch.setattr(server, "HEADER_SECONDS", 2.0)
    pipelined = HttpServer(app.HttpApi(gateway.servicer, MODEL, gateway.service.model).app)
    reader, writer = await connect(await pipelined.start("127.0.0.1:0"), WHOLE + GET)
    async with asyncio.timeout(WAIT_SECONDS):
        assert (await reader.read()).count(b"HTTP/1.1 200") == 1
    writer.close()
    await pipelined.stop(1.0)


async def test_a_request_whose_headers_have_come_has_its_time(
    gateway: LocalGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HEADER_SECONDS", 2.0)  # the first request is to be in time on a busy machine, too
    writing, told = await connect(gateway.url, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n")
    silent, other = await connect(gateway.url, b"")
    async with asyncio.timeout(WAIT_SECONDS):
        assert await silent.read() == b"", "so the time for headers has passed"
        told.write(b"{}")
        assert b" 400 " in await writing.readline()
    for writer in (told, other):
        writer.close()
        await writer.wait_closed()


async def test_connections_beyond_the_limit_are_closed_and_told_once(
    gateway: LocalGateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "max_connections", lambda: 3)
    limited = HttpServer(app.HttpApi(gateway.servicer, MODEL, gateway.service.model).app)
    address = await limited.start("127.0.0.1:0")
    async with asyncio.timeout(WAIT_SECONDS):
        pairs = [await connect(address, WHOLE) for _ in range(2)]
        for reader, _ in pairs:
            assert b"200" in await reader.readline()
        for _ in range(3):
            reader, writer = await connect(address, WHOLE)
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()
        pairs[0][1].close()
        answered = False
        while not answered:  # the server sees the end of that connection soon
            reader, writer = await connect(address, WHOLE)
            with contextlib.suppress(ConnectionResetError):
                answered = b"200" in await reader.readline()
            writer.close()
    pairs[1][1].close()
    await limited.stop(1.0)
    assert [record.message for record in caplog.records if "connections" in record.message] == [
        "2 of 3 HTTP connections are open, 2 of them by 127.0.0.1; new connections are closed"
    ]


async def test_an_address_never_takes_the_last_connections_of_others(
    gateway: LocalGateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "max_connections", lambda: 8)
    limited = HttpServer(app.HttpApi(gateway.servicer, MODEL, gateway.service.model).app)
    host, _, port = (await limited.start("127.0.0.1:0")).rpartition(":")
    writers = []

    async def is_served(source: str) -> bool:
        reader, writer = await asyncio.open_connection(host, int(port), local_addr=(source, 0))
        writers.append(writer)
        with contextlib.suppress(ConnectionError):
            writer.write(WHOLE)
            return b"200" in await reader.readline()
        return False

    async with asyncio.timeout(WAIT_SECONDS):
        assert [await is_served("127.0.0.1") for _ in range(8)] == [True] * 6 + [False] * 2
        assert await is_served("127.0.0.2")
        assert not await is_served("127.0.0.2"), "one place is left, for a third"
        assert await is_served("127.0.0.3")
        assert not await is_served("127.0.0.4")
        writers[0].close()
        while not await is_served("127.0.0.4"):  # the server sees the end of that connection soon
            pass
    for writer in writers:
        writer.close()
    await limited.stop(1.0)
    told = "6 of 8 HTTP connections are open, 6 of them by 127.0.0.1; new connections are closed"
    assert [record.message for record in caplog.records if "connections" in record.message] == [told]


def test_a_network_of_ipv6_counts_as_one_address() -> None:
    assert server._network("2001:db8::1") == server._network("2001:db8::ffff:2") == "2001:db8::/64"
    assert server._network("2001:db8:0:1::1") != server._network("2001:db8::1")
    assert server._network("fe80::1%eth0") == "fe80::/64"
    assert server._network("192.0.2.1") == server._network("::ffff:192.0.2.1") == "192.0.2.1"


NO_DESCRIPTOR = """
import asyncio, os, resource, sys
from ringserve.services.gateway.openai.server import HttpServer

async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})

async def main():
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
    server = HttpServer(app)
    print(await server.start("127.0.0.1:0"), flush=True)
    loop, taken = asyncio.get_running_loop(), []
    for _ in range(2):  # told to take all descriptors, then to free them
        await loop.run_in_executor(None, sys.stdin.readline)
        try:
            while not taken or taken[-1] is not None:
                taken.append(os.dup(0))
        except OSError:
            taken.append(None)
        else:
            for descriptor in taken[:-1]:
                os.close(descriptor)
        print("done", flush=True)
    await loop.run_in_executor(None, sys.stdin.readline)

asyncio.run(main())
"""


async def test_a_server_without_a_free_descriptor_closes_connections_and_tells_it_once() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", NO_DESCRIPTOR),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            address = (await process.stdout.readline()).decode().strip()
            process.stdin.write(b"take\n")
            await process.stdout.readline()
            for _ in range(150):  # more than are refused in one turn of the loop
                reader, writer = await connect(address, b"")
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read() == b""
                writer.close()
            process.stdin.write(b"free\n")
            await process.stdout.readline()
            reader, writer = await connect(address, WHOLE)
            assert b" 200 " in await reader.readline()
            writer.close()
            _, told = await process.communicate(b"end\n")
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    assert told.decode() == "no file descriptor is free; new connections are closed\n"


async def test_connections_in_their_tls_handshake_count(
    gateway: LocalGateway, monkeypatch: pytest.MonkeyPatch, authority: Authority
) -> None:
    monkeypatch.setattr(server, "max_connections", lambda: 3)
    signed = authority.sign("gateway")
    context = ServerTls(cert=str(signed.cert), key=str(signed.key)).http_context()
    limited = HttpServer(app.HttpApi(gateway.servicer, MODEL, gateway.service.model).app, context)
    address = await limited.start("127.0.0.1:0")
    silent = [await connect(address, b"") for _ in range(2)]
    reader, writer = await connect(address, b"")
    async with asyncio.timeout(WAIT_SECONDS):
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
    for each in (writer, *(writer for _, writer in silent)):
        each.close()
    await limited.stop(1.0)


async def test_a_request_with_two_lengths_is_refused_and_its_connection_closed(gateway: LocalGateway) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
    reader, writer = await connect(gateway.url, head + b"0\r\n\r\n" + WHOLE)
    async with asyncio.timeout(WAIT_SECONDS):
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1") == 1, "what follows may be another request, or a part of this one"
    assert b"Content-Length: not allowed beside Transfer-Encoding" in answer
    writer.close()
    await writer.wait_closed()


async def test_a_path_or_method_that_is_not_there_is_refused_in_the_same_shape(http: httpx2.AsyncClient) -> None:
    assert refusal(await http.get("/v1/nothing"), 404) == "there is no path /v1/nothing; /openapi.json lists all paths"
    wrong = await http.get("/v1/completions")
    assert refusal(wrong, 405) == "/v1/completions does not serve the method GET; use POST"
    assert wrong.headers["allow"] == "POST"
    conversation = await http.put("/v1/conversations/c")
    assert refusal(conversation, 405) == "/v1/conversations/c does not serve the method PUT; use DELETE or GET"


async def test_paths_of_other_services_are_refused_in_one_sentence(http: httpx2.AsyncClient) -> None:
    others = "is not served: this service answers chats, completions and responses"
    for path in ("/v1/embeddings", "/v1/audio/speech", "/rerank"):
        assert refusal(await http.post(path, json={"model": MODEL, "input": "Once"}), 404) == f"{path} {others}"
    told = "is not served: the service keeps responses, but not the input of their requests"
    path = "/v1/responses/resp_1/input_items"
    assert refusal(await http.get(path), 404) == f"{path} {told}"


async def test_an_error_of_our_own_shows_nothing_of_its_inside(
    http: httpx2.AsyncClient, gateway: LocalGateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(request: object) -> None:
        raise ZeroDivisionError("a secret of ours")

    monkeypatch.setattr(gateway.service.router, "begin_turn", broken)
    answer = await http.post("/v1/completions", json={"model": MODEL, "prompt": "x"})
    assert refusal(answer, 500) == "internal error; the server's log has the details"
    assert "a secret of ours" in caplog.text


async def test_probes_without_a_token_do_not_ask_the_rings_each_time(
    http: httpx2.AsyncClient, gateway: LocalGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringserve.services.gateway.openai.views.MAX_VIEW_AGE_SECONDS", 3600.0)
    asked, view = 0, gateway.service.router.get_server_info

    async def counted() -> ServerInfo:
        nonlocal asked
        asked += 1
        return await view()

    monkeypatch.setattr(gateway.service.router, "get_server_info", counted)
    answers = await asyncio.gather(*(http.get("/health") for _ in range(20)))
    assert [answer.status_code for answer in answers] == [200] * 20
    assert asked <= 1


async def test_health_says_whether_a_turn_could_be_served(
    http: httpx2.AsyncClient, gateway: LocalGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringserve.services.gateway.openai.views.MAX_VIEW_AGE_SECONDS", 0.0)
    assert (await http.get("/health")).json() == {"status": "ok"}

    async def lost() -> None:
        raise Unavailable("the ring is gone")

    monkeypatch.setattr(gateway.service.decode, "get_status", lost)
    assert refusal(await http.get("/health"), 503) == "no decode ring takes turns"
    monkeypatch.setattr(gateway.service.router, "get_server_info", lost)
    assert refusal(await http.get("/health"), 503) == "the ring is gone"


async def test_events_are_lines_of_json_and_end_with_done(http: httpx2.AsyncClient) -> None:
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 3, "stream": True}
    answer = await http.post("/v1/completions", json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    assert all(json.loads(event.removeprefix("data: "))["object"] == "text_completion" for event in events)


async def test_a_silent_stream_is_kept_open_by_comments() -> None:
    """A prompt of a million tokens takes longer than proxies wait for the first byte."""
    is_pinged, sent = asyncio.Event(), []

    async def events() -> AsyncGenerator[bytes, None]:
        yield b"data: first\n\n"
        await is_pinged.wait()
        yield b"data: second\n\n"

    async def send(message: Message) -> None:
        sent.append(message.get("body"))
        if message.get("body") == KEEP_ALIVE:
            is_pinged.set()

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError("never")

    async with asyncio.timeout(WAIT_SECONDS):
        stream = events()
        await EventStream(await anext(stream), stream, keep_alive_seconds=0.05)({}, receive, send)
    assert [body for body in sent if body != KEEP_ALIVE] == [None, b"data: first\n\n", b"data: second\n\n", b""]
    assert KEEP_ALIVE in sent
    assert sent[-1] == b""


async def test_a_port_in_use_is_an_error_that_names_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"gateway.http: cannot listen on {address}"):
            await HttpServer(app.HttpApi(None, MODEL, LLAMA_8B).app).start(address)  # type: ignore[arg-type]


async def test_a_stopped_server_is_closed_and_its_port_free(gateway: LocalGateway) -> None:
    first = HttpServer(app.HttpApi(gateway.servicer, MODEL, gateway.service.model).app)
    address = await first.start("127.0.0.1:0")
    async with httpx2.AsyncClient(base_url=f"http://{address}") as http:
        assert (await http.get("/v1/models")).status_code == 200
        await first.stop(1.0)
        with pytest.raises(httpx2.ConnectError):
            await http.get("/v1/models")
    again = HttpServer(app.HttpApi(gateway.servicer, MODEL, gateway.service.model).app)
    assert await again.start(address) == address
    await again.stop(1.0)


@pytest.mark.parametrize("error", [NotFinite("the model's logits are NaN"), Unavailable("it lost a ring 3 times")])
async def test_what_would_fail_again_is_not_tried_again_by_the_client(
    gateway: LocalGateway, monkeypatch: pytest.MonkeyPatch, error: RingserveError
) -> None:
    """Each attempt may cost a ring."""
    monkeypatch.setattr(turn_stream, "ROUTER_SECONDS", 0.0)
    asked: list[TurnRequest] = []

    async def fail(request: TurnRequest) -> BegunTurn:
        asked.append(request)
        raise error

    monkeypatch.setattr(gateway.service.router, "begin_turn", fail)
    async with gateway.openai(max_retries=2) as client:
        with pytest.raises(openai.APIStatusError, match=str(error)):
            await client.completions.create(model=MODEL, prompt="x")
    assert len(asked) == 1


@pytest.mark.parametrize(
    "prompt",
    ["[" + "[[]]," * 120_000 + "[]]", "[" + "1," * 4_000_001 + "1]", "[" + '["\\"",{}],' * 110_000 + "[]]"],
    ids=["lists", "token ids", "strings between"],
)
async def test_a_body_of_more_values_than_a_request_needs_is_not_parsed(
    prompt: str, http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parser would hold Python's lock for seconds, and every stream of every tenant would stand."""
    monkeypatch.setattr(app, "json", None)
    answer = await http.post("/v1/completions", content=f'{{"model": "{MODEL}", "prompt": {prompt}}}')
    assert answer.status_code == 413
    assert answer.json()["error"]["message"].startswith("the body has more than 200000 lists and objects, or more than")


async def test_brackets_and_commas_inside_a_text_are_no_values(http: httpx2.AsyncClient) -> None:
    text = '[,{\\"' * 300_000
    answer = await http.post("/v1/completions", json={"model": MODEL, "prompt": text, "max_tokens": 1})
    assert answer.json()["error"]["code"] == "context_length_exceeded", "it was read"


async def test_a_value_of_many_levels_is_quoted_in_a_refusal(http: httpx2.AsyncClient) -> None:
    deep = '{"a":' * 900 + "1" + "}" * 900
    body = f'{{"model": "{MODEL}", "prompt": "x", "structured_outputs": {{"choice": {deep}}}}}'
    answer = await http.post("/v1/completions", content=body)
    assert answer.status_code == 400, answer.text


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
async def test_connections_send_small_parts_at_once(host: str) -> None:
    """Else the first event of a stream waits for the client to acknowledge the headers: 40 ms of each request."""
    sends_at_once: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def note(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted = writer.get_extra_info("socket")
        sends_at_once.set_result(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listener = server._listener(host, 0)
    async with await asyncio.start_server(note, sock=listener):
        _, writer = await asyncio.open_connection(*listener.getsockname()[:2])
        async with asyncio.timeout(WAIT_SECONDS):
            assert await sends_at_once
        writer.close()
