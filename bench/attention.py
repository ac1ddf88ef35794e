"""How ring prefill attention scales: one process a rank, one thread a process, loopback, fp32.

    python bench/attention.py --ranks 1,2 --tokens 8192,16384 --transport sockets

Prints one JSON object a line: the least seconds of a layer's attention, the ratio to one rank, and the share of the
matrix-product rate that was measured in the same run. Where other programs use the cores, `cpu_seconds` (all threads of
the busiest rank) and its ratio still tell what the ring costs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from cp_core.attention import select_backend
from cp_core.distributed import connect_ring
from cp_core.layout import balanced_layout
from cp_core.prefill import KvRun, PrefillPlan, SequencePlan, ring_prefill
from cp_core.rendezvous import RingStore

HOST = "127.0.0.1"
TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measurement, the same on every rank."""

    num_ranks: int
    new_tokens: int
    cached_tokens: int
    algorithm: str
    transport: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    repeats: int

    @property
    def flops(self) -> float:
        pairs = self.new_tokens * self.cached_tokens + self.new_tokens * (self.new_tokens + 1) / 2
        return 4.0 * self.num_heads * self.head_dim * pairs


@dataclass(frozen=True)
class Measured:
    """Least seconds over the repeats, and what the fastest repeat waited for messages and used of the CPU."""

    seconds: float
    cpu_seconds: float
    wait_seconds: float
    gemm_flops: float


def gemm_flops(size: int = 2048, repeats: int = 3) -> float:
    """FLOP/s of this thread in a square matrix product."""
    left, right = torch.randn(size, size), torch.randn(size, size)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        torch.mm(left, right)
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best


def run_rank(rank: int, port: int, case: Case, answer: Connection, store: RingStore | None = None) -> None:
    """One rank: warm up, then time each repeat from a common start."""
    torch.set_num_threads(1)
    name = "bench"
    transport = connect_ring(HOST, port, name, rank, case.num_ranks, TIMEOUT_SECONDS, case.transport, store=store)
    held = [case.cached_tokens // case.num_ranks] * case.num_ranks
    held[0] += case.cached_tokens - sum(held)
    layout = balanced_layout(case.cached_tokens, case.new_tokens, held)
    plan = PrefillPlan((SequencePlan(layout, tuple(held)),))
    num_new = plan.new_on(rank)
    q = torch.randn(num_new, case.num_heads, case.head_dim)
    k, v = (torch.randn(num_new, case.num_kv_heads, case.head_dim) for _ in range(2))
    cached = [[KvRun(*(torch.randn(held[rank], case.num_kv_heads, case.head_dim) for _ in range(2)))]]
    backend = select_backend("auto", "cpu", q.dtype)
    rate = gemm_flops()
    best = Measured(float("inf"), 0.0, 0.0, rate)
    for _ in range(case.repeats + 1):
        transport.gather_all(torch.zeros(1), list(torch.empty(case.num_ranks, 1))).wait()
        waited = transport.stats.seconds_waited
        cpu_start, start = time.process_time(), time.perf_counter()
        ring_prefill(q, k, v, cached, plan, transport, backend, case.head_dim**-0.5, case.algorithm)
        seconds = time.perf_counter() - start
        if seconds < best.seconds:
            cpu_seconds = time.process_time() - cpu_start
            best = Measured(seconds, cpu_seconds, transport.stats.seconds_waited - waited, rate)
    answer.send(best)
    transport.close()


def measure(case: Case) -> list[Measured]:
    """Run the case on fresh processes; one answer a rank."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(case.num_ranks)]
    first, port_sender = context.Pipe(duplex=False)
    processes = [context.Process(target=_host_rank, args=(case, pipes[0][1], port_sender))]
    processes[0].start()
    port = first.recv()
    for rank in range(1, case.num_ranks):
        processes.append(context.Process(target=run_rank, args=(rank, port, case, pipes[rank][1])))
        processes[-1].start()
    answers: list[Measured] = [receiver.recv() for receiver, _ in pipes]
    for process in processes:
        process.join(TIMEOUT_SECONDS)
    return answers


def _host_rank(case: Case, answer: Connection, port_sender: Connection) -> None:
    store = RingStore(HOST)
    port_sender.send(store.port)
    run_rank(0, store.port, case, answer, store)


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=_numbers, default=[1, 2], help="ring sizes, such as 1,2")
    parser.add_argument("--tokens", type=_numbers, default=[8192, 16384], help="new tokens, such as 4096,16384")
    parser.add_argument("--cached", type=int, default=0, help="cached tokens before the new ones")
    parser.add_argument("--algorithm", choices=["pass_kv", "pass_q"], default="pass_kv")
    parser.add_argument("--transport", choices=["auto", "gloo", "sockets"], default="auto", help="of the ring")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    for new_tokens in arguments.tokens:
        alone: tuple[float, float] | None = None
        for num_ranks in arguments.ranks:
            case = Case(
                num_ranks=num_ranks,
                new_tokens=new_tokens,
                cached_tokens=arguments.cached,
                algorithm=arguments.algorithm,
                transport=arguments.transport,
                num_heads=arguments.heads,
                num_kv_heads=arguments.kv_heads,
                head_dim=arguments.head_dim,
                repeats=arguments.repeats,
            )
            answers = measure(case)
            seconds = max(answer.seconds for answer in answers)
            rate = min(answer.gemm_flops for answer in answers)
            cpu_seconds = max(answer.cpu_seconds for answer in answers)
            if num_ranks == 1:
                alone = seconds, cpu_seconds
            record = {
                "ranks": num_ranks,
                "new_tokens": new_tokens,
                "cached_tokens": arguments.cached,
                "algorithm": arguments.algorithm,
                "transport": arguments.transport,
                "seconds": round(seconds, 5),
                "wait_seconds": round(max(answer.wait_seconds for answer in answers), 5),
                "speedup": None if alone is None else round(alone[0] / seconds, 3),
                "cpu_seconds": round(cpu_seconds, 5),
                "cpu_speedup": None if alone is None else round(alone[1] / cpu_seconds, 3),
                "share_of_gemm_rate": round(case.flops / num_ranks / seconds / rate, 3),
            }
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
