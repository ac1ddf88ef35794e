"""The bench beside peers: its client's figures of a real gateway, and servers that do not answer."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from transformers import AutoTokenizer

from bench.service import peers
from bench.service.peers import Caller, Server
from ringserve.cp_core.errors import ConfigError, Unavailable
from ringserve.services.gateway.text import TextCodec
from tests.services.local_gateway import MODEL, LocalGateway
from tests.workers.models import add_text, save_model


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_text(save_model("llama_gqa", tmp_path_factory.mktemp("peers")))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"LENGTHS": (40, 60, 80), "ANSWER": 6, "SHORT": 30, "CLIENTS": 3, "CALLS_OF_CLIENT": 2}
    for name, value in (sizes | {"STREAM_ANSWER": 40, "ASIDE": 20}).items():
        monkeypatch.setattr(peers, name, value)


async def test_one_client_takes_every_figure_of_a_server(path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    async with LocalGateway(path, TextCodec(path)) as gateway:
        caller = Caller(gateway.url, MODEL, tokenizer, seed=0)
        figures = [each async for each in peers.measure(caller)]
        await caller.aclose()
        await gateway.wait_idle()
    names = [name for name, _ in figures]
    assert names.count("TTFT 40, s") == 3
    assert {
        "TTFT 80, s",
        "between tokens after 60, ms",
        "second turn at 80, TTFT s",
        "between tokens of an edit, ms",
        "3 clients, tokens/s",
        "3 clients, worst TTFT s",
        "between tokens, drawn, ms",
        "3 clients, drawn, tokens/s",
        "beside a long prompt: longest gap of a stream, s",
        "beside a long prompt: worst TTFT of short ones, s",
        "beside streams: TTFT 80, s",
    } <= set(names)
    assert all(value >= 0.0 for _, value in figures)


async def test_a_prompt_has_the_length_that_was_asked_for_and_is_new(path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    caller = Caller("http://127.0.0.1:9", MODEL, tokenizer, seed=0)
    texts = [caller.document(50) for _ in range(2)]
    await caller.aclose()
    assert len({text[:20] for text in texts}) == 2
    assert all(len(tokenizer(text, add_special_tokens=False)["input_ids"]) == 50 for text in texts)


@pytest.mark.parametrize("then", ["pass", "signal.pause()"])
def test_a_server_that_does_not_answer_is_told_with_its_log(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """Its time is over when it has written something, however long that takes."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    passed = peers.START_SECONDS + 1.0
    clock = SimpleNamespace(perf_counter=lambda: passed * any(log.read_text() for log in tmp_path.glob("peer-*.log")))
    monkeypatch.setattr(peers, "time", clock)
    code = f"import signal; print('no room', flush=True); {then}"
    server = Server(name="broken", command=[sys.executable, "-c", code])
    with pytest.raises(Unavailable, match=r"its log is|the server's log is") as told:
        asyncio.run(peers._one_round(server, path, "float32", 0, peers.PARTS))
    log = Path(str(told.value).rpartition(" ")[2])
    assert log.read_text() == "no room\n"


ECHO = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def _answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self._answer(b'{"data": [{"id": "m"}]}')

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not asked.get("stream"):
            return self._answer(b"{}")
        events = [{"choices": [{"text": "a"}]}, {"choices": [], "usage": {"completion_tokens": 6}}]
        self._answer(b"".join(b"data: %s\\n\\n" % json.dumps(each).encode() for each in events))

    def log_message(self, *words):
        pass

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


async def test_side_by_side_each_figure_of_all_comes_before_the_next_and_the_others_stand_still(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that does not start is left out; one that may not pause runs on."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where the log of the server that fails stays
    command = [sys.executable, "-c", ECHO.replace("{", "{{").replace("}", "}}"), "{port}"]
    servers = [Server(name="one", command=command), Server(name="two", command=command, pauses=False)]
    broken = Server(name="broken", command=[sys.executable, "-c", "pass"])
    living = dict[str, peers.Living]()
    call = peers.called

    @asynccontextmanager
    async def called(server: Server, *others: Any) -> AsyncIterator[peers.Living]:
        async with call(server, *others) as each:
            living[server.name] = each
            yield each

    monkeypatch.setattr(peers, "called", called)
    found = list[tuple[str, str]]()
    async for name, what, value in peers.measure_in_turn([*servers, broken], path, "float32", 2, ["lone"]):
        assert value >= 0.0
        found.append((name, what))
        if len(found) <= 2 * 2 * 12:  # figures of requests, twice 12 of each server
            if name == "two":  # a process stands still when all its threads have seen the signal
                await asyncio.to_thread(os.waitid, os.P_PID, living["one"].process.pid, os.WSTOPPED | os.WNOWAIT)
            assert living[name].process.status() != psutil.STATUS_STOPPED
            assert living["two"].process.status() != psutil.STATUS_STOPPED
    names = [name for name, _ in found[:48]]
    assert names == ["one", "two"] * 24
    assert [what for _, what in found[:48:2]] == [what for _, what in found[1:48:2]]
    assert sorted(what for name, what in found[48:] if name == "one") == [
        "idle memory, GB",
        "memory afterwards, GB",
        "start to first answer, s",
    ]


FLAGS = """--config '{"k":1}'"""


def test_the_servers_are_those_that_the_options_name() -> None:
    asked = argparse.Namespace(
        form=["one=decode.cp=1,prefill.cp=2"], vllm="env A=1 vllm", llama="", gguf="", vllm_flags=FLAGS
    )
    ours, vllm = peers.servers_of(asked)
    assert ours.command[-4:] == ["--set", "decode.cp=1", "--set", "prefill.cp=2"]
    assert vllm.command[:4] == ["env", "A=1", "vllm", "serve"]
    assert [part.format(model="m", port=1, dtype="d") for part in vllm.command[-2:]] == ["--config", '{"k":1}']
    with pytest.raises(ConfigError, match="--llama needs --gguf"):
        peers.servers_of(argparse.Namespace(form=None, vllm="", llama="llama-server", gguf=""))
