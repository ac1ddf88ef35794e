"""Ring with delayed messages: shows the effect of slow links on one machine.

Each rank has one outgoing link for all its peers. A message leaves when the link is free, occupies it for bytes / rate,
and arrives one latency later. Only waiting for a message takes a rank's time, as on a real link.

The systems bench and tests of rings wrap their transports in it. With one `VirtualClock` per rank, the machine's load
does not change the times. Deadlines use the same clock, so choose rates that make a step take milliseconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch

from ringserve.cp_core.errors import Unavailable
from ringserve.cp_core.transport.collectives import Message, PointToPointRing
from ringserve.cp_core.transport.interface import RingTransport, Work


class Clock(Protocol):
    """Clock of a rank, in seconds. Ranks of a ring compare moments of their clocks."""

    def now(self) -> float: ...

    def wait_until(self, moment: float) -> None:
        """Wait until `moment`, or until the rank leaves the ring."""
        ...

    def stop(self) -> None:
        """End all waits."""
        ...


class WallClock:
    """Real time."""

    def __init__(self) -> None:
        self._is_stopped = threading.Event()

    def now(self) -> float:
        return time.monotonic()

    def wait_until(self, moment: float) -> None:
        while (left := moment - time.monotonic()) > 0 and not self._is_stopped.is_set():
            self._is_stopped.wait(left)

    def stop(self) -> None:
        self._is_stopped.set()


class VirtualClock:
    """Clock of one rank that advances only through `wait_until`. All ranks' clocks start at 0."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def now(self) -> float:
        return self._seconds

    def wait_until(self, moment: float) -> None:
        self._seconds = max(self._seconds, moment)

    def stop(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class ChangingRate:
    """Changing rate of a link: (moment of the rank's clock, bytes/s from then on), ascending.

    The first rate also holds before its moment. A rate of 0 stops the link until the next moment. The last rate is
    above 0. Example: ((0, 1e6), (2, 0), (3, 1e6)) cuts the link from second 2 to 3.
    """

    changes: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        moments = [moment for moment, _ in self.changes]
        assert moments and moments == sorted(moments), f"the moments {moments} do not ascend"
        assert all(rate >= 0.0 for _, rate in self.changes), "a rate is less than 0"
        assert self.changes[-1][1] > 0.0, "the last rate is 0: its messages never arrive"

    def end(self, start: float, num_bytes: float) -> float:
        """Return the moment at which `num_bytes` have left if they start at `start`."""
        for (_, rate), (until, _) in pairwise(self.changes):
            if start < until:
                carried = rate * (until - start)
                if carried >= num_bytes:
                    return start + num_bytes / rate if num_bytes else start
                num_bytes -= carried
                start = until
        return start + num_bytes / self.changes[-1][1]


class DelayedTransport(PointToPointRing):
    """Transport that delays messages of `inner`, usually an in-process ring. Stats count only callers' messages."""

    def __init__(
        self,
        inner: RingTransport,
        latency_seconds: float,
        bytes_per_second: float | ChangingRate,
        timeout_seconds: float = 30.0,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(inner.rank, inner.size, timeout_seconds)
        self._inner = inner
        self._latency_seconds = latency_seconds
        if not isinstance(bytes_per_second, ChangingRate):
            bytes_per_second = ChangingRate(((0.0, bytes_per_second),))
        self._rate = bytes_per_second
        self._clock = WallClock() if clock is None else clock
        self._is_free_at = 0.0

    def _start(self, sends: Sequence[Message], recvs: Sequence[Message]) -> DelayedWork:
        works: list[Work] = []
        arrivals = []
        for message in recvs:
            # A message with the arrival time precedes each message.
            arrival = torch.empty(1, dtype=torch.float64)
            arrivals.append(arrival)
            works += [self._receive(arrival, message.peer), self._receive(message.tensor, message.peer)]
        for message in sends:
            departed = max(self._clock.now(), self._is_free_at)
            self._is_free_at = self._rate.end(departed, message.tensor.nbytes)
            arrival = torch.tensor([self._is_free_at + self._latency_seconds], dtype=torch.float64)
            works += [self._send(arrival, message.peer), self._send(message.tensor, message.peer)]
        return DelayedWork(self, works, arrivals)

    def _send(self, tensor: torch.Tensor, peer: int) -> Work:
        return self._inner.exchange(tensor, peer, torch.empty(0), peer)

    def _receive(self, tensor: torch.Tensor, peer: int) -> Work:
        return self._inner.exchange(torch.empty(0), peer, tensor, peer)

    def wait_until(self, moment: float, deadline: float) -> None:
        """Wait for a message that arrives at `moment`, at most until `deadline`, by the rank's clock."""
        self._clock.wait_until(min(moment, deadline))
        if self._clock.now() < min(moment, deadline):
            raise Unavailable(f"rank {self.rank} left the ring of {self.size}")
        if moment > deadline:
            self.close()
            raise Unavailable(f"rank {self.rank} waited too long for a message that is still in flight")

    def now(self) -> float:
        """Return the time of the rank's clock, seconds."""
        return self._clock.now()

    def close(self) -> None:
        """See RingTransport."""
        self._clock.stop()
        self._inner.close()


class DelayedWork:
    """Operations of the inner ring for one batch, with their messages' arrival times."""

    def __init__(self, transport: DelayedTransport, works: Sequence[Work], arrivals: Sequence[torch.Tensor]) -> None:
        self._transport = transport
        self._works = works
        self._arrivals = arrivals

    def wait(self, timeout_seconds: float | None = None) -> None:
        """See ringserve.cp_core.transport.interface.Work."""
        seconds = self._transport.timeout_seconds if timeout_seconds is None else timeout_seconds
        deadline = self._transport.now() + seconds
        for work in self._works:
            work.wait(max(0.0, deadline - self._transport.now()))
        for arrival in self._arrivals:
            self._transport.wait_until(float(arrival), deadline)
