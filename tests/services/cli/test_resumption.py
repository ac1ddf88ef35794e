"""Commands whose gateway dies in the middle of an answer: they go on at the next one, and print what was asked for."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ringserve.client import Client, Piece, Sampling
from ringserve.client.sync_client import AnswerStream
from ringserve.services.cli.chat import Chat
from ringserve.services.cli.main import main
from ringserve.services.cli.options import AT_ONCE
from tests.proto.client.test_resumed_turns import PROMPT, Gateways, gateways
from tests.services.local_gateway import codec, model_path
from tests.waiting import WAIT_SECONDS

__all__ = ["codec", "gateways", "model_path"]
LONG = Sampling(max_tokens=60, ignore_eos=True)


@pytest.fixture
async def killed(gateways: Gateways, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Kill the first gateway after the first piece of an answer, and note it."""
    monkeypatch.setenv("RINGSERVE_STATE", str(tmp_path))
    loop, follow, deaths = asyncio.get_running_loop(), AnswerStream.__next__, list[int]()

    def followed(self: AnswerStream) -> Piece:
        piece = follow(self)
        if not deaths:
            deaths.append(1)
            asyncio.run_coroutine_threadsafe(gateways.kill(), loop).result(WAIT_SECONDS)
        return piece

    monkeypatch.setattr(AnswerStream, "__next__", followed)
    return deaths


async def test_generate_goes_on_at_the_next_gateway(
    gateways: Gateways, killed: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> str:
        with Client(gateways.target) as client:
            return client.ask(PROMPT, sampling=LONG).text

    wanted = await asyncio.to_thread(run)
    words = ["generate", "--target", gateways.both, "--prompt", PROMPT, "--max-tokens", "60", "--ignore-eos"]
    assert await asyncio.to_thread(main, words) == 0
    shown = capsys.readouterr()
    assert killed
    assert shown.out.removesuffix("\n") == wanted
    assert "\nlost gateway  after " in shown.err


async def test_a_chat_goes_on_at_the_next_gateway(gateways: Gateways, killed: list[int]) -> None:
    def run() -> str:
        with Client(gateways.both, retry=AT_ONCE) as client:
            chat = Chat(client, "", LONG)
            chat.take("hello")
            chat.end()
            return chat.messages[-1].content

    def directly() -> str:
        with Client(gateways.target) as client:
            return client.ask([{"role": "user", "content": "hello"}], sampling=LONG).text

    assert await asyncio.to_thread(run) == await asyncio.to_thread(directly)
    assert killed


async def test_a_gateway_that_is_not_there_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert await asyncio.to_thread(main, ["generate", "--target", "127.0.0.1:1", "--prompt", "x"]) == 1
    assert capsys.readouterr().err == "ringserve: the gateway at 127.0.0.1:1 cannot be reached\n"
