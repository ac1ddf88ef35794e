"""In-process ring: it follows the rules of `RingTransport`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ringserve.cp_core.errors import Unavailable
from ringserve.cp_core.transport.inprocess import InProcessRing
from ringserve.cp_core.transport.interface import RingTransport
from tests.cp_core.rings import on_every_rank
from tests.waiting import WAIT_SECONDS


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_an_exchange_passes_messages_round_the_ring(size: int) -> None:
    def act(transport: RingTransport) -> list[float]:
        received = torch.full((3,), torch.nan)
        rank = transport.rank
        transport.exchange(torch.full((3,), float(rank)), (rank + 1) % size, received, (rank - 1) % size).wait()
        return received.tolist()

    answers = on_every_rank(InProcessRing(size).transports, act)
    assert answers == [[float((rank - 1) % size)] * 3 for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_collectives_deliver_exact_sizes_to_every_rank(size: int) -> None:
    def act(transport: RingTransport) -> tuple[list[list[float]], list[float], list[float]]:
        rank = transport.rank
        sends = [torch.full((rank * peer,), rank * 10.0 + peer) for peer in range(size)]
        arrived = [torch.full((rank * peer,), torch.nan) for peer in range(size)]
        transport.all_to_all(sends, arrived).wait()
        gathered = torch.full((size, 1), torch.nan)
        transport.gather_all(torch.tensor([float(rank)]), list(gathered)).wait()
        shared = torch.full((2,), 7.0 if rank == size - 1 else torch.nan)
        transport.broadcast(shared, size - 1).wait()
        return [each.tolist() for each in arrived], gathered.flatten().tolist(), shared.tolist()

    for rank, (arrived, gathered, shared) in enumerate(on_every_rank(InProcessRing(size).transports, act)):
        assert arrived == [[peer * 10.0 + rank] * (rank * peer) for peer in range(size)]
        assert gathered == [float(peer) for peer in range(size)]
        assert shared == [7.0, 7.0]


def test_messages_match_in_order_of_issue_even_when_waited_for_backwards() -> None:
    left, right = InProcessRing(2).transports
    received = [torch.full((1,), torch.nan) for _ in range(3)]
    works = [right.exchange(torch.empty(0), 0, each, 0) for each in received]
    for value in (1.0, 2.0, 3.0):
        left.exchange(torch.tensor([value]), 1, torch.empty(0), 1).wait()
    for work in reversed(works):
        work.wait()
    assert [float(each) for each in received] == [1.0, 2.0, 3.0]


def test_what_is_sent_is_what_it_was_at_the_time() -> None:
    left, right = InProcessRing(2).transports
    message, received = torch.ones(1), torch.full((1,), torch.nan)
    left.exchange(message, 1, torch.empty(0), 1)
    message.fill_(5.0)
    right.exchange(torch.empty(0), 0, received, 0).wait()
    assert float(received) == 1.0


def test_empty_messages_are_not_sent() -> None:
    left, _ = InProcessRing(2).transports
    left.exchange(torch.empty(0, 3), 1, torch.empty(0), 1).wait()
    assert left.stats.exchanges == 1
    assert left.stats.bytes_sent == 0


def test_bytes_and_operations_are_counted() -> None:
    left, right = InProcessRing(2).transports
    left.exchange(torch.zeros(10), 1, torch.empty(0), 1).wait()
    right.exchange(torch.empty(0), 0, torch.empty(10), 0).wait()
    left.broadcast(torch.zeros(4, dtype=torch.bfloat16), 0).wait()
    left.all_to_all([torch.zeros(100), torch.zeros(1)], [torch.zeros(100), torch.empty(0)]).wait()
    left.gather_all(torch.zeros(1), [torch.empty(1), torch.empty(0)]).wait()
    counts = left.stats
    assert (counts.exchanges, counts.broadcasts, counts.all_to_alls, counts.gathers) == (1, 1, 1, 1)
    assert counts.bytes_sent == 40 + 8 + 4 + 4
    assert right.stats.bytes_sent == 0


def test_waited_seconds_are_counted() -> None:
    left, _ = InProcessRing(2).transports
    with pytest.raises(Unavailable):
        left.broadcast(torch.empty(1), 1).wait(timeout_seconds=0.1)
    assert left.stats.seconds_waited >= 0.1


def test_a_wait_ends_at_its_deadline_and_the_ring_is_broken() -> None:
    left, right = InProcessRing(2, timeout_seconds=0.1).transports
    with pytest.raises(Unavailable, match="rank 0 waited too long for a message of rank 1"):
        left.broadcast(torch.empty(1), 1).wait()
    with pytest.raises(Unavailable, match="rank 0 left the ring of 2"):
        right.broadcast(torch.empty(1), 1)


def test_a_closed_peer_ends_every_wait_at_once() -> None:
    transports = InProcessRing(3, timeout_seconds=WAIT_SECONDS).transports
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(transports[rank].broadcast(torch.empty(1), 1).wait) for rank in (0, 2)]
        transports[1].close()
        for wait in waits:
            with pytest.raises(Unavailable, match="rank 1 left the ring of 3"):
                wait.result(timeout=WAIT_SECONDS)


def test_a_message_of_the_wrong_size_is_a_fault_of_the_caller() -> None:
    left, right = InProcessRing(2).transports
    left.broadcast(torch.zeros(3), 0).wait()
    with pytest.raises(AssertionError, match=r"rank 0 sent 3 x torch.float32, rank 1 expected 4 x torch.float32"):
        right.broadcast(torch.zeros(4), 0).wait()


def test_a_message_that_is_not_contiguous_is_a_fault_of_the_caller() -> None:
    left, _ = InProcessRing(2).transports
    with pytest.raises(AssertionError, match="not contiguous"):
        left.broadcast(torch.zeros(4, 4)[:, 0], 0)
