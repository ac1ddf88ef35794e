"""Benchmark of a gateway's process: tokens a second on one core, with a router and decode rings that compute nothing.

    clients (this process)  <── responses ──  gateway (a process)  <── events ──  router and rings (a process)

The gateway bench calls `measure_gateway`, which starts and ends the two other processes. Every ring makes a token for
each of its turns at the same moment, as a batch does.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import grpc
import psutil

from ringserve.cp_core.errors import NotFound, RingserveError, Unavailable
from ringserve.orchestration.protocol.plans import PromptMode, TurnPlan
from ringserve.orchestration.protocol.turns import (
    BegunTurn,
    FinishedEvent,
    PrefillReport,
    TokensEvent,
    TurnEvent,
    TurnRequest,
)
from ringserve.services.gateway.settings import GatewaySettings
from ringserve.services.rpc.server import GrpcServer
from ringserve.services.rpc.servicers import DecodeServicer, RouterServicer
from ringserve.services.telemetry.metrics.router import RouterMetrics, RouterView
from ringserve.v1 import inference_pb2, inference_pb2_grpc
from ringserve.workers.model.builtin import resolve_model_path
from ringserve.workers.protocol.steps import Algorithm, FinishReason

if TYPE_CHECKING:
    from ringserve.services.cluster.gateway import GatewayKeeper

START_SECONDS = 120.0
TOKEN = 65
"""Token that every answer repeats: a letter to byte-level tokenizers."""
PROMPT = (72, 105)


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayLoad:
    """Load of the gateway for `seconds`: `streams` answers at a time from `rings` rings, each `rate` tokens/s."""

    streams: int = 256
    rings: int = 4
    rate: float = 20.0
    seconds: float = 10.0
    model: str = "builtin:tiny"

    @property
    def num_tokens(self) -> int:
        """Tokens of each answer, which runs longer than the measurement."""
        return round(self.rate * (self.seconds + START_SECONDS))


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayReport:
    """Figures of the `seconds` in which all streams ran.

    `tokens` reached the clients in `messages`, while the gateway used `processor_seconds`. `core_rate` is the tokens a
    second that one core would pass on at that cost.
    """

    streams: int
    seconds: float
    tokens: int
    messages: int
    processor_seconds: float

    @property
    def rate(self) -> float:
        """Tokens a second that reached the clients."""
        return self.tokens / self.seconds

    @property
    def core_rate(self) -> float:
        return self.tokens / self.processor_seconds

    @property
    def microseconds(self) -> float:
        """Processor time of one token."""
        return 1e6 * self.processor_seconds / self.tokens


class SteppingRing:
    """Decode leader whose turns get a token after each step, until they have `num_tokens`."""

    def __init__(self, step_seconds: float, num_tokens: int) -> None:
        self._step_seconds = step_seconds
        self._num_tokens = num_tokens
        self._stepped = asyncio.Event()
        self._num_steps = 0

    async def run(self) -> None:
        """Step for ever."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due += self._step_seconds
            await asyncio.sleep(due - loop.time())
            self._num_steps += 1
            stepped, self._stepped = self._stepped, asyncio.Event()
            stepped.set()

    async def stream_turn(self, turn_id: str, after: int = 0, interval: float = 0.0) -> AsyncGenerator[TurnEvent, None]:
        yield PrefillReport()
        began, told = self._num_steps, after
        while told < self._num_tokens:
            made = min(self._num_tokens, self._num_steps - began)
            if made > told:
                yield TokensEvent(token_ids=(TOKEN,) * (made - told))
                told = made
                await asyncio.sleep(interval)
            else:
                await self._stepped.wait()
        yield FinishedEvent(
            finish_reason=FinishReason.LENGTH, migrated_bytes=0, migration_seconds=0.0, handoff_seconds=0.0
        )

    async def finish_turn(self, turn_id: str, num_tokens: int) -> None:
        raise NotFound("answers of the bench end by their length")

    async def abort_turn(self, turn_id: str, error: RingserveError) -> None:
        """Ignore the request: streams end with their reader."""


class InstantRouter:
    """Router that sends each turn to the next ring."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        self._endpoints = itertools.cycle(endpoints)
        self._numbers = itertools.count()

    async def begin_turn(self, request: TurnRequest) -> BegunTurn:
        plan = TurnPlan(
            algorithm=Algorithm.PASS_KV,
            reason="of a benchmark",
            new_tokens=len(request.token_ids),
            cached_tokens=0,
            prefill_ring="prefill-0",
            decode_ring="decode-0",
            prefill_ranks=1,
            decode_ranks=1,
            cached_sources=(),
            chunks=(),
            predicted_prefill_seconds=0.0,
            alternatives=(),
            prompt_mode=PromptMode.NEW,
        )
        return BegunTurn(
            turn_id=f"turn-{next(self._numbers)}",
            decode_endpoint=next(self._endpoints),
            prompt_tokens=len(request.token_ids),
            plan=plan,
        )

    async def abort_requests(self, request_ids: Sequence[str], reader: str = "") -> tuple[list[str], list[str]]:
        return list(request_ids), []

    async def find_fault(self) -> str:
        return ""


async def _serve_rings(load: GatewayLoad, pipe: Connection) -> None:
    """Serve router and rings, send the router's address, and return when the parent's end of the pipe closes."""
    steps, servers, endpoints = [], [], []
    for _ in range(load.rings):
        ring, server = SteppingRing(1.0 / load.rate, load.num_tokens), GrpcServer()
        DecodeServicer(ring).register(server)  # type: ignore[arg-type]
        servers.append(server)
        endpoints.append(await server.start("127.0.0.1:0"))
        steps.append(asyncio.create_task(ring.run()))
    metrics = RouterMetrics("auto", lambda: RouterView(conversations=0, running_turns=0), asyncio.get_running_loop())
    router = GrpcServer()
    RouterServicer(InstantRouter(endpoints), metrics).register(router)  # type: ignore[arg-type]
    pipe.send(await router.start("127.0.0.1:0"))
    await asyncio.to_thread(pipe.poll, None)


def serve_rings(load: GatewayLoad, pipe: Connection) -> None:
    """Run the process of router and rings."""
    asyncio.run(_serve_rings(load, pipe))


class _Clients:
    """Clients that read all streams, and count tokens for the load's `seconds` once all streams have begun."""

    def __init__(self, load: GatewayLoad, pid: int) -> None:
        self._load = load
        self._gateway = psutil.Process(pid)
        self._all_run = asyncio.Event()
        self._num_running = self._tokens = self._messages = 0

    async def run(self, address: str, tell: Callable[[str], None]) -> GatewayReport:
        """Run the load. Raises Unavailable if a stream ends."""
        async with grpc.aio.insecure_channel(address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            reading = [asyncio.create_task(self._read(stub, number, tell)) for number in range(self._load.streams)]
            try:
                return await self._measure(reading)
            finally:
                for task in reading:
                    task.cancel()
                await asyncio.gather(*reading, return_exceptions=True)

    async def _measure(self, reading: Sequence[asyncio.Task[None]]) -> GatewayReport:
        starting = asyncio.create_task(self._all_run.wait())
        await asyncio.wait([*reading, starting], timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        starting.cancel()
        if self._all_run.is_set():
            self._tokens = self._messages = 0
            began, before = time.perf_counter(), self._used()
            await asyncio.wait(reading, timeout=self._load.seconds, return_when=asyncio.FIRST_COMPLETED)
            ended, after = time.perf_counter(), self._used()
            if not any(task.done() for task in reading) and self._tokens and after > before:
                return GatewayReport(
                    streams=self._load.streams,
                    seconds=ended - began,
                    tokens=self._tokens,
                    messages=self._messages,
                    processor_seconds=after - before,
                )
        error = next((task.exception() for task in reading if task.done()), None)
        raise Unavailable(f"the streams of the benchmark did not run at the same time: {error or 'they are too many'}")

    def _used(self) -> float:
        used = self._gateway.cpu_times()
        return used.user + used.system

    async def _read(self, stub: Any, number: int, tell: Callable[[str], None]) -> None:
        request = inference_pb2.GenerateRequest(
            request_id=f"bench-{number}",
            tokenized=inference_pb2.TokenizedInput(input_ids=PROMPT),
            sampling_params=inference_pb2.SamplingParams(max_tokens=self._load.num_tokens, ignore_eos=True),
        )
        has_begun = False
        async for response in stub.Generate(request):
            if response.HasField("chunk"):
                self._tokens += len(response.chunk.token_ids)
                self._messages += 1
                if not has_begun:
                    has_begun = True
                    self._num_running += 1
                    tell(f"{self._load.streams} streams")
                    if self._num_running == self._load.streams:
                        self._all_run.set()


def measure_gateway(load: GatewayLoad, tell: Callable[[str], None]) -> GatewayReport:
    """Measure a gateway's process under the load. Raises ConfigError, Unavailable."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    rings = context.Process(target=serve_rings, args=(load, theirs), daemon=True)
    rings.start()
    keeper: GatewayKeeper | None = None
    try:
        if not ours.poll(START_SECONDS):
            raise Unavailable("the rings of the benchmark did not start")
        settings = GatewaySettings(
            listen="127.0.0.1:0",
            http="",
            metrics="",
            router=ours.recv(),
            model=str(resolve_model_path(load.model)),
            model_name="",
            dtype="float32",
            device="cpu",
            max_seconds=3600.0,
            log_level="warning",
            follow_stdin=True,
            lost_seconds=START_SECONDS,  # if the machine is too small for the load, rings stand still
        )
        # Imported late: its package imports Ray, which takes longer than all else of a command.
        from ringserve.services.cluster.gateway import GatewayKeeper

        keeper = GatewayKeeper(settings, start_seconds=START_SECONDS, silent_seconds=START_SECONDS)
        keeper.start()
        keeper.await_serving()
        return asyncio.run(_Clients(load, keeper.pid).run(keeper.settings.listen, tell))
    finally:
        if keeper is not None:
            keeper.end()
        ours.close()
        rings.kill()
        rings.join()
