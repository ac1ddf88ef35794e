"""Ring over TCP sockets, plain or with TLS, with one connection per pair of ranks.

Ranks join it for tensors on the CPU. It owns the connections.

Both sides know every size, so the wire carries only payload. A caller that starts messages hands the kernel as many
bytes as it takes, and a waiting caller moves bytes itself. On busy cores every thread switch waits for the scheduler,
so small messages need none (docs/decisions/0004). One background thread, the mover, moves bytes that do not fit in the
kernel's buffers while no caller waits.

    OPEN --close()--> CLOSED   in order, if no message is in flight: peers that expect no more messages never notice
      |
      +--a peer lost, a deadline passed, close() amid messages--> CLOSED   by reset: every peer's next wait fails

The last thread that polls the connections closes them. If a descriptor were closed during a poll, it could already
belong to another file.
"""

from __future__ import annotations

import math
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import torch

from ringserve.cp_core.errors import Unavailable
from ringserve.cp_core.transport.collectives import Message, PointToPointRing
from ringserve.cp_core.transport.interface import TransportStats
from ringserve.cp_core.transport.peer_tls import reason_of

# Linux's default send buffer takes a message of this size whole, so sending it never waits for the receiver.
LARGE_BYTES: Final = 256 << 10
# A waiting rank spins for this long before it sleeps: waking up takes longer than a small message, and a virtual
# machine gives an idle core away. The spin yields to other threads.
SPIN_SECONDS: Final = 0.0005
BROKEN: Final = select.POLLERR | select.POLLHUP | select.POLLNVAL
RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)
FINISH_ON_CLOSE: Final = struct.pack("ii", 0, 0)


@dataclass(slots=True, eq=False)
class Transfer:
    """One message in one direction. `rest` has the bytes that are still to be moved."""

    peer: int
    rest: memoryview

    @property
    def is_done(self) -> bool:
        return not self.rest


class Link:
    """Connection to `peer` with the messages in flight in both directions. Calls never block. Use it under a lock."""

    def __init__(self, peer: int, connection: socket.socket) -> None:
        """Own the connection.

        A process that dies resets its connections, which peers notice even while they wait for another rank. A rank
        that leaves in order ends its streams, which such peers may ignore.
        """
        self.peer = peer
        self.is_broken = False
        self.lost_because: str | None = None
        self.sends: deque[Transfer] = deque()
        self.recvs: deque[Transfer] = deque()
        self._connection = connection
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        self.descriptor = connection.fileno()

    @property
    def is_idle(self) -> bool:
        return not self.sends and not self.recvs

    @property
    def needs_mover(self) -> bool:
        """True if bytes must be moved while no caller waits. Small incoming messages can stay in the kernel."""
        return bool(self.sends) or any(len(recv.rest) > LARGE_BYTES for recv in self.recvs)

    @property
    def wanted_events(self) -> int:
        """Poll events to wait for. BROKEN is always reported, the end of a stream only if more bytes are expected."""
        return (select.POLLIN if self.recvs else 0) | (select.POLLOUT if self.sends else 0)

    def move(self) -> None:
        """Send the bytes that the kernel takes and receive the bytes it has. If that fails, the peer is lost.

        If a poll found the connection broken, the bytes that have arrived are received first; then the peer is lost.
        """
        try:
            self._send()
            self._receive()
        except OSError as error:
            self._lose(reason_of(error))
        if self.is_broken:
            number = self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            self._lose(os.strerror(number) if number else "it closed its connection")

    def _lose(self, reason: str) -> None:
        # The first reason stays: later errors follow from it.
        if self.lost_because is None:
            self.lost_because = reason

    def _send(self) -> None:
        while self.sends:
            transfer = self.sends[0]
            try:
                num_bytes = self._connection.send(transfer.rest)
            except BlockingIOError:
                return
            transfer.rest = transfer.rest[num_bytes:]
            if transfer.rest:
                # The kernel is full, or this was one slice of TLS. Retrying at once would delay the other direction.
                return
            self.sends.popleft()

    def _receive(self) -> None:
        while self.recvs:
            transfer = self.recvs[0]
            try:
                num_bytes = self._connection.recv_into(transfer.rest)
            except BlockingIOError:
                return
            if not num_bytes:
                raise ConnectionResetError("it ended its stream")
            transfer.rest = transfer.rest[num_bytes:]
            if transfer.rest:
                return
            self.recvs.popleft()

    def close(self, in_order: bool) -> None:
        """End the stream after the kernel's remaining bytes, or reset the connection."""
        if in_order:
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, FINISH_ON_CLOSE)
        self._connection.close()


class Wakeup:
    """Descriptor that wakes a polling thread: readable from `set` to `clear`."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self.descriptor = self._reader.fileno()

    def set(self) -> None:
        """Make the descriptor readable."""
        # If the buffer is full, the descriptor is readable already.
        with suppress(BlockingIOError):
            self._writer.send(b"\0")

    def clear(self) -> None:
        """Make the descriptor unreadable."""
        with suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def close(self) -> None:
        """Free the descriptor. No thread may still poll it."""
        self._reader.close()
        self._writer.close()


class Links:
    """All links of `rank`. Any thread may call. The order of `start` calls is the order of messages."""

    def __init__(
        self, rank: int, connections: Mapping[int, socket.socket], mover_seconds: float, stats: TransportStats
    ) -> None:
        """Own the connections, one per peer. The mover's polls end after at most `mover_seconds`.

        `stats` is updated whenever no message is left in flight. A message that the kernel holds whole counts as in
        flight until a caller waits for it.
        """
        self._rank = rank
        self._mover_seconds = mover_seconds
        self._links = {peer: Link(peer, connection) for peer, connection in connections.items()}
        self._by_descriptor = {link.descriptor: link for link in self._links.values()}
        self._lock = threading.Lock()
        self._closing = Wakeup()
        self._mover_wakeup: Wakeup | None = None
        self._num_waiting = 0
        self._num_polling = 0
        self._closed_because: str | None = None
        self._is_in_order = False
        self._is_disposed = False
        self._stats = stats
        stats.seconds_under_way = self._seconds_under_way = 0.0
        self._under_way_since: float | None = None

    def start(self, sends: Sequence[Transfer], recvs: Sequence[Transfer]) -> None:
        """Queue transfers behind earlier ones. Raises Unavailable if the ring is closed."""
        with self._lock:
            if self._closed_because is not None:
                raise Unavailable(self._closed_because)
            if self._under_way_since is None:
                self._under_way_since = time.perf_counter()
            for transfer in recvs:
                self._links[transfer.peer].recvs.append(transfer)
            for transfer in sends:
                self._links[transfer.peer].sends.append(transfer)
            for transfer in sends:
                self._links[transfer.peer].move()
            self._note_idle()
            self._wake_mover()

    def wait(self, transfers: Sequence[Transfer], seconds: float) -> None:
        """Wait until all are done. If a peer is lost, or after `seconds`, close the ring and raise Unavailable."""
        deadline = time.monotonic() + seconds
        with self._lock:
            self._num_waiting += 1
            self._num_polling += 1
        patience = time.monotonic() + SPIN_SECONDS
        try:
            while not self._advance(transfers, deadline):
                if time.monotonic() < patience:
                    os.sched_yield()
                    continue
                with self._lock:
                    poll = self._poll_links()
                self._poll(poll, deadline - time.monotonic())
        finally:
            with self._lock:
                self._num_waiting -= 1
                self._wake_mover()
                self._stop_polling()

    def close(self, reason: str) -> None:
        """Leave the ring. Waits then fail on this rank, and on peers that expect more of its messages."""
        with self._lock:
            self._close(reason, is_in_order=all(link.is_idle for link in self._links.values()))
            if not self._num_polling:
                self._dispose()

    def _advance(self, transfers: Sequence[Transfer], deadline: float) -> bool:
        """Move bytes. Return True if all transfers are done."""
        with self._lock:
            if self._closed_because is None:
                for link in self._links.values():
                    link.move()
                self._note_idle()
            left = [transfer for transfer in transfers if not transfer.is_done]
            if not left:
                return True
            # Check awaited peers first, to name them: a peer that closed because it lost another rank is lost too.
            self._check_peers([*(self._links[transfer.peer] for transfer in left), *self._links.values()])
            if time.monotonic() >= deadline:
                self._close(f"rank {self._rank} lost rank {left[0].peer} after its deadline", is_in_order=False)
            if self._closed_because is not None:
                raise Unavailable(self._closed_because)
            return False

    def _note_idle(self) -> None:
        if self._under_way_since is not None and all(link.is_idle for link in self._links.values()):
            self._seconds_under_way += time.perf_counter() - self._under_way_since
            self._stats.seconds_under_way = self._seconds_under_way
            self._under_way_since = None

    def _poll(self, poll: select.poll, seconds: float) -> None:
        for descriptor, events in poll.poll(max(0, math.ceil(seconds * 1e3))):
            link = self._by_descriptor.get(descriptor)
            if link is not None and events & BROKEN:
                # Handled only after the peer's bytes that have arrived are read.
                link.is_broken = True

    def _poll_links(self) -> select.poll:
        poll = select.poll()
        poll.register(self._closing.descriptor, select.POLLIN)
        for link in self._links.values():
            poll.register(link.descriptor, link.wanted_events)
        return poll

    def _check_peers(self, links: Iterable[Link]) -> None:
        """Close the ring if the peer of any of `links` is lost."""
        for link in links:
            if link.lost_because is not None:
                self._close(f"rank {self._rank} lost rank {link.peer}: {link.lost_because}", is_in_order=False)

    def _wake_mover(self) -> None:
        if self._num_waiting or self._closed_because is not None:
            return
        if not any(link.needs_mover for link in self._links.values()):
            return
        if self._mover_wakeup is None:
            self._mover_wakeup = Wakeup()
            self._num_polling += 1
            threading.Thread(target=self._move_until_closed, name=f"ring-mover-{self._rank}", daemon=True).start()
        self._mover_wakeup.set()

    def _move_until_closed(self) -> None:
        while (poll := self._move_unless_awaited()) is not None:
            self._poll(poll, self._mover_seconds)
        with self._lock:
            self._stop_polling()

    def _move_unless_awaited(self) -> select.poll | None:
        """Move bytes unless a caller waits. Return the mover's next poll, or None if the ring is closed."""
        with self._lock:
            assert self._mover_wakeup is not None
            self._mover_wakeup.clear()
            is_needed = False
            if not self._num_waiting and self._closed_because is None:
                for link in self._links.values():
                    link.move()
                self._note_idle()
                self._check_peers(self._links.values())
                is_needed = any(link.needs_mover for link in self._links.values())
            if self._closed_because is not None:
                return None
            poll = self._poll_links() if is_needed else select.poll()
            poll.register(self._closing.descriptor, select.POLLIN)
            poll.register(self._mover_wakeup.descriptor, select.POLLIN)
            return poll

    def _close(self, reason: str, is_in_order: bool) -> None:
        if self._closed_because is None:
            self._closed_because = reason
            self._is_in_order = is_in_order
            self._closing.set()

    def _stop_polling(self) -> None:
        self._num_polling -= 1
        if not self._num_polling and self._closed_because is not None:
            self._dispose()

    def _dispose(self) -> None:
        if self._is_disposed:
            return
        self._is_disposed = True
        for link in self._links.values():
            link.close(self._is_in_order)
        self._closing.close()
        if self._mover_wakeup is not None:
            self._mover_wakeup.close()


class SocketRing(PointToPointRing):
    """One rank's end of a socket ring. Tensors are on the CPU.

    The death of a rank resets its connections, which ends all other ranks' waits at once. If a rank leaves in order,
    ranks that expect its messages see its streams end and leave by a reset, which the other ranks see.
    """

    def __init__(
        self,
        rank: int,
        timeout_seconds: float,
        connections: Mapping[int, socket.socket],
        store: object = None,
    ) -> None:
        """Own `connections`, one per other rank, and keep `store` alive: on rank 0 it serves all ranks."""
        super().__init__(rank, len(connections) + 1, timeout_seconds)
        self._links = Links(rank, connections, timeout_seconds, self.stats)
        self._store = store

    def _start(self, sends: Sequence[Message], recvs: Sequence[Message]) -> SocketWork:
        outgoing = [Transfer(message.peer, _bytes_of(message.tensor)) for message in sends]
        incoming = [Transfer(message.peer, _bytes_of(message.tensor)) for message in recvs]
        self._links.start(outgoing, incoming)
        return SocketWork(self._links, outgoing + incoming, self.timeout_seconds)

    def close(self) -> None:
        """See RingTransport."""
        self._links.close(f"rank {self.rank} left the ring of {self.size}")


class SocketWork:
    """Transfers of one message batch."""

    __slots__ = ("_links", "_timeout_seconds", "_transfers")

    def __init__(self, links: Links, transfers: Sequence[Transfer], timeout_seconds: float) -> None:
        self._links = links
        self._transfers = transfers
        self._timeout_seconds = timeout_seconds

    def wait(self, timeout_seconds: float | None = None) -> None:
        """See ringserve.cp_core.transport.interface.Work."""
        if not all(transfer.is_done for transfer in self._transfers):
            self._links.wait(self._transfers, self._timeout_seconds if timeout_seconds is None else timeout_seconds)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a view of the tensor's own memory, without a copy."""
    assert tensor.device.type == "cpu", f"a socket ring moves tensors on the CPU, not on {tensor.device}"
    # numpy has no bfloat16.
    array = tensor.detach().view(-1).view(torch.uint8) if tensor.dtype == torch.bfloat16 else tensor.detach()
    return array.numpy().data.cast("B")
