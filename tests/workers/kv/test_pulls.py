"""KV by slots: what a destination reads, and what it refuses before and after. NIXL is a fake with a gate."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from ringserve.cp_core.errors import TransferError, Unavailable
from ringserve.workers.kv.cache import KvCache
from ringserve.workers.kv.frames import (
    Reach,
    ReachedFrame,
    ReadFrame,
    RefusedFrame,
    SettledFrame,
    SettleFrame,
    SlotRef,
    weighted_sum,
)
from ringserve.workers.kv.pulls import PullAgent
from ringserve.workers.kv.receiver import KvReceiver
from tests.waiting import WAIT_SECONDS
from tests.workers.kv.fake_nixl import FakeNetwork, Pair
from tests.workers.kv.kv_peers import (
    BLOCKS,
    DESTINATION,
    LAYER_BYTES,
    NUM_LAYERS,
    SLOT_BYTES,
    SOURCE,
    TOKENS,
    TRUTH,
    HandSource,
    cache_of,
    expect_of,
    hand_source,
    is_untouched,
    key_of,
    layer_frame,
    receiving,
)


@dataclasses.dataclass(frozen=True)
class ByHand:
    """Destination with an agent, and a source by hand whose payload lies in slot 1 of an agent of its own."""

    network: FakeNetwork
    source: HandSource
    slots: PullAgent
    agent: PullAgent
    cache: KvCache
    receiver: KvReceiver

    def show_card(self, **changes: object) -> ReachedFrame:
        self.source.send(dataclasses.replace(self.slots.card(DESTINATION), **changes))  # type: ignore[arg-type]
        reply = self.source.reply()
        assert isinstance(reply, ReachedFrame)
        return reply

    def fill(self, layer: int) -> SlotRef:
        """Write a layer to slot 1."""
        payload = torch.frombuffer(bytearray(TRUTH.payload(layer, range(TOKENS))), dtype=torch.uint8)
        with self.slots.out.writing(1):
            self.slots.out.memory[SLOT_BYTES : SLOT_BYTES + LAYER_BYTES] = payload
        return self.slots.out.ref(1, LAYER_BYTES)

    def send(self, layer: int, ref: SlotRef, *, name: str = "turn-1") -> None:
        self.source.send(dataclasses.replace(layer_frame(key_of(name), layer, [(0, TOKENS)]), slot=ref))


@pytest.fixture
def by_hand(network: FakeNetwork) -> Iterator[ByHand]:
    cache = cache_of()
    with (
        network.open_agent(SOURCE) as slots,
        network.open_agent(DESTINATION) as agent,
        receiving(cache, agent=agent) as receiver,
        hand_source(receiver.endpoint) as source,
    ):
        yield ByHand(network, source, slots, agent, cache, receiver)


# --- what is read ----------------------------------------------------------------------------------------------------


def test_payloads_are_read_from_slots_and_none_goes_by_the_socket(pair: Pair, network: FakeNetwork) -> None:
    pair.begin("turn-1")
    pair.finish("turn-1")
    TRUTH.check(pair.cache, BLOCKS, range(TOKENS))
    counts = pair.sender.counts
    assert (counts.nixl_bytes, counts.socket_bytes, counts.fallbacks) == (NUM_LAYERS * LAYER_BYTES, 0, 0)
    assert network.num_reads == NUM_LAYERS


def test_a_slot_may_be_written_again_when_the_destination_has_read_it(by_hand: ByHand) -> None:
    assert by_hand.show_card() == ReachedFrame(Reach.REACHED, "")
    by_hand.receiver.expect(expect_of(key_of(), TOKENS, BLOCKS))
    for layer in range(NUM_LAYERS):
        by_hand.send(layer, by_hand.fill(layer))
        assert by_hand.source.reply() == ReadFrame(1)
    by_hand.source.send(SettleFrame(key_of()))
    assert by_hand.source.reply() == SettledFrame(key_of(), NUM_LAYERS * LAYER_BYTES)
    TRUTH.check(by_hand.cache, BLOCKS, range(TOKENS))


def test_a_slot_that_was_used_again_is_noticed_and_nothing_of_it_is_stored(by_hand: ByHand) -> None:
    by_hand.show_card()
    by_hand.receiver.expect(expect_of(key_of(), TOKENS, BLOCKS))
    ref = by_hand.fill(0)
    by_hand.fill(1)
    by_hand.send(0, ref)
    with pytest.raises(Unavailable, match=r"slot 1 was reused: generation 4, expected 2"):
        by_hand.receiver.wait_sealed(key_of(), WAIT_SECONDS)
    assert by_hand.source.is_cut_off()
    assert is_untouched(by_hand.cache)


def test_a_slot_that_is_being_written_is_noticed(by_hand: ByHand) -> None:
    by_hand.show_card()
    by_hand.receiver.expect(expect_of(key_of(), TOKENS, BLOCKS))
    ref = by_hand.fill(0)
    with by_hand.slots.out.writing(1):
        by_hand.send(0, ref)
        with pytest.raises(Unavailable, match="slot 1 was reused: generation 3"):
            by_hand.receiver.wait_sealed(key_of(), WAIT_SECONDS)
    assert is_untouched(by_hand.cache)


@pytest.mark.parametrize(
    ("key", "fault"),
    [
        (dataclasses.replace(key_of(), destination="decode-0/0"), "which is not here"),
        (dataclasses.replace(key_of(), source="prefill-0/0"), "is expected from"),
        (key_of(attempt=2), "is at attempt 1, not 2"),
        (key_of("turn-2"), "is not expected here"),
    ],
)
def test_a_frame_of_a_wrong_transfer_is_refused_unread_and_its_slot_is_free(
    by_hand: ByHand, key: object, fault: str
) -> None:
    assert isinstance(key, type(key_of()))
    by_hand.show_card()
    by_hand.receiver.expect(expect_of(key_of(), TOKENS, BLOCKS))
    by_hand.source.send(dataclasses.replace(layer_frame(key, 0, [(0, TOKENS)]), slot=by_hand.fill(0)))
    assert by_hand.source.reply() == ReadFrame(1)
    refused = by_hand.source.reply()
    assert isinstance(refused, RefusedFrame)
    assert fault in refused.reason
    assert by_hand.network.num_reads == 0
    assert is_untouched(by_hand.cache)


@pytest.mark.parametrize(
    ("changes", "reach", "fault"),
    [
        ({"destination": "decode-0/0"}, Reach.STALE, "for an incarnation that is not here"),
        ({"device": "cuda"}, Reach.UNLIKE, "on cuda, the destination's 4096 bytes on cpu"),
        ({"slot_bytes": 2 * SLOT_BYTES}, Reach.UNLIKE, "its slots have 8192 bytes"),
        ({"agent": "another"}, Reach.UNREACHED, "its metadata are those of"),
        ({"metadata": b"nobody"}, Reach.UNREACHED, "nobody has this name"),
    ],
)
def test_a_wrong_card_is_refused_before_any_read(
    by_hand: ByHand, changes: dict[str, object], reach: Reach, fault: str
) -> None:
    reply = by_hand.show_card(**changes)
    assert reply.reach is reach
    assert fault in reply.reason
    by_hand.send(0, by_hand.fill(0))
    assert isinstance(by_hand.source.reply(), ReadFrame)
    assert isinstance(by_hand.source.reply(), RefusedFrame)
    assert by_hand.network.num_reads == 0


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"number": 4}, "of slot 4 lie outside the source's card"),
        ({"generation": 0}, "was reused"),
    ],
)
def test_a_place_outside_the_card_ends_the_connection(by_hand: ByHand, changes: dict[str, int], fault: str) -> None:
    by_hand.show_card()
    by_hand.receiver.expect(expect_of(key_of(), TOKENS, BLOCKS))
    by_hand.send(0, dataclasses.replace(by_hand.fill(0), **changes))
    with pytest.raises(Unavailable, match=fault):
        by_hand.receiver.wait_sealed(key_of(), WAIT_SECONDS)
    assert is_untouched(by_hand.cache)


def test_a_slot_without_a_card_and_a_second_card_end_the_connection(by_hand: ByHand) -> None:
    by_hand.receiver.expect(expect_of(key_of(), TOKENS, BLOCKS))
    by_hand.send(0, by_hand.fill(0))
    with pytest.raises(Unavailable, match="a source without a card sent a slot"):
        by_hand.receiver.wait_sealed(key_of(), WAIT_SECONDS)
    with hand_source(by_hand.receiver.endpoint) as again:
        again.send(by_hand.slots.card(DESTINATION))
        assert again.reply() == ReachedFrame(Reach.REACHED, "")
        again.send(by_hand.slots.card(DESTINATION))
        assert again.is_cut_off()


def test_a_changed_byte_in_a_slot_is_noticed_by_its_checksum(pair: Pair, network: FakeNetwork) -> None:
    network.gate.clear()
    pair.begin("turn-1", layers=1)
    assert network.posted.wait(WAIT_SECONDS)
    with pair.source_agent.out._changed:
        pair.source_agent.out.memory[5] ^= 1
    network.gate.set()
    with pytest.raises(TransferError, match="checksum is wrong"):
        pair.receiver.wait_sealed(key_of("turn-1"), WAIT_SECONDS)
    assert is_untouched(pair.cache)


def test_a_weighted_sum_notices_a_changed_word_and_two_that_change_places() -> None:
    payload = torch.randint(0, 256, (4096,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    words = payload.view(torch.int32)
    true = weighted_sum(payload)
    assert 0 <= true < 1 << 32
    position = torch.arange(1024, dtype=torch.int64)
    odd = (position * 0x3C6EF35F) | 1
    assert true == int((odd * words.to(torch.int64)).sum()) % (1 << 32)
    for changed in (0, 777, 4095):
        damaged = payload.clone()
        damaged[changed] ^= 1
        assert weighted_sum(damaged) != true
    swapped = payload.clone()
    swapped.view(torch.int32)[[3, 4]] = words[[4, 3]]
    assert weighted_sum(swapped) != true
