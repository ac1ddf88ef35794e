"""Receiver of KV from ranks of other rings, over TCP, plain or with TLS, into this rank's cache."""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass

import torch

from cp_core.errors import ConfigError, RingserveError, StaleIncarnation, TransferError, Unavailable
from cp_core.transport.peer_tls import PeerTls, reason_of
from workers.kv.cache import KvCache
from workers.kv.frames import (
    AbandonFrame,
    Frame,
    LayerFrame,
    LeaveFrame,
    RefusedFrame,
    SettledFrame,
    SettleFrame,
    encode,
)
from workers.kv.incoming import IncomingTransfer, TransferTable
from workers.kv.sockets import KvStream, shut, wait_for
from workers.protocol.transfers import TransferKey

logger = logging.getLogger(__name__)

# Longest wait for a frame on an idle connection before checking whether the receiver has closed.
IDLE_SECONDS = 1.0
# Most refusals that a connection remembers until its source asks; the oldest are dropped.
MAX_REFUSED = 1024
# Longest wait for a connection before checking whether the receiver is closing.
ACCEPT_SECONDS = 0.5
# Longest wait of a new connection for the place of an idle one, less than a caller's time to connect. A part of the
# idle ones is asked to leave at a time, so that not every new connection waits.
ROOM_SECONDS = 4.0
# Age from which an unknown caller must make room: a rank's first frame follows its connection at once.
STRANGE_SECONDS = 0.1
LEAVING_FRACTION = 8
JOIN_SECONDS = 10.0


@dataclass(slots=True)
class _Share:
    """Part of one transfer that this connection has brought since its last `settle`."""

    transfer: IncomingTransfer
    payload_bytes: int = 0


class SourceConnection:
    """Connection from a source rank, served in the thread that calls `serve`; `close` may be called from any thread.

    A refused frame is read to its end and dropped, and the connection continues with the next. A malformed frame ends
    the connection: the start of the next frame is unknown.

    A source has `greeting_seconds` until it `is_known`. With TLS its certificate makes it known. Without TLS a frame
    that names the destination's incarnation does, which strangers do not know.
    """

    def __init__(
        self,
        stream: KvStream,
        peer: str,
        table: TransferTable,
        dtype: torch.dtype,
        *,
        greeting_seconds: float,
        is_private: bool,
    ) -> None:
        """`is_private`: the stream is a TLS connection whose handshake is still to be done."""
        self.is_known = False
        self.used_at = time.monotonic()
        self._is_asked_to_leave = False
        self._replying = threading.Lock()
        self._stream = stream
        self._peer = peer
        self._table = table
        self._dtype = dtype
        self._is_private = is_private
        self._stream.deadline = time.monotonic() + greeting_seconds
        self._is_closed = False
        self._shares: dict[TransferKey, _Share] = {}
        # Refusals since the source last asked: one reply a transfer, not one a frame, so replies never pile up.
        self._refused: OrderedDict[TransferKey, RefusedFrame] = OrderedDict()
        # Grows to the largest frame of this peer, which `receive_frame` bounds.
        self._staging = torch.empty(0, dtype=torch.uint8)

    def serve(self) -> None:
        """Read frames until the connection ends, then abort the transfers that it began and did not settle."""
        reason = "this receiver is closing"
        try:
            if self._is_private:
                self._stream.shake_hands()
                self._know()
            while not self._is_closed:
                if self._stream.wait_readable(IDLE_SECONDS):
                    frame, payload_bytes = self._stream.receive_frame()
                    self._take(frame, payload_bytes)
        except TransferError as error:
            reason = f"it broke the protocol: {error}"
            logger.warning("KV connection of %s is closed: %s", self._peer, error)
        except OSError as error:
            reason = reason_of(error)
            if not self.is_known:
                logger.warning("KV connection of %s is closed before its caller is known: %s", self._peer, reason)
        finally:
            self._stream.close()
            for share in self._shares.values():
                share.transfer.abort(Unavailable(f"the source {self._peer} of {share.transfer} is gone: {reason}"))

    def close(self) -> None:
        """Make `serve` return soon."""
        self._is_closed = True
        self._stream.shut()

    @property
    def may_leave(self) -> bool:
        """True if the connection carries nothing, and its source was not asked to leave since its latest frame."""
        return self.is_known and not self._shares and not self._is_asked_to_leave

    def ask_to_leave(self) -> None:
        """Ask the source to end the connection if nothing is under way; another thread than `serve`'s may call."""
        if not self._replying.acquire(blocking=False):
            return  # it is being answered, so it is not idle
        self._is_asked_to_leave = True
        try:
            self._stream.send([memoryview(encode(LeaveFrame()))])
        except OSError:
            return  # it is gone already
        finally:
            self._replying.release()

    def _know(self) -> None:
        self.is_known = True
        self._stream.deadline = None

    def _take(self, frame: Frame, payload_bytes: int) -> None:
        self.used_at, self._is_asked_to_leave = time.monotonic(), False
        if isinstance(frame, LeaveFrame):
            raise TransferError("a source sent LeaveFrame")
        if not self.is_known and self._table.is_own(frame.key):
            self._know()
        match frame:
            case LayerFrame():
                self._take_layer(frame, payload_bytes)
            case SettleFrame():
                self._settle(frame.key)
            case AbandonFrame():
                self._abandon(frame)
            case _:
                raise TransferError(f"a source sent {type(frame).__name__}")

    def _take_layer(self, frame: LayerFrame, payload_bytes: int) -> None:
        try:
            transfer = self._table.find(frame.key)
            transfer.admit(frame, payload_bytes)
        except RingserveError as error:
            self._stream.discard(payload_bytes)
            self._refuse(frame.key, error)
            return
        # From here on the transfer ends with this connection.
        share = self._shares.setdefault(frame.key, _Share(transfer))
        if len(self._staging) < payload_bytes:
            self._staging = torch.empty(payload_bytes, dtype=torch.uint8)
        payload = self._staging[:payload_bytes]
        self._stream.receive_into(payload.numpy().data)
        try:
            transfer.store(frame, payload.view(self._dtype))
        except RingserveError as error:
            self._refuse(frame.key, error)
            return
        share.payload_bytes += payload_bytes

    def _settle(self, key: TransferKey) -> None:
        """Answer for all frames of this key since the last answer."""
        share = self._shares.pop(key, None)
        refused = self._refused.pop(key, None)
        if refused is not None:
            self._reply(refused)
            return
        try:
            if share is None:
                raise TransferError(f"nothing of transfer {key.transfer_id!r} came over this connection")
            # Not looked up in the table: a transfer that was sealed and dropped since then did arrive.
            share.transfer.check_alive()
        except RingserveError as error:
            self._reply(refusal(key, error))
        else:
            self._reply(SettledFrame(key, share.payload_bytes))

    def _abandon(self, frame: AbandonFrame) -> None:
        self._refused.pop(frame.key, None)
        share = self._shares.pop(frame.key, None)
        if share is not None:
            reason = f"{share.transfer} was abandoned by its source {self._peer}: {frame.reason}"
            share.transfer.abort(TransferError(reason))

    def _refuse(self, key: TransferKey, error: RingserveError) -> None:
        if key in self._refused:
            return
        logger.warning("KV of %s is refused: %s", self._peer, error)
        while len(self._refused) >= MAX_REFUSED:
            self._refused.popitem(last=False)
        self._refused[key] = refusal(key, error)
        self._reply(self._refused[key])

    def _reply(self, frame: RefusedFrame | SettledFrame) -> None:
        with self._replying:
            self._stream.send([memoryview(encode(frame))])


def refusal(key: TransferKey, error: RingserveError) -> RefusedFrame:
    """Return the frame that tells a source of `error`."""
    return RefusedFrame(key, isinstance(error, StaleIncarnation), str(error))


class KvReceiver(TransferTable):
    """Listener for KV from construction to `close`: one thread accepts, one serves each connection. Thread-safe.

    `max_connections` bounds threads and staging memory (at most MAX_PAYLOAD_BYTES each). A source that stops in the
    middle of a frame for `stall_seconds` counts as gone. A caller has `greeting_seconds` to become known
    (`SourceConnection`); when connections run out, the oldest unknown caller is closed, and where all are known, those
    that have been idle longest are asked to leave.
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
    ) -> None:
        super().__init__(cache, incarnation)
        self._stall_seconds = stall_seconds
        self._greeting_seconds = greeting_seconds
        self._max_connections = max_connections
        self._room_seconds = room_seconds
        self._strange_seconds = strange_seconds
        self._tls = tls
        self._closing = threading.Event()
        self._serving_changed = threading.Condition()
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

    def close(self) -> None:
        """End everything; idempotent. Open transfers fail with Unavailable."""
        with self._serving_changed:
            self._closing.set()
            self._serving_changed.notify_all()
            serving = dict(self._serving)
        self.abort_all(Unavailable("the KV receiver is closed"))
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
                # The peer left the queue, too many files are open, or TLS files are being replaced: later connections
                # may succeed.
                if not self._closing.wait(ACCEPT_SECONDS):
                    logger.warning("a KV connection could not be accepted: %s", error)

    def _admit(self, connection: socket.socket, address: tuple[str, int]) -> None:
        peer = f"{address[0]}:{address[1]}"
        if self._tls is not None:
            connection = self._tls.accept(connection)
        source = SourceConnection(
            KvStream(connection, self._stall_seconds),
            peer,
            self,
            self._cache.dtype,
            greeting_seconds=self._greeting_seconds,
            is_private=self._tls is not None,
        )
        thread = threading.Thread(target=self._serve, args=(source,), name=f"kv-from-{peer}", daemon=True)
        has_room = self._make_room()
        with self._serving_changed:
            if self._closing.is_set() or not has_room:
                logger.warning("KV connection of %s is closed: %d are open", peer, len(self._serving))
                connection.close()
                return
            self._serving[source] = thread
            thread.start()

    def _make_room(self) -> bool:
        """Make room for a connection -> True if there is. Called by the thread that accepts, the only one that adds."""
        deadline = time.monotonic() + self._room_seconds
        while True:
            with self._serving_changed:
                if len(self._serving) < self._max_connections:
                    return True
                stranger = next((source for source in self._serving if not source.is_known), None)
                if stranger is not None and time.monotonic() - stranger.used_at >= self._strange_seconds:
                    # The thread of the closed connection ends by itself.
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
                    # No event tells that a source which was being answered, and so was not asked to leave, is idle.
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
