"""What messages between two CPU ranks cost over each ring transport, and what a decode step makes of it.

    python bench/ring_transport.py --transports sockets --tokens 2048,16384 --json

Two processes on loopback, one thread of computation each. Messages: a gather of 2 KB from each rank (a layer's partial
results), a broadcast of 8 bytes (a step's header) and an exchange of 4 MB (a ring iteration's KV), on idle cores and
with as many spinning processes as there are cores. The transports take turns within a run, so that they meet the same
machine. Then `builtin:tiny` decodes one sequence after each number of tokens, over one rank and over two.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

import numpy as np
import torch

from cp_core.layout.shards import balanced_layout
from cp_core.transport.connect import RingStore, connect_ring
from cp_core.transport.interface import RingTransport
from workers.protocol.decode_commands import AdmitSequence
from workers.protocol.prefill_steps import Algorithm, PrefillStep, SequencePrefill
from workers.protocol.ranks import RankSettings, RankSpec, RingSpec
from workers.rank.worker import RankWorker
from workers.sampling.parameters import SamplingParameters

HOST = "127.0.0.1"
WAIT_SECONDS = 120.0
NUM_ROUNDS = 10
BLOCK_TOKENS = 16
SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True, kw_only=True)
class MessageRow:
    """Microseconds of one operation, on the slower rank."""

    operation: str
    cores: str
    transport: str
    median: float
    p90: float


@dataclass(frozen=True, kw_only=True)
class DecodeRow:
    """Milliseconds a step; `transport` is empty for one rank."""

    tokens: int
    ranks: int
    transport: str
    median: float
    p90: float


# --- messages --------------------------------------------------------------------------------------------------------


def operations(ring: RingTransport) -> Mapping[str, tuple[int, Callable[[], None]]]:
    """By name: how often in a round, and the operation."""
    peer = 1 - ring.rank
    partial = torch.zeros(512)
    gathered = [partial, torch.empty(512)] if ring.rank == 0 else [torch.empty(512), partial]
    header = torch.zeros(1, dtype=torch.int64)
    keys, received = torch.zeros(1 << 20), torch.empty(1 << 20)

    def broadcast() -> None:
        # There and back: a broadcast alone would only measure its sender.
        ring.broadcast(header, 0).wait()
        ring.broadcast(header, 1).wait()

    return {
        "gather 2 KB": (100, lambda: ring.gather_all(partial, gathered).wait()),
        "broadcast 8 B, there and back": (100, broadcast),
        "exchange 4 MB": (5, lambda: ring.exchange(keys, peer, received, peer).wait()),
    }


def time_messages(rank: int, names: Sequence[str], pipe: Connection, store: RingStore | None = None) -> None:
    """One rank: for every word from `pipe`, the seconds of every operation over every transport."""
    torch.set_num_threads(1)
    port: int = store.port if store is not None else pipe.recv()
    rings = {name: connect_ring(HOST, port, name, rank, 2, WAIT_SECONDS, name, store=store) for name in names}
    acts = {name: operations(ring) for name, ring in rings.items()}
    pipe.send("joined")
    while pipe.recv():
        seconds: dict[tuple[str, str], list[float]] = {}
        for _ in range(NUM_ROUNDS):
            for operation in acts[names[0]]:
                for name in names:
                    count, act = acts[name][operation]
                    # The first one waits for the other rank to come here as well.
                    act()
                    for _ in range(count):
                        start = time.perf_counter()
                        act()
                        seconds.setdefault((operation, name), []).append(time.perf_counter() - start)
        pipe.send(seconds)
    for ring in rings.values():
        ring.close()


def host_messages(names: Sequence[str], pipe: Connection) -> None:
    store = RingStore(HOST)
    pipe.send(store.port)
    time_messages(0, names, pipe, store)


def measure_messages(names: Sequence[str]) -> Iterator[MessageRow]:
    (first, first_end), (second, second_end) = SPAWN.Pipe(), SPAWN.Pipe()
    with (
        running(SPAWN.Process(target=host_messages, args=(names, first_end))),
        running(SPAWN.Process(target=time_messages, args=(1, names, second_end))),
    ):
        second.send(first.recv())
        for pipe in (first, second):
            pipe.recv()
        for cores in ("idle", "busy"):
            with spinning(os.cpu_count() or 1 if cores == "busy" else 0):
                for pipe in (first, second):
                    pipe.send(cores)
                left, right = first.recv(), second.recv()
            for operation, name in left:
                slower = max(left[operation, name], right[operation, name], key=statistics.median)
                yield MessageRow(operation=operation, cores=cores, transport=name, **spread(slower, 1e6))
        for pipe in (first, second):
            pipe.send("")


# --- decode ----------------------------------------------------------------------------------------------------------


def decode(rank: int, num_ranks: int, transport: str, num_tokens: int, steps: int, pipe: Connection) -> None:
    """One rank of `builtin:tiny`; rank 0 sends the seconds between its tokens."""
    worker = RankWorker()
    num_blocks = (num_tokens + steps) // BLOCK_TOKENS + 2
    worker.start(
        RankSpec(
            ring="bench-0",
            rank=rank,
            num_ranks=num_ranks,
            incarnation="bench-0@1",
            settings=RankSettings(
                model_path="builtin:tiny",
                num_blocks=num_blocks,
                block_tokens=BLOCK_TOKENS,
                ring_transport=transport or "auto",
            ),
        )
    )
    pipe.send(worker.open_endpoints())
    worker.join(RingSpec(name="bench", endpoints=pipe.recv(), secret="of a bench", timeout_seconds=WAIT_SECONDS))
    blocks = tuple(range(num_blocks))
    layout = balanced_layout(0, num_tokens, (0,) * num_ranks)
    sequence = SequencePrefill(
        sequence_id="a",
        token_ids=np.random.default_rng(0).integers(32, 120, num_tokens),
        layout=layout,
        cached=(0,) * num_ranks,
        blocks=blocks,
        sample=None,
    )
    worker.prefill(PrefillStep(algorithm=Algorithm.PASS_KV, sequences=(sequence,)))
    loop = threading.Thread(target=worker.run_decode)
    loop.start()
    if rank == 0:
        admit = AdmitSequence(
            sequence_id="a",
            token_id=65,
            position=num_tokens,
            held=layout.shard_map().held,
            blocks=(blocks,) * num_ranks,
            sampling=SamplingParameters(max_tokens=steps),
        )
        worker.submit([admit])
        pipe.send(token_seconds(worker))
    pipe.recv()
    worker.stop()
    loop.join(WAIT_SECONDS)


def token_seconds(worker: RankWorker) -> list[float]:
    """Between tokens, but for the first ones, when the ring warms up."""
    moments: list[float] = []
    cursor, is_running = 0, True
    while is_running:
        events = worker.poll(cursor, WAIT_SECONDS)
        cursor = events.stop
        moments += [time.perf_counter()] * len(events.events)
        is_running = all(event.finish_reason is None for event in events.events)
    return [after - before for before, after in itertools.pairwise(moments[5:])]


def measure_decode(num_ranks: int, transport: str, num_tokens: int, steps: int) -> list[float]:
    pipes = [SPAWN.Pipe() for _ in range(num_ranks)]
    processes = [
        SPAWN.Process(target=decode, args=(rank, num_ranks, transport, num_tokens, steps, pipes[rank][1]))
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    endpoints = tuple(pipe.recv() for pipe, _ in pipes)
    for pipe, _ in pipes:
        pipe.send(endpoints)
    seconds: list[float] = pipes[0][0].recv()
    for pipe, _ in pipes:
        pipe.send("stop")
    for process in processes:
        process.join(WAIT_SECONDS)
    return seconds


def measure_steps(names: Sequence[str], all_tokens: Sequence[int], steps: int, repeats: int) -> Iterator[DecodeRow]:
    cases = [(1, ""), *((2, name) for name in names)]
    for num_tokens in all_tokens:
        seconds: dict[tuple[int, str], list[float]] = {case: [] for case in cases}
        for _ in range(repeats):
            for num_ranks, transport in cases:
                seconds[num_ranks, transport] += measure_decode(num_ranks, transport, num_tokens, steps)
        for (num_ranks, transport), all_seconds in seconds.items():
            yield DecodeRow(tokens=num_tokens, ranks=num_ranks, transport=transport, **spread(all_seconds, 1e3))


# --- both ------------------------------------------------------------------------------------------------------------


def spread(seconds: Sequence[float], scale: float) -> dict[str, float]:
    return {
        "median": round(statistics.median(seconds) * scale, 3),
        "p90": round(float(np.quantile(seconds, 0.9)) * scale, 3),
    }


@contextmanager
def running(process: SpawnProcess) -> Iterator[None]:
    process.start()
    try:
        yield
        process.join(WAIT_SECONDS)
    finally:
        process.kill()
        process.join()


@contextmanager
def spinning(count: int) -> Iterator[None]:
    """That many processes which do nothing as fast as they can."""
    processes = [SPAWN.Process(target=spin, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    # Interpreters that are still starting spin as well, but not for long.
    time.sleep(2.0 if count else 0.0)
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def spin() -> None:
    while True:
        pass


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", type=lambda text: text.split(","), default=["sockets"])
    parser.add_argument("--tokens", type=lambda text: [int(each) for each in text.split(",")], default=[2048, 16384])
    parser.add_argument("--steps", type=int, default=200, help="decode steps of each run")
    parser.add_argument("--repeats", type=int, default=2, help="decode runs of each case, taken in turns")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    for row in measure_messages(options.transports):
        show(row, options.json, f"{row.operation:32} {row.cores:5} {row.transport:8} {row.median:10.1f} us", row.p90)
    for step in measure_steps(options.transports, options.tokens, options.steps, options.repeats):
        title = f"decode step after {step.tokens} tokens"
        show(step, options.json, f"{title:32} N={step.ranks:<3} {step.transport:8} {step.median:10.2f} ms", step.p90)


def show(row: MessageRow | DecodeRow, as_json: bool, text: str, p90: float) -> None:
    print(json.dumps(asdict(row)) if as_json else f"{text}   (90% within {p90:.1f})", file=sys.stdout, flush=True)


if __name__ == "__main__":
    main()
