"""Connections of a ring of sockets: its ranks connect, and strangers neither enter nor delay it."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest
import torch

from ringserve.cp_core.errors import ConfigError, Unavailable
from ringserve.cp_core.transport.connect import RingStore, connect_ring
from ringserve.cp_core.transport.peer_tls import PeerTls
from ringserve.cp_core.transport.socket_mesh import (
    MAX_STRANGERS,
    Rendezvous,
    RingListener,
    connect_mesh,
    parse_endpoint,
)
from ringserve.cp_core.transport.socket_ring import SocketRing
from tests.gloo import gloo_as_nccl
from tests.services.auth.certificates import Authority
from tests.waiting import WAIT_SECONDS

HOST = "127.0.0.1"


@pytest.fixture(params=["plain", "tls"])
def tls(request: pytest.FixtureRequest, authority: Authority) -> PeerTls | None:
    return authority.peer() if request.param == "tls" else None


class Ranks:
    """Ranks as threads. `listeners` listen from the start; a test may change the rendezvous of each rank."""

    def __init__(self, size: int, tls: PeerTls | None = None, seconds: float = WAIT_SECONDS) -> None:
        self.listeners = [RingListener(HOST) for _ in range(size)]
        endpoints = tuple(listener.endpoint for listener in self.listeners)
        self.rendezvous = [
            Rendezvous(name="ring", rank=rank, endpoints=endpoints, secret="s", timeout_seconds=seconds, tls=tls)
            for rank in range(size)
        ]
        self._pool = ThreadPoolExecutor(size)
        self._joining: dict[int, Future[SocketRing]] = {}

    def start(self, *ranks: int) -> None:
        for rank in ranks:
            self._joining[rank] = self._pool.submit(self._join, rank)

    def _join(self, rank: int) -> SocketRing:
        return SocketRing(rank, WAIT_SECONDS, connect_mesh(self.listeners[rank], self.rendezvous[rank]))

    def ring(self, rank: int) -> SocketRing:
        return self._joining[rank].result(WAIT_SECONDS)

    def error(self, rank: int) -> str:
        with pytest.raises(Unavailable) as caught:
            self.ring(rank)
        return str(caught.value)

    def refusal(self, impostor: Rendezvous) -> str:
        """Let `impostor` call rank 0 as rank 1 -> its error; rank 0 goes on and meets the real rank 1."""
        real, self.rendezvous[1] = self.rendezvous[1], impostor
        self.start(0, 1)
        error = self.error(1)
        self.rendezvous[1], self.listeners[1] = real, RingListener(HOST)
        self.start(1)
        self.check_they_talk()
        return error

    def check_they_talk(self) -> None:
        """Assert that every rank's number reaches every other."""
        rings = [self.ring(rank) for rank in sorted(self._joining)]
        received = [[torch.full((1,), torch.nan) for _ in rings] for _ in rings]
        works = [
            ring.gather_all(torch.full((1,), float(ring.rank)), own) for ring, own in zip(rings, received, strict=True)
        ]
        for work in works:
            work.wait()
        assert [[float(each) for each in own] for own in received] == [[float(ring.rank) for ring in rings]] * len(
            rings
        )

    def close(self) -> None:
        for joining in self._joining.values():
            if joining.exception(WAIT_SECONDS) is None:
                joining.result().close()
        for listener in self.listeners:
            listener.close()
        self._pool.shutdown()


@contextmanager
def ranks(size: int, tls: PeerTls | None = None, seconds: float = WAIT_SECONDS) -> Iterator[Ranks]:
    made = Ranks(size, tls, seconds)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def guest(listener: RingListener, saying: bytes = b"") -> Iterator[socket.socket]:
    with socket.create_connection(parse_endpoint(listener.endpoint), timeout=WAIT_SECONDS) as connection:
        connection.sendall(saying)
        yield connection


def is_sent_away(connection: socket.socket) -> bool:
    """Wait until the other end closes the connection; over TLS its alert comes before."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        return True
    return True


@pytest.mark.parametrize("size", [2, 3, 5])
def test_ranks_that_know_the_secret_meet_in_any_order(size: int, tls: PeerTls | None) -> None:
    with ranks(size, tls) as met:
        for rank in reversed(range(size)):
            met.start(rank)
        met.check_they_talk()


def test_strangers_are_refused_and_hold_up_nobody(tls: PeerTls | None) -> None:
    with ranks(2, tls) as met:
        met.start(0)
        listener = met.listeners[0]
        # An awaited rank with a wrong proof, half a greeting, none at all, and a caller that leaves at once.
        with (
            guest(listener, (1).to_bytes(4, "big") + bytes(32)) as liar,
            guest(listener, b"GET / HTTP/1.1\r\n\r\n" + bytes(80)) as lost,
            guest(listener, b"\x16\x03\x01"),
            guest(listener),
        ):
            with guest(listener):
                pass
            assert is_sent_away(liar)
            assert is_sent_away(lost)
            met.start(1)
            met.check_they_talk()


def test_strangers_that_stay_silent_make_room_for_each_other_and_for_ranks(tls: PeerTls | None) -> None:
    with ranks(2, tls) as met, ExitStack() as guests:
        met.start(0)
        first = guests.enter_context(guest(met.listeners[0]))
        for _ in range(MAX_STRANGERS + 2):
            guests.enter_context(guest(met.listeners[0]))
        assert is_sent_away(first)
        met.start(1)
        met.check_they_talk()


def test_a_rank_of_another_ring_is_refused(tls: PeerTls | None) -> None:
    """A port may be taken again: the right rank, even with the right secret, of a ring of another name."""
    with ranks(2, tls) as met:
        assert "rank 0 of ring 'older' at 127.0.0.1:" in met.refusal(replace(met.rendezvous[1], name="older"))


def test_a_rank_with_another_secret_is_refused(tls: PeerTls | None) -> None:
    with ranks(2, tls) as met:
        assert met.refusal(replace(met.rendezvous[1], secret="another")).endswith("refused rank 1")


def test_who_answers_without_the_secret_is_no_rank() -> None:
    with ranks(2) as met, socket.create_server((HOST, 0)) as impostor, ThreadPoolExecutor(1) as pool:
        endpoint = f"{HOST}:{impostor.getsockname()[1]}"
        met.rendezvous[1] = replace(met.rendezvous[1], endpoints=(endpoint, met.listeners[1].endpoint))

        def pretend() -> None:
            connection, _ = impostor.accept()
            with connection:
                connection.sendall(connection.recv(36)[4:])

        pretending = pool.submit(pretend)
        met.start(1)
        assert met.error(1) == f"the process at {endpoint} is not rank 0 of ring 'ring'"
        pretending.result(WAIT_SECONDS)


def test_a_rank_that_calls_nobody_gives_up_at_its_deadline(tls: PeerTls | None) -> None:
    with ranks(2, tls, seconds=0.3) as met:
        met.start(1)  # rank 0 listens, and never accepts
        assert "rank 1 cannot reach rank 0" in met.error(1) or "in time" in met.error(1)


def test_a_rank_that_nobody_calls_gives_up_at_its_deadline(tls: PeerTls | None) -> None:
    with ranks(2, tls, seconds=0.3) as met:
        met.start(0)
        assert met.error(0) == "ranks [1] of ring 'ring' did not connect to rank 0 in time"


def test_no_certificate_an_expired_one_and_one_of_another_authority_are_refused(
    authority: Authority, stranger: Authority
) -> None:
    wrong: Sequence[PeerTls | None] = (
        None,
        authority.peer(authority.sign_expired("late")),
        stranger.peer(trusts=authority),
        authority.peer(trusts=stranger),
    )
    for theirs in wrong:
        with ranks(2, authority.peer()) as met:
            error = met.refusal(replace(met.rendezvous[1], tls=theirs))
            assert "cannot reach rank 0" in error or "refused rank 1" in error


def test_a_server_whose_certificate_has_expired_is_named_as_such(authority: Authority) -> None:
    with ranks(2, authority.peer(), seconds=1.0) as met:
        met.rendezvous[0] = replace(met.rendezvous[0], tls=authority.peer(authority.sign_expired("old")))
        met.start(0, 1)
        assert met.error(1).endswith("its certificate is refused: certificate has expired")


def test_the_name_in_the_certificate_is_the_host_or_the_one_that_is_told(authority: Authority) -> None:
    elsewhere = authority.sign("elsewhere", "DNS:ringserve.internal")
    with ranks(2, authority.peer(elsewhere, server_name="ringserve.internal")) as met:
        met.start(0, 1)
        met.check_they_talk()
    with ranks(2, authority.peer(elsewhere), seconds=1.0) as met:
        met.start(0, 1)
        assert "its certificate is refused: IP address mismatch" in met.error(1)


def test_what_goes_between_ranks_with_tls_cannot_be_read_on_the_way(authority: Authority) -> None:
    words = b"a secret of the ranks alone" * 100
    with ranks(2, authority.peer()) as met, socket.create_server((HOST, 0)) as tap, ThreadPoolExecutor(2) as pool:
        seen = bytearray()

        def pass_on(source: socket.socket, destination: socket.socket) -> None:
            while part := source.recv(1 << 16):
                seen.extend(part)
                destination.sendall(part)

        met.rendezvous[1] = replace(
            met.rendezvous[1], endpoints=(f"{HOST}:{tap.getsockname()[1]}", met.listeners[1].endpoint)
        )
        met.start(0, 1)
        caller, _ = tap.accept()
        with caller, socket.create_connection(parse_endpoint(met.listeners[0].endpoint)) as onward:
            passing = [pool.submit(pass_on, caller, onward), pool.submit(pass_on, onward, caller)]
            received = torch.zeros(len(words), dtype=torch.uint8)
            sending = met.ring(1).exchange(torch.frombuffer(bytearray(words), dtype=torch.uint8), 0, torch.empty(0), 0)
            met.ring(0).exchange(torch.empty(0), 1, received, 1).wait()
            sending.wait()
            assert received.numpy().tobytes() == words
            assert len(seen) > len(words)
            assert words[:20] not in seen
            for ring in (met.ring(0), met.ring(1)):
                ring.close()
            for each in (caller, onward):
                each.shutdown(socket.SHUT_RDWR)
            for end in passing:
                end.exception(WAIT_SECONDS)


def test_a_closed_connection_never_goes_on_in_the_clear(authority: Authority) -> None:
    with ranks(2, authority.peer()) as met, ThreadPoolExecutor(2) as pool:
        sides = [
            pool.submit(connect_mesh, listener, each)
            for listener, each in zip(met.listeners, met.rendezvous, strict=True)
        ]
        first, second = (side.result(WAIT_SECONDS) for side in sides)
        assert isinstance(first[1], ssl.SSLSocket)
        assert first[1].version() == "TLSv1.3"
        first[1].shutdown(socket.SHUT_WR)
        with pytest.raises(OSError, match=r".+"):
            first[1].send(b"plain")
        first[1].close()
        with pytest.raises(ConnectionError, match="no TLS on this connection"):
            first[1].send(b"plain")
        second[0].close()


def test_a_ring_that_cannot_encrypt_is_refused_where_it_should(authority: Authority) -> None:
    store = RingStore(HOST)
    with gloo_as_nccl(), pytest.raises(ConfigError, match="'nccl' cannot encrypt; only 'sockets' can"):
        connect_ring(HOST, store.port, "plain", 0, 2, 5.0, "nccl", store=store, tls=authority.peer())


def test_a_rendezvous_is_shown_without_its_secret() -> None:
    rendezvous = Rendezvous(name="ring", rank=0, endpoints=("a:1",), secret="of the ring", timeout_seconds=1.0)
    assert "of the ring" not in repr(rendezvous)
