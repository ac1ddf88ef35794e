"""A ring over NCCL, between GPUs. Loaded only where NCCL is: torch's CPU build does not have it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import Store

from cp_core.errors import ConfigError
from cp_core.transport.distributed import Operations, TorchRing
from cp_core.transport.point_to_point import Message
from cp_core.transport.rendezvous import RingStore


class NcclRing(TorchRing):
    """One rank's end of an NCCL ring. Waits are the CUDA stream's; NCCL's watchdog keeps the deadline."""

    def __init__(
        self, process_group: ProcessGroup, device: torch.device, timeout_seconds: float, store: RingStore | None
    ) -> None:
        super().__init__(process_group, timeout_seconds, store)
        self._nccl = process_group
        self._device = device

    def _start(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Operations:
        if not sends and not recvs:
            return Operations(self, [])
        # NCCL needs the sends and receives of a batch in one group, or ranks that all send first wait for each other.
        self._nccl._start_coalescing(self._device)
        super()._start(sends, recvs)
        return Operations(self, [(self._nccl._end_coalescing(self._device), self.rank)], is_on_stream=True)

    def _break_connections(self) -> None:
        self._nccl.abort()


def join_nccl(
    store: Store, rank: int, size: int, device: torch.device, timeout_seconds: float, kept: RingStore | None
) -> NcclRing:
    """The ring of the ranks that meet in `store`; `kept` lives as long as it. Raises ConfigError without NCCL."""
    if not torch.distributed.is_nccl_available():
        raise ConfigError("ring transport is 'nccl', but this torch is built without NCCL")
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_seconds)
    nccl = ProcessGroupNCCL(store, rank, size, options)
    nccl.eager_connect_single_device(device)
    group = ProcessGroup(store, rank, size)
    group._set_default_backend(ProcessGroup.BackendType.NCCL)
    group._register_backend(device, ProcessGroup.BackendType.NCCL, nccl)
    return NcclRing(group, device, timeout_seconds, kept)
