"""Receiver for KV from ranks of other rings, over TCP, plain or with TLS, into this rank's cache.

A rank starts one receiver. Each source rank has a connection, which admits frames and stores their payloads. A payload
follows its header, or lies in a slot of the source, from which the agent reads it.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass

import torch

from ringserve.cp_core.errors import ConfigError, RingserveError, StaleIncarnation, TransferError, Unavailable
from ringserve.cp_core.transport.peer_tls import PeerTls, reason_of
from ringserve.workers.kv.cache import KvCache
from ringserve.workers.kv.frames import (
    AbandonFrame,
    CardFrame,
    CopyStream,
    Frame,
    LayerFrame,
    LeaveFrame,
    Reach,
    ReachedFrame,
    ReadFrame,
    RefusedFrame,
    SettledFrame,
    SettleFrame,
    encode,
)
from ringserve.workers.kv.incoming import IncomingTransfer, TransferTable
from ringserve.workers.kv.pulls import Peer, Pull, PullAgent
from ringserve.workers.kv.sockets import KvStream, shut, wait_for
from ringserve.workers.protocol.transfers import TransferKey

logger = logging.getLogger(__name__)

# Interval for checking whether the receiver has closed while a connection is idle.
IDLE_SECONDS = 1.0
# Limit on refusals that a connection remembers until its source asks. The oldest are dropped.
MAX_REFUSED = 1024
# Interval for checking whether the receiver is closing while it waits for connections.
ACCEPT_SECONDS = 0.5
# Longest wait of a new connection for an idle connection's place, less than a caller's connect timeout.
ROOM_SECONDS = 4.0
# Age at which an unknown caller must make room: a rank's first frame follows its connection at once.
STRANGE_SECONDS = 0.1
# This fraction (1/8) of the connections is asked to leave at a time, so that not every new connection waits.
LEAVING_FRACTION = 8
JOIN_SECONDS = 10.0


@dataclass(slots=True)
class _Share:
    """Part of a transfer that arrived on this connection since its last `settle`."""

    transfer: IncomingTransfer
    payload_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Pulled:
    """Admitted frame with a payload that is being read from its slot."""

    share: _Share
    frame: LayerFrame
    pull: Pull


class SourceConnection:
    """Connection from a source rank, served in the thread that calls `serve`. Any thread may call `close`.

    A refused frame is read to its end and dropped, and the connection continues with the next frame. A malformed frame
    ends the connection, because the start of the next frame is unknown.

    A source has `greeting_seconds` until it `is_known`. With TLS, its certificate makes it known. Without TLS, a frame
    that names the destination's incarnation does, since strangers do not know it.

    With an `agent`, a frame's payload may lie in a slot of the source. It is read while the previous frame is stored. A
    READ that takes `stall_seconds` ends the connection.
    """

    def __init__(
        self,
        stream: KvStream,
        peer: str,
        table: TransferTable,
        cache: KvCache,
        *,
        greeting_seconds: float,
        stall_seconds: float,
        is_private: bool,
        agent: PullAgent | None = None,
    ) -> None:
        """`is_private`: the stream is a TLS connection before its handshake."""
        self.is_known = False
        self.used_at = time.monotonic()
        self._is_asked_to_leave = False
        self._replying = threading.Lock()
        self._stream = stream
        self._peer = peer
        self._table = table
        self._dtype = cache.dtype
        self._device = cache.device
        self._copies = CopyStream(cache.device)
        self._stall_seconds = stall_seconds
        self._agent = agent
        self._source_slots: Peer | None = None
        self._pulled: _Pulled | None = None
        self._is_private = is_private
        self._stream.deadline = time.monotonic() + greeting_seconds
        self._is_closed = False
        self._shares: dict[TransferKey, _Share] = {}
        # Refusals since the source last asked: one reply per transfer, not per frame, so replies never pile up.
        self._refused: OrderedDict[TransferKey, RefusedFrame] = OrderedDict()
        # Grows to this peer's largest frame, which `receive_frame` bounds.
        self._staging = torch.empty(0, dtype=torch.uint8)

    def serve(self) -> None:
        """Read frames until the connection ends, then abort its unsettled transfers."""
        reason = "this receiver is closing"
        try:
            if self._is_private:
                self._stream.shake_hands()
                self._know()
            while not self._is_closed:
                if self._stream.wait_readable(IDLE_SECONDS if self._pulled is None else 0.0):
                    frame, payload_bytes = self._stream.receive_frame()
                    self._take(frame, payload_bytes)
                else:
                    self._land()
        except TransferError as error:
            reason = f"it broke the protocol: {error}"
            logger.warning("KV connection of %s is closed: %s", self._peer, error)
        except OSError as error:
            reason = reason_of(error)
            if not self.is_known:
                logger.warning("KV connection of %s is closed before its caller is known: %s", self._peer, reason)
        except RingserveError as error:
            reason = str(error)
            logger.warning("KV connection of %s is closed: %s", self._peer, error)
        finally:
            self._stream.close()
            self._leave_slots()
            for share in self._shares.values():
                share.transfer.abort(Unavailable(f"the source {self._peer} of {share.transfer} is gone: {reason}"))

    def close(self) -> None:
        """Make `serve` return soon."""
        self._is_closed = True
        self._stream.shut()
        if self._agent is not None:
            self._agent.wake()

    @property
    def may_leave(self) -> bool:
        """True if the connection is idle and was not asked to leave since its latest frame."""
        return self.is_known and not self._shares and not self._is_asked_to_leave

    def ask_to_leave(self) -> None:
        """Ask the source to end the connection if it is idle. Any thread may call."""
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
        if isinstance(frame, LeaveFrame | ReachedFrame | ReadFrame):
            raise TransferError(f"a source sent {type(frame).__name__}")
        destination = frame.destination if isinstance(frame, CardFrame) else frame.key.destination
        if not self.is_known and self._table.is_own(destination):
            self._know()
        if not isinstance(frame, LayerFrame):
            self._land()
        match frame:
            case LayerFrame():
                self._take_layer(frame, payload_bytes)
            case SettleFrame():
                self._settle(frame.key)
            case AbandonFrame():
                self._abandon(frame)
            case CardFrame():
                self._reply(self._meet(frame))
            case _:
                raise TransferError(f"a source sent {type(frame).__name__}")

    def _meet(self, card: CardFrame) -> ReachedFrame:
        """Find out whether NIXL reaches a source's slots. A card for another incarnation is not tried."""
        agent = self._agent
        if not self._table.is_own(card.destination):
            return ReachedFrame(Reach.STALE, "its card is for an incarnation that is not here")
        if self._source_slots is not None:
            raise TransferError("a source sent a second card")
        if agent is None:
            return ReachedFrame(Reach.OFF, "the destination has no NIXL agent")
        if card.device != agent.device.type or card.slot_bytes > agent.out.slot_bytes:
            own = f"{agent.out.slot_bytes} bytes on {agent.device.type}"
            return ReachedFrame(
                Reach.UNLIKE, f"its slots have {card.slot_bytes} bytes on {card.device}, the destination's {own}"
            )
        try:
            self._source_slots = agent.meet(card, self._stall_seconds, lambda: self._is_closed)
        except OSError as error:
            return ReachedFrame(Reach.UNREACHED, reason_of(error))
        return ReachedFrame(Reach.REACHED, "")

    def _take_layer(self, frame: LayerFrame, payload_bytes: int) -> None:
        try:
            transfer = self._table.find(frame.key)
            transfer.admit(frame, payload_bytes if frame.slot is None else frame.slot.num_bytes)
        except RingserveError as error:
            self._stream.discard(payload_bytes)
            if frame.slot is not None:
                self._land()
                self._reply(ReadFrame(frame.slot.number))
            self._refuse(frame.key, error)
            return
        # From now on, the transfer ends with this connection.
        share = self._shares.setdefault(frame.key, _Share(transfer))
        if frame.slot is not None:
            if self._agent is None or self._source_slots is None:
                raise TransferError("a source without a card sent a slot")
            pull = self._agent.pull(self._source_slots, frame.slot, self._stall_seconds, lambda: self._is_closed)
            before, self._pulled = self._pulled, _Pulled(share, frame, pull)
            self._store_pulled(before)
            return
        self._land()
        if len(self._staging) < payload_bytes:
            pinned = self._device.type == "cuda"
            self._staging = torch.empty(payload_bytes, dtype=torch.uint8, pin_memory=pinned)
        payload = self._staging[:payload_bytes]
        self._stream.receive_into(payload.numpy().data)
        self._store(share, frame, payload)

    def _land(self) -> None:
        """Wait for the frame whose payload is being read from a slot, if there is one, and store it."""
        before, self._pulled = self._pulled, None
        self._store_pulled(before)

    def _store_pulled(self, pulled: _Pulled | None) -> None:
        """Wait for a frame's payload, free the source's slot, and store the payload."""
        if pulled is None:
            return
        assert self._agent is not None, "a slot was read by no agent"
        try:
            payload = self._agent.wait(pulled.pull, self._stall_seconds, lambda: self._is_closed)
            self._reply(ReadFrame(pulled.pull.ref.number))
            self._store(pulled.share, pulled.frame, payload)
        finally:
            self._agent.release(pulled.pull)

    def _store(self, share: _Share, frame: LayerFrame, payload: torch.Tensor) -> None:
        try:
            with self._copies.copying():
                share.transfer.store(frame, payload.view(self._dtype))
        except RingserveError as error:
            self._refuse(frame.key, error)
            return
        share.payload_bytes += payload.nbytes

    def _leave_slots(self) -> None:
        """Give up the READ in progress and the source's slots."""
        if self._agent is not None and self._pulled is not None:
            self._agent.release(self._pulled.pull)
        if self._agent is not None and self._source_slots is not None:
            self._agent.leave(self._source_slots)

    def _settle(self, key: TransferKey) -> None:
        """Reply for all frames of this key since the last reply."""
        share = self._shares.pop(key, None)
        refused = self._refused.pop(key, None)
        if refused is not None:
            self._reply(refused)
            return
        try:
            if share is None:
                raise TransferError(f"nothing of transfer {key.transfer_id!r} came over this connection")
            # Not looked up in the table, because a transfer that was sealed and dropped since then did arrive.
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
        logger.warning("KV from %s refused: %s", self._peer, error)
        while len(self._refused) >= MAX_REFUSED:
            self._refused.popitem(last=False)
        self._refused[key] = refusal(key, error)
        self._reply(self._refused[key])

    def _reply(self, frame: RefusedFrame | SettledFrame | ReachedFrame | ReadFrame) -> None:
        with self._replying:
            self._stream.send([memoryview(encode(frame))])


def refusal(key: TransferKey, error: RingserveError) -> RefusedFrame:
    """Return the frame that reports `error` to a source."""
    return RefusedFrame(key, isinstance(error, StaleIncarnation), str(error))


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
        """Make room for a connection. Return whether there is room. Only the accepting thread calls it."""
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
