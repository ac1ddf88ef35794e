"""Connections between the ranks of a ring: each rank listens and knows all other ranks' endpoints.

Each rank calls all lower ranks. With the ring's secret, caller and callee prove to each other that they belong to this
ring and are the ranks they claim. With TLS, both show a certificate first. So a stranger never enters a ring. A silent
stranger delays no rank; if too many call, the oldest is disconnected. Ranks and ring leaders connect here and then own
the connections.
"""

from __future__ import annotations

import hmac
import select
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from ringserve.cp_core.errors import ConfigError, Unavailable
from ringserve.cp_core.transport.peer_tls import PeerTls, handshake_events, reason_of

RANK: Final = struct.Struct("!I")
PROOF_BYTES: Final = 32
GREETING_BYTES: Final = RANK.size + PROOF_BYTES
# Unproven callers beyond the expected ranks. If there are more, the oldest is disconnected.
MAX_STRANGERS: Final = 64


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Parse HOST:PORT to (host, port). An IPv6 host may be in brackets. Raises ConfigError.

    Example: `parse_endpoint("[::1]:7000")` is ("::1", 7000).
    """
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"endpoint {endpoint!r} is not allowed; it must be HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def listen(host: str, port: int, purpose: str) -> socket.socket:
    """Listen on one address; port 0 picks a free port. Raises Unavailable, naming `purpose`."""
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
        raise Unavailable(f"the {purpose} cannot listen on {host}:{port}: {error}") from error
    return listener


def own_address(host: str, port: int) -> str:
    """Return the address of this machine's interface towards `host`, without sending a packet. Raises Unavailable."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise Unavailable(f"no interface leads to ring host {host}: {error}") from error


class RingListener:
    """Endpoint on which one rank listens for its ring's higher ranks, from construction to `close`.

    Raises Unavailable if it cannot listen.
    """

    def __init__(self, host: str) -> None:
        self.socket = listen(host, 0, "ring")
        port = self.socket.getsockname()[1]
        self.endpoint = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self.socket.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """What one rank needs to connect to ring `name`: all ranks' `endpoints`, their common `secret` and its own place.

    With `tls` the connections are encrypted and both ends show certificates.
    """

    name: str
    rank: int
    endpoints: tuple[str, ...]
    secret: str = field(repr=False)
    timeout_seconds: float
    tls: PeerTls | None = None


def connect_mesh(listener: RingListener, rendezvous: Rendezvous) -> dict[int, socket.socket]:
    """Connect to every other rank, close the listener, and return the connections by rank.

    Raises Unavailable if a rank does not connect within the rendezvous's timeout or fails its proof, and ConfigError if
    a TLS file cannot be used.
    """
    mesh = _Mesh(rendezvous, time.monotonic() + rendezvous.timeout_seconds)
    with mesh.closed_on_failure(), listener.socket:
        # Every rank first waits for answers from lower ranks only, and rank 0 for none, so this cannot deadlock.
        for peer in range(rendezvous.rank):
            mesh.call(peer)
        mesh.accept(listener.socket)
    return mesh.connections


def call_rank(rendezvous: Rendezvous, peer: int) -> socket.socket:
    """Connect to one lower rank, which is in `connect_mesh` meanwhile. Raises what `connect_mesh` raises."""
    mesh = _Mesh(rendezvous, time.monotonic() + rendezvous.timeout_seconds)
    with mesh.closed_on_failure():
        mesh.call(peer)
    return mesh.connections[peer]


@dataclass(slots=True)
class _Caller:
    """Connection of an unproven caller, with the received part of its greeting. It waits for events `awaits`."""

    connection: socket.socket
    has_tls: bool
    greeting: bytes = b""
    awaits: int = select.POLLIN

    def receive(self) -> None:
        """Read more of the greeting, after the handshake if there is TLS. Raises BlockingIOError, OSError."""
        if self.has_tls:
            events = handshake_events(self.connection)
            self.awaits = events or select.POLLIN
            if events:
                raise BlockingIOError
            self.has_tls = False
        buffer = bytearray(GREETING_BYTES - len(self.greeting))
        count = self.connection.recv_into(buffer)
        if not count:
            raise ConnectionError("the caller closed the connection")
        self.greeting += buffer[:count]


@dataclass(slots=True)
class _Mesh:
    """Connections of one rank while they are being made."""

    rendezvous: Rendezvous
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
        """Connect to a lower rank, prove this rank's identity, and check the peer's proof."""
        rendezvous, endpoint = self.rendezvous, self.rendezvous.endpoints[peer]
        host, port = parse_endpoint(endpoint)
        try:
            connection = socket.create_connection((host, port), timeout=self._seconds_left())
            self.connections[peer] = connection
            if rendezvous.tls is not None:
                connection = self.connections[peer] = rendezvous.tls.call(connection, host)
            connection.sendall(RANK.pack(rendezvous.rank) + self._proof(rendezvous.rank, peer))
            answer = b""
            while len(answer) < PROOF_BYTES:
                connection.settimeout(self._seconds_left())
                part = connection.recv(PROOF_BYTES - len(answer))
                if not part:
                    raise Unavailable(
                        f"rank {peer} of ring {rendezvous.name!r} at {endpoint} refused rank {rendezvous.rank}"
                    )
                answer += part
        except OSError as error:
            raise Unavailable(
                f"rank {rendezvous.rank} cannot reach rank {peer} at {endpoint}: {reason_of(error)}"
            ) from error
        if not hmac.compare_digest(answer, self._proof(peer, rendezvous.rank)):
            raise Unavailable(f"the process at {endpoint} is not rank {peer} of ring {rendezvous.name!r}")

    def accept(self, listener: socket.socket) -> None:
        """Accept the connections of all higher ranks."""
        listener.setblocking(False)
        while len(self.connections) < len(self.rendezvous.endpoints) - 1:
            poll = select.poll()
            poll.register(listener, select.POLLIN)
            for descriptor, caller in self.callers.items():
                poll.register(descriptor, caller.awaits)
            for descriptor, _ in poll.poll(self._seconds_left() * 1e3):
                if descriptor in self.callers:
                    self._answer(descriptor)
                elif descriptor == listener.fileno():
                    self._admit(listener)

    def _admit(self, listener: socket.socket) -> None:
        tls = self.rendezvous.tls
        try:
            connection, _ = listener.accept()
            connection.setblocking(False)
            if tls is not None:
                connection = tls.accept(connection)
        except OSError:
            # The caller is gone already.
            return
        while len(self.callers) >= MAX_STRANGERS + len(self.rendezvous.endpoints):
            self.callers.pop(next(iter(self.callers))).connection.close()
        self.callers[connection.fileno()] = _Caller(connection, has_tls=tls is not None)

    def _answer(self, descriptor: int) -> None:
        """Read more of a greeting. Answer and keep the connection if it is right, else close it."""
        caller = self.callers[descriptor]
        try:
            caller.receive()
            if len(caller.greeting) < GREETING_BYTES:
                return
            peer = self._proven_rank(caller.greeting)
            if peer is not None:
                # These are the first bytes on the connection, so the kernel takes them whole.
                caller.connection.sendall(self._proof(self.rendezvous.rank, peer))
                self.connections[peer] = caller.connection
            else:
                caller.connection.close()
        except BlockingIOError:
            return
        except OSError:
            caller.connection.close()
        del self.callers[descriptor]

    def _proven_rank(self, greeting: bytes) -> int | None:
        (peer,) = RANK.unpack_from(greeting)
        rank = self.rendezvous.rank
        is_awaited = rank < peer < len(self.rendezvous.endpoints) and peer not in self.connections
        return peer if is_awaited and hmac.compare_digest(greeting[RANK.size :], self._proof(peer, rank)) else None

    def _proof(self, prover: int, verifier: int) -> bytes:
        text = f"{prover} {verifier} {self.rendezvous.name}"
        return hmac.digest(self.rendezvous.secret.encode(), text.encode(), "sha256")

    def _seconds_left(self) -> float:
        left = self.deadline - time.monotonic()
        if left <= 0:
            rendezvous = self.rendezvous
            missing = [
                rank
                for rank in range(len(rendezvous.endpoints))
                if rank != rendezvous.rank and rank not in self.connections
            ]
            raise Unavailable(
                f"ranks {missing} of ring {rendezvous.name!r} did not connect to rank {rendezvous.rank} in time"
            )
        return left
