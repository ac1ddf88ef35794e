"""Ring transport contract: the operations that move tensors between ranks.

All code that sends between the ranks of a ring uses it. Operations start at once and return a `Work`. Until
`Work.wait()` returns, sent tensors may be read but not written, and received tensors may be neither read nor written.
Tensors are contiguous. Both sides know every size in advance, so lengths are exact, and an empty tensor sends nothing.
Messages between two ranks arrive in issue order, and every rank issues its operations in the same order.

If `is_on_stream`, messages are work of the device's stream: `wait` returns at once, and work that is queued later runs
after the messages. CUDA graphs record them. On other rings, `wait` returns when the messages have arrived.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class Work(Protocol):
    """Operation in progress."""

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Wait until the tensors may be used again.

        Raises Unavailable if a peer died or closed, or after `timeout_seconds` (None: the transport's timeout). The
        ring is then broken: all later operations fail, here and on the peers.
        """
        ...


@dataclass(slots=True)
class TransportStats:
    """Counters since the transport was made.

    `seconds_waited` is the time that the caller waited, without waits for messages that a CUDA graph replays.
    `seconds_under_way` counts the time with any message in flight, awaited or not. It is None if the transport cannot
    see when a message is done.
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
        """Return the number of operations issued, by kind, and the bytes sent."""
        return {name: getattr(self, name) for name in COUNTERS}

    def add(self, counts: Mapping[str, int], times: int = 1) -> None:
        """Add the `counts` of operations that a CUDA graph replayed `times` times."""
        for name, count in counts.items():
            setattr(self, name, getattr(self, name) + times * count)


COUNTERS = ("exchanges", "all_to_alls", "gathers", "broadcasts", "bytes_sent")


class RingTransport(Protocol):
    """One rank's end of a ring. Only one thread at a time may use it, except for `close`."""

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
        """Send send[r] to every rank r and receive recv[r] from it. The rank's own part is copied."""
        ...

    def gather_all(self, send: torch.Tensor, recv: Sequence[torch.Tensor]) -> Work:
        """Receive every rank r's `send` into recv[r]. The rank's own part is copied."""
        ...

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        """Send rank `source`'s `tensor` to every other rank, into its `tensor`."""
        ...

    def await_event(self, event: torch.Event) -> None:
        """Wait until the device has passed `event`, and with it all earlier messages of its stream.

        Raises Unavailable like a wait for these messages.
        """
        ...

    def close(self) -> None:
        """Leave the ring. Waits of this rank and its peers raise Unavailable. Idempotent."""
        ...
