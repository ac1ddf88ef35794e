"""Restart of a router from its journal: from the kill of one process to the first decisions of the next.

The router bench calls `measure_restart`. The router is a process of its own, made as by the cluster but without Ray. A
client and rings that compute nothing are in this process and reach the router over gRPC.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import psutil

from bench.router.load import VOCABULARY
from bench.router.records import first_turn, turn_request
from bench.router.rings import SIZES, InstantRing, registrations
from ringserve.channels import CHANNEL_OPTIONS
from ringserve.cp_core.errors import Unavailable
from ringserve.cp_core.layout.shards import spread
from ringserve.orchestration.journal.journal import SqliteJournal
from ringserve.orchestration.protocol.inventory import RingInventory, SequenceOnRing
from ringserve.orchestration.protocol.plans import PromptMode
from ringserve.orchestration.protocol.rings import HEARTBEAT_SECONDS, ROLES
from ringserve.orchestration.protocol.turns import BegunTurn, RingRegistration
from ringserve.orchestration.ring.leader import RETRY_SECONDS
from ringserve.services.config import Config
from ringserve.services.gateway.turn_stream import begin_with_retries
from ringserve.services.offline.reports import Summary
from ringserve.services.rpc.peers import GrpcPeers, make_peer_metadata
from ringserve.services.rpc.server import GrpcServer
from ringserve.services.rpc.servicers import DecodeServicer
from ringserve.services.rpc.wire.contract import to_message
from ringserve.v1 import router_pb2, router_pb2_grpc
from ringserve.workers.protocol.ranks import ModelInfo

if TYPE_CHECKING:
    from ringserve.services.cluster.hosts import RouterHost

START_SECONDS = 120.0
ANSWER = 20
RECORDS_AT_ONCE = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartLoad:
    """Journal of `conversations` conversations with prompts of `tokens` tokens, whose KV `rings` rings retain.

    `decisions` turns follow the first one, one after the other.
    """

    conversations: int = 100_000
    rings: int = 200
    tokens: int = 1000
    decisions: int = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartReport:
    """Seconds from the kill of a router until the next one serves, has heard from all rings, and decides.

    `processor_seconds` are those of the new process until its first decision. `decisions` are milliseconds of the
    decisions right after it, as a client sees them; `cached_share` of all decisions found KV on a ring.
    """

    conversations: int
    rings: int
    journal_bytes: int
    serving_seconds: float
    told_seconds: float
    first_decision_seconds: float
    processor_seconds: float
    memory_bytes: int
    decisions: Summary
    cached_share: float


async def _serve(host: RouterHost, pipe: Connection) -> None:
    """Serve as the router's actor does, send the address, and return when the parent's end of the pipe closes."""
    router = host()
    pipe.send(await router.start())
    await asyncio.to_thread(pipe.poll, None)


def serve_router(host: RouterHost, pipe: Connection) -> None:
    """Run the process of a router."""
    asyncio.run(_serve(host, pipe))


class _AnnouncedRing:
    """Ring that announces itself as its leader does, and tells each router that is new to it what it retains."""

    def __init__(self, registration: RingRegistration, inventory: RingInventory, told: Callable[[], None]) -> None:
        self._announcement = to_message(router_pb2.RegisterRingRequest, registration)
        self._inventory = to_message(router_pb2.RegisterRingRequest, registration)
        # Made in advance, to take no time from the router: in service each leader makes its own.
        self._inventory.inventory.CopyFrom(to_message(router_pb2.RingInventory, inventory))
        self._told = told
        self._metadata = make_peer_metadata()
        self._epoch = 0

    async def run(self, stub: Any) -> None:
        """Announce the ring for ever."""
        while True:
            pause = HEARTBEAT_SECONDS
            try:
                epoch = await self._announce(stub, self._announcement, self._epoch)
                if epoch != self._epoch and await self._announce(stub, self._inventory, epoch) == epoch:
                    self._epoch = epoch
                    self._told()
            except grpc.aio.AioRpcError:
                pause = RETRY_SECONDS
            await asyncio.sleep(pause)

    async def _announce(self, stub: Any, message: router_pb2.RegisterRingRequest, epoch: int) -> int:
        message.epoch = epoch
        answer: router_pb2.RegisterRingResponse = await stub.RegisterRing(
            message, timeout=START_SECONDS, metadata=self._metadata
        )
        return answer.epoch


class _Restart:
    """One restart, with the rings and the client."""

    def __init__(self, model: ModelInfo, load: RestartLoad, journal: Path, tell: Callable[[str], None]) -> None:
        self._model = model
        self._load = load
        self._journal = journal
        self._tell = tell
        self._ids = np.random.default_rng(0)
        self._num_told = 0
        self._all_told = asyncio.Event()
        self._processes: list[tuple[BaseProcess, Connection]] = []

    async def run(self) -> RestartReport:
        """Write the journal, start a router on it, kill it, and measure the next one. Raises Unavailable."""
        await self._write()
        async with self._rings() as rings:
            try:
                endpoint = await self._start("127.0.0.1:0")
                channel = grpc.aio.insecure_channel(endpoint, options=CHANNEL_OPTIONS)
                stub = router_pb2_grpc.RouterServiceStub(channel)
                announcing = [asyncio.create_task(ring.run(stub)) for ring in rings]
                peers = GrpcPeers()
                try:
                    await self._until_told()
                    return await self._measure(peers, endpoint)
                finally:
                    for task in announcing:
                        task.cancel()
                    await asyncio.gather(*announcing, return_exceptions=True)
                    await channel.close()
                    await peers.close()
            finally:
                for process, pipe in self._processes:
                    process.kill()
                    process.join()
                    pipe.close()

    async def _measure(self, peers: GrpcPeers, endpoint: str) -> RestartReport:
        self._num_told = 0
        self._all_told.clear()
        began = time.perf_counter()
        killed, _ = self._processes[-1]
        killed.kill()
        killed.join()
        deciding = asyncio.create_task(self._decide(peers, endpoint, 0))
        telling = asyncio.create_task(self._seconds_until_told(began))
        await self._start(endpoint)
        serving = time.perf_counter() - began
        begun = [await deciding]
        first = time.perf_counter() - began
        new = psutil.Process(self._processes[-1][0].pid)
        used, memory = new.cpu_times(), new.memory_info().rss
        seconds = []
        for number in range(1, 1 + self._load.decisions):
            before = time.perf_counter()
            begun.append(await self._decide(peers, endpoint, number))
            seconds.append(time.perf_counter() - before)
        return RestartReport(
            conversations=self._load.conversations,
            rings=self._load.rings,
            journal_bytes=sum(each.stat().st_size for each in self._journal.iterdir()),
            serving_seconds=serving,
            told_seconds=await telling,
            first_decision_seconds=first,
            processor_seconds=used.user + used.system,
            memory_bytes=memory,
            decisions=Summary.of(seconds, 1e3),
            cached_share=sum(each.plan.cached_tokens > 0 for each in begun) / len(begun),
        )

    async def _decide(self, peers: GrpcPeers, endpoint: str, number: int) -> BegunTurn:
        """Begin a turn as a gateway does, in another conversation for each number."""
        name = self._name(number * self._load.conversations // (1 + self._load.decisions))
        request = turn_request(f"request-{number}", name, self._tokens(50), ANSWER, PromptMode.APPEND)
        return await begin_with_retries(peers.router(endpoint).begin_turn, request)

    async def _until_told(self) -> None:
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._all_told.wait()
        except TimeoutError:
            raise Unavailable(f"the router did not hear from all rings within {START_SECONDS:.0f} s") from None

    async def _seconds_until_told(self, began: float) -> float:
        await self._until_told()
        return time.perf_counter() - began

    # --- processes ---------------------------------------------------------------------------------------------------

    async def _start(self, listen: str) -> str:
        """Start a router's process. Return its address when it serves. Raises Unavailable."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve_router, args=(self._host(listen), theirs), daemon=True)
        process.start()
        self._processes.append((process, ours))
        if not await asyncio.to_thread(ours.poll, START_SECONDS):
            raise Unavailable("the router of the benchmark did not start")
        address: str = ours.recv()
        return address

    def _host(self, listen: str) -> RouterHost:
        # Imported late: its package imports Ray, which takes longer than all else of a command.
        from ringserve.services.cluster.hosts import RouterHost

        base, rings = Config(), self._load.rings
        config = replace(
            base,
            router=replace(base.router, listen=listen, max_conversations=self._load.conversations + 1),
            prefill=replace(base.prefill, rings=rings - rings // 2),
            decode=replace(base.decode, rings=rings // 2),
            logs=replace(base.logs, level="warning"),
        )
        return RouterHost(config=config, model=self._model, journal=str(self._journal))

    @asynccontextmanager
    async def _rings(self) -> AsyncIterator[list[_AnnouncedRing]]:
        """Serve the rings (those of one role and size at one address) and yield an announcer of each."""
        kinds = {(role, size): InstantRing(_of_kind(role, size)) for role in ROLES for size in SIZES}
        servers, endpoints = [], {}
        for kind, instant in kinds.items():
            server = GrpcServer()
            DecodeServicer(instant).register(server)
            servers.append(server)
            endpoints[kind] = await server.start("127.0.0.1:0")
        known = registrations(self._load.rings, 0, endpoints)
        here: dict[str, list[SequenceOnRing]] = {each.name: [] for each in known}
        of_role = {role: [each for each in known if each.role == role] for role in ROLES}
        for number in range(self._load.conversations):
            for role, lacking in (("prefill", ANSWER), ("decode", 1)):
                ring = of_role[role][number % len(of_role[role])]
                num_tokens = self._load.tokens + ANSWER - lacking
                shards = spread(0, num_tokens, (0,) * ring.num_ranks)
                sequence = SequenceOnRing(kv_id=self._name(number), last_turn=f"turn-{number}", shards=shards)
                here[ring.name].append(sequence)
                kinds[role, ring.num_ranks].retained[self._name(number)] = num_tokens
        inventories = [RingInventory(sequences=tuple(here[each.name]), turns=()) for each in known]
        try:
            yield [_AnnouncedRing(*pair, self._note_told) for pair in zip(known, inventories, strict=True)]
        finally:
            for server in servers:
                await server.stop(0.0)

    def _note_told(self) -> None:
        self._num_told += 1
        if self._num_told == self._load.rings:
            self._all_told.set()

    # --- journal -----------------------------------------------------------------------------------------------------

    async def _write(self) -> None:
        journal = SqliteJournal(self._journal, self._host("127.0.0.1:0").fingerprint)
        try:
            for start in range(0, self._load.conversations, RECORDS_AT_ONCE):
                stop = min(start + RECORDS_AT_ONCE, self._load.conversations)
                await asyncio.gather(*(self._write_one(journal, number) for number in range(start, stop)))
        finally:
            await asyncio.to_thread(journal.close)

    async def _write_one(self, journal: SqliteJournal, number: int) -> None:
        prompt, answer = self._tokens(self._load.tokens), self._tokens(ANSWER)
        begun, committed = first_turn(f"turn-{number}", self._name(number), prompt, answer)
        writing = journal.begun(begun)
        await journal.committed(committed)
        await writing
        self._tell("conversations in the journal")

    def _name(self, number: int) -> str:
        return f"conversation-{number}"

    def _tokens(self, count: int) -> np.ndarray[Any, Any]:
        return self._ids.integers(0, VOCABULARY, count)


def _of_kind(role: str, num_ranks: int) -> RingRegistration:
    """Return what the first ring of a role and size announces."""
    return next(each for each in registrations(2 * len(SIZES), 0) if (each.role, each.num_ranks) == (role, num_ranks))


def measure_restart(model: ModelInfo, load: RestartLoad, journal: Path, tell: Callable[[str], None]) -> RestartReport:
    """Measure a restart on a journal in a directory of its own. `tell` is called for every conversation.

    Raises Unavailable.
    """

    async def run() -> RestartReport:
        return await _Restart(model, load, journal, tell).run()

    return asyncio.run(run())
