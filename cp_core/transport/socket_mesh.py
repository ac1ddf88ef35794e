"""Connects every rank of a ring with every other one: each opens a door, and is told those of all others.

Each rank calls all lower ranks at their doors. Whoever calls proves by the ring's secret that it belongs to this ring
and is the rank it says; whoever answers proves the same. With TLS both show a certificate before. A stranger therefore
never enters a ring; one that says nothing holds up nobody, and many of them make room for whoever comes after.
"""

from __future__ import annotations

import hmac
import select
import socket
import ssl
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from cp_core.errors import Unavailable
from cp_core.transport.peer_tls import PeerTls, reason_of
from cp_core.transport.rendezvous import listen

RANK: Final = struct.Struct("!I")
PROOF_BYTES: Final = 32
HELLO_BYTES: Final = RANK.size + PROOF_BYTES
# Callers beyond those that are expected, none of which has proved itself: of more the oldest is sent away.
MAX_STRANGERS: Final = 64


class RingDoor:
    """Where this rank waits to be called, on one address only, from construction to `close`. Raises Unavailable."""

    def __init__(self, host: str) -> None:
        self.listener = listen(host, 0, "ring")
        port = self.listener.getsockname()[1]
        self.endpoint = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def close(self) -> None:
        """May be called again."""
        self.listener.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """What the ranks of ring `name` know before they meet: by rank, the `endpoints` of their doors; a common `secret`.

    With `tls` their connections are encrypted, and both ends show a certificate.
    """

    name: str
    rank: int
    endpoints: tuple[str, ...]
    secret: str = field(repr=False)
    timeout_seconds: float
    tls: PeerTls | None = None


def connect_mesh(door: RingDoor, meeting: Meeting) -> dict[int, socket.socket]:
    """A connection to every other rank. The door is closed then.

    Raises Unavailable if the others have not come after the meeting's timeout, or one of them is not who it should be;
    ConfigError for files of TLS that cannot be used.
    """
    arrivals = _Arrivals(meeting, time.monotonic() + meeting.timeout_seconds)
    with arrivals.closed_on_failure(), door.listener:
        # Every rank waits for answers of lower ranks first, and rank 0 for none: so all get theirs.
        for peer in range(meeting.rank):
            arrivals.call(peer)
        arrivals.accept(door.listener)
    return arrivals.connections


@dataclass(slots=True)
class _Caller:
    """Somebody who called, and the part of the greeting that came. `awaits` is what to poll for."""

    connection: socket.socket
    is_private: bool
    hello: bytes = b""
    awaits: int = select.POLLIN

    def listen(self) -> None:
        """Read more of the greeting, after the handshake where there is TLS. Raises BlockingIOError, OSError."""
        if not self.is_private:
            self._shake_hands()
        buffer = bytearray(HELLO_BYTES - len(self.hello))
        count = self.connection.recv_into(buffer)
        if not count:
            raise ConnectionError("it went away")
        self.hello += buffer[:count]

    def _shake_hands(self) -> None:
        assert isinstance(self.connection, ssl.SSLSocket)
        try:
            self.connection.do_handshake()
        except ssl.SSLWantReadError:
            self.awaits = select.POLLIN
            raise BlockingIOError from None
        except ssl.SSLWantWriteError:
            self.awaits = select.POLLOUT
            raise BlockingIOError from None
        self.is_private, self.awaits = True, select.POLLIN


@dataclass(slots=True)
class _Arrivals:
    """The connections of a rank while they are made."""

    meeting: Meeting
    deadline: float
    connections: dict[int, socket.socket] = field(default_factory=dict)
    # By descriptor, oldest first.
    callers: dict[int, _Caller] = field(default_factory=dict)

    @contextmanager
    def closed_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            for connection in self.connections.values():
                connection.close()
            raise
        finally:
            for caller in self.callers.values():
                caller.connection.close()

    def call(self, peer: int) -> None:
        """Connect to a lower rank, say who we are, and check that it is the one."""
        meeting, endpoint = self.meeting, self.meeting.endpoints[peer]
        host, port = split_endpoint(endpoint)
        try:
            connection = socket.create_connection((host, port), timeout=self._seconds_left())
            self.connections[peer] = connection
            if meeting.tls is not None:
                connection = self.connections[peer] = meeting.tls.call(connection, host)
            connection.sendall(RANK.pack(meeting.rank) + self._proof(meeting.rank, peer))
            answer = b""
            while len(answer) < PROOF_BYTES:
                connection.settimeout(self._seconds_left())
                part = connection.recv(PROOF_BYTES - len(answer))
                if not part:
                    raise Unavailable(f"rank {peer} of ring {meeting.name!r} at {endpoint} refused rank {meeting.rank}")
                answer += part
        except OSError as error:
            raise Unavailable(
                f"rank {meeting.rank} cannot reach rank {peer} at {endpoint}: {reason_of(error)}"
            ) from error
        if not hmac.compare_digest(answer, self._proof(peer, meeting.rank)):
            raise Unavailable(f"who answers at {endpoint} is not rank {peer} of ring {meeting.name!r}")

    def accept(self, listener: socket.socket) -> None:
        """Take the connections of all higher ranks."""
        listener.setblocking(False)
        while len(self.connections) < len(self.meeting.endpoints) - 1:
            poll = select.poll()
            poll.register(listener, select.POLLIN)
            for descriptor, caller in self.callers.items():
                poll.register(descriptor, caller.awaits)
            for descriptor, _ in poll.poll(self._seconds_left() * 1e3):
                if descriptor in self.callers:
                    self._hear(descriptor)
                elif descriptor == listener.fileno():
                    self._welcome(listener)

    def _welcome(self, listener: socket.socket) -> None:
        tls = self.meeting.tls
        try:
            connection, _ = listener.accept()
            connection.setblocking(False)
            if tls is not None:
                connection = tls.accept(connection)
        except OSError:
            # Gone again before we came to it.
            return
        while len(self.callers) >= MAX_STRANGERS + len(self.meeting.endpoints):
            self.callers.pop(next(iter(self.callers))).connection.close()
        self.callers[connection.fileno()] = _Caller(connection, is_private=tls is None)

    def _hear(self, descriptor: int) -> None:
        """Read more of a greeting; answer and keep the connection if it is right, else close it."""
        caller = self.callers[descriptor]
        try:
            caller.listen()
            if len(caller.hello) < HELLO_BYTES:
                return
            peer = self._recognise(caller.hello)
            if peer is not None:
                # The first bytes on a connection: the kernel takes them whole.
                caller.connection.sendall(self._proof(self.meeting.rank, peer))
                self.connections[peer] = caller.connection
            else:
                caller.connection.close()
        except BlockingIOError:
            return
        except OSError:
            caller.connection.close()
        del self.callers[descriptor]

    def _recognise(self, hello: bytes) -> int | None:
        (peer,) = RANK.unpack_from(hello)
        rank = self.meeting.rank
        is_awaited = rank < peer < len(self.meeting.endpoints) and peer not in self.connections
        return peer if is_awaited and hmac.compare_digest(hello[RANK.size :], self._proof(peer, rank)) else None

    def _proof(self, speaker: int, listener: int) -> bytes:
        words = f"{speaker} {listener} {self.meeting.name}"
        return hmac.digest(self.meeting.secret.encode(), words.encode(), "sha256")

    def _seconds_left(self) -> float:
        left = self.deadline - time.monotonic()
        if left <= 0:
            meeting = self.meeting
            missing = [
                rank for rank in range(len(meeting.endpoints)) if rank != meeting.rank and rank not in self.connections
            ]
            raise Unavailable(f"rank {meeting.rank} waits for ranks {missing} of ring {meeting.name!r} in vain")
        return left


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """(host, port) of HOST:PORT, an IPv6 host in brackets or not."""
    host, _, port = endpoint.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)
