"""KV connections with TLS: accepted and refused peers, encryption, and otherwise the rules of plain TCP."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from ringserve.cp_core.errors import TransferError, Unavailable
from ringserve.cp_core.transport.peer_tls import PeerTls
from ringserve.workers.kv.cache import KvCache
from ringserve.workers.kv.receiver import KvReceiver
from ringserve.workers.kv.sockets import KvStream
from tests.services.auth.certificates import Authority
from tests.waiting import WAIT_SECONDS
from tests.workers.kv.kv_peers import (
    BLOCKS,
    TOKENS,
    TRUTH,
    HandSource,
    cache_of,
    check_transfer,
    expect_of,
    hand_destination,
    hand_source,
    is_untouched,
    key_of,
    receiving,
    send_of,
    sending,
)


def refusal_of(receiver: KvReceiver, tls: PeerTls | None) -> str:
    """Return the error of a source with `tls` that cannot send."""
    source = cache_of()
    TRUTH.store(source, BLOCKS, range(TOKENS))
    with sending(source, tls=tls) as sender, pytest.raises((Unavailable, TransferError)) as caught:
        sender.send_all(send_of(key_of(), receiver.endpoint, TOKENS, BLOCKS), WAIT_SECONDS)
    return str(caught.value)


def test_only_who_shows_a_certificate_of_the_authority_may_send(authority: Authority, stranger: Authority) -> None:
    cache = cache_of()
    wrong: Sequence[PeerTls | None] = (
        None,
        stranger.peer(trusts=authority),
        authority.peer(authority.sign_expired("late")),
    )
    with receiving(cache, tls=authority.peer()) as receiver:
        receiver.expect(expect_of(key_of(), TOKENS, BLOCKS))
        for tls in wrong:
            assert f"the KV receiver at {receiver.endpoint} is gone" in refusal_of(receiver, tls)
        assert receiver.num_open == 1
        assert is_untouched(cache)
        receiver.drop(key_of())
        check_transfer(receiver, cache, authority.peer())


def test_a_source_sends_nothing_to_who_cannot_prove_itself(authority: Authority, stranger: Authority) -> None:
    ours, cannot = authority.peer(), "cannot be reached: its certificate is refused"
    with receiving(cache_of(), tls=stranger.peer(trusts=authority)) as receiver:
        assert cannot in refusal_of(receiver, ours)
    with receiving(cache_of(), tls=authority.peer(authority.sign_expired("old"))) as receiver:
        assert f"{cannot}: certificate has expired" in refusal_of(receiver, ours)
    with receiving(cache_of(), tls=authority.peer(authority.sign("elsewhere", "DNS:elsewhere"))) as receiver:
        assert f"{cannot}: IP address mismatch" in refusal_of(receiver, ours)


def test_the_name_that_is_told_counts_for_every_host(authority: Authority) -> None:
    cache = cache_of()
    named = authority.peer(authority.sign("inside", "DNS:ringserve.internal"), server_name="ringserve.internal")
    with receiving(cache, tls=named) as receiver:
        check_transfer(receiver, cache, named)


def test_a_source_with_tls_does_not_talk_plainly_to_a_receiver_without(authority: Authority) -> None:
    with hand_destination() as plain, ThreadPoolExecutor(1) as pool:

        def answer_nonsense() -> bytes:
            plain.accept()
            assert plain.connection is not None
            heard = plain.connection.recv(1 << 16)
            plain.connection.sendall(b"RSKV, plainly")
            with contextlib.suppress(ConnectionResetError):
                heard += plain.drain()
            return heard

        heard = pool.submit(answer_nonsense)
        cache = cache_of()
        TRUTH.store(cache, BLOCKS, range(TOKENS))
        with sending(cache, tls=authority.peer()) as sender, pytest.raises(Unavailable, match="TLS failed"):
            sender.send_all(send_of(key_of(), plain.endpoint, TOKENS, BLOCKS), WAIT_SECONDS)
        assert key_of().transfer_id.encode() not in heard.result(WAIT_SECONDS)
    # The receiver treats it as a stranger and continues.
    cache = cache_of()
    with receiving(cache) as receiver, hand_source(receiver.endpoint) as source:
        assert "cannot be reached" in refusal_of(receiver, authority.peer())
        receiver.expect(expect_of(key_of("afterwards"), TOKENS, BLOCKS))
        source.send_whole(TRUTH, name="afterwards")
        receiver.wait_sealed(key_of("afterwards"), WAIT_SECONDS)


def test_kv_cannot_be_read_on_the_way(authority: Authority) -> None:
    seen = bytearray()

    def pass_on(source: socket.socket, destination: socket.socket) -> None:
        while part := source.recv(1 << 16):
            seen.extend(part)
            destination.sendall(part)

    source, destination = cache_of(), cache_of()
    TRUTH.store(source, BLOCKS, range(TOKENS))
    with (
        socket.create_server(("127.0.0.1", 0)) as tap,
        receiving(destination, tls=authority.peer()) as receiver,
        sending(source, tls=authority.peer()) as sender,
        ThreadPoolExecutor(3) as pool,
    ):
        receiver.expect(expect_of(key_of(), TOKENS, BLOCKS))
        endpoint = f"127.0.0.1:{tap.getsockname()[1]}"
        moving = pool.submit(sender.send_all, send_of(key_of(), endpoint, TOKENS, BLOCKS), WAIT_SECONDS)
        caller, _ = tap.accept()
        host, _, port = receiver.endpoint.rpartition(":")
        with caller, socket.create_connection((host, int(port))) as onward:
            passing = [pool.submit(pass_on, caller, onward), pool.submit(pass_on, onward, caller)]
            moving.result(WAIT_SECONDS)
            receiver.wait_sealed(key_of(), WAIT_SECONDS)
            for each in (caller, onward):
                each.shutdown(socket.SHUT_RDWR)
            for end in passing:
                end.exception(WAIT_SECONDS)
    TRUTH.check(destination, BLOCKS, range(TOKENS))
    assert len(seen) > len(TRUTH.payload(0, range(TOKENS)))
    assert TRUTH.payload(0, range(TOKENS))[:16] not in seen
    assert key_of().transfer_id.encode() not in seen


def test_files_that_were_replaced_count_for_the_next_connection(
    authority: Authority, stranger: Authority, tmp_path: Path
) -> None:
    """Replace the certificate while the ranks run, as a renewal does."""

    def lay_out(by: Authority) -> PeerTls:
        signed = by.sign("renewed")
        for path, name in ((signed.cert, "cert.pem"), (signed.key, "key.pem"), (by.own.cert, "ca.pem")):
            shutil.copy(path, tmp_path / name)
        paths = {name: str(tmp_path / f"{name}.pem") for name in ("cert", "key", "ca")}
        return PeerTls(**paths)

    ours, cache = lay_out(authority), cache_of()
    with receiving(cache, tls=ours) as receiver:
        check_transfer(receiver, cache, authority.peer(), name="before")
        lay_out(stranger)
        assert "its certificate is refused" in refusal_of(receiver, authority.peer())
        check_transfer(receiver, cache, stranger.peer(), name="after")
        (tmp_path / "key.pem").write_text("half a ke")
        assert "cannot be reached" in refusal_of(receiver, stranger.peer())
        lay_out(stranger)
        check_transfer(receiver, cache, stranger.peer(), name="repaired")


def private_pair(tls: PeerTls) -> tuple[KvStream, KvStream]:
    """Make the two ends of one connection: (client, server)."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        calling = pool.submit(
            lambda: tls.call(socket.create_connection(listener.getsockname(), WAIT_SECONDS), "127.0.0.1")
        )
        called = KvStream(tls.accept(listener.accept()[0]), WAIT_SECONDS)
        called.shake_hands()
        return KvStream(calling.result(WAIT_SECONDS), WAIT_SECONDS), called


@pytest.mark.parametrize("counts", [(1, 16384, 3), (16383, 16385, 1 << 20), (300_000, 7, 300_001)])
def test_both_directions_move_at_once_whatever_the_sizes(authority: Authority, counts: tuple[int, ...]) -> None:
    """Read in one thread while another writes: OpenSSL has one state for both directions."""
    first, second = private_pair(authority.peer())
    messages = [torch.randint(0, 256, (count,), dtype=torch.uint8) for count in counts] * 20

    def send(stream: KvStream) -> None:
        for message in messages:
            stream.send([message.numpy().data[:5], message.numpy().data[5:]])

    def receive(stream: KvStream) -> bool:
        received = [torch.zeros_like(message) for message in messages]
        for into in received:
            stream.receive_into(into.numpy().data)
        return all(torch.equal(*pair) for pair in zip(received, messages, strict=True))

    with ThreadPoolExecutor(4) as pool:
        sends = [pool.submit(send, stream) for stream in (first, second)]
        receives = [pool.submit(receive, stream) for stream in (first, second)]
        assert [each.result(WAIT_SECONDS) for each in receives] == [True, True]
        for each in sends:
            each.result(WAIT_SECONDS)
    assert not first.wait_readable(0)
    for stream in (first, second):
        stream.close()


def test_what_openssl_has_decrypted_already_is_readable(authority: Authority) -> None:
    """Send two messages in one record: a poll for the second alone would never return."""
    first, second = private_pair(authority.peer())
    first.send([memoryview(b"onetwo")])
    three = bytearray(3)
    second.receive_into(memoryview(three))
    assert second.wait_readable(0)
    second.receive_into(memoryview(three))
    assert three == b"two"
    assert not second.wait_readable(0)
    for stream in (first, second):
        stream.close()


def test_closing_one_end_wakes_who_waits_on_it(authority: Authority) -> None:
    first, second = private_pair(authority.peer())
    with ThreadPoolExecutor(1) as pool:
        began = threading.Event()

        def wait() -> bool:
            began.set()
            return second.wait_readable(WAIT_SECONDS)

        waiting = pool.submit(wait)
        assert began.wait(WAIT_SECONDS)
        second.shut()
        second.close()
        with contextlib.suppress(ConnectionError):  # if it was closed before the wait began
            assert waiting.result(WAIT_SECONDS)
    with pytest.raises(ConnectionError):
        second.send([memoryview(b"nothing")])
    first.close()


def test_no_block_is_read_after_a_transfer_over_tls_was_given_up(authority: Authority) -> None:
    cache = KvCache(num_layers=1, num_blocks=2048, block_tokens=16, num_kv_heads=2, head_dim=64)
    cache.k_layers[0].fill_(1.0)
    cache.v_layers[0].fill_(1.0)
    tls, tokens, blocks = authority.peer(), 2048 * 16, tuple(range(2048))
    with sending(cache, tls=tls) as sender, hand_destination() as destination, ThreadPoolExecutor(1) as pool:

        def greet() -> ssl.SSLSocket:
            destination.accept()
            assert destination.connection is not None
            connection = tls.accept(destination.connection)
            connection.do_handshake()
            return connection

        greeting = pool.submit(greet)
        sender.begin(send_of(key_of(), destination.endpoint, tokens, blocks))
        sender.layer_ready(key_of(), 0)
        connection = greeting.result(WAIT_SECONDS)
        ones, nans = (torch.full((8,), value).view(torch.uint8).numpy().tobytes() for value in (1.0, torch.nan))
        received, part = bytearray(), bytearray(1 << 16)
        while ones not in received:  # by then the sender reads the blocks
            received += part[: connection.recv_into(part)]
        with pytest.raises(TransferError, match="has 1 parts that were not sent in time"):
            sender.finish(key_of(), 0.0)
        cache.k_layers[0].fill_(torch.nan)
        cache.v_layers[0].fill_(torch.nan)
        sender.close()
        with contextlib.suppress(OSError):  # the connection ends in the middle of a record
            while count := connection.recv_into(part):
                received += part[:count]
        connection.close()
    assert nans not in received


def test_a_hand_made_source_needs_the_certificate_too(authority: Authority) -> None:
    cache, tls = cache_of(), authority.peer()  # once: the receiver reads the files while the source connects
    with receiving(cache, tls=tls) as receiver:
        source = HandSource(receiver.endpoint)
        source.connection = tls.call(source.connection, "127.0.0.1")
        receiver.expect(expect_of(key_of(), TOKENS, BLOCKS))
        source.send_whole(TRUTH)
        receiver.wait_sealed(key_of(), WAIT_SECONDS)
        source.close()
    TRUTH.check(cache, BLOCKS, range(TOKENS))


def test_what_came_before_a_reset_is_received_before_its_error(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last frame of a source may come together with the end of its process."""
    tls = authority.peer()
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        address = listener.getsockname()
        called = pool.submit(lambda: tls.call(socket.create_connection(address, WAIT_SECONDS), address[0]))
        accepted, _ = listener.accept()
        accepted.settimeout(WAIT_SECONDS)
        with tls.accept(accepted) as destination:
            destination.do_handshake()
            with called.result(WAIT_SECONDS) as source:
                source.send(b"frame")
                read = ssl.SSLSocket.recv_into

                def read_once(self: ssl.SSLSocket, buffer: memoryview) -> int:
                    if len(buffer) < 100:
                        raise ConnectionResetError
                    return read(self, buffer)

                monkeypatch.setattr(ssl.SSLSocket, "recv_into", read_once)
                buffer = bytearray(100)
                assert destination.recv_into(buffer) == len(b"frame")
                assert buffer.startswith(b"frame")
                with pytest.raises(ConnectionResetError):
                    destination.recv_into(memoryview(buffer)[5:])
