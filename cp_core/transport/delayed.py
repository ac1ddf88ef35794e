"""A ring whose messages take their time: what a slow link does to an algorithm, shown on one machine.

Each message leaves when the link to its receiver is free, occupies it for bytes / rate, and arrives a latency later.
Nobody is kept waiting but who waits for a message, as on a real link.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Protocol

import torch

from cp_core.errors import Unavailable
from cp_core.transport.collectives import Message, PointToPointRing
from cp_core.transport.interface import RingTransport, Work


class Clock(Protocol):
    """What time it is for a rank, seconds, the same for all ranks of a ring."""

    def now(self) -> float: ...

    def wait_until(self, moment: float) -> None:
        """Return at `moment`, at once if it has passed, or when the rank leaves the ring."""
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


class DelayedTransport(PointToPointRing):
    """A rank's end of `inner`, an in-process ring as a rule, delayed. Its statistics count what it was asked for."""

    def __init__(
        self,
        inner: RingTransport,
        latency_seconds: float,
        bytes_per_second: float,
        timeout_seconds: float = 30.0,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(inner.rank, inner.size, timeout_seconds)
        self._inner = inner
        self._latency_seconds = latency_seconds
        self._bytes_per_second = bytes_per_second
        self._clock = WallClock() if clock is None else clock
        self._is_free_at: dict[int, float] = {}

    def _start(self, sends: Sequence[Message], recvs: Sequence[Message]) -> DelayedWork:
        works: list[Work] = []
        arrivals = []
        for message in recvs:
            # The moment of arrival goes before each message.
            arrival = torch.empty(1, dtype=torch.float64)
            arrivals.append(arrival)
            works += [self._receive(arrival, message.peer), self._receive(message.tensor, message.peer)]
        for message in sends:
            departed = max(self._clock.now(), self._is_free_at.get(message.peer, 0.0))
            self._is_free_at[message.peer] = departed + message.tensor.nbytes / self._bytes_per_second
            arrival = torch.tensor([self._is_free_at[message.peer] + self._latency_seconds], dtype=torch.float64)
            works += [self._send(arrival, message.peer), self._send(message.tensor, message.peer)]
        return DelayedWork(self, works, arrivals)

    def _send(self, tensor: torch.Tensor, peer: int) -> Work:
        return self._inner.exchange(tensor, peer, torch.empty(0), peer)

    def _receive(self, tensor: torch.Tensor, peer: int) -> Work:
        return self._inner.exchange(torch.empty(0), peer, tensor, peer)

    def wait_until(self, moment: float, deadline: float) -> None:
        """Wait for a message that arrives at `moment`; at `deadline`, both of the rank's clock, give up."""
        self._clock.wait_until(min(moment, deadline))
        if self._clock.now() < min(moment, deadline):
            raise Unavailable(f"rank {self.rank} left the ring of {self.size}")
        if moment > deadline:
            self.close()
            raise Unavailable(f"rank {self.rank} waited too long for a message that is still under way")

    def now(self) -> float:
        """Of the rank's clock, seconds."""
        return self._clock.now()

    def close(self) -> None:
        """See RingTransport."""
        self._clock.stop()
        self._inner.close()


class DelayedWork:
    """The inner ring's operations of one batch, and when their messages arrive."""

    def __init__(self, transport: DelayedTransport, works: Sequence[Work], arrivals: Sequence[torch.Tensor]) -> None:
        self._transport = transport
        self._works = works
        self._arrivals = arrivals

    def wait(self, timeout_seconds: float | None = None) -> None:
        """See cp_core.transport.interface.Work."""
        seconds = self._transport.timeout_seconds if timeout_seconds is None else timeout_seconds
        deadline = self._transport.now() + seconds
        for work in self._works:
            work.wait(max(0.0, deadline - self._transport.now()))
        for arrival in self._arrivals:
            self._transport.wait_until(float(arrival), deadline)
