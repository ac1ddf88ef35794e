"""Ring over a torch process group, and the one that serves GPUs: NCCL.

The process group is private to the ring. torch's default group is never touched, so several rings can live in one
process, and one of them can be torn down and rebuilt.
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

# Messages of one tag and pair of ranks keep the order in which they were issued.
DATA_TAG = 0
# Time between two questions whether a device has passed an event.
POLL_SECONDS = 50e-6


class ProcessGroupLike(Protocol):
    """Operations of a torch process group, or of a backend such as ProcessGroupGloo, that a ring uses."""

    def rank(self) -> int: ...
    def size(self) -> int: ...
    def send(self, tensors: list[torch.Tensor], dstRank: int, tag: int, /) -> Work: ...
    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int, /) -> Work: ...


class ProcessGroupRing(PointToPointRing):
    """One rank's end of a ring over a process group.

    A rank that meets an error breaks its own connections. So the news of a lost rank goes round a ring of any size
    without waiting for a timeout.
    """

    def __init__(self, process_group: ProcessGroupLike, timeout_seconds: float, store: object) -> None:
        """Take `process_group` over, and retain `store` as long as the ring: on rank 0 it serves the others."""
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
        """Start all messages and return each operation with its peer. Raises RuntimeError if the ring is broken."""
        # Receives first: a message that finds its receiver ready needs one trip, not three.
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
        """See RingTransport. A broken ring ends the wait: its messages end without data, and work behind them is void.

        The deadline is that of any wait. Nothing else has one for messages of a recording that is replayed. A rank
        that is alone has no messages, and sees the event sooner by a plain wait.
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
    """Operations of one message batch, each with its peer."""

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
                raise self._ring.fail(f"rank {self._ring.rank} lost rank {peer}{late}") from error


class StreamEvent(Protocol):
    """Event with a time, recorded on a stream: `torch.cuda.Event(enable_timing=True)`."""

    def query(self) -> bool: ...
    def elapsed_time(self, end_event: Any, /) -> float: ...


class StreamWaits:
    """Seconds for which a stream waited for messages, by events before and after each wait.

    Waits of a stream that is being recorded are not known: its replays record no events with times.
    """

    def __init__(self, record: Callable[[], StreamEvent], is_recorded: Callable[[], bool]) -> None:
        """`record` records an event on the stream; `is_recorded` tells whether the stream's work is."""
        self._record = record
        self._is_recorded = is_recorded
        self._open: deque[tuple[StreamEvent, StreamEvent]] = deque()

    def around(self, wait: Callable[[], object]) -> None:
        """Let the stream wait by `wait`, which returns at once."""
        if self._is_recorded():
            wait()
            return
        began = self._record()
        wait()
        self._open.append((began, self._record()))

    def take(self) -> float:
        """Return the seconds of the waits that have ended since the last call, without waiting for others."""
        seconds = 0.0
        while self._open and self._open[0][1].query():
            began, ended = self._open.popleft()
            seconds += began.elapsed_time(ended) / 1e3
        return seconds


class NcclRing(ProcessGroupRing):
    """One rank's end of an NCCL ring. Waits are the CUDA stream's; NCCL's watchdog keeps their deadline.

    `stats.seconds_waited` are those of the stream that has waited when they are read. The watchdog is not told of
    messages that are recorded: `await_event` has the deadline of their replays. NCCL allows a recording only where all
    ranks record the same messages, and replay that together.
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
        # NCCL needs the sends and receives of a batch in one call, or ranks that all send first wait for each other.
        self._nccl._start_coalescing(self._device)
        super()._issue(sends, recvs)
        return [(self._nccl._end_coalescing(self._device), self.rank)]

    def wait_for(self, work: Work, deadline: float) -> None:
        """See ProcessGroupRing. Returns at once: later work of the CUDA stream waits."""
        self._waits.around(work.wait)

    def _break_connections(self) -> None:
        # It ends NCCL's kernels at once, but returns only when all recordings of messages are gone: some may be those
        # of the thread that breaks the ring.
        threading.Thread(target=self._nccl.abort, daemon=True, name=f"abort of rank {self.rank}").start()


def join_nccl(
    prefixed: Store, rank: int, size: int, device: torch.device, timeout_seconds: float, store: object
) -> ProcessGroupRing:
    """Return the ring of the ranks that find each other in `prefixed`; `store` lives as long as the ring.

    Raises ConfigError where torch is built without NCCL, RuntimeError if the others do not come.
    """
    if not torch.distributed.is_nccl_available():
        raise ConfigError("ring transport is 'nccl', but this torch is built without NCCL")
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_seconds)
    nccl = ProcessGroupNCCL(prefixed, rank, size, options)
    nccl.eager_connect_single_device(device)
    group = ProcessGroup(prefixed, rank, size)
    group._set_default_backend(ProcessGroup.BackendType.NCCL)
    group._register_backend(device, ProcessGroup.BackendType.NCCL, nccl)
    return NcclRing(group, device, timeout_seconds, store)
