"""Joining a ring: ranks find each other in a key-value store that one of them serves.

Ranks join NCCL rings here; benchmarks and tests join rings of any kind here. Ranks that already know each other's
endpoints need no store: `cp_core.transport.socket_mesh` connects them.
"""

from __future__ import annotations

import secrets
import time
from contextlib import closing
from datetime import timedelta

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from ringserve.cp_core.errors import ConfigError, Unavailable
from ringserve.cp_core.transport.inprocess import InProcessRing
from ringserve.cp_core.transport.interface import RingTransport
from ringserve.cp_core.transport.peer_tls import PeerTls
from ringserve.cp_core.transport.ring_backend import select_ring_backend
from ringserve.cp_core.transport.socket_mesh import Rendezvous, RingListener, connect_mesh, listen, own_address
from ringserve.cp_core.transport.socket_ring import SocketRing
from ringserve.cp_core.transport.staged import for_device


class RingStore:
    """Key-value store for any number of rings, served by this process on one address.

    torch would listen on every interface, so the socket is bound to `host` first. Port 0 picks a free port. Raises
    Unavailable if it cannot listen on the address.
    """

    def __init__(self, host: str, port: int = 0, timeout_seconds: float = 60.0) -> None:
        self.host = host
        listener = listen(host, port, "ring store")
        self.port: int = listener.getsockname()[1]
        self.store = TCPStore(
            host,
            self.port,
            world_size=None,
            is_master=True,
            timeout=timedelta(seconds=timeout_seconds),
            wait_for_workers=False,
            # The store owns the descriptor from here on.
            master_listen_fd=listener.detach(),
        )


def find_store(host: str, port: int, timeout_seconds: float) -> TCPStore:
    """Connect to the store that another rank serves at host:port. Raises Unavailable after `timeout_seconds`."""
    try:
        return TCPStore(
            host,
            port,
            world_size=None,
            is_master=False,
            timeout=timedelta(seconds=timeout_seconds),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        raise Unavailable(f"no ring store answers at {host}:{port} within {timeout_seconds} s") from error


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
    device: torch.device | str = "cpu",
    tls: PeerTls | None = None,
) -> RingTransport:
    """Join the ring `name` of `size` ranks and return when all ranks have joined. The name must be new to the store.

    The store is not guarded: any process that reaches it can join a ring.

    Ranks find the store at host:port. The rank that serves it passes `store`, which may serve several rings.
    `timeout_seconds` bounds the joining and every later wait. `backend` must be the same on all ranks and support
    `device` (see `transport.ring_backend`). Only sockets support `tls`. Raises Unavailable if other ranks do not join,
    ConfigError if the backend does not support the device or `tls`.
    """
    device = torch.device(device)
    backend = select_ring_backend(backend, device.type)
    if size == 1:
        return InProcessRing(1, timeout_seconds).transports[0]
    if tls is not None and backend != "sockets":
        raise ConfigError(f"ring transport {backend!r} cannot encrypt; only 'sockets' can")
    deadline = time.monotonic() + timeout_seconds
    found = store.store if store is not None else find_store(host, port, timeout_seconds)
    prefixed = PrefixStore(name, found)
    try:
        if backend == "nccl":
            # Imported only if needed: torch.distributed takes a while to import.
            from ringserve.cp_core.transport import nccl

            return nccl.join_nccl(prefixed, rank, size, device, timeout_seconds, store)
        with closing(RingListener(own_address(host, found.port))) as listener:
            rendezvous = _rendezvous_by_store(prefixed, listener.endpoint, name, rank, size, deadline, tls)
            ring = SocketRing(rank, timeout_seconds, connect_mesh(listener, rendezvous), store)
            return for_device(ring, device)
    except (RuntimeError, Unavailable) as error:
        reason = f": {error}" if isinstance(error, Unavailable) else ""
        raise Unavailable(f"rank {rank} cannot join ring {name!r} of {size} at {host}:{port}{reason}") from error


def _rendezvous_by_store(
    store: Store, endpoint: str, name: str, rank: int, size: int, deadline: float, tls: PeerTls | None
) -> Rendezvous:
    """Publish this rank's endpoint. Return all ranks' endpoints and rank 0's secret.

    Raises RuntimeError at the deadline.
    """
    if rank == 0:
        store.set("secret", secrets.token_hex(32))
    store.set(f"endpoint {rank}", endpoint)
    keys = ["secret", *(f"endpoint {peer}" for peer in range(size))]
    store.wait(keys, timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
    secret, *endpoints = (store.get(key).decode() for key in keys)
    left = max(deadline - time.monotonic(), 0.001)
    return Rendezvous(name=name, rank=rank, endpoints=tuple(endpoints), secret=secret, timeout_seconds=left, tls=tls)
