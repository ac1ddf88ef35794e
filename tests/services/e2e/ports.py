"""For programs that cannot choose a port themselves and tell which."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Return a port on loopback that was free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
