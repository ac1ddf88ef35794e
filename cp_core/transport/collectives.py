"""Ring collectives, built from sends and receives between pairs of ranks, and sums over tensor-parallel ranks.

Every transport derives from `PointToPointRing` or wraps one that does. Tensor-parallel layers call the functions. Sums
have the same bits on every rank.

Shapes: T tokens, any leading dims.
"""

from __future__ import annotations

import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ringserve.cp_core.layout.shards import even_share
from ringserve.cp_core.transport.interface import RingTransport, TransportStats, Work

# Up to this size, one round of whole tensors beats two rounds of parts: latency costs more than bytes.
ONE_ROUND_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Message:
    """Tensor to send to `peer`, or to receive from it."""

    tensor: torch.Tensor
    peer: int


class PointToPointRing(ABC):
    """Base class of ring transports. Every operation is one batch of messages, which a subclass starts in `_start`."""

    is_on_stream = False

    def __init__(self, rank: int, size: int, timeout_seconds: float) -> None:
        assert 0 <= rank < size, f"rank {rank} in a ring of {size}"
        self.rank = rank
        self.size = size
        self.timeout_seconds = timeout_seconds
        self._stats = TransportStats()

    @property
    def stats(self) -> TransportStats:
        return self._stats

    @abstractmethod
    def _start(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Work:
        """Start all messages. No tensor is empty, no peer is this rank. Raises Unavailable if the ring is broken."""

    @abstractmethod
    def close(self) -> None:
        """See RingTransport."""

    def await_event(self, event: torch.Event) -> None:
        """See RingTransport."""
        event.synchronize()

    def exchange(self, send: torch.Tensor, dst: int, recv: torch.Tensor, src: int) -> Work:
        """See RingTransport."""
        self.stats.exchanges += 1
        if dst == self.rank:
            assert src == self.rank, f"rank {self.rank} sends to itself but receives from {src}"
            recv.copy_(send)
            return self._begin([], [])
        return self._begin([Message(send, dst)], [Message(recv, src)])

    def all_to_all(self, send: Sequence[torch.Tensor], recv: Sequence[torch.Tensor]) -> Work:
        """See RingTransport."""
        self.stats.all_to_alls += 1
        recv[self.rank].copy_(send[self.rank])
        return self._begin(
            [Message(send[peer], peer) for peer in self._peers()], [Message(recv[peer], peer) for peer in self._peers()]
        )

    def gather_all(self, send: torch.Tensor, recv: Sequence[torch.Tensor]) -> Work:
        """See RingTransport."""
        self.stats.gathers += 1
        if recv[self.rank] is not send:
            recv[self.rank].copy_(send)
        return self._begin(
            [Message(send, peer) for peer in self._peers()], [Message(recv[peer], peer) for peer in self._peers()]
        )

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        """See RingTransport."""
        self.stats.broadcasts += 1
        if source == self.rank:
            return self._begin([Message(tensor, peer) for peer in self._peers()], [])
        return self._begin([], [Message(tensor, source)])

    def _peers(self) -> list[int]:
        # Each rank starts with its successor, so that not all ranks send to rank 0 first.
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def _begin(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Work:
        sends = [message for message in sends if message.tensor.numel()]
        recvs = [message for message in recvs if message.tensor.numel()]
        for message in (*sends, *recvs):
            assert message.tensor.is_contiguous(), f"a message of shape {tuple(message.tensor.shape)} is not contiguous"
        self.stats.bytes_sent += sum(message.tensor.nbytes for message in sends)
        return TimedWork(self._start(sends, recvs), self.stats)


class TimedWork:
    """Work that adds its waits to the transport's stats."""

    __slots__ = ("_stats", "_work")

    def __init__(self, work: Work, stats: TransportStats) -> None:
        self._work = work
        self._stats = stats

    def wait(self, timeout_seconds: float | None = None) -> None:
        """See Work."""
        start = time.perf_counter()
        try:
            self._work.wait(timeout_seconds)
        finally:
            self._stats.seconds_waited += time.perf_counter() - start


def all_reduce(partial: torch.Tensor, transport: RingTransport) -> torch.Tensor:
    """Sum every rank's `partial`, in rank order and at least in fp32. The result has its shape and dtype.

    On N ranks, a rank sends N - 1 times the tensor's bytes if N is 2 or the tensor is small, else 2 * (N - 1) / N
    times. Raises Unavailable if the ring breaks.
    """
    if transport.size == 1:
        return partial
    flat = partial.contiguous().view(-1)
    if transport.size == 2 or flat.nbytes <= ONE_ROUND_BYTES:
        whole = [flat if rank == transport.rank else torch.empty_like(flat) for rank in range(transport.size)]
        transport.gather_all(flat, whole).wait()
        return _sum(whole).view(partial.shape)
    parts = list(flat.tensor_split(transport.size))
    mine = [torch.empty_like(parts[transport.rank]) for _ in range(transport.size)]
    transport.all_to_all(parts, mine).wait()
    total = torch.empty_like(flat)
    transport.gather_all(_sum(mine), list(total.tensor_split(transport.size))).wait()
    return total.view(partial.shape)


def reduce_scatter_rows(partial: torch.Tensor, transport: RingTransport) -> torch.Tensor:
    """Return this rank's rows [..., even share of T, C] of the sum over all ranks' `partial` [..., T, C].

    The sum has the same bits as `all_reduce`. On N ranks, a rank sends (N - 1) / N times the tensor's bytes. Raises
    Unavailable if the ring breaks.
    """
    if transport.size == 1:
        return partial
    parts = [partial[..., start:stop, :].contiguous() for start, stop in _row_shares(partial.shape[-2], transport.size)]
    mine = [torch.empty_like(parts[transport.rank]) for _ in range(transport.size)]
    transport.all_to_all(parts, mine).wait()
    return _sum(mine)


def gather_rows(own: torch.Tensor, num_rows: int, transport: RingTransport) -> torch.Tensor:
    """Gather every rank's rows [..., even share of T, C] to [..., T, C]. Raises Unavailable if the ring breaks."""
    if transport.size == 1:
        return own
    own = own.contiguous()
    shares = _row_shares(num_rows, transport.size)
    parts = [own.new_empty(*own.shape[:-2], stop - start, own.shape[-1]) for start, stop in shares]
    transport.gather_all(own, parts).wait()
    return torch.cat(parts, dim=-2)


def _row_shares(num_rows: int, size: int) -> list[tuple[int, int]]:
    return [even_share(num_rows, rank, size) for rank in range(size)]


def join_last_dim(part: torch.Tensor, widths: tuple[int, ...], transport: RingTransport) -> torch.Tensor:
    """Join every rank's `part` [..., widths[rank]] to [..., sum(widths)]. Raises Unavailable if the ring breaks."""
    if transport.size == 1:
        return part
    own = part.contiguous()
    parts = [own.new_empty(*own.shape[:-1], width) for width in widths]
    transport.gather_all(own, parts).wait()
    return torch.cat(parts, dim=-1)


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    if parts[0].dtype == torch.float32:
        return functools.reduce(torch.add, parts)
    total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32))
    for part in parts[1:]:
        total = total + part
    return total.to(parts[0].dtype)
