"""Wakes a thread that polls descriptors."""

from __future__ import annotations

import socket
from contextlib import suppress


class Bell:
    """A descriptor that is readable from `ring` to `silence`."""

    def __init__(self) -> None:
        self._heard, self._rung = socket.socketpair()
        self._heard.setblocking(False)
        self._rung.setblocking(False)
        self.descriptor = self._heard.fileno()

    def ring(self) -> None:
        # It rings already if nothing more fits in.
        with suppress(BlockingIOError):
            self._rung.send(b"\0")

    def silence(self) -> None:
        with suppress(BlockingIOError):
            while self._heard.recv(4096):
                pass

    def close(self) -> None:
        """Nobody may be polling it any more."""
        self._heard.close()
        self._rung.close()
