"""Checksums of KV: a frame with a wrong one is refused as a whole, before a byte of it is stored."""

from __future__ import annotations

import dataclasses

import pytest

from ringserve.cp_core.errors import TransferError
from ringserve.workers.kv.frames import LayerFrame, TransferFrame, checksum_of
from ringserve.workers.kv.sender import DestinationConnection, KvSender
from tests.waiting import WAIT_SECONDS
from tests.workers.kv.kv_peers import (
    BLOCKS,
    NUM_LAYERS,
    SOURCE,
    TOKENS,
    TRUTH,
    cache_of,
    expect_of,
    hand_destination,
    hand_source,
    is_untouched,
    key_of,
    layer_frame,
    receiving,
    send_of,
)


def summed(layer: int, payload: bytes, name: str = "turn-1") -> LayerFrame:
    frame = layer_frame(key_of(name), layer, [(0, TOKENS)])
    return dataclasses.replace(frame, checksum=checksum_of([memoryview(payload)]))


@pytest.mark.parametrize("changed", [0, 777, -1])
def test_one_changed_byte_refuses_the_frame_and_ends_its_transfer(changed: int) -> None:
    cache = cache_of()
    with receiving(cache) as receiver, hand_source(receiver.endpoint) as source:
        receiver.expect(expect_of(key_of(), TOKENS, BLOCKS))
        payload = TRUTH.payload(0, range(TOKENS))
        damaged = bytearray(payload)
        damaged[changed] ^= 1
        source.send(summed(0, payload), bytes(damaged))
        assert "checksum is wrong" in source.refusal().reason
        with pytest.raises(TransferError, match="layer 0 from position 0 on is damaged"):
            receiver.wait_sealed(key_of(), WAIT_SECONDS)
        assert is_untouched(cache)
        assert receiver.num_open == 0


def test_after_a_damaged_frame_the_connection_goes_on() -> None:
    cache = cache_of()
    with receiving(cache) as receiver, hand_source(receiver.endpoint) as source:
        receiver.expect(expect_of(key_of(), TOKENS, BLOCKS))
        source.send(dataclasses.replace(layer_frame(key_of(), 0, [(0, 1)]), checksum=1), TRUTH.payload(0, [0]))
        assert "checksum is wrong" in source.refusal().reason
        receiver.expect(expect_of(key_of("afterwards"), TOKENS, BLOCKS))
        for layer in range(NUM_LAYERS):
            payload = TRUTH.payload(layer, range(TOKENS))
            source.send(summed(layer, payload, "afterwards"), payload)
        receiver.wait_sealed(key_of("afterwards"), WAIT_SECONDS)
        TRUTH.check(cache, BLOCKS, range(TOKENS))


def test_a_sender_sums_up_what_it_sends() -> None:
    cache = cache_of()
    TRUTH.store(cache, BLOCKS, range(TOKENS))
    sender = KvSender(cache, SOURCE)
    with hand_destination() as destination:
        sender.begin(send_of(key_of(), destination.endpoint, TOKENS, BLOCKS))
        sender.layer_ready(key_of(), 0)
        destination.accept()
        frame, payload = destination.receive()
        assert isinstance(frame, LayerFrame)
        assert payload == TRUTH.payload(0, range(TOKENS))
        assert frame.checksum == checksum_of([memoryview(payload)])
        sender.close()


def test_a_sum_goes_over_all_buffers_as_if_they_were_one() -> None:
    whole = bytes(range(256))
    parts = [memoryview(whole)[:100], memoryview(whole)[100:100], memoryview(whole)[100:]]
    assert checksum_of(parts) == checksum_of([memoryview(whole)])


def test_a_block_written_while_its_source_sends_it_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    source, destination = cache_of(), cache_of()
    TRUTH.store(source, BLOCKS, range(TOKENS))
    send = DestinationConnection.send

    def send_late(connection: DestinationConnection, frame: TransferFrame, payload: list[memoryview]) -> None:
        """Write to the block between its checksum and its send."""
        source.k_layers[0].fill_(1.0)
        send(connection, frame, payload)

    monkeypatch.setattr(DestinationConnection, "send", send_late)
    with receiving(destination) as receiver:
        sender = KvSender(source, SOURCE)
        receiver.expect(expect_of(key_of(), TOKENS, BLOCKS))
        with pytest.raises(TransferError, match="checksum is wrong"):
            sender.send_all(send_of(key_of(), receiver.endpoint, TOKENS, BLOCKS), WAIT_SECONDS)
        sender.close()
    assert is_untouched(destination)
