"""What a gateway adds to a token: from the decode leader's hands into the client's, beside the leader called directly.

    python bench/token_path.py --streams 1,16,64 --interval 0.01 --tokens 500

A real gateway process stands between this client and a decode leader that computes nothing: every `--interval` seconds
it hands each stream one token and notes when. Both paths are one process from another on loopback; the path through the
gateway has one hop more, the text of the token, and the gateway's own work. Paths alternate, `--rounds` times. The
router is on no token's path. Prints one JSON object for each number of streams: milliseconds from leader to client,
median and 99th percentile, and what the gateway spends of a processor on a token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing as mp
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import grpc
import psutil

from ringserve.v1 import inference_pb2, inference_pb2_grpc, rings_pb2, rings_pb2_grpc, router_pb2, router_pb2_grpc
from services.gateway.settings import GatewaySettings
from services.rpc.server import GrpcServer
from services.rpc.wire.mapping import pack_ids

TOKEN = 65
MODEL = "builtin:tiny"
START_SECONDS = 60.0
PROMPT_TOKENS = 4

Context = grpc.aio.ServicerContext[Any, Any]


class PacedLeader(rings_pb2_grpc.RingServiceServicer):
    """Hands out tokens at fixed times, and reports to `stamps` when each was handed out (time.monotonic)."""

    def __init__(self, stamps: Connection, interval: float, tokens: int) -> None:
        self._stamps = stamps
        self._interval = interval
        self._tokens = tokens

    async def StreamTurn(
        self, request: rings_pb2.StreamTurnRequest, context: Context
    ) -> AsyncIterator[rings_pb2.TurnEvent]:
        sent = []
        start = time.monotonic()
        for number in range(self._tokens):
            await asyncio.sleep(max(start + number * self._interval - time.monotonic(), 0))
            sent.append(time.monotonic())
            yield rings_pb2.TurnEvent(tokens=rings_pb2.Tokens(token_ids=pack_ids([TOKEN])))
        self._stamps.send((request.turn_id, sent))
        yield rings_pb2.TurnEvent(finished=rings_pb2.Finished(finish_reason="length"))


class OnlyRing(router_pb2_grpc.RouterServiceServicer):
    """A router that sends every turn to `decode_endpoint`; turns are called as their requests."""

    def __init__(self) -> None:
        self.decode_endpoint = ""

    async def BeginTurn(self, request: router_pb2.BeginTurnRequest, context: Context) -> router_pb2.BeginTurnResponse:
        return router_pb2.BeginTurnResponse(
            turn_id=request.request_id,
            decode_endpoint=self.decode_endpoint,
            prompt_tokens=PROMPT_TOKENS,
            plan=inference_pb2.Plan(algorithm="pass_kv", prompt_mode="new", new_tokens=PROMPT_TOKENS),
        )

    async def GetServerInfo(
        self, request: inference_pb2.GetServerInfoRequest, context: Context
    ) -> inference_pb2.GetServerInfoResponse:
        return inference_pb2.GetServerInfoResponse()


def serve_ring(pipe: Connection, interval: float, tokens: int) -> None:
    """A process: both services on one port, whose address is the first thing sent. Ends when told to, or alone."""

    async def serve() -> None:
        server, router = GrpcServer(), OnlyRing()  # type: ignore[abstract]  # no gateway asks for more
        leader = PacedLeader(pipe, interval, tokens)  # type: ignore[abstract]
        server.add("ringserve.v1.RingService", lambda to: rings_pb2_grpc.add_RingServiceServicer_to_server(leader, to))
        server.add(
            "ringserve.v1.RouterService", lambda to: router_pb2_grpc.add_RouterServiceServicer_to_server(router, to)
        )
        router.decode_endpoint = await server.start("127.0.0.1:0")
        pipe.send(router.decode_endpoint)
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(pipe.fileno(), ended.set)  # a word, or the end of the other side
        await ended.wait()
        await server.stop(1.0)

    asyncio.run(serve())


@dataclass
class Seen:
    """Seconds from leader to client of each token, by path, and what the gateway's process used meanwhile."""

    direct: list[float] = field(default_factory=list)
    through: list[float] = field(default_factory=list)
    gateway_seconds: float = 0.0

    def figures(self, streams: int) -> dict[str, float]:
        direct, through = statistics.median(self.direct), statistics.median(self.through)
        return {
            "streams": streams,
            "direct_ms": _ms(direct),
            "direct_p99_ms": _ms(_p99(self.direct)),
            "through_gateway_ms": _ms(through),
            "through_gateway_p99_ms": _ms(_p99(self.through)),
            "gateway_adds_ms": _ms(through - direct),
            "gateway_processor_ms_per_token": _ms(self.gateway_seconds / len(self.through)),
            "tokens": len(self.through),
        }


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)


def _p99(seconds: list[float]) -> float:
    return statistics.quantiles(seconds, n=100)[98]


async def read_direct(ring: rings_pb2_grpc.RingServiceAsyncStub, name: str) -> list[float]:
    times = []
    async for event in ring.StreamTurn(rings_pb2.StreamTurnRequest(turn_id=name)):
        if event.HasField("tokens"):
            times.append(time.monotonic())
    return times


async def read_through(gateway: inference_pb2_grpc.InferenceAsyncStub, name: str, tokens: int) -> list[float]:
    request = inference_pb2.GenerateRequest(
        request_id=name,
        tokenized=inference_pb2.TokenizedInput(input_ids=[TOKEN] * PROMPT_TOKENS),
        sampling_params=inference_pb2.SamplingParams(max_tokens=tokens),
    )
    times = []
    async for response in gateway.Generate(request):
        if response.HasField("chunk"):
            times.append(time.monotonic())
    return times


@asynccontextmanager
async def gateway_before(router: str) -> AsyncIterator[tuple[str, psutil.Process]]:
    """A gateway process of its own: its address, and the process."""
    settings = GatewaySettings(
        listen="127.0.0.1:0",
        http="",
        metrics="",
        router=router,
        model=MODEL,
        model_name="",
        dtype="float32",
        max_seconds=600.0,
        log_level="error",
        follow_stdin=True,
    )
    command = [sys.executable, "-m", "services.gateway.process", "--settings", settings.to_json()]
    process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_SECONDS):
            started = json.loads(await process.stdout.readline())
        yield started["gateway"], psutil.Process(process.pid)
    finally:
        process.stdin.close()  # it ends with us
        await process.wait()


async def measure(
    ring: str, gateway: str, process: psutil.Process, stamps: Connection, streams: int, options: argparse.Namespace
) -> Seen:
    seen = Seen()
    async with grpc.aio.insecure_channel(ring) as to_ring, grpc.aio.insecure_channel(gateway) as to_gateway:
        leader = rings_pb2_grpc.RingServiceStub(to_ring)
        door = inference_pb2_grpc.InferenceStub(to_gateway)
        for number in range(options.rounds + 1):  # the first warms up
            names = [f"{streams}-{number}-{stream}" for stream in range(streams)]
            direct = await asyncio.gather(*(read_direct(leader, f"direct-{name}") for name in names))
            before = sum(process.cpu_times()[:2])
            through = await asyncio.gather(*(read_through(door, name, options.tokens) for name in names))
            used = sum(process.cpu_times()[:2]) - before
            sent = dict(await asyncio.to_thread(lambda: [stamps.recv() for _ in range(2 * streams)]))
            if not number:
                continue
            seen.gateway_seconds += used
            for name, times in zip(names, direct, strict=True):
                seen.direct += [got - left for got, left in zip(times, sent[f"direct-{name}"], strict=True)]
            for name, times in zip(names, through, strict=True):
                seen.through += [got - left for got, left in zip(times, sent[name], strict=True)]
    return seen


async def run(options: argparse.Namespace) -> None:
    ours, theirs = mp.Pipe()
    # Started anew: a fork of a process that uses gRPC hangs.
    ring = mp.get_context("spawn").Process(target=serve_ring, args=(theirs, options.interval, options.tokens))
    ring.start()
    theirs.close()
    try:
        if not await asyncio.to_thread(ours.poll, START_SECONDS):
            raise TimeoutError(f"the ring did not start within {START_SECONDS:g} s")
        address = ours.recv()
        async with AsyncExitStack() as stack:
            gateway, process = await stack.enter_async_context(gateway_before(address))
            for streams in (int(each) for each in options.streams.split(",")):
                seen = await measure(address, gateway, process, ours, streams, options)
                print(json.dumps(seen.figures(streams)), flush=True)
    finally:
        ours.close()
        ring.join(START_SECONDS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--streams", default="1,16,64", help="turns that run at once")
    parser.add_argument("--interval", type=float, default=0.01, help="seconds between the tokens of a stream")
    parser.add_argument("--tokens", type=int, default=500, help="of each stream and round")
    parser.add_argument("--rounds", type=int, default=3)
    asyncio.run(run(parser.parse_args()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
