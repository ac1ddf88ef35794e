"""Connection by which a leader polls its decode ring's first rank, so that tokens need no call of Ray.

Such a call takes a millisecond of the leader's core a token. The rank listens until its leader comes; each
proves to the other that it knows the secret of this connection, which Ray has carried. Then the leader writes a cursor
and the seconds to wait, and the rank answers with the number of bytes and the events.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from ringserve.cp_core.errors import ConfigError, RingserveError, Unavailable
from ringserve.cp_core.transport.socket_mesh import Rendezvous, RingListener, call_rank, connect_mesh
from ringserve.workers.protocol.encoding import Codec
from ringserve.workers.protocol.steps import DecodeEvents

log = logging.getLogger(__name__)

RANK, LEADER = 0, 1
"""Places at the ends of the connection."""
SILENCE_SECONDS = 180.0
"""Seconds without a poll after which a rank ends the connection. A leader that lives polls every few seconds."""
QUESTION, LENGTH = struct.Struct("<qd"), struct.Struct("<q")
EVENTS = Codec(DecodeEvents)


def polls_of(incarnation: str, secret: str, timeout_seconds: float) -> Rendezvous:
    """Return the parameters of the connection that both ends know before the rank listens."""
    name = f"polls of {incarnation}"
    return Rendezvous(name=name, rank=RANK, endpoints=("", ""), secret=secret, timeout_seconds=timeout_seconds)


def listen_for_polls(host: str, rendezvous: Rendezvous, poll: Callable[[int, float], DecodeEvents]) -> str:
    """Answer polls of one leader in a thread, and return the endpoint to call. Raises Unavailable.

    `poll(after, wait_seconds)` is the rank's. The connection ends with its first error: to ask again by Ray tells it.
    """
    listener = RingListener(host)
    threading.Thread(target=_answer, args=(listener, rendezvous, poll), name="ringserve-polls", daemon=True).start()
    return listener.endpoint


def _answer(listener: RingListener, rendezvous: Rendezvous, poll: Callable[[int, float], DecodeEvents]) -> None:
    try:
        connection = connect_mesh(listener, rendezvous)[LEADER]
    except (ConfigError, Unavailable) as error:
        log.info("no leader polls by a connection: %s", error)
        return
    question = bytearray(QUESTION.size)
    with connection:
        try:
            connection.settimeout(SILENCE_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while _fill(question, connection):
                events = EVENTS.encode(poll(*QUESTION.unpack(question)))
                connection.sendall(LENGTH.pack(len(events)) + events)
        except (OSError, RingserveError) as error:
            log.debug("a leader's polls have ended: %s", error)


def _fill(buffer: bytearray, connection: socket.socket) -> bool:
    """Return False if the peer has closed the connection. Raises OSError."""
    left = memoryview(buffer)
    while left:
        received = connection.recv_into(left)
        if not received:
            return False
        left = left[received:]
    return True


class Polls:
    """Leader's end of the connection. It is closed by the first call that fails or is cancelled, or by `end`."""

    def __init__(self, endpoint: str, rendezvous: Rendezvous) -> None:
        """Connect, which may take the rendezvous's timeout. Raises Unavailable, ConfigError."""
        self._connection = call_rank(replace(rendezvous, rank=LEADER, endpoints=(endpoint, "")), RANK)
        self._connection.setblocking(False)
        self._is_asking = False

    @property
    def is_closed(self) -> bool:
        return self._connection.fileno() < 0

    async def ask(self, after: int, wait_seconds: float) -> DecodeEvents:
        """Return the events from cursor `after` on, as `RankPort.poll` does. One call at a time. Raises OSError."""
        self._is_asking = True
        try:
            # The kernel has room: nothing else is under way.
            self._connection.sendall(QUESTION.pack(after, wait_seconds))
            (count,) = LENGTH.unpack(await self._receive(LENGTH.size))
            return EVENTS.decode(await self._receive(count))
        except BaseException:  # half an answer may be left on it
            self._connection.close()
            raise
        finally:
            self._is_asking = False

    async def _receive(self, count: int) -> bytes:
        buffer = bytearray(count)
        left = memoryview(buffer)
        while left:
            try:
                received = self._connection.recv_into(left)
            except BlockingIOError:
                await self._readable()
                continue
            if not received:
                raise ConnectionError("the rank closed the connection")
            left = left[received:]
        return bytes(buffer)

    async def _readable(self) -> None:
        loop, is_readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._connection, is_readable.set)
        try:
            await is_readable.wait()
        finally:
            loop.remove_reader(self._connection)

    def end(self) -> None:
        """Close the connection; a call that waits fails. Idempotent."""
        if not self._is_asking:
            self._connection.close()
            return
        with suppress(OSError):  # the rank has gone
            self._connection.shutdown(socket.SHUT_RDWR)
