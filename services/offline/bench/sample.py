"""One measurement as one rank sees it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from cp_core.transport.interface import RingTransport
from services.offline.bench.flops import GEMM_SIZE


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Seconds from a common start to this rank's end; processor seconds of all its threads; seconds spent waiting for
    messages; the most memory the process has held since it began.
    """

    seconds: float
    cpu_seconds: float = 0.0
    wait_seconds: float = 0.0
    peak_memory_bytes: int = 0


def timed(transport: RingTransport, run: Callable[[], object], repeats: int = 1) -> Sample:
    """Wait for all ranks, then time `run`, the mean of `repeats`. Collective."""
    line_up(transport)
    waited = transport.stats.seconds_waited
    cpu, start = time.process_time(), time.perf_counter()
    for _ in range(repeats):
        run()
    return Sample(
        seconds=(time.perf_counter() - start) / repeats,
        cpu_seconds=(time.process_time() - cpu) / repeats,
        wait_seconds=(transport.stats.seconds_waited - waited) / repeats,
        peak_memory_bytes=peak_memory_bytes(),
    )


def line_up(transport: RingTransport) -> None:
    """Return when every rank has come here."""
    transport.gather_all(torch.zeros(1), list(torch.empty(transport.size, 1))).wait()


def timed_gemm(transport: RingTransport) -> Sample:
    """One matrix product on every rank at the same time: the rate that there is to be had."""
    left, right = torch.ones(GEMM_SIZE, GEMM_SIZE), torch.ones(GEMM_SIZE, GEMM_SIZE)
    return timed(transport, lambda: torch.mm(left, right))


def peak_memory_bytes() -> int:
    """Linux's own high-water mark of this process. (`getrusage` would pass on that of the process that started it.)"""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel tells no VmHWM")
