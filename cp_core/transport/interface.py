"""Contract of a ring: the operations by which its ranks move tensors.

All operations start at once and return a `Work`. Between the start and the end of `Work.wait()` a sent tensor may be
read but not written, and a received one neither. Tensors are contiguous. Both sides know every size beforehand, so
lengths are exact and a tensor without elements puts no byte on the wire. Messages of a pair of ranks arrive in the
order in which they were issued; every rank issues its operations in the same order.

Messages of a ring that `is_on_stream` are work of the device's stream: what the device is given after a wait comes
after the messages, and the host goes on. A recording of the stream's work has them. Of any other ring a wait returns
when they have come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class Work(Protocol):
    """Operation under way."""

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Return when the tensors may be used again.

        Raises Unavailable when a peer died or closed, or after `timeout_seconds` (None: the transport's timeout).
        The ring is then broken: its every later operation fails, here and at the peers.
        """
        ...


@dataclass(slots=True)
class TransportStats:
    """Counters of a transport since it was made.

    `seconds_waited` is the time that its user spent in waits; messages of a recording that a device replays have none.
    `seconds_under_way` is the time in which any message was under way, waited for or not; None for a transport that
    does not see when a message is done.
    """

    exchanges: int = 0
    all_to_alls: int = 0
    gathers: int = 0
    broadcasts: int = 0
    bytes_sent: int = 0
    seconds_waited: float = 0.0
    seconds_under_way: float | None = None

    @property
    def counts(self) -> dict[str, int]:
        """Return how many operations were issued by their kind, and the bytes sent."""
        return {name: getattr(self, name) for name in COUNTERS}

    def add(self, counts: Mapping[str, int], times: int = 1) -> None:
        """Count operations that a device did again without their issue."""
        for name, count in counts.items():
            setattr(self, name, getattr(self, name) + times * count)


COUNTERS = ("exchanges", "all_to_alls", "gathers", "broadcasts", "bytes_sent")


class RingTransport(Protocol):
    """One rank's end of a ring. Used by one thread at a time, except `close`."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def stats(self) -> TransportStats: ...

    @property
    def is_on_stream(self) -> bool: ...

    def exchange(self, send: torch.Tensor, dst: int, recv: torch.Tensor, src: int) -> Work:
        """Send `send` to rank `dst` while receiving `recv` from rank `src`."""
        ...

    def all_to_all(self, send: Sequence[torch.Tensor], recv: Sequence[torch.Tensor]) -> Work:
        """Send send[r] to, and receive recv[r] from, every rank r. The own part is copied."""
        ...

    def gather_all(self, send: torch.Tensor, recv: Sequence[torch.Tensor]) -> Work:
        """Receive into recv[r] the `send` of every rank r. The own part is copied."""
        ...

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        """Send `tensor` of rank `source` to every other rank, which receives it into its own `tensor`."""
        ...

    def await_event(self, event: torch.Event) -> None:
        """Wait until the device has passed `event`, and with it the messages of its stream before that.

        Raises Unavailable as the wait for these messages would.
        """
        ...

    def close(self) -> None:
        """Leave the ring. Waits of this rank and of its peers raise Unavailable. May be called again."""
        ...
