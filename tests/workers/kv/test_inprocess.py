"""In-process KV network: the rules are those of the real one."""

from __future__ import annotations

import pytest

from ringserve.cp_core.errors import TransferError, Unavailable
from ringserve.workers.kv.inprocess import InProcessNetwork
from tests.workers.kv.kv_peers import (
    BLOCKS,
    DESTINATION,
    NUM_LAYERS,
    SOURCE,
    TOKENS,
    TRUTH,
    cache_of,
    expect_of,
    key_of,
    send_of,
)

OTHER_BLOCKS = (2, 1, 0)


class Pair:
    """Source with known KV, and a destination full of NaN."""

    def __init__(self) -> None:
        network = InProcessNetwork()
        self.source, self.destination = cache_of(), cache_of()
        TRUTH.store(self.source, BLOCKS, range(TOKENS))
        self.sender = network.sender(self.source, SOURCE)
        self.receiver = network.receiver(self.destination, DESTINATION)
        self.send = send_of(key_of(), self.receiver.endpoint, TOKENS, BLOCKS)
        self.expect = expect_of(key_of(), TOKENS, OTHER_BLOCKS)


def test_what_is_sent_in_process_arrives_bit_for_bit() -> None:
    pair = Pair()
    pair.receiver.expect(pair.expect)
    sent = pair.sender.send_all(pair.send, 1.0)
    assert pair.receiver.wait_sealed(key_of(), 0.0).payload_bytes == sent.payload_bytes
    TRUTH.check(pair.destination, OTHER_BLOCKS, range(TOKENS))


def test_what_is_not_expected_is_refused_in_process_too() -> None:
    pair = Pair()
    with pytest.raises(TransferError, match="is not expected here"):
        pair.sender.send_all(pair.send, 1.0)


def test_a_drop_in_process_refuses_the_layers_that_follow() -> None:
    pair = Pair()
    pair.receiver.expect(pair.expect)
    pair.sender.begin(pair.send)
    pair.sender.layer_ready(key_of(), 0)
    pair.receiver.drop(key_of())
    for layer in range(1, NUM_LAYERS):
        pair.sender.layer_ready(key_of(), layer)
    with pytest.raises(TransferError, match="is not expected here"):
        pair.sender.finish(key_of(), 1.0)
    assert pair.destination.k_layers[1].isnan().all()


def test_abandoning_in_process_ends_the_wait_of_the_destination() -> None:
    pair = Pair()
    pair.receiver.expect(pair.expect)
    pair.sender.begin(pair.send)
    pair.sender.layer_ready(key_of(), 0)
    pair.sender.abandon(key_of())
    with pytest.raises(TransferError, match="was abandoned by its source"):
        pair.receiver.wait_sealed(key_of(), 1.0)


def test_an_endpoint_outside_the_network_cannot_be_reached() -> None:
    pair = Pair()
    with pytest.raises(Unavailable, match="in-process:9 cannot be reached"):
        pair.sender.begin(send_of(key_of(), "in-process:9", TOKENS, BLOCKS))
