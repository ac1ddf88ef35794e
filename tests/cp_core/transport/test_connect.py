"""Real rings on loopback, of sockets and process groups: ranks are threads, or processes where one of them must die."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

import pytest
import torch

from ringserve.cp_core.attention.torch_cpu import TorchCpuFlash
from ringserve.cp_core.errors import ConfigError, Unavailable
from ringserve.cp_core.layout.shards import chunked_layout
from ringserve.cp_core.layout.step_plans import KvRun
from ringserve.cp_core.ring.decode import sharded_decode
from ringserve.cp_core.transport.connect import RingStore, connect_ring
from ringserve.cp_core.transport.interface import RingTransport
from ringserve.cp_core.transport.socket_mesh import own_address
from ringserve.cp_core.transport.socket_ring import SocketRing
from tests.cp_core.real_rings import HOST, real_ring
from tests.cp_core.rings import PlacedSequence, on_every_rank, prefill_on_threads
from tests.forking import forking
from tests.gloo import GlooRing, gloo_as_nccl
from tests.oracles import fp32_bound, largest, oracle_causal, random_tokens
from tests.waiting import WAIT_SECONDS


@pytest.fixture(params=["nccl", "sockets"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with gloo_as_nccl():
        yield str(request.param)


def test_a_real_ring_moves_messages_like_the_in_process_one(backend: str) -> None:
    with real_ring(backend, 3) as transports:

        def act(transport: RingTransport) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
            rank, size = transport.rank, transport.size
            from_previous = torch.full((5,), torch.nan)
            transport.exchange(
                torch.full((5,), float(rank)), (rank + 1) % size, from_previous, (rank - 1) % size
            ).wait()
            # Rank r sends r * 10 + p, r + p times, to rank p: no size repeats, some are empty.
            sends = [torch.full((rank + peer,), rank * 10.0 + peer) for peer in range(size)]
            arrived = [torch.full((rank + peer,), torch.nan) for peer in range(size)]
            transport.all_to_all(sends, arrived).wait()
            gathered = [torch.full((2,), torch.nan, dtype=torch.bfloat16) for _ in range(size)]
            transport.gather_all(torch.full((2,), rank + 0.5, dtype=torch.bfloat16), gathered).wait()
            shared = torch.arange(4.0) if rank == 1 else torch.full((4,), torch.nan)
            transport.broadcast(shared, source=1).wait()
            return from_previous, arrived, gathered, shared

        for rank, (from_previous, arrived, gathered, shared) in enumerate(on_every_rank(transports, act)):
            assert from_previous.tolist() == [float((rank - 1) % 3)] * 5
            assert [each.tolist() for each in arrived] == [[peer * 10.0 + rank] * (rank + peer) for peer in range(3)]
            assert [each.tolist() for each in gathered] == [[peer + 0.5] * 2 for peer in range(3)]
            assert shared.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_messages_of_a_pair_keep_their_order_when_many_are_under_way(backend: str) -> None:
    with real_ring(backend, 2) as transports:

        def act(transport: RingTransport) -> bool:
            peer = 1 - transport.rank
            sent = [torch.full((1 + (index * 7919) % 20000,), float(index)) for index in range(100)]
            received = [torch.full_like(message, torch.nan) for message in sent]
            works = [transport.exchange(out, peer, into, peer) for out, into in zip(sent, received, strict=True)]
            for work in reversed(works):
                work.wait()
            return all(torch.equal(out, into) for out, into in zip(sent, received, strict=True))

        assert on_every_rank(transports, act) == [True, True]


@pytest.mark.parametrize("algorithm", ["pass_kv", "pass_q"])
def test_prefill_over_a_real_ring_has_the_bits_of_the_in_process_ring(algorithm: str, backend: str) -> None:
    sequence = PlacedSequence(random_tokens(41), chunked_layout(9, 32, (2, 0, 1)), (0, 2, 2, 1, 0, 0, 2, 2, 2))
    expected = prefill_on_threads([sequence], 3, algorithm, 0.125)
    with real_ring(backend, 3) as transports:
        result = prefill_on_threads([sequence], 3, algorithm, 0.125, transports=transports)
    assert torch.equal(result.outs[0], expected.outs[0])
    assert largest(result.outs[0].double() - oracle_causal(sequence.tokens, 0.125)[9:]) <= fp32_bound(
        sequence.tokens, 0.125
    )


def test_decode_over_a_real_ring_gives_every_rank_the_same_bits(backend: str) -> None:
    tokens = random_tokens(50)
    with real_ring(backend, 2) as transports:

        def act(transport: RingTransport) -> torch.Tensor:
            mine = slice(transport.rank, None, 2)
            shards = [[KvRun(tokens.k[mine], tokens.v[mine])]]
            return sharded_decode(tokens.q[-1:], shards, transport, TorchCpuFlash(), 0.125)

        left, right = on_every_rank(transports, act)
    assert torch.equal(left, right)
    assert largest(left[0].double() - oracle_causal(tokens, 0.125)[-1]) <= fp32_bound(tokens, 0.125)


def test_two_rings_share_a_process_and_a_store(backend: str) -> None:
    with real_ring(backend, 2, name="first") as first, real_ring(backend, 2, name="second") as second:

        def act(transport: RingTransport) -> float:
            received = torch.full((1,), torch.nan)
            peer = 1 - transport.rank
            transport.exchange(torch.full((1,), float(transport.rank)), peer, received, peer).wait()
            return float(received)

        assert on_every_rank(first, act) == [1.0, 0.0]
        first[0].close()
        assert on_every_rank(second, act) == [1.0, 0.0]


def test_closing_one_rank_ends_the_waits_of_all(backend: str) -> None:
    with real_ring(backend, 3) as transports, ThreadPoolExecutor(3) as pool:
        waits = [
            pool.submit(transport.broadcast(torch.empty(1), (transport.rank + 1) % 3).wait) for transport in transports
        ]
        transports[1].close()
        for wait in waits:
            with pytest.raises(Unavailable) as caught:
                wait.result(timeout=WAIT_SECONDS)
            assert "deadline" not in str(caught.value)
        with pytest.raises(Unavailable, match="left the ring"):
            transports[1].broadcast(torch.empty(1), 1)


def test_a_wait_ends_at_its_deadline(backend: str) -> None:
    with real_ring(backend, 2) as transports:
        started = time.monotonic()
        with pytest.raises(Unavailable, match="rank 0 lost rank 1 after its deadline"):
            transports[0].broadcast(torch.empty(1), 1).wait(timeout_seconds=0.2)
        assert time.monotonic() - started >= 0.2


def _rank_until_killed(backend: str, rank: int, port: int, told: Connection) -> None:
    """Join as rank 1 or 2 of 3, report it, then wait for a message that never comes."""
    with gloo_as_nccl():
        ring = connect_ring(HOST, port, "doomed", rank, 3, WAIT_SECONDS, backend)
    told.send("joined")
    try:
        ring.broadcast(torch.empty(1), 0).wait()
    except Unavailable as error:
        told.send(str(error))
    ring.close()


def test_the_death_of_a_rank_surfaces_at_once_on_all_others(backend: str) -> None:
    context = forking()
    store = RingStore(HOST)
    pipes = [context.Pipe() for _ in (1, 2)]
    processes = [
        context.Process(target=_rank_until_killed, args=(backend, rank, store.port, pipe[1]), daemon=True)
        for rank, pipe in zip((1, 2), pipes, strict=True)
    ]
    for process in processes:
        process.start()
    try:
        ring = connect_ring(HOST, store.port, "doomed", 0, 3, WAIT_SECONDS, backend, store=store)
        for ours, _ in pipes:
            assert ours.poll(WAIT_SECONDS)
            assert ours.recv() == "joined"
        work = ring.broadcast(torch.empty(1), 2)
        victim = processes[1].pid
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        # Of a process group only the rank that waits for the dead one notices, and tells the others; sockets tell all.
        lost = "rank 0 lost rank 2" if backend == "nccl" else "rank 0 lost rank [12]"
        with pytest.raises(Unavailable, match=lost) as caught:
            work.wait()
        assert "deadline" not in str(caught.value)
        assert pipes[0][0].poll(WAIT_SECONDS)
        assert pipes[0][0].recv().startswith(("rank 1 lost rank 0", "rank 1 lost rank 2"))
    finally:
        for process in processes:
            process.kill()
            process.join(WAIT_SECONDS)
            process.close()


def test_joining_fails_when_the_others_do_not_come(backend: str) -> None:
    store = RingStore(HOST)
    with pytest.raises(Unavailable, match=r"rank 0 cannot join ring 'lonely' of 2"):
        connect_ring(HOST, store.port, "lonely", 0, 2, 0.5, backend, store=store)


def test_joining_fails_when_no_store_answers() -> None:
    with socket.socket() as unused:
        unused.bind((HOST, 0))
        port = unused.getsockname()[1]
        with pytest.raises(Unavailable, match="no ring store answers"):
            connect_ring(HOST, port, "nowhere", 1, 2, 0.5)


def test_a_store_on_a_taken_port_is_refused_with_the_address() -> None:
    store = RingStore(HOST)
    with pytest.raises(Unavailable, match=f"cannot listen on {HOST}:{store.port}"):
        RingStore(HOST, store.port)


def test_a_ring_of_one_needs_no_store() -> None:
    ring = connect_ring(HOST, 1, "solo", 0, 1, 5.0)
    received = torch.full((3,), torch.nan)
    ring.exchange(torch.arange(3.0), 0, received, 0).wait()
    assert received.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("name", "device", "reason"),
    [
        ("mpi", "cpu", "'mpi' is no ring transport; allowed are auto, nccl, sockets"),
        ("nccl", "cpu", "'nccl' does not support device 'cpu'; allowed are auto, sockets"),
        ("auto", "meta", "no ring transport supports device 'meta'"),
        ("auto", "cuda", "built without NCCL"),
    ],
)
def test_a_backend_that_cannot_be_had_is_refused(
    name: str, device: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    store = RingStore(HOST)
    with pytest.raises(ConfigError, match=reason):
        connect_ring(HOST, store.port, "gpu", 0, 2, 5.0, name, store=store, device=device)


def test_the_ring_of_a_cpu_is_one_of_sockets_unless_told_otherwise(backend: str) -> None:
    with real_ring("auto", 2) as transports:
        assert [type(transport) for transport in transports] == [SocketRing, SocketRing]
    with real_ring(backend, 2) as transports:
        assert type(transports[0]) is {"nccl": GlooRing, "sockets": SocketRing}[backend]


def test_the_own_address_towards_loopback_is_loopback() -> None:
    assert own_address("127.0.0.1", 9) == "127.0.0.1"
