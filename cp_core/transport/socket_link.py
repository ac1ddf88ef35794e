"""One TCP connection of a socket ring: the messages under way in both directions, and the moving of their bytes.

Both sides know every size, so nothing but payload is on the wire.
"""

from __future__ import annotations

import select
import socket
import struct
from collections import deque
from dataclasses import dataclass
from typing import Final

# Linux' default send buffer takes a message of this size whole, so that sending it never needs the receiver.
LARGE_BYTES: Final = 256 << 10
BROKEN: Final = select.POLLERR | select.POLLHUP | select.POLLNVAL
RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)
FINISH_ON_CLOSE: Final = struct.pack("ii", 0, 0)


@dataclass(slots=True, eq=False)
class Transfer:
    """One message in one direction; `rest` is what has not been moved yet."""

    peer: int
    rest: memoryview

    @property
    def is_done(self) -> bool:
        return not self.rest


class Link:
    """The connection to `peer`. No call waits. Used under a lock."""

    def __init__(self, peer: int, connection: socket.socket) -> None:
        """Takes the connection over.

        A process that dies, however it dies, resets its connections: peers that wait for somebody else notice that,
        whereas the end of a stream, which a rank that leaves in order sends, they need not look at.
        """
        self.peer = peer
        self.is_lost = False
        self.sends: deque[Transfer] = deque()
        self.recvs: deque[Transfer] = deque()
        self._connection = connection
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        self.descriptor = connection.fileno()

    @property
    def is_idle(self) -> bool:
        return not self.sends and not self.recvs

    @property
    def needs_mover(self) -> bool:
        """Whether something must be moved while nobody waits for it. What is small is held by the kernel meanwhile."""
        return bool(self.sends) or any(len(recv.rest) > LARGE_BYTES for recv in self.recvs)

    @property
    def wanted_events(self) -> int:
        """What to poll for. BROKEN is always reported, the end of the stream only where more is expected."""
        return (select.POLLIN if self.recvs else 0) | (select.POLLOUT if self.sends else 0)

    def move(self) -> None:
        """Send what the kernel takes and receive what it has; sets `is_lost` if the peer is gone."""
        try:
            self._send()
            self._receive()
        except OSError:
            self.is_lost = True

    def _send(self) -> None:
        while self.sends:
            transfer = self.sends[0]
            try:
                num_bytes = self._connection.send(transfer.rest)
            except BlockingIOError:
                return
            transfer.rest = transfer.rest[num_bytes:]
            if transfer.rest:
                # The kernel is full. To try again at once would keep the other direction waiting.
                return
            self.sends.popleft()

    def _receive(self) -> None:
        while self.recvs:
            transfer = self.recvs[0]
            try:
                num_bytes = self._connection.recv_into(transfer.rest)
            except BlockingIOError:
                return
            if not num_bytes:
                raise ConnectionResetError(f"rank {self.peer} ended the stream")
            transfer.rest = transfer.rest[num_bytes:]
            if transfer.rest:
                return
            self.recvs.popleft()

    def close(self, in_order: bool) -> None:
        """End the stream after what the kernel still holds, or else reset the connection."""
        if in_order:
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, FINISH_ON_CLOSE)
        self._connection.close()
