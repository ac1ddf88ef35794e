"""Receiver for KV from ranks of other rings, over TCP, plain or with TLS, into this rank's cache."""

from __future__ import annotations

import logging
import select
import socket
import threading
import time

from ringserve.cp_core.errors import ConfigError, Unavailable
from ringserve.cp_core.transport.peer_tls import PeerTls
from ringserve.workers.kv.cache import KvCache
from ringserve.workers.kv.incoming import TransferTable
from ringserve.workers.kv.pulls import PullAgent
from ringserve.workers.kv.sockets import KvStream, shut, wait_for
from ringserve.workers.kv.source_connection import SourceConnection

logger = logging.getLogger(__name__)

# Interval for checking whether the receiver is closing while it waits for connections.
ACCEPT_SECONDS = 0.5
# Longest wait of a new connection for an idle connection's place, less than a caller's connect timeout. Several idle
# connections are asked to leave at a time, so that not every new connection waits.
ROOM_SECONDS = 4.0
# Age at which an unknown caller must make room: a rank's first frame follows its connection at once.
STRANGE_SECONDS = 0.1
LEAVING_FRACTION = 8
JOIN_SECONDS = 10.0


class KvReceiver(TransferTable):
    """KV listener, from construction to `close`: one thread accepts, another serves each connection. Thread-safe.

    `max_connections` bounds threads and staging memory (at most MAX_PAYLOAD_BYTES each). A source that pauses inside a
    frame for `stall_seconds` counts as gone. A caller has `greeting_seconds` to become known (`SourceConnection`). If
    connections run out, the oldest unknown caller is closed; if all are known, the longest-idle connections are asked
    to leave. `agent` reads payloads in slots; its owner closes it afterwards.
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
        room_seconds: float = ROOM_SECONDS,
        strange_seconds: float = STRANGE_SECONDS,
        tls: PeerTls | None = None,
        agent: PullAgent | None = None,
    ) -> None:
        super().__init__(cache, incarnation)
        self._agent = agent
        self._stall_seconds = stall_seconds
        self._greeting_seconds = greeting_seconds
        self._max_connections = max_connections
        self._room_seconds = room_seconds
        self._strange_seconds = strange_seconds
        self._tls = tls
        self._closing = threading.Event()
        self._serving_changed = threading.Condition()
        self._serving: dict[SourceConnection, None] = {}  # in the order in which they came
        self._threads: list[threading.Thread] = []  # one a connection, until the thread ends
        family = socket.AF_INET6 if ":" in listen_host else socket.AF_INET
        try:
            self._listener = socket.create_server((listen_host, port), family=family, backlog=128)
        except OSError as error:
            raise Unavailable(f"KV cannot be received at {listen_host}:{port}: {error.strerror}") from error
        bound_port = self._listener.getsockname()[1]
        self.endpoint = f"[{listen_host}]:{bound_port}" if ":" in listen_host else f"{listen_host}:{bound_port}"
        self._accepting = threading.Thread(target=self._accept, name="kv-accept", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """End all connections and threads. Open transfers fail with Unavailable. Idempotent."""
        with self._serving_changed:
            self._closing.set()
            self._serving_changed.notify_all()
            serving, threads = list(self._serving), self._threads
        self.abort_all(Unavailable("the KV receiver is closed"))
        shut(self._listener)
        for connection in serving:
            connection.close()
        for thread in (self._accepting, *threads):
            thread.join(JOIN_SECONDS)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                if wait_for(self._listener, select.POLLIN, ACCEPT_SECONDS):
                    self._admit(*self._listener.accept())
            except (OSError, ConfigError) as error:
                # The peer left the queue, too many files are open, or TLS files are being replaced. Later connections
                # may succeed.
                if not self._closing.wait(ACCEPT_SECONDS):
                    logger.warning("cannot accept a KV connection: %s", error)

    def _admit(self, connection: socket.socket, address: tuple[str, int]) -> None:
        peer = f"{address[0]}:{address[1]}"
        if self._tls is not None:
            connection = self._tls.accept(connection)
        source = SourceConnection(
            KvStream(connection, self._stall_seconds),
            peer,
            self,
            self._cache,
            greeting_seconds=self._greeting_seconds,
            stall_seconds=self._stall_seconds,
            is_private=self._tls is not None,
            agent=self._agent,
        )
        thread = threading.Thread(target=self._serve, args=(source,), name=f"kv-from-{peer}", daemon=True)
        has_room = self._make_room()
        with self._serving_changed:
            if self._closing.is_set() or not has_room:
                logger.warning("KV connection from %s refused: %d connections are open", peer, len(self._serving))
                connection.close()
                return
            self._serving[source] = None
            thread.start()
            self._threads = [each for each in self._threads if each.is_alive()] + [thread]

    def _make_room(self) -> bool:
        """Make room for a connection. Return whether there is room. Only the accepting thread, which adds, may call."""
        deadline = time.monotonic() + self._room_seconds
        while True:
            with self._serving_changed:
                if len(self._serving) < self._max_connections:
                    return True
                stranger = next((source for source in self._serving if not source.is_known), None)
                if stranger is not None and time.monotonic() - stranger.used_at >= self._strange_seconds:
                    # The closed connection's thread ends by itself.
                    del self._serving[stranger]
                    stranger.close()
                    return True
                idle = sorted((source for source in self._serving if source.may_leave), key=_use_of)
            for source in idle[: -(-self._max_connections // LEAVING_FRACTION)]:
                source.ask_to_leave()
            with self._serving_changed:
                left = deadline - time.monotonic()
                if self._closing.is_set() or left <= 0:
                    return False
                if len(self._serving) >= self._max_connections:
                    # Poll, because no event says that a source that was being answered has become idle.
                    self._serving_changed.wait(min(left, ACCEPT_SECONDS, self._strange_seconds))

    def _serve(self, source: SourceConnection) -> None:
        try:
            source.serve()
        finally:
            with self._serving_changed:
                self._serving.pop(source, None)
                self._serving_changed.notify_all()


def _use_of(source: SourceConnection) -> float:
    return source.used_at
