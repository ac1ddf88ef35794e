"""More sources than a receiver has places: idle ones make room, busy ones stay, and no transfer fails."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing

import pytest

from ringserve.cp_core.transport.peer_tls import PeerTls
from ringserve.workers.kv.frames import LeaveFrame, SettledFrame, SettleFrame
from ringserve.workers.kv.receiver import KvReceiver
from ringserve.workers.kv.sender import DestinationConnection, OutgoingTransfer
from tests.services.auth.certificates import Authority
from tests.waiting import WAIT_SECONDS
from tests.workers.kv.kv_peers import (
    BLOCKS,
    DESTINATION,
    TOKENS,
    TRUTH,
    cache_of,
    expect_of,
    hand_destination,
    hand_source,
    key_of,
    send_of,
    sending,
)


@pytest.fixture(params=["plain", "tls"])
def tls(request: pytest.FixtureRequest, authority: Authority) -> PeerTls | None:
    return authority.peer() if request.param == "tls" else None


def test_every_source_hands_off_where_there_are_more_of_them_than_places(tls: PeerTls | None) -> None:
    truth = cache_of()
    TRUTH.store(truth, BLOCKS, range(TOKENS))
    with ExitStack() as stack:
        receiver = stack.enter_context(closing(KvReceiver(cache_of(), DESTINATION, max_connections=3, tls=tls)))
        senders = [stack.enter_context(sending(truth, tls=tls)) for _ in range(8)]
        for attempt in (1, 2):
            for number, sender in enumerate(senders):
                key = key_of(f"turn-{number}", attempt=attempt)
                receiver.expect(expect_of(key, TOKENS, BLOCKS))
                sender.send_all(send_of(key, receiver.endpoint, TOKENS, BLOCKS), WAIT_SECONDS)
                receiver.wait_sealed(key, WAIT_SECONDS)


def test_a_source_that_has_just_connected_is_spared_where_an_idle_one_can_leave() -> None:
    truth = cache_of()
    TRUTH.store(truth, BLOCKS, range(TOKENS))
    with ExitStack() as stack:
        receiver = KvReceiver(cache_of(), DESTINATION, max_connections=2, strange_seconds=60.0)
        stack.enter_context(closing(receiver))

        def hand_off(name: str, blocks: tuple[int, ...]) -> None:
            receiver.expect(expect_of(key_of(name), TOKENS, blocks))
            sender = stack.enter_context(sending(truth))
            sender.send_all(send_of(key_of(name), receiver.endpoint, TOKENS, BLOCKS), WAIT_SECONDS)

        hand_off("idle", BLOCKS)
        new = stack.enter_context(hand_source(receiver.endpoint))
        hand_off("another", (10, 11, 12))
        receiver.expect(expect_of(key_of("new"), TOKENS, (20, 21, 22)))
        new.send_whole(TRUTH, name="new")
        receiver.wait_sealed(key_of("new"), WAIT_SECONDS)


def test_a_source_in_the_middle_of_a_transfer_keeps_its_place() -> None:
    truth, cache = cache_of(), cache_of()
    TRUTH.store(truth, BLOCKS, range(TOKENS))
    with ExitStack() as stack:
        receiver = stack.enter_context(closing(KvReceiver(cache, DESTINATION, max_connections=2)))
        busy = stack.enter_context(hand_source(receiver.endpoint))
        receiver.expect(expect_of(key_of("busy"), TOKENS, (40, 41, 42)))
        busy.send_rows(TRUTH, 0, [(0, TOKENS)], name="busy")
        for number in range(4):
            sender, key = stack.enter_context(sending(truth)), key_of(f"turn-{number}")
            receiver.expect(expect_of(key, TOKENS, BLOCKS))
            sender.send_all(send_of(key, receiver.endpoint, TOKENS, BLOCKS), WAIT_SECONDS)
        for layer in (1, 2):
            busy.send_rows(TRUTH, layer, [(0, TOKENS)], name="busy")
        busy.send(SettleFrame(key_of("busy")))
        assert isinstance(busy.reply(), SettledFrame)
        assert receiver.wait_sealed(key_of("busy"), WAIT_SECONDS).payload_bytes


def test_a_source_leaves_only_where_nothing_is_under_way() -> None:
    with hand_destination() as destination:
        connection = DestinationConnection(destination.endpoint, connect_seconds=WAIT_SECONDS, stall_seconds=30.0)
        destination.accept()
        transfer = OutgoingTransfer(key_of())
        assert connection.carry(transfer)
        transfer.begin_part(destination.endpoint)
        destination.reply(LeaveFrame())
        destination.reply(SettledFrame(key_of(), 0))
        transfer.wait_confirmed(time.monotonic() + WAIT_SECONDS)
        other = OutgoingTransfer(key_of("other"))
        assert connection.carry(other), "it carried a transfer when it was asked, so it stayed"
        assert connection.forget(other)
        destination.reply(LeaveFrame())
        assert destination.drain() == b""
        assert not connection.carry(transfer), "the sender opens another connection"
        connection.join(WAIT_SECONDS)


def test_a_source_closes_a_connection_that_is_idle_for_long() -> None:
    with hand_destination() as destination:
        connection = DestinationConnection(
            destination.endpoint, connect_seconds=WAIT_SECONDS, stall_seconds=30.0, idle_seconds=0.05
        )
        destination.accept()
        assert destination.drain() == b""
        assert connection.is_broken
        connection.join(WAIT_SECONDS)
