"""Ring over a torch process group, and the one that serves GPUs: NCCL.

The process group is private to the ring. torch's default group is never touched, so several rings can live in one
process, and one of them can be torn down and rebuilt.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
from torch.distributed import ProcessGroup, Work
from torch.distributed.distributed_c10d import Store

from cp_core.errors import ConfigError, Unavailable
from cp_core.transport.collectives import Message, PointToPointRing

# Messages of one tag and pair of ranks keep the order in which they were issued.
DATA_TAG = 0


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
        """See cp_core.transport.interface.Work."""
        seconds = self._ring.timeout_seconds if timeout_seconds is None else timeout_seconds
        deadline = time.monotonic() + seconds
        for work, peer in self._started:
            try:
                self._ring.wait_for(work, deadline)
            except RuntimeError as error:
                late = " after its deadline" if time.monotonic() >= deadline else ""
                raise self._ring.fail(f"rank {self._ring.rank} lost rank {peer}{late}") from error


class NcclRing(ProcessGroupRing):
    """One rank's end of an NCCL ring. Waits are the CUDA stream's; NCCL's watchdog keeps the deadline."""

    def __init__(
        self, process_group: ProcessGroup, device: torch.device, timeout_seconds: float, store: object
    ) -> None:
        super().__init__(process_group, timeout_seconds, store)
        self._nccl = process_group
        self._device = device

    def _issue(self, sends: Sequence[Message], recvs: Sequence[Message]) -> list[tuple[Work, int]]:
        if not sends and not recvs:
            return []
        # NCCL needs the sends and receives of a batch in one call, or ranks that all send first wait for each other.
        self._nccl._start_coalescing(self._device)
        super()._issue(sends, recvs)
        return [(self._nccl._end_coalescing(self._device), self.rank)]

    def wait_for(self, work: Work, deadline: float) -> None:
        """See ProcessGroupRing. Returns at once: later work of the CUDA stream waits."""
        work.wait()

    def _break_connections(self) -> None:
        self._nccl.abort()


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
