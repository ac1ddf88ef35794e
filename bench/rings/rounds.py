"""Measurements in rounds: contenders alternate, so that a drifting machine affects all of them.

The benches of rings, selection, service and GPU use it; `timed` runs in every rank, `alternate` in the measuring
process. The file holds no state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench.rings.operations import GEMM_SIZE
from ringserve.cp_core.transport.interface import RingTransport
from ringserve.services.offline.reports import Summary


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Sample of one rank.

    Times and bytes are the mean of one repeat. `seconds` run from a common start to this rank's end, `cpu_seconds`
    count all its threads, `wait_seconds` is the time spent waiting for messages, `bytes_sent` went to its peers.
    `peak_memory_bytes` is the maximum since the process began.
    """

    seconds: float
    cpu_seconds: float = 0.0
    wait_seconds: float = 0.0
    peak_memory_bytes: int = 0
    bytes_sent: float = 0.0


def timed(transport: RingTransport, run: Callable[[], object], repeats: int = 1) -> Sample:
    """Wait for all ranks, then return the mean of `repeats` calls of `run`. Collective."""
    barrier(transport)
    waited, sent = transport.stats.seconds_waited, transport.stats.bytes_sent
    cpu, start = time.process_time(), time.perf_counter()
    for _ in range(repeats):
        run()
    return Sample(
        seconds=(time.perf_counter() - start) / repeats,
        cpu_seconds=(time.process_time() - cpu) / repeats,
        wait_seconds=(transport.stats.seconds_waited - waited) / repeats,
        peak_memory_bytes=peak_memory_bytes(),
        bytes_sent=(transport.stats.bytes_sent - sent) / repeats,
    )


def barrier(transport: RingTransport) -> None:
    """Return when every rank has called this."""
    transport.gather_all(torch.zeros(1), list(torch.empty(transport.size, 1))).wait()


def timed_gemm(transport: RingTransport) -> Sample:
    """Time one matrix product on every rank at once, which gives the reference rate."""
    left, right = torch.ones(GEMM_SIZE, GEMM_SIZE), torch.ones(GEMM_SIZE, GEMM_SIZE)
    return timed(transport, lambda: torch.mm(left, right))


def peak_memory_bytes() -> int:
    """Return this process's peak memory as Linux counts it; the one of `getrusage` would start at the parent's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel reports no VmHWM")


@dataclass(frozen=True, slots=True)
class Contender:
    """Contender of a bench; `run` returns one sample a rank."""

    name: str
    ranks: int
    run: Callable[[], list[Sample]]


@dataclass(slots=True)
class Series:
    """Samples of one contender by round; a ring is as slow as its slowest rank."""

    contender: Contender
    rounds: list[list[Sample]] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        return [max(sample.seconds for sample in ranks) for ranks in self.rounds]

    @property
    def cpu_seconds(self) -> list[float]:
        """Processor seconds of the busiest rank, by round."""
        return [max(sample.cpu_seconds for sample in ranks) for ranks in self.rounds]

    @property
    def wait_seconds(self) -> list[float]:
        return [max(sample.wait_seconds for sample in ranks) for ranks in self.rounds]

    @property
    def bytes_sent(self) -> float:
        """Bytes of the rank that sends most; the same in every round."""
        return max(sample.bytes_sent for ranks in self.rounds for sample in ranks)

    @property
    def figures(self) -> Summary:
        return Summary.of(self.seconds)

    @property
    def peak_memory_bytes(self) -> int:
        return max(sample.peak_memory_bytes for ranks in self.rounds for sample in ranks)


def alternate(
    contenders: Sequence[Contender], num_rounds: int, tell: Callable[[str], None] = lambda name: None
) -> dict[tuple[str, int], Series]:
    """Measure all contenders once a round, every second round in reverse; return the series by (name, ranks).

    `tell` is called after each measurement.
    """
    series = {(each.name, each.ranks): Series(each) for each in contenders}
    for number in range(num_rounds):
        for one in list(series.values())[:: -1 if number % 2 else 1]:
            one.rounds.append(one.contender.run())
            tell(f"{one.contender.name}, {one.contender.ranks}")
    return series
