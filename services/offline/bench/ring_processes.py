"""Where the processes of a ring meet."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

from cp_core.errors import Unavailable
from cp_core.transport.connect import RingStore, connect_ring
from cp_core.transport.interface import RingTransport
from services.offline.bench.rounds import Sample


class Network(Protocol):
    """What a rank's process and the one that measures do before the rank opens anything: enter, connect, settle.

    It is pickled into every rank's process.
    """

    @property
    def host(self) -> str:
        """The address of rank 0, as the ranks see it."""
        ...

    def enter(self) -> None:
        """In the rank's process, first of all. Raises Unavailable."""
        ...

    def connect(self, rank: int, pid: int) -> None:
        """In the measuring process, when the rank's has entered. Raises Unavailable."""
        ...

    def settle(self, rank: int) -> None:
        """In the rank's process, when it is connected. Raises Unavailable."""
        ...


@dataclass(frozen=True, slots=True)
class Loopback:
    """This machine's own: there is nothing to do."""

    host: str = "127.0.0.1"

    def enter(self) -> None:
        """See Network."""

    def connect(self, rank: int, pid: int) -> None:
        """See Network."""

    def settle(self, rank: int) -> None:
        """See Network."""


RING_TIMEOUT_SECONDS = 600.0
# For one task, and for a rank to be ready: imports, weights and the filling of a large cache.
TASK_SECONDS = 600.0
JOIN_SECONDS = 10.0


class Station(Protocol):
    """What one rank does. It measures the same task at the same time as its peers; `RingProcesses.ask` may be answered
    by something else than a sample.
    """

    def measure(self, task: Any) -> Any: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank's place: `transport` leads to its peers, the store at `host` and `port` to whatever else wants to meet."""

    rank: int
    num_ranks: int
    host: str
    port: int
    transport: RingTransport


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rank gave up, in words."""

    text: str


class RingProcesses:
    """`num_ranks` processes, one thread each, with a station made by `make(seat)` in every one of them.

    `transport` is what moves the ring's messages, as in the configuration; `network` is where the processes meet.
    A context manager: at its end the processes are gone. Raises Unavailable when a rank fails or does not answer in
    TASK_SECONDS.
    """

    def __init__(
        self,
        num_ranks: int,
        make: Callable[[Seat], Station],
        transport: str = "auto",
        network: Network | None = None,
    ) -> None:
        self._network: Network = network or Loopback()
        # Each is forked from a process of one thread that has imported what all of them need.
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
                assert process.pid is not None, "it has answered, so it runs"
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
                pipe.send(None)
            for process in self._processes:
                process.join(JOIN_SECONDS)
        self._kill()

    def measure(self, task: object) -> list[Sample]:
        """Give every rank the task; their samples, by rank."""
        return self.ask(task)

    def ask(self, task: object) -> list[Any]:
        """Give every rank the task; their answers, by rank."""
        for pipe in self._pipes:
            pipe.send(task)
        return [self._answer(rank) for rank in range(len(self._pipes))]

    def _answer(self, rank: int) -> Any:
        try:
            if not self._pipes[rank].poll(TASK_SECONDS):
                raise Unavailable(f"rank {rank} of {len(self._pipes)} did not answer in {TASK_SECONDS:g} s")
            answer = self._pipes[rank].recv()
        except (EOFError, ConnectionResetError) as error:
            raise Unavailable(f"rank {rank} of {len(self._pipes)} ended without a word") from error
        if isinstance(answer, Failure):
            raise Unavailable(f"rank {rank} of {len(self._pipes)} failed: {answer.text}")
        return answer

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join(JOIN_SECONDS)


def serve(
    rank: int, num_ranks: int, make: Callable[[Seat], Station], backend: str, network: Network, pipe: Connection
) -> None:
    """The life of one rank's process: enter the network, meet the others, then an answer for every task until None
    comes.
    """
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
        station = make(Seat(rank, num_ranks, network.host, port, transport))
        pipe.send(None)
        while (task := pipe.recv()) is not None:
            pipe.send(station.measure(task))
        station.close()
        transport.close()
    except (EOFError, KeyboardInterrupt):
        return  # the measuring process is gone, or the user wants it to be
    except Exception as error:
        pipe.send(Failure(f"{type(error).__name__}: {error}"))
