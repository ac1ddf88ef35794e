"""Rings of ranks whose tensors are copied to host memory and back, on a device that is plain memory here."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from ringserve.cp_core.errors import Unavailable
from ringserve.cp_core.transport.inprocess import InProcessRing
from ringserve.cp_core.transport.interface import RingTransport
from ringserve.cp_core.transport.staged import StagedRing
from tests.cp_core.rings import on_every_rank
from tests.cp_core.staging import PoisonedStaging


def staged(size: int) -> Sequence[StagedRing]:
    return [StagedRing(transport, PoisonedStaging()) for transport in InProcessRing(size).transports]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_operation_delivers_what_was_sent_when_it_began(size: int) -> None:
    """Counts are uneven and some are 0; a sent tensor is overwritten once its message is over."""

    def act(transport: RingTransport) -> tuple[list[float], list[list[float]], list[float], list[float]]:
        rank = transport.rank
        passed, arrived = torch.full((3,), float(rank)), torch.full((3,), torch.nan)
        transport.exchange(passed, (rank + 1) % size, arrived, (rank - 1) % size).wait()
        passed.fill_(torch.nan)
        sends = [torch.full((rank * peer,), rank * 10.0 + peer) for peer in range(size)]
        received = [torch.full((rank * peer,), torch.nan) for peer in range(size)]
        transport.all_to_all(sends, received).wait()
        gathered = torch.full((size, 1), torch.nan)
        gathered[rank] = rank
        transport.gather_all(gathered[rank], list(gathered)).wait()
        shared = torch.full((2,), 7.0 if rank == size - 1 else torch.nan)
        transport.broadcast(shared, size - 1).wait()
        return arrived.tolist(), [each.tolist() for each in received], gathered.flatten().tolist(), shared.tolist()

    for rank, (arrived, received, gathered, shared) in enumerate(on_every_rank(staged(size), act)):
        assert arrived == [float((rank - 1) % size)] * 3
        assert received == [[peer * 10.0 + rank] * (rank * peer) for peer in range(size)]
        assert gathered == [float(peer) for peer in range(size)]
        assert shared == [7.0, 7.0]


def test_a_received_tensor_is_written_by_the_wait_alone_and_once() -> None:
    left, right = staged(2)
    received = torch.zeros(2)
    work = right.exchange(torch.empty(0), 0, received, 0)
    left.exchange(torch.ones(2), 1, torch.empty(0), 1).wait()
    assert received.tolist() == [0.0, 0.0]
    work.wait()
    assert received.tolist() == [1.0, 1.0]
    received.zero_()
    work.wait()
    assert received.tolist() == [0.0, 0.0]


def test_one_all_to_all_waits_for_the_device_once() -> None:
    staging = PoisonedStaging()
    first, *others = InProcessRing(3).transports
    ring = StagedRing(first, staging)
    ring.all_to_all([torch.ones(2)] * 3, [torch.zeros(2) for _ in range(3)])
    assert staging.num_waits == 1
    assert len(others) == 2


def test_the_end_of_a_ring_ends_its_waits() -> None:
    left, right = staged(2)
    work = right.exchange(torch.empty(0), 0, torch.zeros(2), 0)
    left.close()
    with pytest.raises(Unavailable):
        work.wait()
