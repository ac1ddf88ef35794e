"""A ring over torch.distributed, and the joining of any ring: gloo or sockets between CPUs, NCCL between GPUs.

The process group is private to the ring. torch's default group is never touched, so that several rings can live in one
process and one can be torn down and rebuilt.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import ProcessGroupGloo, Work
from torch.distributed.distributed_c10d import PrefixStore, Store

from cp_core.errors import ConfigError, Unavailable
from cp_core.transport.inprocess import InProcessRing
from cp_core.transport.interface import RingTransport
from cp_core.transport.peer_tls import PeerTls
from cp_core.transport.point_to_point import Message, PointToPointRing
from cp_core.transport.rendezvous import RingStore, find_store, own_address
from cp_core.transport.ring_backend import select_ring_backend
from cp_core.transport.socket_mesh import Meeting, RingDoor, connect_mesh
from cp_core.transport.socket_ring import SocketRing

# Messages carry DATA_TAG: gloo keeps those of one tag and pair in order of issue. Nobody ever sends CLOSING_TAG.
DATA_TAG = 0
CLOSING_TAG = 1


class Group(Protocol):
    """What of a torch process group, or of a backend such as ProcessGroupGloo, a ring uses."""

    def rank(self) -> int: ...
    def size(self) -> int: ...
    def send(self, tensors: list[torch.Tensor], dstRank: int, tag: int, /) -> Work: ...
    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int, /) -> Work: ...


class TorchRing(PointToPointRing):
    """One rank's end of a gloo ring.

    A peer's death closes its sockets, which ends the waits of its neighbours at once; a rank that meets an error closes
    its own, so the news goes round a ring of any size without waiting for a timeout.
    """

    def __init__(self, process_group: Group, timeout_seconds: float, store: RingStore | None = None) -> None:
        """`store` is kept as long as the ring: on rank 0 it serves the others."""
        super().__init__(process_group.rank(), process_group.size(), timeout_seconds)
        self._group = process_group
        self._store = store
        self._closed_because: str | None = None

    def _start(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Operations:
        if self._closed_because is not None:
            raise Unavailable(self._closed_because)
        started: list[tuple[Work, int]] = []
        try:
            # Receives first: a message that finds its receiver ready needs one trip, not three.
            for message in recvs:
                started.append((self._group.recv([message.tensor], message.peer, DATA_TAG), message.peer))
            for message in sends:
                started.append((self._group.send([message.tensor], message.peer, DATA_TAG), message.peer))
        except RuntimeError as error:
            raise self.fail(f"rank {self.rank} lost the ring") from error
        return Operations(self, started)

    def fail(self, reason: str) -> Unavailable:
        """Close the ring and return what to raise."""
        if self._closed_because is None:
            self._closed_because = reason
            self._break_connections()
        return Unavailable(self._closed_because)

    def close(self) -> None:
        """See RingTransport."""
        self.fail(f"rank {self.rank} left the ring of {self.size}")

    def _break_connections(self) -> None:
        # ProcessGroupGloo.abort() leaves waiting operations waiting. An operation that times out does what we need: it
        # closes the connections to all ranks, and every waiting operation, here and there, fails at once. On a
        # connection that is broken already nothing times out, so each peer is tried.
        for peer in range(self.size):
            if peer != self.rank:
                with suppress(RuntimeError):
                    self._group.recv([torch.empty(1)], peer, CLOSING_TAG).wait(timedelta(milliseconds=1))


class Operations:
    """The operations of one message batch, each with its peer."""

    def __init__(self, ring: TorchRing, started: list[tuple[Work, int]], is_on_stream: bool = False) -> None:
        self._ring = ring
        self._started = started
        self._is_on_stream = is_on_stream

    def wait(self, timeout_seconds: float | None = None) -> None:
        """See cp_core.transport.interface.Work."""
        seconds = self._ring.timeout_seconds if timeout_seconds is None else timeout_seconds
        deadline = time.monotonic() + seconds
        for work, peer in self._started:
            try:
                if self._is_on_stream:
                    work.wait()
                else:
                    # Gloo counts whole milliseconds: rounded down, it would give up before the deadline.
                    left = max(deadline - time.monotonic(), 0.0)
                    work.wait(timedelta(milliseconds=math.floor(left * 1e3) + 1))
            except RuntimeError as error:
                late = " after its deadline" if time.monotonic() >= deadline else ""
                raise self._ring.fail(f"rank {self._ring.rank} lost rank {peer}{late}") from error


def connect_ring(
    host: str,
    port: int,
    name: str,
    rank: int,
    size: int,
    timeout_seconds: float,
    backend: str = "auto",
    *,
    store: RingStore | None = None,
    opens_store: bool = True,
    device: torch.device | str = "cpu",
    tls: PeerTls | None = None,
) -> RingTransport:
    """Join the ring called `name` of `size` ranks; returns when all have joined. The name must be new to the store.

    The store guards nothing: whoever reaches it can be part of the ring. Ranks that were told their doors otherwise
    meet by `cp_core.transport.socket_mesh` alone.

    Rank 0 opens the store at host:port unless it passes `store`, as it must where the port is chosen (port 0) and told
    to the others first, or unless a rank of another ring opens it for both (`opens_store` is False). `timeout_seconds`
    bounds the joining and every later wait. `backend`, the same on all ranks, is one of `transport.ring_backend` that
    serves `device`; only sockets go by `tls`. Raises Unavailable if the others do not come, ConfigError for a backend
    that does not serve the device, or cannot encrypt where it should.
    """
    device = torch.device(device)
    backend = select_ring_backend(backend, device.type)
    if size == 1:
        return InProcessRing(1, timeout_seconds).transports[0]
    if tls is not None and backend != "sockets":
        raise ConfigError(f"ring transport {backend!r} cannot encrypt; only 'sockets' can")
    deadline = time.monotonic() + timeout_seconds
    if rank == 0 and store is None and opens_store:
        store = RingStore(host, port, timeout_seconds)
    found = store.store if store is not None else find_store(host, port, timeout_seconds)
    prefixed = PrefixStore(name, found)
    try:
        if backend == "nccl":
            from cp_core.transport.nccl import join_nccl

            return join_nccl(prefixed, rank, size, device, timeout_seconds, store)
        address = own_address(host, found.port)
        if backend == "sockets":
            with closing(RingDoor(address)) as door:
                meeting = _meet_in_store(prefixed, door.endpoint, name, rank, size, deadline, tls)
                return SocketRing(rank, timeout_seconds, connect_mesh(door, meeting), store)
        return TorchRing(_join_gloo(prefixed, rank, size, address, deadline), timeout_seconds, store)
    except (RuntimeError, Unavailable) as error:
        reason = f": {error}" if isinstance(error, Unavailable) else ""
        raise Unavailable(f"rank {rank} cannot join ring {name!r} of {size} at {host}:{port}{reason}") from error


def _meet_in_store(
    store: Store, endpoint: str, name: str, rank: int, size: int, deadline: float, tls: PeerTls | None
) -> Meeting:
    """Tell the others our door, learn theirs, and the secret that rank 0 makes. Raises RuntimeError at the deadline."""
    if rank == 0:
        store.set("secret", secrets.token_hex(32))
    store.set(f"door {rank}", endpoint)
    keys = ["secret", *(f"door {peer}" for peer in range(size))]
    store.wait(keys, timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
    secret, *endpoints = (store.get(key).decode() for key in keys)
    left = max(deadline - time.monotonic(), 0.001)
    return Meeting(name=name, rank=rank, endpoints=tuple(endpoints), secret=secret, timeout_seconds=left, tls=tls)


def _join_gloo(store: Store, rank: int, size: int, address: str, deadline: float) -> Group:
    # torch 2.13's stubs know neither the constructor with options nor the options' members.
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
    # Connected at once: a ring that cannot form should fail here, not in its first step.
    options._devices = [gloo.create_device(hostname=address, lazy_init=False)]
    options._threads = 1
    group: Group = gloo(store, rank, size, options)
    return group
