"""KV receiver: refusals and failures of its sources; nothing refused is ever written."""

from __future__ import annotations

import dataclasses
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
import torch

from ringserve.cp_core.errors import TransferError, Unavailable
from ringserve.workers.kv.cache import KvCache
from ringserve.workers.kv.frames import (
    MAGIC,
    MAX_PAYLOAD_BYTES,
    PREFIX,
    VERSION,
    AbandonFrame,
    LayerFrame,
    LeaveFrame,
    RefusedFrame,
    SettledFrame,
    SettleFrame,
    encode,
)
from ringserve.workers.kv.receiver import KvReceiver, SourceConnection
from tests.waiting import WAIT_SECONDS
from tests.workers.kv.kv_peers import (
    BLOCKS,
    DESTINATION,
    NUM_LAYERS,
    TOKENS,
    TRUTH,
    HandSource,
    cache_of,
    expect_of,
    hand_source,
    is_untouched,
    key_of,
    layer_frame,
)


def check_still_serves(receiver: KvReceiver, cache: KvCache, source: HandSource) -> None:
    """Check that a whole transfer over this connection arrives."""
    receiver.expect(expect_of(key_of("afterwards"), TOKENS, BLOCKS))
    source.send_whole(TRUTH, name="afterwards")
    receiver.wait_sealed(key_of("afterwards"), WAIT_SECONDS)
    TRUTH.check(cache, BLOCKS, range(TOKENS))


def refusal(source: HandSource) -> RefusedFrame:
    reply = source.reply()
    assert isinstance(reply, RefusedFrame)
    return reply


# --- arrivals --------------------------------------------------------------------------------------------------------


def test_pieces_in_any_order_of_layers_and_frames_seal_the_transfer(
    receiver: KvReceiver, cache: KvCache, source: HandSource
) -> None:
    receiver.expect(expect_of(key_of(), TOKENS, BLOCKS))
    for layer in reversed(range(NUM_LAYERS)):
        source.send_rows(TRUTH, layer, [(1, 2), (5, 1), (8, 2)])
        source.send_rows(TRUTH, layer, [(0, 1), (3, 2), (6, 2)])
    report = receiver.wait_sealed(key_of(), WAIT_SECONDS)
    assert report.payload_bytes == NUM_LAYERS * len(TRUTH.payload(0, range(TOKENS)))
    TRUTH.check(cache, BLOCKS, range(TOKENS))


def test_the_source_is_told_how_many_bytes_arrived_since_it_last_asked(
    receiver: KvReceiver, source: HandSource
) -> None:
    receiver.expect(expect_of(key_of(), TOKENS, BLOCKS))
    source.send_rows(TRUTH, 0, [(0, 4)])
    source.send(SettleFrame(key_of()))
    assert source.reply() == SettledFrame(key_of(), len(TRUTH.payload(0, range(4))))
    source.send_rows(TRUTH, 0, [(4, 1)])
    source.send(SettleFrame(key_of()))
    assert source.reply() == SettledFrame(key_of(), len(TRUTH.payload(0, range(1))))


def test_a_source_may_ask_after_its_transfer_was_sealed_and_dropped(receiver: KvReceiver, source: HandSource) -> None:
    receiver.expect(expect_of(key_of(), TOKENS, BLOCKS))
    source.send_whole(TRUTH)
    receiver.wait_sealed(key_of(), WAIT_SECONDS)
    receiver.drop(key_of())
    source.send(SettleFrame(key_of()))
    assert isinstance(source.reply(), SettledFrame)


def test_an_unsealed_transfer_says_how_much_is_missing_when_the_wait_is_over(receiver: KvReceiver) -> None:
    receiver.expect(expect_of(key_of(), TOKENS, BLOCKS))
    with pytest.raises(TransferError, match=r"has 0 of 60 \(layer, head, token\) after 0.01 s"):
        receiver.wait_sealed(key_of(), 0.01)
    assert receiver.num_open == 1


# --- refusals that the connection survives ---------------------------------------------------------------------------


def test_a_token_that_arrives_twice_is_refused_and_ends_the_transfer(
    receiver: KvReceiver, cache: KvCache, source: HandSource
) -> None:
    receiver.expect(expect_of(key_of(), TOKENS, BLOCKS))
    source.send_rows(TRUTH, 0, [(0, 5)])
    source.send(layer_frame(key_of(), 0, [(4, 2)]), bytes(len(TRUTH.payload(0, [4, 5]))))
    assert "arrived twice" in source.refusal().reason
    with pytest.raises(TransferError, match="arrived twice"):
        receiver.wait_sealed(key_of(), WAIT_SECONDS)
    assert torch.equal(cache.read(0, BLOCKS, 4, 1).k[0], TRUTH.k[0, 4])
    assert cache.read(0, BLOCKS, 5, 1).k.isnan().all()


def test_a_layer_that_arrives_again_among_others_is_refused_and_writes_none_of_them(
    receiver: KvReceiver, cache: KvCache, source: HandSource
) -> None:
    receiver.expect(expect_of(key_of(), TOKENS, BLOCKS))
    source.send_rows(TRUTH, 1, [(4, 1)])
    frame = dataclasses.replace(layer_frame(key_of(), 0, [(0, TOKENS)]), num_layers=2)
    source.send(frame, TRUTH.payload(0, range(TOKENS)) + TRUTH.payload(1, range(TOKENS)))
    assert "layers 0 to 1 from position 0 on arrived twice" in source.refusal().reason
    assert cache.read(0, BLOCKS, 0, TOKENS).k.isnan().all()


def test_a_sealed_transfer_takes_no_late_frame(receiver: KvReceiver, cache: KvCache, source: HandSource) -> None:
    receiver.expect(expect_of(key_of(), TOKENS, BLOCKS))
    source.send_whole(TRUTH)
    receiver.wait_sealed(key_of(), WAIT_SECONDS)
    source.send(layer_frame(key_of(), 0, [(0, 3)]), bytes(len(TRUTH.payload(0, range(3)))))
    assert "sealed already" in source.refusal().reason
    assert receiver.wait_sealed(key_of(), 0.0).payload_bytes > 0
    TRUTH.check(cache, BLOCKS, range(TOKENS))


@pytest.mark.parametrize(
    ("frame", "payload_tokens", "fault"),
    [
        (layer_frame(key_of(), 0, [(8, 3)]), 3, "does not expect"),
        (layer_frame(key_of(), 0, [(0, 2), (50, 1)]), 3, "does not expect"),
        (layer_frame(key_of(), NUM_LAYERS, [(0, 1)]), 1, "this cache has"),
        (dataclasses.replace(layer_frame(key_of(), 1, [(0, 1)]), num_layers=NUM_LAYERS), 1, "this cache has"),
        (dataclasses.replace(layer_frame(key_of(), 0, [(0, 1)]), num_layers=2), 1, "bytes, but its pieces need"),
        (dataclasses.replace(layer_frame(key_of(), 0, [(0, 1)]), num_layers=1 << 40), 1, "this cache has"),
        (layer_frame(key_of(), 0, [(0, 1)], dtype="float16"), 1, "is float16, this cache is float32"),
        (layer_frame(key_of(), 0, [(0, 2)]), 1, "bytes, but its pieces need"),
        (layer_frame(key_of(), 0, [(0, 1 << 40)]), 1, "bytes, but its pieces need"),
        (dataclasses.replace(layer_frame(key_of(), 0, [(0, 1)]), head_start=1, head_stop=3), 1, "are not in"),
    ],
)
def test_a_frame_that_does_not_fit_is_refused_and_ends_the_transfer(
    receiver: KvReceiver, cache: KvCache, source: HandSource, frame: LayerFrame, payload_tokens: int, fault: str
) -> None:
    receiver.expect(expect_of(key_of(), TOKENS, BLOCKS))
    source.send(frame, TRUTH.payload(0, range(payload_tokens)))
    assert fault in source.refusal().reason
    with pytest.raises(TransferError, match=fault):
        receiver.wait_sealed(key_of(), WAIT_SECONDS)
    assert is_untouched(cache)
    check_still_serves(receiver, cache, source)


@pytest.mark.parametrize(
    ("key", "is_stale", "fault"),
    [
        (key_of("turn-2"), False, "'turn-2' attempt 1 is not expected here"),
        (key_of(attempt=2), False, "is at attempt 1, not 2"),
        (key_of(attempt=0), False, "is at attempt 1, not 0"),
        (dataclasses.replace(key_of(), source="prefill-0/0"), True, "is expected from 'prefill-0/1', not"),
        (dataclasses.replace(key_of(), destination="decode-0/0"), True, "is meant for 'decode-0/0', which is not here"),
    ],
)
def test_a_stale_or_unknown_key_is_refused_and_harms_no_other_transfer(
    receiver: KvReceiver, cache: KvCache, source: HandSource, key: object, is_stale: bool, fault: str
) -> None:
    assert isinstance(key, type(key_of()))
    receiver.expect(expect_of(key_of(), TOKENS, BLOCKS))
    source.send(layer_frame(key, 0, [(0, 3)]), bytes(len(TRUTH.payload(0, range(3)))))
    reply = source.refusal()
    assert (reply.key, reply.is_stale) == (key, is_stale)
    assert fault in reply.reason
    assert is_untouched(cache)
    source.send_whole(TRUTH)
    receiver.wait_sealed(key_of(), WAIT_SECONDS)
    TRUTH.check(cache, BLOCKS, range(TOKENS))


def test_a_source_is_told_once_of_a_refusal_and_again_when_it_asks(
    receiver: KvReceiver, cache: KvCache, source: HandSource
) -> None:
    for layer in range(NUM_LAYERS):
        source.send_rows(TRUTH, layer, [(0, TOKENS)])
    source.send(SettleFrame(key_of()))
    assert source.refusal() == source.refusal()
    check_still_serves(receiver, cache, source)


def test_a_source_that_asks_about_nothing_is_told_so(receiver: KvReceiver, source: HandSource) -> None:
    source.send(SettleFrame(key_of()))
    assert "nothing of transfer 'turn-1' came over this connection" in source.refusal().reason


def test_a_source_that_abandons_its_transfer_ends_the_wait(receiver: KvReceiver, source: HandSource) -> None:
    receiver.expect(expect_of(key_of(), TOKENS, BLOCKS))
    source.send_rows(TRUTH, 0, [(0, 3)])
    source.send(AbandonFrame(key_of(), "the turn was cancelled"))
    with pytest.raises(TransferError, match=r"abandoned by its source .*: the turn was cancelled"):
        receiver.wait_sealed(key_of(), WAIT_SECONDS)


# --- failures that end the connection and that the receiver survives -------------------------------------------------


@pytest.mark.parametrize(
    ("garbage", "fault"),
    [
        (b"GET / HTTP/1.1\r\nHost: example\r\n\r\n", "not a KV frame"),
        (PREFIX.pack(MAGIC, VERSION, 20, MAX_PAYLOAD_BYTES * 1000), "payload of"),
        (PREFIX.pack(MAGIC, VERSION, 1 << 31, 0), "header of"),
        (PREFIX.pack(MAGIC, VERSION, 9, 0) + b"\xc1garbage!", "broken header"),
        (PREFIX.pack(MAGIC, 77, 9, 0), "version 77"),
        (encode(SettledFrame(key_of(), 5)), "a source sent SettledFrame"),
    ],
)
def test_a_malformed_frame_ends_its_connection_with_a_logged_reason_and_nothing_else(
    receiver: KvReceiver,
    cache: KvCache,
    source: HandSource,
    caplog: pytest.LogCaptureFixture,
    garbage: bytes,
    fault: str,
) -> None:
    with caplog.at_level(logging.WARNING), hand_source(receiver.endpoint) as bad_source:
        bad_source.connection.sendall(garbage)
        assert bad_source.is_cut_off()
        assert fault in caplog.text
    check_still_serves(receiver, cache, source)


def test_a_source_that_dies_in_the_middle_of_a_frame_fails_the_wait_at_once(
    receiver: KvReceiver, cache: KvCache, source: HandSource
) -> None:
    receiver.expect(expect_of(key_of(), TOKENS, BLOCKS))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(receiver.wait_sealed, key_of(), WAIT_SECONDS)
        with hand_source(receiver.endpoint) as dying:
            payload = TRUTH.payload(0, range(TOKENS))
            dying.connection.sendall(encode(layer_frame(key_of(), 0, [(0, TOKENS)]), len(payload)) + payload[:99])
        # Far less than the wait's own timeout.
        with pytest.raises(Unavailable, match=r"the source 127.0.0.1:\d+ of transfer 'turn-1' attempt 1 is gone"):
            waiting.result(WAIT_SECONDS)
    assert is_untouched(cache)
    check_still_serves(receiver, cache, source)


def test_a_source_that_dies_between_frames_fails_the_wait_at_once(receiver: KvReceiver) -> None:
    receiver.expect(expect_of(key_of(), TOKENS, BLOCKS))
    with hand_source(receiver.endpoint) as dying:
        dying.send_rows(TRUTH, 0, [(0, TOKENS)])
    with pytest.raises(Unavailable, match="is gone"):
        receiver.wait_sealed(key_of(), 5.0)


def test_a_source_that_settled_its_share_may_go_while_others_still_send(
    receiver: KvReceiver, cache: KvCache, source: HandSource
) -> None:
    receiver.expect(expect_of(key_of(), TOKENS, BLOCKS))
    with hand_source(receiver.endpoint) as early:
        for layer in range(NUM_LAYERS):
            early.send_rows(TRUTH, layer, [(0, 4)])
        early.send(SettleFrame(key_of()))
        assert isinstance(early.reply(), SettledFrame)
        early.connection.shutdown(1)
        assert early.is_cut_off()
    for layer in range(NUM_LAYERS):
        source.send_rows(TRUTH, layer, [(4, 6)])
    receiver.wait_sealed(key_of(), WAIT_SECONDS)
    TRUTH.check(cache, BLOCKS, range(TOKENS))


def test_more_connections_than_allowed_are_cut_off() -> None:
    cache = cache_of()
    receiver = KvReceiver(cache, "decode-0/1", max_connections=1, room_seconds=0.1)
    with hand_source(receiver.endpoint) as first:
        first.send(SettleFrame(key_of()))
        first.refusal()
        with hand_source(receiver.endpoint) as second:
            assert second.is_cut_off()
        assert isinstance(first.reply(), LeaveFrame), "it could have left"
        check_still_serves(receiver, cache, first)
    receiver.close()


def test_closing_waits_for_the_thread_of_a_connection_that_has_ended(
    cache: KvCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread counts as ended to the receiver, and goes on until somebody waits for it."""
    has_left, is_awaited, join = threading.Event(), threading.Event(), threading.Thread.join

    class Lingering(KvReceiver):
        def _serve(self, source: SourceConnection) -> None:
            super()._serve(source)
            has_left.set()
            is_awaited.wait(WAIT_SECONDS)

    def wait_for_thread(thread: threading.Thread, timeout: float | None = None) -> None:
        if thread.name.startswith("kv-from"):
            is_awaited.set()
        join(thread, timeout)

    before = set(threading.enumerate())
    with closing(Lingering(cache, DESTINATION)) as receiver:
        with hand_source(receiver.endpoint):
            pass
        assert has_left.wait(WAIT_SECONDS)
        monkeypatch.setattr(threading.Thread, "join", wait_for_thread)
    left = set(threading.enumerate()) - before
    is_awaited.set()
    assert not left
