"""gloo in the place of NCCL: rings of process groups are tested on CPUs, by the same control flow as on GPUs."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast
from unittest import mock

import torch
from torch.distributed import ProcessGroupGloo, Work
from torch.distributed.distributed_c10d import Store

from ringserve.cp_core.transport import nccl, ring_backend
from ringserve.cp_core.transport.nccl import ProcessGroupRing

HOST = "127.0.0.1"
# Tag of messages that no rank ever sends.
CLOSING_TAG = 1
FORGOTTEN_SECONDS = 60.0
"""Limit of one wait. gloo forgets an operation that begins just as its connection breaks, in 7 of 16,500 breaks, and
nothing else ends the wait for it."""


class GlooRing(ProcessGroupRing):
    """One rank's end of a gloo ring. A peer's death closes its sockets, which ends the waits of its neighbours."""

    def wait_for(self, work: Work, deadline: float) -> None:
        # gloo counts whole milliseconds: rounded down, the wait would end before the deadline.
        left = min(max(deadline - time.monotonic(), 0.0), FORGOTTEN_SECONDS)
        work.wait(timedelta(milliseconds=math.floor(left * 1e3) + 1))

    def _break_connections(self) -> None:
        # ProcessGroupGloo.abort() leaves waiting operations waiting. An operation that times out closes the connections
        # to all ranks, and every waiting operation, here and there, fails at once. On a connection that is broken
        # already nothing times out, so each peer is tried.
        for peer in range(self.size):
            if peer != self.rank:
                try:
                    self._group.recv([torch.empty(1)], peer, CLOSING_TAG).wait(timedelta(milliseconds=1))
                except RuntimeError:
                    continue


def join_gloo(
    prefixed: Store, rank: int, size: int, device: torch.device, timeout_seconds: float, store: object
) -> ProcessGroupRing:
    """Join as `cp_core.transport.nccl.join_nccl` does, on loopback."""
    # torch's stubs know neither the constructor with options nor the options' members.
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout_seconds)
    # Connected at once: a ring that cannot form fails here, not in its first step.
    options._devices = [gloo.create_device(hostname=HOST, lazy_init=False)]
    options._threads = 1
    return GlooRing(gloo(prefixed, rank, size, options), timeout_seconds, store)


@contextmanager
def gloo_as_nccl() -> Iterator[None]:
    """Serve ring transport "nccl" on CPUs, by gloo."""
    serving = cast("dict[str, tuple[str, ...]]", ring_backend.SERVING)
    with mock.patch.object(nccl, "join_nccl", join_gloo), mock.patch.dict(serving, cpu=("sockets", "nccl")):
        yield
