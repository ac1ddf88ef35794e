"""Receives KV from ranks of other rings, over TCP, plain or with TLS, into this rank's cache."""

from __future__ import annotations

import logging
import select
import socket
import threading

from cp_core.errors import ConfigError, Unavailable
from cp_core.transport.peer_tls import PeerTls
from workers.kv.cache import KvCache
from workers.kv.sockets import KvStream, shut, wait_for
from workers.kv.source_connection import SourceConnection
from workers.kv.table import TransferTable
from workers.protocol.steps import KvExpect, TransferKey, TransferReport

logger = logging.getLogger(__name__)

# How long the listener waits for a connection before looking whether it is to close.
ACCEPT_SECONDS = 0.5
JOIN_SECONDS = 10.0


class KvReceiver:
    """Listens from construction to `close`; one thread accepts, one serves each connection. Any thread may call.

    `expect`, `wait_sealed`, `drop` are `TransferTable`'s. `max_connections` bounds threads and staging memory
    (at most MAX_PAYLOAD_BYTES each). `stall_seconds`: a source that stops in the middle of a frame for so long is gone.
    Whoever calls has `greeting_seconds` to show that it is one of ours (`SourceConnection`); when connections run out,
    the oldest that has not shown it makes room.
    """

    def __init__(
        self,
        cache: KvCache,
        incarnation: str,
        *,
        listen_host: str = "127.0.0.1",
        port: int = 0,
        stall_seconds: float = 30.0,
        greeting_seconds: float = 10.0,
        max_connections: int = 256,
        tls: PeerTls | None = None,
    ) -> None:
        self._cache = cache
        self._table = TransferTable(cache, incarnation)
        self._stall_seconds = stall_seconds
        self._greeting_seconds = greeting_seconds
        self._max_connections = max_connections
        self._tls = tls
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._serving: dict[SourceConnection, threading.Thread] = {}
        family = socket.AF_INET6 if ":" in listen_host else socket.AF_INET
        try:
            self._listener = socket.create_server((listen_host, port), family=family, backlog=128)
        except OSError as error:
            raise Unavailable(f"KV cannot be received at {listen_host}:{port}: {error.strerror}") from error
        bound_port = self._listener.getsockname()[1]
        self.endpoint = f"[{listen_host}]:{bound_port}" if ":" in listen_host else f"{listen_host}:{bound_port}"
        self._accepting = threading.Thread(target=self._accept, name="kv-accept", daemon=True)
        self._accepting.start()

    @property
    def num_open(self) -> int:
        """Transfers that may still receive bytes."""
        return self._table.num_open

    @property
    def stalled_seconds(self) -> float:
        """See `TransferTable.stalled_seconds`."""
        return self._table.stalled_seconds

    def expect(self, expect: KvExpect) -> None:
        """See `TransferTable.expect`."""
        self._table.expect(expect)

    def wait_sealed(self, key: TransferKey, timeout: float) -> TransferReport:
        """See `TransferTable.wait_sealed`."""
        return self._table.wait_sealed(key, timeout)

    def drop(self, key: TransferKey) -> None:
        """See `TransferTable.drop`."""
        self._table.drop(key)

    def close(self) -> None:
        """End everything; idempotent. Open transfers fail with Unavailable."""
        with self._lock:
            self._closing.set()
            serving = dict(self._serving)
        self._table.abort_all(Unavailable("the KV receiver is closed"))
        shut(self._listener)
        for connection in serving:
            connection.close()
        for thread in (self._accepting, *serving.values()):
            thread.join(JOIN_SECONDS)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                if wait_for(self._listener, select.POLLIN, ACCEPT_SECONDS):
                    self._admit(*self._listener.accept())
            except (OSError, ConfigError) as error:
                # A peer that gave up while it was queued, too many open files, or files of TLS that are being replaced:
                # later ones may be luckier.
                if not self._closing.wait(ACCEPT_SECONDS):
                    logger.warning("a KV connection could not be accepted: %s", error)

    def _admit(self, connection: socket.socket, address: tuple[str, int]) -> None:
        peer = f"{address[0]}:{address[1]}"
        if self._tls is not None:
            connection = self._tls.accept(connection)
        source = SourceConnection(
            KvStream(connection, self._stall_seconds),
            peer,
            self._table,
            self._cache.dtype,
            greeting_seconds=self._greeting_seconds,
            is_private=self._tls is not None,
        )
        thread = threading.Thread(target=self._serve, args=(source,), name=f"kv-from-{peer}", daemon=True)
        with self._lock:
            if self._closing.is_set() or not self._make_room():
                logger.warning("KV connection of %s is closed: %d are open", peer, len(self._serving))
                connection.close()
                return
            self._serving[source] = thread
            thread.start()

    def _make_room(self) -> bool:
        """Whether one more may be served; the lock is held."""
        if len(self._serving) < self._max_connections:
            return True
        stranger = next((source for source in self._serving if not source.is_known), None)
        if stranger is None:
            return False
        # Its thread ends by itself; it is not counted any more.
        del self._serving[stranger]
        stranger.close()
        return True

    def _serve(self, source: SourceConnection) -> None:
        try:
            source.serve()
        finally:
            with self._lock:
                self._serving.pop(source, None)
