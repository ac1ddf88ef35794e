"""Plain TCP, as both ends of a KV connection use it. Every wait is bounded by the socket's stall timeout.

Why plain sockets and not gRPC or ZeroMQ: docs/decisions/0003-kv-carrier.md.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence

from cp_core.errors import TransferError
from workers.kv_transfer.frames import PREFIX, Frame, decode_header, decode_prefix

# One sendmsg takes no more buffers than this (IOV_MAX on Linux is 1024).
MAX_BUFFERS = 512


def tune(connection: socket.socket, stall_seconds: float) -> None:
    """Send small frames at once, notice a dead host in about ten seconds, and never wait longer than the timeout."""
    connection.settimeout(stall_seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """(host, port) of HOST:PORT; an IPv6 host may stand in brackets. Raises TransferError."""
    host, colon, port = endpoint.rpartition(":")
    if not colon or not host or not port.isdecimal():
        raise TransferError(f"KV endpoint {endpoint!r} is not HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def shut(connection: socket.socket) -> None:
    """End a connection from any thread: whoever waits on it wakes with an error or an end of stream."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        # Not connected any more: what we wanted.
        return


def wait_readable(connection: socket.socket, seconds: float) -> bool:
    """Whether bytes, or the end of the stream, are there within `seconds`."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def send_buffers(connection: socket.socket, buffers: Sequence[memoryview]) -> None:
    """Send all of the buffers in order, with no copy of our own. Raises OSError when it breaks or stalls."""
    left = [buffer for buffer in buffers if buffer.nbytes]
    while left:
        sent = connection.sendmsg(left[:MAX_BUFFERS])
        whole = 0
        while whole < len(left) and sent >= left[whole].nbytes:
            sent -= left[whole].nbytes
            whole += 1
        left = left[whole:]
        if sent:
            left[0] = left[0][sent:]


def receive_into(connection: socket.socket, buffer: memoryview) -> None:
    """Fill the buffer. Raises OSError when the connection breaks, ends or stalls."""
    while buffer.nbytes:
        count = connection.recv_into(buffer)
        if not count:
            raise ConnectionError("the peer closed the connection")
        buffer = buffer[count:]


def receive_frame(connection: socket.socket) -> tuple[Frame, int]:
    """The next frame, and how many bytes of payload follow it. Raises OSError, or TransferError if malformed."""
    prefix = bytearray(PREFIX.size)
    receive_into(connection, memoryview(prefix))
    header_bytes, payload_bytes = decode_prefix(prefix)
    header = bytearray(header_bytes)
    receive_into(connection, memoryview(header))
    return decode_header(header, payload_bytes), payload_bytes


def discard(connection: socket.socket, count: int) -> None:
    """Read `count` bytes and forget them. Raises OSError."""
    scratch = memoryview(bytearray(min(count, 1 << 16)))
    while count:
        step = min(count, len(scratch))
        receive_into(connection, scratch[:step])
        count -= step
