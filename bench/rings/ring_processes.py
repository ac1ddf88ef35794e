"""Rings of processes that wait for tasks, so that several rings exist at once and are measured in alternation.

The benches of rings, selection and service start them. A ring owns its processes and the pipes to them.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

from bench.rings.rounds import Sample
from ringserve.cp_core.errors import Unavailable
from ringserve.cp_core.transport.connect import RingStore, connect_ring
from ringserve.cp_core.transport.interface import RingTransport


class Network(Protocol):
    """Network of a ring: steps that precede a rank's first connection, pickled into every rank's process."""

    @property
    def host(self) -> str:
        """Address of rank 0, as the ranks see it."""
        ...

    def enter(self) -> None:
        """Enter the network; the rank's process does this first. Raises Unavailable."""
        ...

    def connect(self, rank: int, pid: int) -> None:
        """Connect the process of a rank that has entered; the measuring process does this. Raises Unavailable."""
        ...

    def settle(self, rank: int) -> None:
        """Configure the connected rank's side; the rank's process does this. Raises Unavailable."""
        ...


@dataclass(frozen=True, slots=True)
class Loopback:
    """Loopback network, which needs no preparation."""

    host: str = "127.0.0.1"

    def enter(self) -> None:
        """See Network."""

    def connect(self, rank: int, pid: int) -> None:
        """See Network."""

    def settle(self, rank: int) -> None:
        """See Network."""


RING_TIMEOUT_SECONDS = 600.0
# Limit of one task, and of a rank's start: imports, weights and the filling of a large cache.
TASK_SECONDS = 600.0
JOIN_SECONDS = 10.0


class BenchRank(Protocol):
    """Work of one rank, which runs a task together with its peers; the result is a Sample, or anything for `ask`."""

    def measure(self, task: Any) -> Any: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Place of a rank: the `transport` to its peers, and `host` and `port` of the ring's store for other rendezvous."""

    rank: int
    num_ranks: int
    host: str
    port: int
    transport: RingTransport


@dataclass(frozen=True, slots=True)
class Failure:
    """Reason why a rank failed, in words."""

    text: str


class RingProcesses:
    """Ring of `num_ranks` single-threaded processes, each with the bench rank that `make(place)` returns.

    `transport` moves the ring's messages, as in the configuration; the processes rendezvous in `network`. The context
    ends with all processes gone. Raises Unavailable when a rank fails or does not answer within TASK_SECONDS.
    """

    def __init__(
        self,
        num_ranks: int,
        make: Callable[[RankPlace], BenchRank],
        transport: str = "auto",
        network: Network | None = None,
    ) -> None:
        self._network: Network = network or Loopback()
        # Ranks are forked from a single-threaded process that has done all imports.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, (make.func if isinstance(make, partial) else make).__module__])
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            arguments = (rank, num_ranks, make, transport, self._network, theirs)
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> RingProcesses:
        try:
            for rank, process in enumerate(self._processes):
                self._answer(rank)
                assert process.pid is not None, "a process that answered runs"
                self._network.connect(rank, process.pid)
            for pipe in self._pipes:
                pipe.send(None)
            port = self._answer(0)
            for pipe in self._pipes[1:]:
                pipe.send(port)
            for rank in range(len(self._pipes)):
                self._answer(rank)
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            for pipe in self._pipes:
                with suppress(BrokenPipeError):  # a rank that has failed may have ended
                    pipe.send(None)
            for process in self._processes:
                process.join(JOIN_SECONDS)
        self._kill()

    def measure(self, task: object) -> list[Sample]:
        """Give every rank the task and return their samples, by rank."""
        return self.ask(task)

    def ask(self, task: object) -> list[Any]:
        """Give every rank the task and return their answers, by rank."""
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send(task)
            except BrokenPipeError as error:
                raise Unavailable(f"rank {rank} of {len(self._pipes)} ended unexpectedly") from error
        return [self._answer(rank) for rank in range(len(self._pipes))]

    def _answer(self, rank: int) -> Any:
        try:
            if not self._pipes[rank].poll(TASK_SECONDS):
                raise Unavailable(f"rank {rank} of {len(self._pipes)} did not answer in {TASK_SECONDS:g} s")
            answer = self._pipes[rank].recv()
        except (EOFError, ConnectionResetError) as error:
            raise Unavailable(f"rank {rank} of {len(self._pipes)} ended unexpectedly") from error
        if isinstance(answer, Failure):
            raise Unavailable(f"rank {rank} of {len(self._pipes)} failed: {answer.text}")
        return answer

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join(JOIN_SECONDS)


def serve(
    rank: int, num_ranks: int, make: Callable[[RankPlace], BenchRank], backend: str, network: Network, pipe: Connection
) -> None:
    """Run one rank's process: enter the network, connect to its peers, then answer every task until None arrives."""
    torch.set_num_threads(1)
    try:
        network.enter()
        pipe.send(None)
        pipe.recv()
        network.settle(rank)
        if rank == 0:
            store: RingStore | None = RingStore(network.host)
            assert store is not None
            port = store.port
            pipe.send(port)
        else:
            store, port = None, pipe.recv()
        transport = connect_ring(
            network.host, port, "bench", rank, num_ranks, RING_TIMEOUT_SECONDS, backend, store=store
        )
        bench_rank = make(RankPlace(rank, num_ranks, network.host, port, transport))
        pipe.send(None)
        while (task := pipe.recv()) is not None:
            pipe.send(bench_rank.measure(task))
        bench_rank.close()
        transport.close()
    except (EOFError, KeyboardInterrupt):
        return  # the measuring process has ended, or the user interrupts it
    except Exception as error:
        pipe.send(Failure(f"{type(error).__name__}: {error}"))
