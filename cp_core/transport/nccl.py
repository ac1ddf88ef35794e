"""Rings over torch process groups, among them the GPU ring over NCCL.

`connect_ring` joins a rank to its NCCL ring. The process group is private to the ring. torch's default process group is
never touched, so one process can have several rings and rebuild any of them.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import ProcessGroup, Work
from torch.distributed.distributed_c10d import Store

from ringserve.cp_core.errors import ConfigError, Unavailable
from ringserve.cp_core.transport.collectives import Message, PointToPointRing
from ringserve.cp_core.transport.interface import TransportStats

# Messages with one tag between two ranks keep their issue order.
DATA_TAG = 0
# Interval for polling whether the device has passed an event.
POLL_SECONDS = 50e-6


class ProcessGroupLike(Protocol):
    """Operations that a ring uses of a torch process group, or of a backend such as ProcessGroupGloo."""

    def rank(self) -> int: ...
    def size(self) -> int: ...
    def send(self, tensors: list[torch.Tensor], dstRank: int, tag: int, /) -> Work: ...
    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int, /) -> Work: ...


class ProcessGroupRing(PointToPointRing):
    """One rank's end of a ring over a process group.

    A rank that meets an error breaks its own connections, so the loss of a rank spreads through the ring without
    waiting for timeouts.
    """

    def __init__(self, process_group: ProcessGroupLike, timeout_seconds: float, store: object) -> None:
        """Own `process_group`. Keep `store` alive as long as the ring, in case this rank serves it to the others."""
        super().__init__(process_group.rank(), process_group.size(), timeout_seconds)
        self._group = process_group
        self._store = store
        self._closed_because: str | None = None

    def _start(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Operations:
        if self._closed_because is not None:
            raise Unavailable(self._closed_because)
        try:
            return Operations(self, self._issue(sends, recvs))
        except RuntimeError as error:
            raise self.fail(f"rank {self.rank} lost the ring") from error

    def _issue(self, sends: Sequence[Message], recvs: Sequence[Message]) -> list[tuple[Work, int]]:
        """Start all messages. Return each operation with its peer, or with this rank if it is the whole batch.

        Raises RuntimeError if the ring is broken.
        """
        # Receives first: if the receiver is ready, a message needs one trip instead of three.
        received = [(self._group.recv([each.tensor], each.peer, DATA_TAG), each.peer) for each in recvs]
        sent = [(self._group.send([each.tensor], each.peer, DATA_TAG), each.peer) for each in sends]
        return received + sent

    @abstractmethod
    def wait_for(self, work: Work, deadline: float) -> None:
        """Wait for one operation until `deadline` (time.monotonic). Raises RuntimeError if it fails or is late."""

    @abstractmethod
    def _break_connections(self) -> None:
        """End every wait of this rank and of its peers."""

    def await_event(self, event: torch.Event) -> None:
        """See RingTransport. If the ring breaks, the wait ends with Unavailable.

        Messages of a broken ring end without their data, so nothing computed from them may be used. The transport's
        timeout bounds the wait. It is the only deadline for messages that a CUDA graph replays. A lone rank has no
        messages, so it waits without polling, which is faster.
        """
        if self.size == 1:
            return super().await_event(event)
        deadline = time.monotonic() + self.timeout_seconds
        while not event.query() and self._closed_because is None:
            if time.monotonic() >= deadline:
                raise self.fail(f"rank {self.rank} waited {self.timeout_seconds:g} s for its device and its peers")
            time.sleep(POLL_SECONDS)
        if self._closed_because is not None:
            raise Unavailable(self._closed_because)

    def fail(self, reason: str) -> Unavailable:
        """Close the ring and return the error to raise."""
        if self._closed_because is None:
            self._closed_because = reason
            self._break_connections()
        return Unavailable(self._closed_because)

    def close(self) -> None:
        """See RingTransport."""
        self.fail(f"rank {self.rank} left the ring of {self.size}")


class Operations:
    """Operations of one message batch with their peers."""

    def __init__(self, ring: ProcessGroupRing, started: list[tuple[Work, int]]) -> None:
        self._ring = ring
        self._started = started

    def wait(self, timeout_seconds: float | None = None) -> None:
        """See ringserve.cp_core.transport.interface.Work."""
        seconds = self._ring.timeout_seconds if timeout_seconds is None else timeout_seconds
        deadline = time.monotonic() + seconds
        for work, peer in self._started:
            try:
                self._ring.wait_for(work, deadline)
            except RuntimeError as error:
                late = " after its deadline" if time.monotonic() >= deadline else ""
                # A batch that was issued as one operation has no single peer.
                lost = "the ring" if peer == self._ring.rank else f"rank {peer}"
                raise self._ring.fail(f"rank {self._ring.rank} lost {lost}{late}") from error


class StreamEvent(Protocol):
    """Timed event on a stream, for example `torch.cuda.Event(enable_timing=True)`."""

    def query(self) -> bool: ...
    def elapsed_time(self, end_event: Any, /) -> float: ...


class StreamWaits:
    """Seconds that a stream waited for messages, measured by events before and after each wait.

    Waits inside a CUDA graph are not measured: replays record no timed events.
    """

    def __init__(self, record: Callable[[], StreamEvent], is_capturing: Callable[[], bool]) -> None:
        """`record` records an event on the stream. `is_capturing` returns whether a CUDA graph captures the stream."""
        self._record = record
        self._is_capturing = is_capturing
        self._open: deque[tuple[StreamEvent, StreamEvent]] = deque()

    def around(self, wait: Callable[[], object]) -> None:
        """Make the stream wait by calling `wait`, which returns at once."""
        if self._is_capturing():
            wait()
            return
        began = self._record()
        wait()
        self._open.append((began, self._record()))

    def take(self) -> float:
        """Return the seconds of all waits that ended since the last call. Does not block."""
        seconds = 0.0
        while self._open and self._open[0][1].query():
            began, ended = self._open.popleft()
            seconds += began.elapsed_time(ended) / 1e3
        return seconds


class NcclRing(ProcessGroupRing):
    """One rank's end of an NCCL ring. The CUDA stream waits; NCCL's watchdog enforces the deadline.

    `stats.seconds_waited` counts the stream's finished waits. The watchdog does not see recorded messages:
    `await_event` bounds their replays. NCCL requires that all ranks record the same messages and replay them together.
    """

    is_on_stream = True

    def __init__(
        self, process_group: ProcessGroup, device: torch.device, timeout_seconds: float, store: object
    ) -> None:
        super().__init__(process_group, timeout_seconds, store)
        self._nccl = process_group
        self._device = device
        self._waits = StreamWaits(self._record, torch.cuda.is_current_stream_capturing)

    @property
    def stats(self) -> TransportStats:
        """See RingTransport."""
        self._stats.seconds_waited += self._waits.take()
        return self._stats

    def _record(self) -> StreamEvent:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _issue(self, sends: Sequence[Message], recvs: Sequence[Message]) -> list[tuple[Work, int]]:
        if not sends and not recvs:
            return []
        # NCCL needs a batch's sends and receives in one call: ranks that all send first would deadlock.
        self._nccl._start_coalescing(self._device)
        super()._issue(sends, recvs)
        return [(self._nccl._end_coalescing(self._device), self.rank)]

    def wait_for(self, work: Work, deadline: float) -> None:
        """See ProcessGroupRing. Returns at once; later work of the CUDA stream waits."""
        self._waits.around(work.wait)

    def _break_connections(self) -> None:
        # `abort` ends NCCL's kernels at once, but returns only when all graphs with messages are gone, and this thread
        # may own some of them.
        threading.Thread(target=self._nccl.abort, daemon=True, name=f"abort of rank {self.rank}").start()


def join_nccl(
    rendezvous: Store, rank: int, size: int, device: torch.device, timeout_seconds: float, store: object
) -> ProcessGroupRing:
    """Join the ring of the ranks that meet in `rendezvous`, a store with only this ring's keys.

    `store` lives as long as the ring. Raises ConfigError if torch is built without NCCL, RuntimeError if other ranks do
    not join.
    """
    if not torch.distributed.is_nccl_available():
        raise ConfigError("ring transport is 'nccl', but this torch is built without NCCL")
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_seconds)
    nccl = ProcessGroupNCCL(rendezvous, rank, size, options)
    nccl.eager_connect_single_device(device)
    group = ProcessGroup(rendezvous, rank, size)
    group._set_default_backend(ProcessGroup.BackendType.NCCL)
    group._register_backend(device, ProcessGroup.BackendType.NCCL, nccl)
    return NcclRing(group, device, timeout_seconds, store)
