"""Ring for GPU tensors over a host-memory transport, so that several ranks may share a GPU.

Ranks wrap a ring of sockets in it, since NCCL refuses two ranks on one device. A message is copied to pinned host
memory, sent by the host transport, and copied to the receiver's device. Host tensors are sent as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ringserve.cp_core.transport.interface import RingTransport, TransportStats, Work


class Staging(Protocol):
    """Copies between a device and host memory."""

    def covers(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on the device."""
        ...

    def room(self, like: torch.Tensor) -> torch.Tensor:
        """Return host memory for a tensor with the shape and dtype of `like`."""
        ...

    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy tensors to host memory. They may be read there at once."""
        ...

    def to_device(self, host: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copy to a tensor on the device. Work that the caller queues later sees the copy."""
        ...


class PinnedStaging:
    """Staging of CUDA tensors in pinned memory from torch's caching allocator.

    The allocator reuses memory only after copies from it are done.
    """

    def covers(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def room(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        copies = [self.room(tensor).copy_(tensor, non_blocking=True) for tensor in tensors]
        # The transport reads the copies outside the stream.
        torch.cuda.current_stream(tensors[0].device).synchronize()
        return copies

    def to_device(self, host: torch.Tensor, tensor: torch.Tensor) -> None:
        tensor.copy_(host, non_blocking=True)


def for_device(ring: RingTransport, device: torch.device) -> RingTransport:
    """Adapt a host-memory ring to tensors on `device`."""
    return StagedRing(ring, PinnedStaging()) if device.type == "cuda" else ring


class _Arrival:
    """Work of the inner ring; the first `wait` copies the received tensors to the device."""

    def __init__(self, work: Work, staging: Staging, received: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._work = work
        self._staging = staging
        self._received = received

    def wait(self, timeout_seconds: float | None = None) -> None:
        """See `Work.wait`."""
        self._work.wait(timeout_seconds)
        for host, tensor in self._received:
            self._staging.to_device(host, tensor)
        self._received = []


class StagedRing:
    """`RingTransport` over another transport, which moves host memory."""

    is_on_stream = False

    def __init__(self, inner: RingTransport, staging: Staging) -> None:
        self._inner = inner
        self._staging = staging
        self.rank = inner.rank
        self.size = inner.size

    @property
    def stats(self) -> TransportStats:
        return self._inner.stats

    def exchange(self, send: torch.Tensor, dst: int, recv: torch.Tensor, src: int) -> Work:
        """See `RingTransport.exchange`."""
        (sent,), (room,) = self._on_host([send]), self._host_buffers([recv])
        return self._arrival(self._inner.exchange(sent, dst, room, src), [room], [recv])

    def all_to_all(self, send: Sequence[torch.Tensor], recv: Sequence[torch.Tensor]) -> Work:
        """See `RingTransport.all_to_all`. The rank's own part stays on the device."""
        send, recv = list(send), list(recv)
        recv[self.rank].copy_(send[self.rank])
        send[self.rank] = recv[self.rank] = torch.empty(0)
        rooms = self._host_buffers(recv)
        return self._arrival(self._inner.all_to_all(self._on_host(send), rooms), rooms, recv)

    def gather_all(self, send: torch.Tensor, recv: Sequence[torch.Tensor]) -> Work:
        """See `RingTransport.gather_all`. The rank's own part is copied within the device."""
        recv = list(recv)
        if recv[self.rank] is not send:
            recv[self.rank].copy_(send)
        (sent,) = self._on_host([send])
        recv[self.rank] = sent
        rooms = self._host_buffers(recv)
        return self._arrival(self._inner.gather_all(sent, rooms), rooms, recv)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        """See `RingTransport.broadcast`."""
        if source == self.rank:
            (sent,) = self._on_host([tensor])
            return self._inner.broadcast(sent, source)
        (room,) = self._host_buffers([tensor])
        return self._arrival(self._inner.broadcast(room, source), [room], [tensor])

    def await_event(self, event: torch.Event) -> None:
        """See `RingTransport.await_event`."""
        event.synchronize()

    def close(self) -> None:
        """See `RingTransport.close`."""
        self._inner.close()

    def _on_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors in host memory: those on the device are copied, with one synchronisation."""
        covered = [place for place, tensor in enumerate(tensors) if tensor.numel() and self._staging.covers(tensor)]
        sent = [tensor if tensor.numel() else torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
        if covered:
            for place, host in zip(covered, self._staging.to_host([sent[place] for place in covered]), strict=True):
                sent[place] = host
        return sent

    def _host_buffers(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [self._staging.room(tensor) if self._staging.covers(tensor) else tensor for tensor in tensors]

    def _arrival(self, work: Work, rooms: Sequence[torch.Tensor], recv: Sequence[torch.Tensor]) -> Work:
        received = [(room, tensor) for room, tensor in zip(rooms, recv, strict=True) if room is not tensor]
        return _Arrival(work, self._staging, received) if received else work
