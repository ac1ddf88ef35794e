"""Where the ranks of a ring meet: rank 0 opens a store, the others find each other's addresses in it."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from cp_core.errors import Unavailable


class RingStore:
    """A key-value store for any number of rings, served by this process on one address only.

    torch would listen on every interface; here the socket is bound to `host` first. Port 0 takes a free one.
    Raises Unavailable if the address cannot be listened on.
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
    """The store that rank 0 opened at host:port, waiting for it to appear. Raises Unavailable."""
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


def own_address(host: str, port: int) -> str:
    """The address of this machine's interface towards `host`. No packet is sent. Raises Unavailable."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise Unavailable(f"no interface leads to ring host {host}: {error}") from error


def listen(host: str, port: int, what: str) -> socket.socket:
    """A listening socket on one address only; port 0 takes a free one. Raises Unavailable, which names `what`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(128)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise Unavailable(f"the {what} cannot listen on {host}:{port}: {error}") from error
    return listener
