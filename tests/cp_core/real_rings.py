"""Rings of threads of this process, connected over loopback as those of processes are."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from ringserve.cp_core.transport.connect import RingStore, connect_ring
from ringserve.cp_core.transport.interface import RingTransport
from ringserve.cp_core.transport.peer_tls import PeerTls
from tests.waiting import WAIT_SECONDS

HOST = "127.0.0.1"


@contextmanager
def real_ring(
    backend: str, size: int, timeout_seconds: float = WAIT_SECONDS, name: str = "ring", tls: PeerTls | None = None
) -> Iterator[list[RingTransport]]:
    """Yield every rank's end of a ring of `size`."""
    store = RingStore(HOST, 0, timeout_seconds)

    def join(rank: int) -> RingTransport:
        own_store = store if rank == 0 else None
        return connect_ring(HOST, store.port, name, rank, size, timeout_seconds, backend, store=own_store, tls=tls)

    with ThreadPoolExecutor(size) as pool:
        transports = [future.result() for future in [pool.submit(join, rank) for rank in range(size)]]
    try:
        yield transports
    finally:
        for transport in transports:
            transport.close()
