"""In-process ring whose ranks are threads: it behaves like a real ring. Rings of one rank and tests use it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch

from ringserve.cp_core.errors import Unavailable
from ringserve.cp_core.transport.collectives import Message, PointToPointRing

Pair = tuple[int, int]


class InProcessRing:
    """Ring with one transport per rank, each for its own thread. `timeout_seconds` bounds every wait."""

    def __init__(self, size: int, timeout_seconds: float = 30.0) -> None:
        mailbox = _Mailbox()
        self.transports = tuple(InProcessTransport(rank, size, timeout_seconds, mailbox) for rank in range(size))

    def close(self) -> None:
        """Close every rank."""
        for transport in self.transports:
            transport.close()


class _Mailbox:
    """Messages in flight, by (source, destination) pair and number within the pair."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.messages: dict[tuple[Pair, int], torch.Tensor] = {}
        self.closed_by: int | None = None


class InProcessTransport(PointToPointRing):
    """One rank's end of an InProcessRing. Sent tensors are copied at once."""

    def __init__(self, rank: int, size: int, timeout_seconds: float, mailbox: _Mailbox) -> None:
        super().__init__(rank, size, timeout_seconds)
        self._mailbox = mailbox
        self._num_sent: dict[int, int] = {}
        self._num_expected: dict[int, int] = {}

    def _start(self, sends: Sequence[Message], recvs: Sequence[Message]) -> _Delivery:
        copies = [(message.peer, message.tensor.clone()) for message in sends]
        with self._mailbox.changed:
            # A batch that only receives is not refused: messages sent before a rank left can still be received, as with
            # sockets.
            if copies:
                self._check_open()
            for peer, copy in copies:
                self._mailbox.messages[(self.rank, peer), _next(self._num_sent, peer)] = copy
            self._mailbox.changed.notify_all()
        expected = [
            (((message.peer, self.rank), _next(self._num_expected, message.peer)), message.tensor) for message in recvs
        ]
        return _Delivery(self, expected)

    def take(self, key: tuple[Pair, int], deadline: float) -> torch.Tensor:
        """Wait for message `key` and return it. Raises Unavailable at `deadline` (time.monotonic)."""
        with self._mailbox.changed:
            while key not in self._mailbox.messages:
                self._check_open()
                if not self._mailbox.changed.wait(deadline - time.monotonic()) and key not in self._mailbox.messages:
                    self._break()
                    raise Unavailable(f"rank {self.rank} waited too long for a message of rank {key[0][0]}")
            return self._mailbox.messages.pop(key)

    def close(self) -> None:
        """See RingTransport."""
        with self._mailbox.changed:
            self._break()

    def _break(self) -> None:
        if self._mailbox.closed_by is None:
            self._mailbox.closed_by = self.rank
        self._mailbox.changed.notify_all()

    def _check_open(self) -> None:
        if self._mailbox.closed_by is not None:
            raise Unavailable(f"rank {self._mailbox.closed_by} left the ring of {self.size}")


class _Delivery:
    """Expected messages of one batch. Each is copied to its tensor when it arrives."""

    def __init__(self, transport: InProcessTransport, expected: list[tuple[tuple[Pair, int], torch.Tensor]]) -> None:
        self._transport = transport
        self._expected = expected

    def wait(self, timeout_seconds: float | None = None) -> None:
        """See Work."""
        seconds = self._transport.timeout_seconds if timeout_seconds is None else timeout_seconds
        deadline = time.monotonic() + seconds
        while self._expected:
            key, tensor = self._expected[0]
            message = self._transport.take(key, deadline)
            assert message.dtype == tensor.dtype and message.numel() == tensor.numel(), (
                f"rank {key[0][0]} sent {message.numel()} x {message.dtype}, "
                f"rank {key[0][1]} expected {tensor.numel()} x {tensor.dtype}"
            )
            tensor.view(-1).copy_(message.view(-1))
            self._expected.pop(0)


def _next(counters: dict[int, int], peer: int) -> int:
    counters[peer] = counters.get(peer, 0) + 1
    return counters[peer]
