"""A stream without tokens stays open while its leader lives, and ends when the leader stands still."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from ringserve.cp_core.errors import Unavailable
from ringserve.orchestration.protocol.turns import EndingEvent, TurnEvent
from ringserve.services.rpc import turn_streams
from ringserve.services.rpc.peers import GrpcPeers
from ringserve.services.rpc.server import GrpcServer
from ringserve.services.rpc.servicers import DecodeServicer
from ringserve.services.rpc.turn_streams import SILENT_TICKS, Silence
from ringserve.workers.protocol.steps import FinishReason
from tests.waiting import WAIT_SECONDS, eventually

LAST = EndingEvent(finish_reason=FinishReason.LENGTH)


class Leader:
    """Decode leader whose turn has one event, once `may_end` is set."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.is_closed = asyncio.Event()

    async def stream_turn(self, turn_id: str, after: int = 0, interval: float = 0.0) -> AsyncGenerator[TurnEvent, None]:
        try:
            await self.may_end.wait()
            yield LAST
        finally:
            self.is_closed.set()


class CountedSilence(Silence):
    """Silence whose time the test lets pass, and which tells the test of every message."""

    def __init__(self, call: Any, seconds: float) -> None:
        super().__init__(call, seconds)
        self.heartbeat = asyncio.Event()

    def note_event(self) -> None:
        super().note_event()
        self.heartbeat.set()


@pytest.fixture
async def peers() -> AsyncIterator[GrpcPeers]:
    made = GrpcPeers(lost_seconds=WAIT_SECONDS)
    yield made
    await made.close()


async def serve(leader: Leader, heartbeat: float) -> tuple[GrpcServer, str]:
    server, port = GrpcServer(), leader
    DecodeServicer(port, heartbeat).register(server)  # type: ignore[arg-type]
    return server, await server.start("127.0.0.1:0")


async def test_heartbeats_keep_a_stream_without_tokens_open(peers: GrpcPeers, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[CountedSilence] = []

    def watch(call: Any, seconds: float) -> CountedSilence:
        made.append(CountedSilence(call, seconds))
        return made[0]

    monkeypatch.setattr(turn_streams, "Silence", watch)
    leader = Leader()
    server, endpoint = await serve(leader, heartbeat=0.05)
    async with asyncio.timeout(WAIT_SECONDS), aclosing(peers.leader("decode", endpoint).stream_turn("t")) as events:
        event = asyncio.ensure_future(anext(events))
        await eventually(lambda: bool(made))
        for _ in range(3):
            for _ in range(SILENT_TICKS):  # one more, and the leader would be lost
                made[0]._tick()
            made[0].heartbeat.clear()
            await made[0].heartbeat.wait()
        assert not event.done()
        leader.may_end.set()
        assert await event == LAST
    await server.stop(0)


async def test_a_stream_without_a_sign_of_life_is_lost_and_names_its_leader() -> None:
    leader, peers = Leader(), GrpcPeers(lost_seconds=1.0)
    server, endpoint = await serve(leader, heartbeat=3600.0)
    async with asyncio.timeout(WAIT_SECONDS):
        with pytest.raises(Unavailable, match=f"decode leader at {endpoint} sent no heartbeat for 1 s"):
            await anext(peers.leader("decode", endpoint).stream_turn("t"))
        await leader.is_closed.wait()
    await peers.close()
    await server.stop(0)


async def test_a_reader_that_is_cancelled_is_told_so_and_not_that_the_leader_is_lost(peers: GrpcPeers) -> None:
    leader = Leader()
    server, endpoint = await serve(leader, heartbeat=0.05)
    reading = asyncio.ensure_future(anext(peers.leader("decode", endpoint).stream_turn("t")))
    await asyncio.wait([reading], timeout=0.2)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    async with asyncio.timeout(WAIT_SECONDS):
        await leader.is_closed.wait()
    await server.stop(0)


SERVER = """
import asyncio
from ringserve.services.rpc.server import GrpcServer
async def main():
    server = GrpcServer()
    print(await server.start("127.0.0.1:0"), flush=True)
    await server.wait()
asyncio.run(main())
"""


async def test_a_call_to_a_process_that_stands_still_fails_before_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ringserve.services.rpc.peers.CONTROL_SECONDS", WAIT_SECONDS)
    peers = GrpcPeers(lost_seconds=1.0)
    process = await asyncio.to_thread(
        subprocess.Popen, [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        endpoint = (await asyncio.to_thread(process.stdout.readline)).strip()
        leader: Any = peers.leader("decode", endpoint)
        with pytest.raises(Unavailable, match="unimplemented"):
            await leader.get_status()
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(Unavailable, match="cannot be reached"):  # at its deadline it would not answer in time
            await leader.get_status()
    finally:
        process.kill()
        await asyncio.to_thread(process.communicate)
        await peers.close()
