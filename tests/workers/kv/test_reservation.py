"""Reservation of blocks for a transfer, from `expect` to `drop`: the bytes that may be written, and until when."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ringserve.cp_core.errors import StaleIncarnation, TransferError, Unavailable
from ringserve.cp_core.layout.shards import TokenRange
from ringserve.workers.kv.cache import KvCache
from ringserve.workers.kv.frames import (
    SettledFrame,
    SettleFrame,
    encode,
)
from ringserve.workers.kv.incoming import IncomingTransfer, TransferState
from ringserve.workers.kv.receiver import KvReceiver
from ringserve.workers.protocol.transfers import KvExpect
from tests.waiting import WAIT_SECONDS
from tests.workers.kv.kv_peers import (
    BLOCKS,
    NUM_BLOCKS,
    NUM_LAYERS,
    TOKENS,
    TRUTH,
    HandSource,
    Truth,
    cache_of,
    expect_of,
    hand_source,
    is_untouched,
    key_of,
    layer_frame,
    receiving,
)


def test_frames_before_their_expect_are_refused(receiver: KvReceiver, cache: KvCache, source: HandSource) -> None:
    source.send_rows(TRUTH, 0, [(0, TOKENS)])
    assert "is not expected here" in source.refusal().reason
    assert is_untouched(cache)


def test_late_frames_of_a_dropped_transfer_are_read_and_refused(
    receiver: KvReceiver, cache: KvCache, source: HandSource
) -> None:
    receiver.expect(expect_of(key_of(), TOKENS, BLOCKS))
    source.send_rows(TRUTH, 0, [(0, TOKENS)])
    source.send(SettleFrame(key_of()))
    assert isinstance(source.reply(), SettledFrame)
    # Half a frame is under way when the transfer is dropped and its blocks go to another one.
    payload = TRUTH.payload(1, range(TOKENS))
    frame = encode(layer_frame(key_of(), 1, [(0, TOKENS)]), len(payload)) + payload
    source.connection.sendall(frame[:-100])
    receiver.drop(key_of())
    other = Truth.random(TOKENS, seed=9)
    receiver.expect(expect_of(key_of("other"), TOKENS, BLOCKS))
    with hand_source(receiver.endpoint) as other_source:
        for layer in range(NUM_LAYERS):
            other_source.send(layer_frame(key_of("other"), layer, [(0, TOKENS)]), other.payload(layer, range(TOKENS)))
        receiver.wait_sealed(key_of("other"), WAIT_SECONDS)
    source.connection.sendall(frame[-100:])
    source.send_rows(TRUTH, 2, [(0, TOKENS)])
    reason = source.refusal().reason
    assert "dropped by its destination" in reason or "is not expected here" in reason
    other.check(cache, BLOCKS, range(TOKENS))


def test_a_frame_that_was_admitted_before_the_drop_is_not_stored_after_it() -> None:
    cache = cache_of()
    transfer = IncomingTransfer(expect_of(key_of(), TOKENS, BLOCKS), cache)
    frame = layer_frame(key_of(), 0, [(0, TOKENS)])
    payload = torch.ones(2 * TOKENS * 2 * 8)
    states = [transfer.state]
    transfer.admit(frame, payload.nbytes)
    states.append(transfer.state)
    transfer.abort(TransferError("dropped"))
    states.append(transfer.state)
    with pytest.raises(TransferError, match="dropped"):
        transfer.store(frame, payload)
    assert states == [TransferState.RESERVED, TransferState.STREAMING, TransferState.ABORTED]
    assert is_untouched(cache)


def test_a_drop_ends_the_wait_and_may_be_repeated(receiver: KvReceiver) -> None:
    receiver.expect(expect_of(key_of(), TOKENS, BLOCKS))
    started = threading.Event()

    def wait() -> None:
        started.set()
        receiver.wait_sealed(key_of(), WAIT_SECONDS)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        assert started.wait(WAIT_SECONDS)
        receiver.drop(key_of())
        receiver.drop(key_of())
        with pytest.raises(TransferError, match=r"dropped|not expected"):
            waiting.result(WAIT_SECONDS)
    assert receiver.num_open == 0


def test_a_dropped_key_never_comes_back(receiver: KvReceiver) -> None:
    receiver.drop(key_of())
    with pytest.raises(TransferError, match="was dropped: a new attempt is needed"):
        receiver.expect(expect_of(key_of(), TOKENS, BLOCKS))
    receiver.expect(expect_of(key_of(attempt=2), TOKENS, BLOCKS))


def test_a_key_is_expected_once(receiver: KvReceiver) -> None:
    receiver.expect(expect_of(key_of(), TOKENS, BLOCKS))
    with pytest.raises(TransferError, match="expected already"):
        receiver.expect(expect_of(key_of(), TOKENS, BLOCKS))


def test_a_transfer_for_another_life_of_the_ring_is_not_expected(receiver: KvReceiver) -> None:
    with pytest.raises(StaleIncarnation, match="is meant for 'decode-0/2', which is not here"):
        receiver.expect(expect_of(dataclasses.replace(key_of(), destination="decode-0/2"), TOKENS, BLOCKS))


@pytest.mark.parametrize(
    ("expect", "fault"),
    [
        (expect_of(key_of(), TOKENS, BLOCKS[:2]), "stored indices 0 to 10 in 2 blocks of 4"),
        (expect_of(key_of(), TOKENS, BLOCKS, stored_start=3), "stored indices 3 to 13"),
        (expect_of(key_of(), TOKENS, BLOCKS, stored_start=-1), "stored indices -1"),
        (expect_of(key_of(), TOKENS, (1, NUM_BLOCKS, 2)), f"outside 0 to {NUM_BLOCKS - 1}"),
        (expect_of(key_of(), TOKENS, (1, -1, 2)), "outside"),
        (expect_of(key_of(), TOKENS, (1, 1, 2)), "names a block twice"),
        (KvExpect(key_of(), (TokenRange(5, 9), TokenRange(0, 2)), 0, BLOCKS), "not ascending"),
    ],
)
def test_blocks_that_cannot_hold_the_transfer_are_refused(receiver: KvReceiver, expect: KvExpect, fault: str) -> None:
    with pytest.raises(TransferError, match=fault):
        receiver.expect(expect)


def test_a_leader_that_never_drops_sealed_transfers_does_not_fill_the_table(receiver: KvReceiver) -> None:
    for number in range(5000):
        receiver.expect(KvExpect(key_of(f"empty-{number}"), (), 0, ()))
    assert receiver.wait_sealed(key_of("empty-4999"), 0.0).payload_bytes == 0
    with pytest.raises(TransferError, match="not expected"):
        receiver.wait_sealed(key_of("empty-0"), 0.0)


# --- closing ---------------------------------------------------------------------------------------------------------


def test_closing_fails_open_transfers_and_frees_the_port(cache: KvCache) -> None:
    with receiving(cache) as receiver:
        receiver.expect(expect_of(key_of(), TOKENS, BLOCKS))
        with hand_source(receiver.endpoint) as source:
            source.send_rows(TRUTH, 0, [(0, TOKENS)])
            source.send(SettleFrame(key_of()))
            source.reply()
            receiver.close()
            receiver.close()
            assert source.is_cut_off()
        with pytest.raises(Unavailable, match="closed"):
            receiver.wait_sealed(key_of(), WAIT_SECONDS)
        port = int(receiver.endpoint.split(":")[1])
    again = KvReceiver(cache, "decode-0/1", port=port)
    again.close()


def test_a_port_in_use_is_one_clear_error(cache: KvCache, receiver: KvReceiver) -> None:
    port = int(receiver.endpoint.split(":")[1])
    with pytest.raises(Unavailable, match=rf"KV cannot be received at 127.0.0.1:{port}: Address already in use"):
        KvReceiver(cache, "decode-0/1", port=port)


def test_a_transfer_is_stalled_from_its_first_byte_to_its_last_only() -> None:
    transfer = IncomingTransfer(expect_of(key_of(), TOKENS, BLOCKS), cache_of())
    frame = layer_frame(key_of(), 0, [(0, TOKENS)])
    assert transfer.stalled_seconds == 0.0
    transfer.admit(frame, len(TRUTH.payload(0, range(TOKENS))))
    first, second = transfer.stalled_seconds, transfer.stalled_seconds
    assert 0.0 <= first <= second
    threading.Event().wait(0.01)
    assert transfer.stalled_seconds >= 0.01
    transfer.abort(TransferError("dropped"))
    assert transfer.stalled_seconds == 0.0
