"""Strangers at a KV port: closed in time, without harm to ranks."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest

from ringserve.cp_core.transport.peer_tls import PeerTls
from ringserve.workers.kv.frames import MAGIC, MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, PREFIX, VERSION, SettleFrame, encode
from ringserve.workers.kv.receiver import KvReceiver
from tests.services.auth.certificates import Authority
from tests.waiting import WAIT_SECONDS
from tests.workers.kv.kv_peers import (
    BLOCKS,
    DESTINATION,
    TOKENS,
    TRUTH,
    HandSource,
    cache_of,
    check_transfer,
    expect_of,
    hand_source,
    key_of,
    layer_frame,
    receiving,
)

GREETING_SECONDS = 0.5


@pytest.fixture(params=["plain", "tls"])
def tls(request: pytest.FixtureRequest, authority: Authority) -> PeerTls | None:
    return authority.peer() if request.param == "tls" else None


SILENT = {
    "nothing at all": b"",
    "half a prefix": PREFIX.pack(MAGIC, VERSION, 50, 0)[:7],
    "a header that never comes": PREFIX.pack(MAGIC, VERSION, MAX_HEADER_BYTES, 0),
    "half a handshake": b"\x16\x03\x01\x02\x00\x01\x00",
}


@pytest.mark.parametrize("said", SILENT)
def test_who_stays_silent_is_sent_away_in_time(said: str, tls: PeerTls | None) -> None:
    cache = cache_of()
    with (
        receiving(cache, tls=tls, greeting_seconds=GREETING_SECONDS) as receiver,
        hand_source(receiver.endpoint) as silent,
    ):
        silent.connection.sendall(SILENT[said])
        assert silent.is_cut_off()
        receiver._greeting_seconds = WAIT_SECONDS  # of a rank: a busy machine may be slow to greet
        check_transfer(receiver, cache, tls)


def talk(talker: HandSource) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        talker.connection.sendall(b"x")


def test_who_talks_without_end_and_says_nothing_is_sent_away_in_time() -> None:
    """Send a well-formed frame byte by byte, each soon after the one before."""
    cache, foreign = cache_of(), replace(key_of(), destination="decode-0/0")
    frame = encode(layer_frame(foreign, 0, [(0, 3)]), MAX_PAYLOAD_BYTES)
    with (
        receiving(cache, greeting_seconds=GREETING_SECONDS) as receiver,
        hand_source(receiver.endpoint) as talker,
    ):
        talker.connection.sendall(frame)
        with pytest.raises(OSError, match=r"reset|Broken pipe"):
            talk(talker)
        receiver._greeting_seconds = WAIT_SECONDS  # of a rank: a busy machine may be slow to greet
        check_transfer(receiver, cache, None)


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\nHost: ring\r\n\r\n", bytes(4096), b"\xff" * 70_000])
def test_garbage_ends_its_own_connection_only(garbage: bytes, tls: PeerTls | None) -> None:
    cache = cache_of()
    with receiving(cache, tls=tls) as receiver:
        for _ in range(3):
            with hand_source(receiver.endpoint) as stranger:
                stranger.connection.sendall(garbage)
                assert stranger.is_cut_off()
        check_transfer(receiver, cache, tls)


def test_a_stranger_learns_nothing_by_which_it_would_be_taken_for_a_rank() -> None:
    with receiving(cache_of()) as receiver, hand_source(receiver.endpoint) as stranger:
        stranger.send(SettleFrame(replace(key_of(), destination="guessed")))
        assert "nothing of transfer" in stranger.refusal().reason
        stranger.send(layer_frame(replace(key_of(), destination="guessed"), 0, [(0, 3)]))
        told = stranger.refusal()
        assert told.is_stale
        assert DESTINATION not in told.reason


@contextmanager
def crowd(endpoint: str, count: int) -> Iterator[list[HandSource]]:
    with ExitStack() as stack:
        yield [stack.enter_context(hand_source(endpoint)) for _ in range(count)]


def test_a_crowd_of_silent_strangers_keeps_no_rank_out(tls: PeerTls | None) -> None:
    cache = cache_of()
    receiver = KvReceiver(cache, DESTINATION, max_connections=4, greeting_seconds=WAIT_SECONDS, tls=tls)
    try:
        with crowd(receiver.endpoint, 6) as strangers:
            # The oldest strangers make room for younger ones.
            assert [stranger.is_cut_off() for stranger in strangers[:2]] == [True, True]
            check_transfer(receiver, cache, tls)
            assert strangers[2].is_cut_off()
    finally:
        receiver.close()


def test_a_rank_that_is_known_makes_no_room_for_strangers_and_may_stay_silent() -> None:
    cache = cache_of()
    receiver = KvReceiver(cache, DESTINATION, max_connections=2, greeting_seconds=WAIT_SECONDS)
    try:
        with hand_source(receiver.endpoint) as rank:
            rank.send(SettleFrame(key_of()))
            rank.refusal()
            (known,) = receiver._serving
            assert known._stream.deadline is None, "it has greeted"
            receiver._greeting_seconds = GREETING_SECONDS
            with crowd(receiver.endpoint, 4) as strangers:
                assert all(stranger.is_cut_off() for stranger in strangers)
            receiver.expect(expect_of(key_of(), TOKENS, BLOCKS))
            rank.send_whole(TRUTH)
            receiver.wait_sealed(key_of(), WAIT_SECONDS)
    finally:
        receiver.close()


def test_a_receiver_that_closes_waits_for_no_handshake(authority: Authority) -> None:
    receiver = KvReceiver(cache_of(), DESTINATION, greeting_seconds=WAIT_SECONDS, tls=authority.peer())
    host, _, port = receiver.endpoint.rpartition(":")
    with socket.create_connection((host, int(port))) as silent:
        silent.sendall(b"\x16\x03\x01")
        receiver.close()
    assert not [each for each in threading.enumerate() if each.name.startswith("kv-from")], (
        "one waits for the handshake"
    )
