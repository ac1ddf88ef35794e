"""A ring over TCP sockets, plain or with TLS, one connection for each pair of ranks: the ring of CPU ranks.

A gloo message passes through two helper threads, which on busy cores wait for their turns: a small gather took
milliseconds there (docs/decisions/0004). Here callers send and receive small messages themselves.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

import torch

from cp_core.transport.point_to_point import Message, PointToPointRing
from cp_core.transport.rendezvous import RingStore
from cp_core.transport.socket_link import Transfer
from cp_core.transport.socket_traffic import Traffic


class SocketRing(PointToPointRing):
    """One rank's end of a ring of sockets. Tensors are on the CPU.

    The death of a rank resets its connections, which ends the waits of all others at once. A rank that leaves in order
    is missed by those that expect a message of it; they leave by a reset, so the others hear of it from them.
    """

    def __init__(
        self,
        rank: int,
        timeout_seconds: float,
        connections: Mapping[int, socket.socket],
        store: RingStore | None = None,
    ) -> None:
        """Takes over `connections`, one to every other rank. `store` is kept as long: on rank 0 it serves all."""
        super().__init__(rank, len(connections) + 1, timeout_seconds)
        self._traffic = Traffic(rank, connections, timeout_seconds, self.stats)
        self._store = store

    def _start(self, sends: Sequence[Message], recvs: Sequence[Message]) -> SocketWork:
        outgoing = [Transfer(message.peer, _bytes_of(message.tensor)) for message in sends]
        incoming = [Transfer(message.peer, _bytes_of(message.tensor)) for message in recvs]
        self._traffic.start(outgoing, incoming)
        return SocketWork(self._traffic, outgoing + incoming, self.timeout_seconds)

    def close(self) -> None:
        """See RingTransport."""
        self._traffic.close(f"rank {self.rank} left the ring of {self.size}")


class SocketWork:
    """The transfers of one message batch."""

    __slots__ = ("_timeout_seconds", "_traffic", "_transfers")

    def __init__(self, traffic: Traffic, transfers: Sequence[Transfer], timeout_seconds: float) -> None:
        self._traffic = traffic
        self._transfers = transfers
        self._timeout_seconds = timeout_seconds

    def wait(self, timeout_seconds: float | None = None) -> None:
        """See cp_core.transport.interface.Work."""
        if not all(transfer.is_done for transfer in self._transfers):
            self._traffic.wait(self._transfers, self._timeout_seconds if timeout_seconds is None else timeout_seconds)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The tensor's own memory: kept alive by the view, not copied."""
    assert tensor.device.type == "cpu", f"a socket ring moves tensors on the CPU, not on {tensor.device}"
    return tensor.detach().view(-1).view(torch.uint8).numpy().data
