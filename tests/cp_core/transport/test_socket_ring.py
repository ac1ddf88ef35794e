"""Promises of a ring of sockets beyond any ring's rules, with and without TLS: progress behind computation, order."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

import pytest
import torch

from ringserve.cp_core.errors import Unavailable
from ringserve.cp_core.transport.connect import RingStore, connect_ring
from ringserve.cp_core.transport.interface import RingTransport
from ringserve.cp_core.transport.peer_tls import PeerTls
from ringserve.cp_core.transport.socket_ring import LARGE_BYTES, Link
from tests.cp_core.real_rings import HOST, real_ring
from tests.cp_core.rings import on_every_rank
from tests.forking import forking
from tests.services.auth.certificates import Authority
from tests.waiting import WAIT_SECONDS

HUGE_BYTES = 64 << 20


@pytest.fixture(params=["plain", "tls"])
def tls(request: pytest.FixtureRequest, authority: Authority) -> PeerTls | None:
    return authority.peer() if request.param == "tls" else None


def pattern(num_bytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_every_rank_gets_what_every_other_sent_small_and_large(size: int, tls: PeerTls | None) -> None:
    with real_ring("sockets", size, tls=tls) as transports:

        def act(transport: RingTransport) -> bool:
            rank = transport.rank
            # From 1 byte to more than twice LARGE_BYTES; rank 0 sends no bytes to itself and others.
            lengths = [[(peer * source * 131071) % (3 * LARGE_BYTES) for peer in range(size)] for source in range(size)]
            arrived = [torch.zeros(lengths[source][rank], dtype=torch.uint8) for source in range(size)]
            transport.all_to_all(
                [pattern(length, rank * size + p) for p, length in enumerate(lengths[rank])], arrived
            ).wait()
            gathered = [torch.zeros(2 * LARGE_BYTES + 1, dtype=torch.uint8) for _ in range(size)]
            transport.gather_all(pattern(2 * LARGE_BYTES + 1, rank), gathered).wait()
            return all(
                torch.equal(each, pattern(lengths[source][rank], source * size + rank))
                for source, each in enumerate(arrived)
            ) and all(torch.equal(each, pattern(len(each), source)) for source, each in enumerate(gathered))

        assert on_every_rank(transports, act) == [True] * size


def test_ranks_that_all_send_more_than_any_buffer_holds_do_not_wait_for_each_other(tls: PeerTls | None) -> None:
    with real_ring("sockets", 2, tls=tls) as transports:

        def act(transport: RingTransport) -> bool:
            peer = 1 - transport.rank
            sent, received = pattern(HUGE_BYTES, transport.rank), torch.zeros(HUGE_BYTES, dtype=torch.uint8)
            transport.exchange(sent, peer, received, peer).wait()
            assert transport.stats.bytes_sent == HUGE_BYTES
            return torch.equal(received, pattern(HUGE_BYTES, peer))

        assert on_every_rank(transports, act) == [True, True]


def test_a_large_message_arrives_while_nobody_waits_for_it(tls: PeerTls | None) -> None:
    with real_ring("sockets", 2, tls=tls) as (left, right):
        sent, received = pattern(HUGE_BYTES, 1), torch.zeros(HUGE_BYTES, dtype=torch.uint8)
        receiving = right.exchange(torch.empty(0), 0, received, 0)
        sending = left.exchange(sent, 1, torch.empty(0), 1)
        # Neither rank waits. Only the small message at the end may still lie in the kernel.
        deadline = time.monotonic() + WAIT_SECONDS
        while not torch.equal(received[: -2 * LARGE_BYTES], sent[: -2 * LARGE_BYTES]):
            assert time.monotonic() < deadline, "the message does not move"
        receiving.wait()
        sending.wait()
        assert torch.equal(received, sent)


def test_messages_keep_their_order_when_small_ones_follow_large_ones(tls: PeerTls | None) -> None:
    with real_ring("sockets", 2, tls=tls) as transports:

        def act(transport: RingTransport) -> bool:
            peer = 1 - transport.rank
            lengths = [HUGE_BYTES // 8, 1, LARGE_BYTES, LARGE_BYTES + 1, 3, HUGE_BYTES // 8, 8]
            sent = [pattern(length, index) for index, length in enumerate(lengths)]
            received = [torch.zeros_like(each) for each in sent]
            works = [transport.exchange(out, peer, into, peer) for out, into in zip(sent, received, strict=True)]
            for work in reversed(works):
                work.wait()
            return all(torch.equal(out, into) for out, into in zip(sent, received, strict=True))

        assert on_every_rank(transports, act) == [True, True]


def test_a_slow_reader_is_waited_for_until_the_deadline(tls: PeerTls | None) -> None:
    with real_ring("sockets", 2, tls=tls) as (left, right):
        sending = left.exchange(pattern(HUGE_BYTES, 1), 1, torch.empty(0), 1)
        received = torch.zeros(HUGE_BYTES // 64, dtype=torch.uint8)
        for _ in range(8):  # what is left is more than a kernel takes in: Linux's buffers grow to 36 MiB
            right.exchange(torch.empty(0), 0, received, 0).wait()
        started = time.monotonic()
        with pytest.raises(Unavailable, match="rank 0 lost rank 1 after its deadline"):
            sending.wait(timeout_seconds=0.3)
        assert time.monotonic() - started >= 0.3
        # Rank 0 passed its deadline in the middle of a message, so the start of the next one is unknown.
        work = right.exchange(torch.empty(0), 0, torch.empty(HUGE_BYTES, dtype=torch.uint8), 0)
        with pytest.raises(Unavailable, match=r"rank 1 lost rank 0: .*(reset|ended its stream|closed its connection)"):
            work.wait()


def test_a_rank_that_leaves_in_order_is_not_missed_by_those_that_need_no_more_of_it(tls: PeerTls | None) -> None:
    with real_ring("sockets", 3, tls=tls) as (first, second, third):
        last_words, answer = torch.full((1,), 7.0), torch.full((1,), torch.nan)
        third.exchange(last_words, 0, torch.empty(0), 0).wait()
        third.close()
        second.exchange(torch.full((1,), 5.0), 0, torch.empty(0), 0).wait()
        first.exchange(torch.empty(0), 1, answer, 1).wait()
        assert float(answer) == 5.0
        first.exchange(torch.empty(0), 2, answer, 2).wait()
        assert float(answer) == 7.0
        with pytest.raises(Unavailable, match="rank 0 lost rank 2: it ended its stream"):
            first.exchange(torch.empty(0), 2, answer, 2).wait()


def test_closing_during_a_wait_of_another_thread_ends_that_wait(tls: PeerTls | None) -> None:
    with real_ring("sockets", 2, tls=tls) as (left, _), ThreadPoolExecutor(1) as pool:
        work = left.broadcast(torch.empty(2 * LARGE_BYTES), 1)
        waiting = pool.submit(work.wait)
        left.close()
        left.close()
        with pytest.raises(Unavailable, match="rank 0 left the ring of 2"):
            waiting.result(timeout=WAIT_SECONDS)


def test_a_ring_of_sockets_leaves_no_thread_and_no_descriptor_behind(tls: PeerTls | None) -> None:
    def count() -> tuple[int, int]:
        movers = [thread for thread in threading.enumerate() if thread.name.startswith("ring-mover")]
        return len(movers), len(os.listdir("/proc/self/fd"))

    def act(transport: RingTransport) -> None:
        gathered = [torch.empty(HUGE_BYTES // 16, dtype=torch.uint8) for _ in range(3)]
        transport.gather_all(torch.zeros(HUGE_BYTES // 16, dtype=torch.uint8), gathered).wait()

    def live_and_die() -> None:
        with real_ring("sockets", 3, tls=tls) as transports:
            on_every_rank(transports, act)
            assert count()[0] == 3

    gc.collect()  # what earlier tests have left
    before = count()
    live_and_die()
    deadline = time.monotonic() + WAIT_SECONDS
    while count() != before:
        assert time.monotonic() < deadline, f"{count()} movers and descriptors, {before} before"


def _send_half(port: int, told: Connection) -> None:
    """Join as rank 1 of 3, and send a message that rank 0 does not read to its end in time."""
    ring = connect_ring(HOST, port, "doomed", 1, 3, WAIT_SECONDS, "sockets")
    ring.exchange(torch.ones(HUGE_BYTES, dtype=torch.uint8), 0, torch.empty(0), 0)
    told.send("sending")
    told.recv()


def test_a_death_in_the_middle_of_a_large_message_surfaces_on_everybody_at_once() -> None:
    context = forking()
    store = RingStore(HOST)
    ours, theirs = context.Pipe()
    process = context.Process(target=_send_half, args=(store.port, theirs), daemon=True)
    process.start()
    with ThreadPoolExecutor(2) as pool:
        joining = pool.submit(connect_ring, HOST, store.port, "doomed", 2, 3, WAIT_SECONDS, "sockets")
        first = connect_ring(HOST, store.port, "doomed", 0, 3, WAIT_SECONDS, "sockets", store=store)
        third = joining.result(timeout=WAIT_SECONDS)
        try:
            assert ours.poll(WAIT_SECONDS)
            # Twice as much as is sent: after half of it there is more to come.
            message = first.exchange(torch.empty(0), 1, torch.empty(2 * HUGE_BYTES, dtype=torch.uint8), 1)
            waits = [pool.submit(message.wait), pool.submit(third.broadcast(torch.empty(1), 0).wait)]
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            # Either rank may notice first, by the dead rank's kernel; the other then notices by it.
            for wait, reason in zip(waits, ["rank 0 lost rank [12]", "rank 2 lost rank [01]"], strict=True):
                with pytest.raises(Unavailable, match=reason) as caught:
                    wait.result(timeout=WAIT_SECONDS)
                assert "deadline" not in str(caught.value)
        finally:
            first.close()
            third.close()
            process.kill()
            process.join(WAIT_SECONDS)
            process.close()


def test_what_moves_while_nobody_waits_is_counted_as_under_way_and_not_as_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has_moved, move = threading.Condition(), Link.move

    def move_and_tell(link: Link) -> None:
        move(link)
        with has_moved:
            has_moved.notify_all()

    monkeypatch.setattr(Link, "move", move_and_tell)
    with real_ring("sockets", 2) as transports:
        works, arrived = [], []
        for transport in transports:
            peer = 1 - transport.rank
            arrived.append(torch.zeros(HUGE_BYTES, dtype=torch.uint8))
            works.append(transport.exchange(pattern(HUGE_BYTES, transport.rank), peer, arrived[-1], peer))
        stats = [transport.stats for transport in transports]
        wanted = [pattern(HUGE_BYTES, 1 - transport.rank) for transport in transports]
        # The last message, which the kernel holds whole, stays there until a rank waits for it.
        moved = slice(HUGE_BYTES - LARGE_BYTES - 1024, HUGE_BYTES - LARGE_BYTES)
        assert all(each[moved].any() for each in wanted)

        def have_all_moved() -> bool:
            return all(torch.equal(got[moved], want[moved]) for got, want in zip(arrived, wanted, strict=True))

        with has_moved:
            assert has_moved.wait_for(have_all_moved, WAIT_SECONDS)
        assert [each.seconds_waited for each in stats] == [0.0, 0.0]
        for work in works:
            work.wait()
        for each in stats:
            assert each.seconds_under_way is not None
            assert each.seconds_under_way > each.seconds_waited
        assert all(torch.equal(got, want) for got, want in zip(arrived, wanted, strict=True))


def test_messages_are_under_way_at_least_as_long_as_they_are_waited_for() -> None:
    with real_ring("sockets", 3) as transports:

        def act(transport: RingTransport) -> bool:
            for _ in range(20):
                arrived = [torch.zeros(100, dtype=torch.uint8) for _ in range(3)]
                transport.gather_all(pattern(100, transport.rank), arrived).wait()
            stats = transport.stats
            assert stats.seconds_under_way is not None
            # The clock is read once more at the end of each wait, and threads change: neither is time of messages.
            return 0.0 < stats.seconds_under_way >= stats.seconds_waited * 0.5

        assert on_every_rank(transports, act) == [True] * 3
