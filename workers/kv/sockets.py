"""TCP stream of a KV connection, plain or with TLS, for both ends. Every wait is bounded.

The KV sender and receiver own the streams. docs/decisions/0003-kv-carrier.md compares plain sockets with gRPC and
ZeroMQ. Decision 0022 covers their security.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from collections.abc import Sequence

from ringserve.cp_core.transport.peer_tls import PeerTls, handshake_events
from ringserve.cp_core.transport.socket_mesh import parse_endpoint
from ringserve.workers.kv.frames import PREFIX, Frame, decode_header, decode_prefix

# Limit on buffers per sendmsg (IOV_MAX on Linux is 1024).
MAX_BUFFERS = 512


class KvStream:
    """Stream of one connection. One thread may send while another receives. Any thread may call `shut`.

    Waits for the peer raise TimeoutError after `stall_seconds`, and at `deadline` (monotonic clock) if it is set. This
    and every other connection failure is an OSError. The stream is unusable afterwards.
    """

    def __init__(self, connection: socket.socket, stall_seconds: float) -> None:
        """Own the connection. Raises OSError if it is closed already."""
        self.deadline: float | None = None
        self._connection = connection
        self._stall_seconds = stall_seconds
        # Guards each single call on the socket, because OpenSSL has one state for both directions. A thread that waits
        # for the peer does not hold it.
        self._lock = threading.Lock()
        self._num_waiting = 0
        self._is_closed = False
        tune(connection)

    def shake_hands(self) -> None:
        """Do the server side's TLS handshake. Raises OSError."""
        while True:
            with self._lock:
                events = handshake_events(self._connection)
            if not events:
                return
            self._await(events)

    def send(self, buffers: Sequence[memoryview]) -> None:
        """Send all buffers in order, without a copy on plain TCP. Raises OSError."""
        left = [buffer for buffer in buffers if buffer.nbytes]
        while left:
            sent = self._send_some(left[:MAX_BUFFERS])
            whole = 0
            while whole < len(left) and sent >= left[whole].nbytes:
                sent -= left[whole].nbytes
                whole += 1
            left = left[whole:]
            if sent:
                left[0] = left[0][sent:]

    def _send_some(self, buffers: Sequence[memoryview]) -> int:
        while True:
            try:
                with self._lock:
                    if isinstance(self._connection, ssl.SSLSocket):
                        return self._connection.send(buffers[0])
                    return self._connection.sendmsg(buffers)
            except BlockingIOError:
                self._await(select.POLLOUT)

    def receive_into(self, buffer: memoryview) -> None:
        """Fill the buffer. Raises OSError if the connection breaks, ends or stalls."""
        while buffer.nbytes:
            try:
                with self._lock:
                    count = self._connection.recv_into(buffer)
            except BlockingIOError:
                self._await(select.POLLIN)
                continue
            if not count:
                raise ConnectionError("the peer closed the connection")
            buffer = buffer[count:]

    def receive_frame(self) -> tuple[Frame, int]:
        """Receive (frame, number of payload bytes that follow). Raises OSError, or TransferError if malformed."""
        prefix = bytearray(PREFIX.size)
        self.receive_into(memoryview(prefix))
        header_bytes, payload_bytes = decode_prefix(prefix)
        header = bytearray(header_bytes)
        self.receive_into(memoryview(header))
        return decode_header(header, payload_bytes), payload_bytes

    def discard(self, count: int) -> None:
        """Read and drop `count` bytes. Raises OSError."""
        scratch = memoryview(bytearray(min(count, 1 << 16)))
        while count:
            step = min(count, len(scratch))
            self.receive_into(scratch[:step])
            count -= step

    def wait_readable(self, seconds: float) -> bool:
        """Return whether bytes or the stream's end arrive within `seconds`. Raises TimeoutError at the deadline."""
        with self._lock:
            # A poll does not see bytes that OpenSSL has already decrypted.
            if isinstance(self._connection, ssl.SSLSocket) and self._connection.pending():
                return True
        return self._wait(select.POLLIN, seconds)

    def shut(self) -> None:
        """End the connection, from any thread. Waiting calls return with an error or the end of the stream."""
        with self._lock:  # else another thread could free the descriptor now, and its next owner would be cut off
            shut(self._connection)

    def close(self) -> None:
        """Free the descriptor. Idempotent.

        If calls still wait on it, the last of them frees it: a free descriptor may be another connection's at once.
        """
        with self._lock:
            self._is_closed = True
            self._dispose()

    def _dispose(self) -> None:
        if self._is_closed and not self._num_waiting:
            self._connection.close()

    def _await(self, events: int) -> None:
        if not self._wait(events, self._stall_seconds):
            raise TimeoutError("timed out")

    def _wait(self, events: int, seconds: float) -> bool:
        seconds = min(seconds, self._seconds_left())
        with self._lock:
            if self._is_closed:
                raise ConnectionError("the connection is closed")
            self._num_waiting += 1
        try:
            return wait_for(self._connection, events, seconds)
        finally:
            with self._lock:
                self._num_waiting -= 1
                self._dispose()

    def _seconds_left(self) -> float:
        """Return the seconds until the deadline. Raises TimeoutError if it has passed."""
        if self.deadline is None:
            return float("inf")
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        return left


def connect(endpoint: str, connect_seconds: float, stall_seconds: float, tls: PeerTls | None = None) -> KvStream:
    """Connect to HOST:PORT and return the stream. Raises ConfigError, OSError."""
    host, port = parse_endpoint(endpoint)
    connection = socket.create_connection((host, port), timeout=connect_seconds)
    return KvStream(connection if tls is None else tls.call(connection, host), stall_seconds)


def tune(connection: socket.socket) -> None:
    """Set socket options: non-blocking, no delay for small frames, dead hosts noticed in about ten seconds."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)


def shut(connection: socket.socket) -> None:
    """Shut down a connection or a listening socket, from any thread."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        # The socket is already disconnected.
        return


def wait_for(connection: socket.socket, events: int, seconds: float) -> bool:
    """Wait up to `seconds` for one of these poll events or an error. Return whether there is one."""
    poll = select.poll()
    poll.register(connection, events)
    return bool(poll.poll(seconds * 1000))
