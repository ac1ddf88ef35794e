"""Paths beside OpenAI's own: tokens, version, metrics, the description of all, and calls from a browser."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import pytest

from ringserve.cp_core.errors import ConfigError
from ringserve.services.config import config_from
from ringserve.services.config.sections import HttpConfig
from ringserve.services.gateway.text import TextCodec
from ringserve.services.telemetry.metrics.registry import package_version
from tests.services.auth.test_isolation import guarded
from tests.services.local_gateway import CALL_SECONDS, MODEL, LocalGateway
from tests.workers.models import Oracle

__all__ = ["guarded"]

CHAT = [{"role": "user", "content": "Hello"}]


@pytest.fixture
async def http(gateway: LocalGateway) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=gateway.url, timeout=CALL_SECONDS) as client:
        yield client


def said(answer: httpx2.Response, status: int = 400) -> str:
    assert answer.status_code == status, answer.text
    sentence: str = answer.json()["error"]["message"]
    return sentence


async def test_the_tokens_of_a_text_and_of_a_chat_are_those_that_a_turn_has(
    http: httpx2.AsyncClient, codec: TextCodec
) -> None:
    text = (await http.post("/tokenize", json={"prompt": "Once upon", "return_token_strs": True})).json()
    ids = codec.encode("Once upon").tolist()
    assert text == {"count": len(ids), "max_model_len": 8192, "tokens": ids, "token_strs": codec.names(ids)}
    assert len(text["token_strs"]) == len(ids)
    chat = (await http.post("/tokenize", json={"model": MODEL, "messages": CHAT})).json()
    assert chat["tokens"] == codec.encode_chat([("user", "Hello")]).tolist()
    assert chat["token_strs"] is None
    answer = await http.post("/v1/chat/completions", json={"model": MODEL, "messages": CHAT, "max_tokens": 1})
    assert answer.json()["usage"]["prompt_tokens"] == chat["count"]
    unopened = await http.post("/tokenize", json={"messages": CHAT, "add_generation_prompt": False})
    assert 0 < unopened.json()["count"] < chat["count"]
    assert chat["tokens"][: unopened.json()["count"]] == unopened.json()["tokens"]


async def test_the_text_of_tokens_is_the_text_they_came_of(http: httpx2.AsyncClient) -> None:
    for text in ("Once upon a time", "ä€ 漢", ""):
        tokens = (await http.post("/tokenize", json={"prompt": text, "add_special_tokens": False})).json()["tokens"]
        assert (await http.post("/detokenize", json={"tokens": tokens})).json() == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        ("/tokenize", {}, "prompt: null is not allowed; give a string"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, "prompt: not allowed with messages; leave one out"),
        ("/tokenize", {"messages": []}, "messages: none given; at least 1 is needed"),
        ("/tokenize", {"messages": CHAT, "add_special_tokens": True}, "add_special_tokens: true is not allowed"),
        ("/tokenize", {"prompt": "x" * 200_000}, "prompt: 200000 characters are too many"),
        ("/detokenize", {"tokens": [1, 300]}, "tokens[1]: token 300 is outside the vocabulary"),
    ],
)
async def test_what_has_no_tokens_is_refused_by_name(
    http: httpx2.AsyncClient, path: str, body: dict[str, Any], sentence: str
) -> None:
    assert sentence in said(await http.post(path, json=body))


async def test_tokens_of_another_model_are_not_found(http: httpx2.AsyncClient) -> None:
    assert "there is no model 'gpt'" in said(await http.post("/tokenize", json={"model": "gpt", "prompt": "a"}), 404)


async def test_version_and_metrics_are_served_beside_the_api(http: httpx2.AsyncClient) -> None:
    assert (await http.get("/version")).json() == {"version": package_version()}
    await http.post("/v1/completions", json={"model": MODEL, "prompt": "Once", "max_tokens": 2})
    metrics = await http.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    assert 'ringserve_requests_total{outcome="length"} 1.0' in metrics.text


async def test_strangers_see_no_path_and_tenants_no_metrics(guarded: LocalGateway) -> None:
    async with httpx2.AsyncClient(base_url=guarded.url, timeout=CALL_SECONDS) as http:
        operator = {"authorization": "Bearer o-token"}
        paths = (await http.get("/openapi.json", headers=operator)).json()["paths"]
        assert {"/tokenize", "/metrics", "/v1/completions"} < paths.keys()
        for path, method in [(path, method) for path, methods in paths.items() for method in methods]:
            answer = await http.request(method.upper(), path)
            assert answer.status_code == (200 if path in ("/health", "/ping") else 401), (path, method)
        assert (await http.get("/openapi.json")).status_code == 401
        assert (await http.get("/metrics", headers={"authorization": "Bearer a-token"})).status_code == 403
        assert (await http.get("/metrics", headers=operator)).status_code == 200


@pytest.fixture
async def thinking(model_path: Path, tmp_path: Path) -> AsyncIterator[httpx2.AsyncClient]:
    """Yield a client of a model whose template has a variable."""
    path = tmp_path / "model"
    shutil.copytree(model_path, path)
    (path / "chat_template.jinja").write_text(
        "{% for each in messages %}{{ each.content }}{% endfor %}{% if thinks %} Think {{ steps }} steps.{% endif %}"
    )
    async with LocalGateway(path, TextCodec(path)) as gateway:
        async with httpx2.AsyncClient(base_url=gateway.url, timeout=CALL_SECONDS) as client:
            yield client
        await gateway.wait_idle()


async def test_values_for_the_template_change_the_prompt_of_a_chat_and_its_tokens(
    thinking: httpx2.AsyncClient, oracle: Oracle
) -> None:
    chat: dict[str, Any] = {"model": MODEL, "messages": CHAT}
    values = {"chat_template_kwargs": {"thinks": True, "steps": 3}}
    for more, text in (({}, "Hello"), (values, "Hello Think 3 steps.")):
        ids = list(text.encode())
        assert (await thinking.post("/tokenize", json=chat | more)).json()["tokens"] == ids
        asked = chat | more | {"max_tokens": 4, "temperature": 0, "conversation_id": "c"}
        answer = (await thinking.post("/v1/chat/completions", json=asked)).json()
        assert answer["ringserve"]["token_ids"] == oracle.greedy(ids, 4)
        assert answer["ringserve"]["plan"]["prompt_mode"] == "whole_history" or not more


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "messages", "tools"])
async def test_values_that_are_no_variables_of_the_template_are_refused(
    thinking: httpx2.AsyncClient, name: str
) -> None:
    chat = {"model": MODEL, "messages": CHAT, "chat_template_kwargs": {name: "{{ 7 * 7 }}"}}
    for path in ("/tokenize", "/v1/chat/completions"):
        refused = await thinking.post(path, json=chat)
        assert said(refused) == f"chat_template_kwargs: '{name}' is not allowed; give variables of the model's template"


async def test_an_answer_goes_on_in_the_assistants_last_message(
    http: httpx2.AsyncClient, gateway: LocalGateway, oracle: Oracle
) -> None:
    messages = [*CHAT, {"role": "assistant", "content": "I am"}]
    ids = gateway.codec.encode("<|user|>Hello<|end|><|assistant|>I am", adds_special=False).tolist()
    chat = {"model": MODEL, "messages": messages, "continue_final_message": True}
    assert (await http.post("/tokenize", json=chat)).json()["tokens"] == ids
    answer = (await http.post("/v1/chat/completions", json=chat | {"max_tokens": 4, "temperature": 0})).json()
    assert answer["ringserve"]["token_ids"] == oracle.greedy(ids, 4)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "continue_final_message: only allowed if the last message is the assistant's"),
        ({"add_generation_prompt": True}, "add_generation_prompt: true is not allowed with continue_final_message"),
    ],
)
async def test_an_answer_goes_on_in_no_other_message(
    http: httpx2.AsyncClient, fields: dict[str, Any], words: str
) -> None:
    chat = {"model": MODEL, "messages": CHAT, "continue_final_message": True}
    for path in ("/tokenize", "/v1/chat/completions"):
        assert said(await http.post(path, json=chat | fields)).startswith(words)


async def test_the_tokenizer_is_described(http: httpx2.AsyncClient, codec: TextCodec) -> None:
    described = (await http.get("/tokenizer_info")).json()
    assert described["chat_template"] == codec.chat_template(())
    assert described["eos_token"] == "<|eos|>"


# --- the description -------------------------------------------------------------------------------------------------


async def test_the_description_has_every_path_and_no_other(http: httpx2.AsyncClient) -> None:
    described = (await http.get("/openapi.json")).json()
    assert (described["openapi"], described["info"]["version"]) == ("3.1.0", package_version())
    for path, methods in described["paths"].items():
        for method in ("get", "post", "delete", "put"):
            answer = await http.request(method.upper(), path.replace("{name}", "nothing"))
            assert (answer.status_code == 405) == (method not in methods), (path, method)
            if method in methods and answer.status_code >= 400:
                told = methods[method]["responses"]["default"]["content"]["application/json"]["schema"]
                jsonschema.validate(answer.json(), described | told)
    schema = described["paths"]["/tokenize"]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    jsonschema.validate((await http.post("/tokenize", json={"prompt": "a"})).json(), described | schema)


# --- settings --------------------------------------------------------------------------------------------------------


async def test_unknown_fields_are_ignored_and_each_is_logged_once(
    model_path: Path, codec: TextCodec, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    body: dict[str, Any] = {"model": MODEL, "prompt": "x", "max_tokens": 1, "magic": 1, "a\nb": 2, "stream": True}
    body["stream_options"] = {"sorcery": True}
    async with (
        LocalGateway(model_path, codec) as gateway,
        httpx2.AsyncClient(base_url=gateway.url, timeout=CALL_SECONDS) as http,
    ):
        answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 200
        assert answer.text.endswith("data: [DONE]\n\n")
        line = "requests have fields that are not served and are ignored: 'magic', 'a\\nb', 'stream_options.sorcery'"
        assert line in caplog.messages
        assert (await http.post("/tokenize", json={"prompt": "x", "magic": 1})).status_code == 200
        refused = await http.post("/v1/completions", json=body | {"best_of": 3})
        assert said(refused) == "best_of: 3 is not allowed; give 1"
        assert caplog.messages.count(line) == 1
        await gateway.wait_idle()
    async with (
        LocalGateway(model_path, codec, http=HttpConfig(unknown_fields="refuse")) as strict,
        httpx2.AsyncClient(base_url=strict.url, timeout=CALL_SECONDS) as http,
    ):
        refused = await http.post("/v1/completions", json={"model": MODEL, "prompt": "x", "magic": 1})
        assert said(refused) == "magic: there is no such field; leave it out"
        await strict.wait_idle()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * 9000}]}, "messages"),
        ("completions", {"prompt": "x" * 9000}, "prompt"),
        ("completions", {"prompt": "x" * 4_000_000}, "prompt"),
        ("responses", {"input": "x" * 9000}, "input"),
    ],
)
async def test_a_prompt_that_is_too_long_is_told_in_the_words_on_which_agents_compact(
    path: str, body: dict[str, Any], param: str, http: httpx2.AsyncClient
) -> None:
    answer = await http.post(f"/v1/{path}", json={"model": MODEL} | body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert re.search(r"this model's maximum context length is \d+ tokens", error["message"])


async def test_the_first_event_of_a_stream_comes_with_the_first_token(http: httpx2.AsyncClient) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 3, "ignore_eos": True, "stream": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = await http.post("/v1/completions", json=body | {"stream_options": options, "return_token_ids": True})
    assert answer.text.isascii()
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert "plan" in events[0]["ringserve"]
    pieces = [event for event in events if event["choices"] and "token_ids" in event["choices"][0]]
    ids = [token for event in pieces for token in event["choices"][0]["token_ids"]]
    assert len(ids) == 3
    assert pieces[-1]["usage"]["completion_tokens"] == 3
    whole = (await http.post("/v1/completions", json=body | {"stream": False, "return_token_ids": True})).json()
    assert len(whole["choices"][0]["token_ids"]) == 3


async def test_only_pages_of_the_configured_origins_may_call(
    http: httpx2.AsyncClient, model_path: Path, codec: TextCodec
) -> None:
    ours, other = "https://chat.example.org", "https://elsewhere.example.org"
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    async with (
        LocalGateway(model_path, codec, http=HttpConfig(origins=f"{ours} http://localhost:3000")) as gateway,
        httpx2.AsyncClient(base_url=gateway.url, timeout=CALL_SECONDS) as shared,
    ):
        for origin, allowed in ((ours, True), (other, False)):
            preflight = await shared.options("/v1/chat/completions", headers=asked | {"origin": origin})
            assert (preflight.status_code == 200) == allowed
            refused = await shared.post("/v1/completions", json={}, headers={"origin": origin})
            assert said(refused)
            assert refused.headers.get("access-control-allow-origin") == (origin if allowed else None)
    unset = await http.options("/v1/chat/completions", headers=asked | {"origin": ours})
    assert (unset.status_code, "access-control-allow-origin" in unset.headers) == (405, False)


EVIL = {"origin": "http://evil.example", "sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
PAGE = {"origin": "http://localhost:3000", "sec-fetch-site": "same-site", "sec-fetch-mode": "cors"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 403),
        ({"host": "evil.example:8000"}, 403),
        ({"host": "127.0.0.1.evil.example"}, 403),
        (EVIL, 403),
        (EVIL | {"origin": "null"}, 403),
        (EVIL | {"content-type": "text/plain"}, 403),
        (PAGE | {"content-type": "text/plain"}, 415),
        (PAGE | {"content-type": "application/x-www-form-urlencoded"}, 415),
        (PAGE, 200),
        ({"host": "localhost"}, 200),
        ({"host": "LOCALHOST.:8000"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"host": "192.0.2.7:8000"}, 200),
        ({"host": "ringserve-gateway:8000"}, 200),
        ({"host": "ringserve.prod.svc.cluster.local"}, 200),
        ({"content-type": "application/x-www-form-urlencoded"}, 200),  # curl -d
    ],
)
async def test_a_page_of_another_site_cannot_call_a_gateway_without_tokens(
    headers: dict[str, str], status: int, http: httpx2.AsyncClient
) -> None:
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1})
    answer = await http.post("/v1/completions", content=body, headers={"content-type": "application/json"} | headers)
    assert answer.status_code == status, answer.text
    if status != 200:
        assert said(answer, status)


async def test_a_link_leads_to_the_page_and_a_foreign_name_to_nothing(http: httpx2.AsyncClient) -> None:
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert (await http.get("/", headers=link)).status_code == 200
    for path in ("/", "/v1/models", "/v1/service", "/metrics", "/openapi.json"):
        refused = await http.get(path, headers={"host": "evil.example"})
        assert "Host: 'evil.example' is not a name of this gateway" in said(refused, 403)


async def test_tokens_or_configuration_open_a_gateway_to_other_names_and_origins(
    model_path: Path, codec: TextCodec
) -> None:
    ours = HttpConfig(origins="https://chat.example.org", hosts="Chat.example.org")
    async with (
        LocalGateway(model_path, codec, http=ours) as gateway,
        httpx2.AsyncClient(base_url=gateway.url, timeout=CALL_SECONDS) as shared,
    ):
        known = {"host": "chat.EXAMPLE.org", "origin": "https://chat.example.org", "sec-fetch-site": "cross-site"}
        assert (await shared.get("/v1/models", headers=known)).status_code == 200
        assert (await shared.get("/v1/models", headers={"host": "example.org"})).status_code == 403


@pytest.mark.parametrize("origin", ["example.org", "https://", "https://example.org/", "a, b"])
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"http\.origins: .* is not allowed; give SCHEME://HOST"):
        config_from({"http": {"origins": f"* {origin}"}})
