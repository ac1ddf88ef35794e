"""Page in a real browser, before a whole service in this process; and the JSON views that it reads."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
import yaml

from ringserve.cp_core.errors import Unavailable
from ringserve.services.auth.authenticator import Authenticator, TokenFile
from ringserve.services.auth.tenants import hash_token
from ringserve.services.gateway.openai.app import HttpApi
from ringserve.services.gateway.openai.models import MAX_LIMIT, ChatRequest
from ringserve.services.gateway.openai.server import HttpServer
from ringserve.services.gateway.openai.views import queue_seconds
from ringserve.services.gateway.page.page import FILES
from ringserve.services.gateway.text import TextCodec
from ringserve.views import RingInfo
from tests.rings import GPU_RATES, LLAMA_8B
from tests.services.gateway.page.browser import Browser, browser
from tests.services.gateway.test_failover import kill
from tests.services.local_gateway import CALL_SECONDS, MODEL, LocalGateway


@pytest.fixture
async def http(gateway: LocalGateway) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=gateway.url, timeout=CALL_SECONDS) as client:
        yield client


@pytest.fixture
async def page() -> AsyncIterator[Browser]:
    async with browser() as page:
        yield page


async def chat(page: Browser, words: str, tokens: int = 8) -> None:
    """Send a message, and return when its answer is whole."""
    await page.value(
        f"document.getElementById('max-tokens').value = {tokens};"
        f"document.getElementById('prompt').value = {json.dumps(words)};"
        "document.getElementById('chat').requestSubmit()"
    )
    await page.until("!document.getElementById('plan').hidden && !document.getElementById('send').disabled")


def text_of(selector: str) -> str:
    return f"document.querySelector({json.dumps(selector)}).innerText"


# --- in a browser ----------------------------------------------------------------------------------------------------


async def test_an_idle_service_is_shown_without_any_outside_resource(gateway: LocalGateway, page: Browser) -> None:
    await page.open(gateway.url)
    await page.until("document.querySelectorAll('.ring').length === 2")
    assert await page.value(text_of("#state")) == "It serves."
    assert await page.value("document.querySelectorAll('[data-role=decode] rect.free').length") == 1
    assert await page.value("document.querySelectorAll('.gap').length") == 0
    assert all(url.startswith((gateway.url, "data:,")) for url in page.requested), page.requested
    assert page.faults == []


async def test_a_chat_streams_and_its_plan_and_tokens_are_shown(gateway: LocalGateway, page: Browser) -> None:
    await page.open(gateway.url)
    await page.until("document.querySelectorAll('.ring').length === 2")
    await chat(page, "How are you? <b>not bold</b>")
    await page.until("document.querySelectorAll('#strip rect').length > 0")
    assert await page.value("document.querySelector('.message.user').innerText") == "How are you? <b>not bold</b>"
    assert await page.value("document.querySelectorAll('.message.refused, .message b').length") == 0
    assert await page.value(
        "[...document.querySelectorAll('#bars td:first-child')].slice(0, 2).map(e => e.innerText)"
    ) == [
        "predicted",
        "measured",
    ]
    assert await page.value("document.querySelectorAll('.bar')[1].querySelectorAll('i').length") >= 2
    times = await page.value("[...document.querySelectorAll('tr.taken td')].map(e => e.innerText)")
    assert times[5].endswith("s"), "the time to the first token"
    await chat(page, "And now?")
    words = await page.value(text_of("#reason"))
    assert " 0 cached" not in words, "the second turn's history has its KV"
    assert await page.value("document.querySelectorAll('.message.assistant').length") == 2
    assert page.faults == []


async def test_the_load_and_the_conversations_are_shown_and_one_is_picked(gateway: LocalGateway, page: Browser) -> None:
    await page.open(gateway.url)
    await page.until("document.querySelectorAll('.ring').length === 2")
    await chat(page, "One turn")
    await page.value("document.getElementById('new-chat').click()")
    await chat(page, "Another")
    await page.until("document.querySelectorAll('#conversations .pick').length === 2")
    await page.until("document.querySelector('#tiles .tile p').innerText === '2 requests in 10 min'")
    names = await page.value("[...document.querySelectorAll('#tiles h3')].map(e => e.innerText)")
    assert names == [
        "Requests", "Generated", "Prompts", "First token", "Between tokens", "Failed", "Turns", "KV, fullest ring"
    ]  # fmt: skip
    figures = await page.value("[...document.querySelectorAll('#tiles b')].map(e => e.innerText)")
    assert figures[3].endswith("s")
    assert figures[5] == "0"
    assert "NaN" not in str(figures)
    older = "[...document.querySelectorAll('#conversations .pick')].at(-1)"
    await page.value(f"{older}.click()")
    await page.until(f"document.getElementById('conversation-id').value === {older}.innerText")
    await page.until("document.getElementById('conversation-words').innerText.includes('after 1 turn;')")
    assert page.faults == []


async def test_the_contract_is_a_page_with_every_path_and_field_and_nothing_from_elsewhere(
    gateway: LocalGateway, http: httpx2.AsyncClient, page: Browser
) -> None:
    described = (await http.get("/openapi.json")).json()["paths"]
    await page.open(f"{gateway.url}/docs")
    await page.until("document.querySelectorAll('section').length > 0")
    titles = await page.value("[...document.querySelectorAll('section h2')].map(e => e.innerText)")
    assert titles == [f"{method.upper()} {path}" for path, methods in described.items() for method in methods]
    shown = await page.value(text_of("main"))
    for name in ChatRequest.model_fields:
        assert name in shown
    assert "undefined" not in shown
    assert all(url.startswith((gateway.url, "data:,")) for url in page.requested), page.requested
    assert page.faults == []


async def test_a_conversation_is_forked_and_deleted(gateway: LocalGateway, page: Browser) -> None:
    await page.open(gateway.url)
    await page.until("document.querySelectorAll('.ring').length === 2")
    await chat(page, "A tale of two rings")
    await page.until("document.querySelectorAll('#strip rect').length > 0")
    own = await page.value("document.getElementById('conversation-id').value")
    await page.value("document.getElementById('fork').click()")
    await page.until("document.getElementById('events').innerText.includes('begins with the tokens of')")
    fork = await page.value("document.getElementById('conversation-id').value")
    assert fork.startswith(own)
    assert fork != own
    await page.value("document.getElementById('delete').click()")
    await page.until("document.getElementById('conversation-words').innerText.endsWith('is deleted.')")
    listing = await gateway.service.router.list_conversations("", "", 10)
    assert [each.conversation_id for each in listing.conversations] == [own]
    assert page.faults == []


async def test_a_killed_rank_and_a_missing_role_are_shown(
    gateway: LocalGateway, page: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    await page.open(gateway.url)
    await page.until("document.querySelectorAll('.ring').length === 2")
    await kill(gateway.service, "decode-0")
    await page.until("document.getElementById('events').innerText.includes('ring decode-0 serves again')")

    async def lost() -> None:
        raise Unavailable("the ring is gone")

    monkeypatch.setattr(gateway.service.decode, "get_status", lost)
    await page.until("document.querySelector('[data-role=decode] .gap') !== null")
    assert await page.value(text_of("#state")) == "It does not serve: no decode ring takes turns."
    assert await page.value("document.querySelectorAll('[data-role=prefill] .gap').length") == 0
    await page.open(gateway.url)
    await page.until("document.getElementById('events').innerText.includes('ring decode-0 lost a rank')")


async def test_a_page_whose_gateway_ends_says_so(gateway: LocalGateway, page: Browser) -> None:
    server = HttpServer(HttpApi(gateway.servicer, MODEL, gateway.service.model).app)
    address = await server.start("127.0.0.1:0")
    await page.open(f"http://{address}")
    await page.until("document.querySelectorAll('.ring').length === 2")
    server.hurry()
    await server.stop(0.1)
    await page.until("document.getElementById('state').innerText.startsWith('The gateway does not answer')", 15)


@pytest.mark.parametrize("dark", [False, True])
async def test_it_fits_a_telephone_in_light_and_dark(gateway: LocalGateway, page: Browser, dark: bool) -> None:
    await page.open(gateway.url, width=360, height=740, dark=dark)
    await page.until("document.querySelectorAll('.ring').length === 2")
    await chat(page, "x" * 200)
    assert await page.value("document.documentElement.scrollWidth") <= 360
    assert await page.value("[...document.querySelectorAll('.tile')].every(e => e.scrollWidth <= e.clientWidth)")
    back, front = await page.value(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    )
    assert (sum(numbers(back)) < sum(numbers(front))) is dark
    assert page.faults == []


def numbers(colour: str) -> list[float]:
    return [float(each) for each in colour[colour.index("(") + 1 : -1].split(",")[:3]]


# --- tenants ---------------------------------------------------------------------------------------------------------


@pytest.fixture
async def shared(model_path: Path, codec: TextCodec, tmp_path: Path) -> AsyncIterator[LocalGateway]:
    """Start a gateway of an operator and of a tenant."""
    file = tmp_path / "tokens.yaml"
    tenants = [
        {"name": "ops", "operator": True, "tokens": [{"sha256": hash_token("of-ops")}]},
        {"name": "acme", "tokens": [{"sha256": hash_token("of-acme")}], "max_turns_per_minute": 3},
    ]
    file.write_text(yaml.safe_dump({"tenants": tenants}))
    async with LocalGateway(model_path, codec, Authenticator(TokenFile(file))) as gateway:
        yield gateway
        await gateway.wait_idle()
        gateway.service.check_integrity()


@pytest.fixture
async def callers(shared: LocalGateway) -> AsyncIterator[dict[str, httpx2.AsyncClient]]:
    """Open a client of each tenant, and one of a stranger."""
    async with AsyncExitStack() as stack:
        clients = {}
        for name in ("ops", "acme", ""):
            headers = {"authorization": f"Bearer of-{name}"} if name else {}
            client = httpx2.AsyncClient(base_url=shared.url, timeout=CALL_SECONDS, headers=headers)
            clients[name] = await stack.enter_async_context(client)
        yield clients


async def begin(http: httpx2.AsyncClient, conversation: str) -> None:
    body = {"model": MODEL, "prompt": "x" * 20, "max_tokens": 3, "temperature": 0, "conversation_id": conversation}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text


async def test_an_operator_sees_the_rings_and_a_tenant_whether_it_serves(
    callers: dict[str, httpx2.AsyncClient],
) -> None:
    seen = {name: await http.get("/v1/service") for name, http in callers.items()}
    assert {name: answer.status_code for name, answer in seen.items()} == {"ops": 200, "acme": 200, "": 401}
    operators, tenants = seen["ops"].json(), seen["acme"].json()
    assert tenants == {key: operators[key] for key in ("object", "model", "version", "serves", "fault")}
    assert (tenants["serves"], tenants["fault"], tenants["model"]) == (True, "", MODEL)
    assert [(ring["role"], ring["num_ranks"]) for ring in operators["rings"]] == [("prefill", 2), ("decode", 1)]
    assert {(event["kind"], event["text"], event["count"]) for event in operators["events"]} == {
        ("ring", "ring prefill-0 serves with 2 ranks", 1),
        ("ring", "ring decode-0 serves with 1 rank", 1),
    }
    for ring in operators["rings"]:
        for rank in ring["kv_usage"]:
            assert rank["free_blocks"] + rank["active_blocks"] + rank["kept_blocks"] == rank["total_blocks"] > 0
        assert isinstance(ring["capacity_tokens"], int)


async def test_a_list_has_the_callers_own_conversations_in_pages(callers: dict[str, httpx2.AsyncClient]) -> None:
    for name in ("a-1", "a-2", "b-1"):
        await begin(callers["acme"], name)
    await begin(callers["ops"], "a-3")
    first = (await callers["acme"].get("/v1/conversations", params={"limit": 2})).json()
    assert ([each["id"] for each in first["data"]], first["has_more"]) == (["a-1", "a-2"], True)
    assert first["data"][0]["ringserve"]["num_tokens"] == 23
    rest = (await callers["acme"].get("/v1/conversations", params={"after": first["next_after"]})).json()
    assert ([each["id"] for each in rest["data"]], rest["has_more"], rest["next_after"]) == (["b-1"], False, "")
    named = (await callers["acme"].get("/v1/conversations", params={"prefix": "a-"})).json()
    assert [each["id"] for each in named["data"]] == ["a-1", "a-2"]


async def test_a_fork_is_made_within_the_tenants_limits(callers: dict[str, httpx2.AsyncClient]) -> None:
    acme = callers["acme"]
    await begin(acme, "trunk")
    body = {"id": "branch", "forked_from": "trunk", "at_token": 8}
    made = await acme.post("/v1/conversations", json=body)
    assert (made.status_code, made.json()["id"], made.json()["ringserve"]["num_tokens"]) == (200, "branch", 8)
    stolen = await callers["ops"].post("/v1/conversations", json=body | {"id": "theft"})
    assert stolen.status_code == 404
    assert (await callers[""].post("/v1/conversations", content=b"not even JSON")).status_code == 401
    statuses = [(await acme.post("/v1/conversations", json=body | {"id": f"b{i}"})).status_code for i in range(3)]
    assert statuses == [200, 429, 429], "a turn and two forks are three in this minute"


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"limit": "0"}, "limit: '0' is not allowed; give 1 or more"),
        ({"limit": "9999"}, f"limit: '9999' is not allowed; give {MAX_LIMIT} or less"),
        ({"limit": "\u0665"}, "limit: '\u0665' is not allowed"),
        ({"page": "2"}, "page: there is no such field; allowed are prefix, after, limit"),
        ({"prefix": "a\nb"}, "prefix: 'a\\nb' holds characters that cannot be printed"),
    ],
)
async def test_a_list_refuses_what_it_does_not_know(
    http: httpx2.AsyncClient, query: dict[str, str], words: str
) -> None:
    answer = await http.get("/v1/conversations", params=query)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ([], "the body must be a JSON object"),
        ({}, "forked_from: "),
        ({"forked_from": "a"}, "id: "),
        ({"forked_from": "", "id": "b"}, "forked_from: '' is not allowed; name a forked"),
    ],
)
async def test_a_fork_refuses_what_it_does_not_know(http: httpx2.AsyncClient, body: object, words: str) -> None:
    answer = await http.post("/v1/conversations", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(words)


async def test_the_page_loads_nothing_from_elsewhere_and_can_be_switched_off(
    gateway: LocalGateway, http: httpx2.AsyncClient
) -> None:
    for path in FILES:
        answer = await http.get(path)
        assert answer.status_code == 200
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        # The namespace of SVG is a name, not an address that is asked.
        assert "://" not in answer.text.replace("http://www.w3.org/2000/svg", "")
    server = HttpServer(HttpApi(gateway.servicer, MODEL, gateway.service.model, has_page=False).app)
    address = await server.start("127.0.0.1:0")
    async with httpx2.AsyncClient(base_url=f"http://{address}") as without:
        assert {(await without.get(path)).status_code for path in FILES} == {404}
        assert (await without.get("/v1/service")).status_code == 200
    await server.stop(1.0)


async def test_a_service_that_cannot_be_seen_is_said_in_words(
    gateway: LocalGateway, http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost() -> None:
        raise Unavailable("the router cannot be reached")

    monkeypatch.setattr(gateway.service.router, "get_server_info", lost)
    seen = (await http.get("/v1/service")).json()
    assert (seen["serves"], seen["fault"]) == (False, "the router cannot be reached")
    assert "rings" not in seen


def test_a_queue_in_seconds_follows_from_the_rings_own_speed() -> None:
    ring = RingInfo(
        role="prefill", name="p", endpoint="", incarnation="", state="ready", num_ranks=4, waiting_work=1000.0
    )
    assert queue_seconds(ring, LLAMA_8B) is None
    measured = replace(ring, rates=GPU_RATES)
    flops = 1000 * LLAMA_8B.shape.linear_flops_per_token
    assert queue_seconds(measured, LLAMA_8B) == pytest.approx(flops / (4 * GPU_RATES.gemm_flops))
    # Two processes a rank share the products of each token.
    assert queue_seconds(replace(measured, tp=2), LLAMA_8B) == pytest.approx(flops / (8 * GPU_RATES.gemm_flops))
