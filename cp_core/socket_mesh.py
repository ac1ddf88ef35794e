"""Connects every rank of a ring with every other one: addresses are exchanged in the ring's store.

Each rank listens, and connects to all lower ranks. Whoever connects proves with a token from the store that it belongs
to this ring and is the rank it says; whoever accepts proves the same in its answer. A stray connection therefore never
enters a ring, and one that says nothing holds up nobody.
"""

from __future__ import annotations

import hmac
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from torch.distributed.distributed_c10d import Store

from cp_core.errors import Unavailable
from cp_core.rendezvous import listen

TOKEN_KEY: Final = "token"
TOKEN_BYTES: Final = 32
RANK: Final = struct.Struct("!I")
PROOF_BYTES: Final = 32
HELLO_BYTES: Final = RANK.size + PROOF_BYTES


def connect_mesh(
    store: Store, name: str, rank: int, size: int, address: str, timeout_seconds: float
) -> dict[int, socket.socket]:
    """A connection to every other rank of ring `name`, whose keys `store` holds alone. Listens on `address` meanwhile.

    Raises Unavailable if the others have not come after `timeout_seconds`; RuntimeError if the store does not answer.
    """
    meeting = _Meeting(store, name, rank, size, time.monotonic() + timeout_seconds)
    listener = listen(address, 0, "ring")
    with meeting.closed_on_failure(), listener:
        store.set(_address_key(rank), f"{listener.getsockname()[1]} {address}")
        # Every rank waits for answers of lower ranks first, and rank 0 for none: so all get theirs.
        for peer in range(rank):
            meeting.call(peer)
        meeting.accept(listener)
    return meeting.connections


@dataclass(slots=True)
class _Caller:
    """Somebody who connected, and the part of the greeting that came."""

    connection: socket.socket
    hello: bytes = b""


@dataclass(slots=True)
class _Meeting:
    """The connections of a rank while they are made."""

    store: Store
    name: str
    rank: int
    size: int
    deadline: float
    connections: dict[int, socket.socket] = field(default_factory=dict)
    callers: dict[int, _Caller] = field(default_factory=dict)
    token: bytes = b""

    def __post_init__(self) -> None:
        if self.rank == 0:
            self.store.set(TOKEN_KEY, secrets.token_hex(TOKEN_BYTES))
        self.token = self._read(TOKEN_KEY)

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
        port, address = self._read(_address_key(peer)).decode().split(" ", 1)
        try:
            connection = socket.create_connection((address, int(port)), timeout=self._seconds_left())
            self.connections[peer] = connection
            connection.sendall(RANK.pack(self.rank) + self._proof(self.rank, peer))
            answer = b""
            while len(answer) < PROOF_BYTES:
                connection.settimeout(self._seconds_left())
                part = connection.recv(PROOF_BYTES - len(answer))
                if not part:
                    raise Unavailable(f"rank {peer} of ring {self.name!r} at {address}:{port} refused rank {self.rank}")
                answer += part
        except OSError as error:
            raise Unavailable(f"rank {self.rank} cannot reach rank {peer} at {address}:{port}: {error}") from error
        if not hmac.compare_digest(answer, self._proof(peer, self.rank)):
            raise Unavailable(f"who answers at {address}:{port} is not rank {peer} of ring {self.name!r}")

    def accept(self, listener: socket.socket) -> None:
        """Take the connections of all higher ranks."""
        listener.setblocking(False)
        while len(self.connections) < self.size - 1:
            poll = select.poll()
            poll.register(listener, select.POLLIN)
            for descriptor in self.callers:
                poll.register(descriptor, select.POLLIN)
            for descriptor, _ in poll.poll(self._seconds_left() * 1e3):
                if descriptor in self.callers:
                    self._hear(descriptor)
                else:
                    self._welcome(listener)

    def _welcome(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            # Gone again before we came to it.
            return
        connection.setblocking(False)
        self.callers[connection.fileno()] = _Caller(connection)

    def _hear(self, descriptor: int) -> None:
        """Read more of a greeting; answer and keep the connection if it is right, else close it."""
        caller = self.callers[descriptor]
        try:
            part = caller.connection.recv(HELLO_BYTES - len(caller.hello))
            caller.hello += part
            if part and len(caller.hello) < HELLO_BYTES:
                return
            peer = self._recognise(caller.hello)
            if peer is not None:
                # The first bytes on a connection: the kernel takes them whole.
                caller.connection.sendall(self._proof(self.rank, peer))
                self.connections[peer] = caller.connection
            else:
                caller.connection.close()
        except OSError:
            caller.connection.close()
        del self.callers[descriptor]

    def _recognise(self, hello: bytes) -> int | None:
        if len(hello) < HELLO_BYTES:
            return None
        (peer,) = RANK.unpack_from(hello)
        is_awaited = self.rank < peer < self.size and peer not in self.connections
        return peer if is_awaited and hmac.compare_digest(hello[RANK.size :], self._proof(peer, self.rank)) else None

    def _proof(self, speaker: int, listener: int) -> bytes:
        return hmac.digest(self.token, f"{speaker} {listener} {self.name}".encode(), "sha256")

    def _read(self, key: str) -> bytes:
        self.store.wait([key], timedelta(seconds=self._seconds_left()))
        return self.store.get(key)

    def _seconds_left(self) -> float:
        left = self.deadline - time.monotonic()
        if left <= 0:
            missing = [rank for rank in range(self.size) if rank != self.rank and rank not in self.connections]
            raise Unavailable(f"rank {self.rank} waits for ranks {missing} of ring {self.name!r} in vain")
        return left


def _address_key(rank: int) -> str:
    return f"address {rank}"
