"""Who moves the bytes of a rank's links, and how its part in the ring ends.

A caller that starts messages hands the kernel at once what it takes, and a caller that waits moves all that can be
moved itself: on busy cores every change of thread costs a scheduler's turn, so small messages see none. What does not
fit in the kernel's buffers is moved by one background thread, the mover, as long as no caller waits.

    OPEN --close()--> CLOSED   in order, if nothing is under way: peers that expect nothing more never notice
      |
      +--a peer lost, a deadline passed, close() amid messages--> CLOSED   by reset: every peer's next wait fails

The last thread that may be polling the connections closes them: a descriptor closed under a poll could be another's by
then.
"""

from __future__ import annotations

import math
import select
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence

from cp_core.errors import Unavailable
from cp_core.transport.bell import Bell
from cp_core.transport.interface import TransportStats
from cp_core.transport.socket_link import BROKEN, Link, Transfer


class Traffic:
    """All links of `rank`. Any thread may call; `start` calls decide the order of messages."""

    def __init__(
        self, rank: int, connections: Mapping[int, socket.socket], mover_seconds: float, stats: TransportStats
    ) -> None:
        """Takes the connections, one for each peer, over. The mover looks up every `mover_seconds` at the latest.

        `stats` is told how long messages were under way, whenever none is left. One that the kernel holds whole is
        under way until somebody asks for it.
        """
        self._rank = rank
        self._mover_seconds = mover_seconds
        self._links = {peer: Link(peer, connection) for peer, connection in connections.items()}
        self._by_descriptor = {link.descriptor: link for link in self._links.values()}
        self._lock = threading.Lock()
        self._closing = Bell()
        self._mover_call: Bell | None = None
        self._num_waiting = 0
        self._num_polling = 0
        self._closed_because: str | None = None
        self._is_in_order = False
        self._is_disposed = False
        self._stats = stats
        stats.seconds_under_way = self._seconds_under_way = 0.0
        self._under_way_since: float | None = None

    def start(self, sends: Sequence[Transfer], recvs: Sequence[Transfer]) -> None:
        """Queue the transfers behind those of earlier calls. Raises Unavailable once the ring is closed."""
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
            self._call_mover()

    def wait(self, transfers: Sequence[Transfer], seconds: float) -> None:
        """Return when all are done. Raises Unavailable, and closes the ring, if a peer is lost or after `seconds`."""
        deadline = time.monotonic() + seconds
        with self._lock:
            self._num_waiting += 1
            self._num_polling += 1
        try:
            while (poll := self._advance(transfers, deadline)) is not None:
                self._listen(poll, deadline - time.monotonic())
        finally:
            with self._lock:
                self._num_waiting -= 1
                self._call_mover()
                self._stop_polling()

    def close(self, reason: str) -> None:
        """End this rank's part. Waits here, and those of peers that expect more of this rank, fail."""
        with self._lock:
            self._close(reason, is_in_order=all(link.is_idle for link in self._links.values()))
            if not self._num_polling:
                self._dispose()

    # --- what callers do under the lock, or without it where they may block -------------------------------------------

    def _advance(self, transfers: Sequence[Transfer], deadline: float) -> select.poll | None:
        """What to poll for before the next attempt, or None if all transfers are done."""
        with self._lock:
            if self._closed_because is None:
                for link in self._links.values():
                    link.move()
                self._note_idle()
            left = [transfer for transfer in transfers if not transfer.is_done]
            if not left:
                return None
            # What is waited for is named first: a peer that broke off because it lost another is a cause as well.
            self._check_peers([*(self._links[transfer.peer] for transfer in left), *self._links.values()])
            if time.monotonic() >= deadline:
                self._close(f"rank {self._rank} lost rank {left[0].peer} after its deadline", is_in_order=False)
            if self._closed_because is not None:
                raise Unavailable(self._closed_because)
            return self._poll_links()

    def _note_idle(self) -> None:
        if self._under_way_since is not None and all(link.is_idle for link in self._links.values()):
            self._seconds_under_way += time.perf_counter() - self._under_way_since
            self._stats.seconds_under_way = self._seconds_under_way
            self._under_way_since = None

    def _listen(self, poll: select.poll, seconds: float) -> None:
        for descriptor, events in poll.poll(max(0, math.ceil(seconds * 1e3))):
            link = self._by_descriptor.get(descriptor)
            if link is not None and events & BROKEN:
                # Acted upon only after what has arrived from the peer is read.
                link.is_lost = True

    def _poll_links(self) -> select.poll:
        poll = select.poll()
        poll.register(self._closing.descriptor, select.POLLIN)
        for link in self._links.values():
            poll.register(link.descriptor, link.wanted_events)
        return poll

    def _check_peers(self, links: Iterable[Link]) -> None:
        """Close the ring if the peer of any of `links` is lost."""
        for link in links:
            if link.is_lost:
                self._close(f"rank {self._rank} lost rank {link.peer}", is_in_order=False)

    # --- the mover ---------------------------------------------------------------------------------------------------

    def _call_mover(self) -> None:
        if self._num_waiting or self._closed_because is not None:
            return
        if not any(link.needs_mover for link in self._links.values()):
            return
        if self._mover_call is None:
            self._mover_call = Bell()
            self._num_polling += 1
            threading.Thread(target=self._move_until_closed, name=f"ring-mover-{self._rank}", daemon=True).start()
        self._mover_call.ring()

    def _move_until_closed(self) -> None:
        while (poll := self._move_unless_waited_for()) is not None:
            self._listen(poll, self._mover_seconds)
        with self._lock:
            self._stop_polling()

    def _move_unless_waited_for(self) -> select.poll | None:
        """What the mover is to poll for, or None once the ring is closed."""
        with self._lock:
            assert self._mover_call is not None
            self._mover_call.silence()
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
            poll.register(self._mover_call.descriptor, select.POLLIN)
            return poll

    # --- the end -----------------------------------------------------------------------------------------------------

    def _close(self, reason: str, is_in_order: bool) -> None:
        if self._closed_because is None:
            self._closed_because = reason
            self._is_in_order = is_in_order
            self._closing.ring()

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
        if self._mover_call is not None:
            self._mover_call.close()
