"""KV sender: destinations that refuse, stall or disconnect, and transfers abandoned by the source."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
import torch

from ringserve.cp_core.errors import StaleIncarnation, TransferError, Unavailable
from ringserve.cp_core.layout.reshard import KvPiece
from ringserve.cp_core.layout.shards import TokenRange
from ringserve.workers.kv.cache import KvCache
from ringserve.workers.kv.frames import (
    AbandonFrame,
    LayerFrame,
    RefusedFrame,
    SettledFrame,
    SettleFrame,
    TransferFrame,
)
from ringserve.workers.kv.sender import (
    DestinationConnection,
    KvSender,
    Lane,
    OutgoingTransfer,
    WrittenLayer,
    together,
)
from ringserve.workers.protocol.transfers import KvPart, KvSend, TransferReport
from tests.waiting import WAIT_SECONDS
from tests.workers.kv.kv_peers import (
    BLOCK_TOKENS,
    BLOCKS,
    LAYER_BYTES,
    NUM_KV_HEADS,
    NUM_LAYERS,
    SOURCE,
    TOKENS,
    TRUTH,
    HandDestination,
    cache_of,
    expect_of,
    hand_destination,
    key_of,
    receiving,
    send_of,
    sending,
)


@pytest.fixture
def cache() -> KvCache:
    cache = cache_of()
    TRUTH.store(cache, BLOCKS, range(TOKENS))
    return cache


@pytest.fixture
def sender(cache: KvCache) -> Iterator[KvSender]:
    with sending(cache) as sender:
        yield sender


@pytest.fixture
def destination() -> Iterator[HandDestination]:
    with hand_destination() as destination:
        yield destination


def begin_and_send_layers(sender: KvSender, destination: HandDestination, num_layers: int = NUM_LAYERS) -> None:
    sender.begin(send_of(key_of(), destination.endpoint, TOKENS, BLOCKS))
    for layer in range(num_layers):
        sender.layer_ready(key_of(), layer)
    destination.accept()


# --- frames ----------------------------------------------------------------------------------------------------------


def test_a_layer_leaves_when_it_is_ready_and_not_before(sender: KvSender, destination: HandDestination) -> None:
    sender.begin(send_of(key_of(), destination.endpoint, TOKENS, BLOCKS))
    for layer in (1, 0, 2):
        sender.layer_ready(key_of(), layer)
        if destination.connection is None:
            destination.accept()
        frame, payload = destination.receive()
        assert isinstance(frame, LayerFrame)
        assert (frame.layer, frame.starts.tolist(), frame.counts.tolist()) == (layer, [0], [TOKENS])
        assert payload == TRUTH.payload(layer, range(TOKENS))


class NotedLane:
    """Carrier that notes the layers which it is to send."""

    def __init__(self) -> None:
        self.layers: list[int] = []

    def send_layers(self, transfer: object, part: object, layers: Sequence[WrittenLayer]) -> None:
        self.layers += [layer for layer, _ in layers]

    def settle(self, transfer: object) -> None: ...
    def release(self, transfer: object) -> None: ...
    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("held_bytes", "sent"),
    [(0, [[1], [1, 0], [1, 0, 2]]), (2 * LAYER_BYTES, [[], [1, 0], [1, 0, 2]]), (1 << 40, [[], [], [1, 0, 2]])],
)
def test_layers_leave_together_once_they_have_bytes_enough_or_are_all(
    held_bytes: int, sent: list[list[int]], cache: KvCache
) -> None:
    """A share that was begun later holds its own, and what an abandoned transfer holds is never sent."""
    lane = NotedLane()
    with closing(KvSender(cache, SOURCE, open_lane=lambda _: lane, held_bytes=held_bytes)) as sender:
        for name in ("given up", "turn-1"):
            sender.begin(send_of(key_of(name), "anywhere:1", TOKENS, BLOCKS))
        if held_bytes:
            sender.layer_ready(key_of("given up"), 0)
        sender.abandon(key_of("given up"))
        for layer, wanted in zip((1, 0, 2), sent, strict=True):
            sender.layer_ready(key_of(), layer)
            assert lane.layers == wanted


def test_small_layers_that_leave_together_share_a_frame(cache: KvCache, destination: HandDestination) -> None:
    with sending(cache, held_bytes=1 << 30) as sender:
        begin_and_send_layers(sender, destination)
        frame, payload = destination.receive()
        assert isinstance(frame, LayerFrame)
        assert frame.layers == range(NUM_LAYERS)
        assert payload == b"".join(TRUTH.payload(layer, range(TOKENS)) for layer in range(NUM_LAYERS))


@pytest.mark.parametrize(
    ("layers", "most", "groups"),
    [
        ([0, 1, 2], 2, [range(2), range(2, 3)]),
        ([0, 1, 3], 8, [range(2), range(3, 4)]),
        ([1, 0, 2], 8, [range(1, 2), range(1), range(2, 3)]),
        ([5], 1, [range(5, 6)]),
        ([], 1, []),
    ],
)
def test_neighbouring_layers_are_grouped_in_their_order(layers: list[int], most: int, groups: list[range]) -> None:
    assert [group for group, _ in together([(layer, None) for layer in layers], most)] == groups


def test_finish_asks_and_returns_when_the_destination_has_confirmed(
    sender: KvSender, destination: HandDestination
) -> None:
    begin_and_send_layers(sender, destination)
    with ThreadPoolExecutor(1) as pool:
        finishing = pool.submit(sender.finish, key_of(), WAIT_SECONDS)
        frames = [destination.receive()[0] for _ in range(NUM_LAYERS + 1)]
        assert frames[-1] == SettleFrame(key_of())
        assert not finishing.done()
        destination.reply(SettledFrame(key_of(), NUM_LAYERS * LAYER_BYTES))
        assert finishing.result(WAIT_SECONDS).payload_bytes == NUM_LAYERS * LAYER_BYTES
    assert sender.num_open == 0


def test_a_long_piece_is_cut_into_frames_that_together_are_the_piece() -> None:
    cache = KvCache(num_layers=1, num_blocks=2048, block_tokens=BLOCK_TOKENS, num_kv_heads=4, head_dim=64)
    other = KvCache(num_layers=1, num_blocks=2048, block_tokens=BLOCK_TOKENS, num_kv_heads=4, head_dim=64)
    k, v = torch.randn(2, 8000, 4, 64)
    cache.write(0, range(48, 2048), 0, k, v)
    piece = KvPiece(TokenRange(100, 8100), 0, 0, 4)
    with receiving(other) as receiver, sending(cache) as sender:
        receiver.expect(dataclasses.replace(expect_of(key_of(), 0, tuple(range(2048))), ranges=(piece.tokens,)))
        send = KvSend(key_of(), tuple(range(48, 2048)), (KvPart(receiver.endpoint, (piece,)),))
        assert sender.send_all(send, WAIT_SECONDS).payload_bytes == 2 * 8000 * 4 * 64 * 4
        receiver.wait_sealed(key_of(), WAIT_SECONDS)
    arrived = other.read(0, range(2048), 0, 8000)
    assert torch.equal(arrived.k, k)
    assert torch.equal(arrived.v, v)


def test_scattered_pieces_of_a_shard_travel_in_one_frame(sender: KvSender, destination: HandDestination) -> None:
    pieces = tuple(KvPiece(TokenRange(3 * number, 3 * number + 1), number, 0, NUM_KV_HEADS) for number in range(TOKENS))
    sender.begin(KvSend(key_of(), BLOCKS, (KvPart(destination.endpoint, pieces),)))
    sender.layer_ready(key_of(), 0)
    destination.accept()
    frame, payload = destination.receive()
    assert isinstance(frame, LayerFrame)
    assert frame.starts.tolist() == [3 * number for number in range(TOKENS)]
    assert payload == TRUTH.payload(0, range(TOKENS))


# --- failures of the destination -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("is_stale", "error"), [(True, StaleIncarnation), (False, TransferError)])
def test_a_refusal_ends_finish_at_once_with_the_peers_reason(
    sender: KvSender, destination: HandDestination, is_stale: bool, error: type[Exception]
) -> None:
    begin_and_send_layers(sender, destination, num_layers=1)
    with ThreadPoolExecutor(1) as pool:
        # Two layers never become ready, so that only the refusal can end this.
        finishing = pool.submit(sender.finish, key_of(), WAIT_SECONDS)
        destination.receive()
        destination.reply(RefusedFrame(key_of(), is_stale, "we met in another life"))
        with pytest.raises(error, match="we met in another life"):
            finishing.result(WAIT_SECONDS)


def test_fewer_bytes_confirmed_than_sent_is_an_error(sender: KvSender, destination: HandDestination) -> None:
    begin_and_send_layers(sender, destination)
    with ThreadPoolExecutor(1) as pool:
        finishing = pool.submit(sender.finish, key_of(), WAIT_SECONDS)
        for _ in range(NUM_LAYERS + 1):
            destination.receive()
        destination.reply(SettledFrame(key_of(), 64))
        with pytest.raises(TransferError, match=f"64 of {NUM_LAYERS * LAYER_BYTES} bytes arrived"):
            finishing.result(WAIT_SECONDS)


def test_a_destination_that_goes_away_ends_finish_at_once(sender: KvSender, destination: HandDestination) -> None:
    begin_and_send_layers(sender, destination)
    with ThreadPoolExecutor(1) as pool:
        finishing = pool.submit(sender.finish, key_of(), WAIT_SECONDS)
        for _ in range(NUM_LAYERS + 1):
            destination.receive()
        destination.hang_up()
        with pytest.raises(Unavailable, match=r"the KV receiver at .* is gone: the peer closed the connection"):
            finishing.result(WAIT_SECONDS)


def test_a_destination_that_does_not_answer_is_unavailable(sender: KvSender) -> None:
    with hand_destination() as gone:
        endpoint = gone.endpoint
    with pytest.raises(Unavailable, match=f"the KV receiver at {endpoint} cannot be reached"):
        sender.send_all(send_of(key_of(), endpoint, TOKENS, BLOCKS), WAIT_SECONDS)


def test_a_reply_that_is_no_frame_ends_the_connection(sender: KvSender, destination: HandDestination) -> None:
    begin_and_send_layers(sender, destination)
    destination.receive()
    assert destination.connection is not None
    destination.connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with pytest.raises(Unavailable, match="is gone: not a KV frame"):
        sender.finish(key_of(), WAIT_SECONDS)


def test_a_broken_connection_is_replaced_for_the_next_transfer(cache: KvCache, sender: KvSender) -> None:
    other = cache_of()
    with receiving(other) as receiver:
        endpoint = receiver.endpoint
        receiver.expect(expect_of(key_of(), TOKENS, BLOCKS))
        sender.send_all(send_of(key_of(), endpoint, TOKENS, BLOCKS), WAIT_SECONDS)
    with pytest.raises(Unavailable):
        sender.send_all(send_of(key_of("meanwhile"), endpoint, TOKENS, BLOCKS), WAIT_SECONDS)
    again = cache_of()
    with receiving(again, port=int(endpoint.split(":")[1])) as receiver:
        receiver.expect(expect_of(key_of("again"), TOKENS, BLOCKS))
        sender.send_all(send_of(key_of("again"), endpoint, TOKENS, BLOCKS), WAIT_SECONDS)
        receiver.wait_sealed(key_of("again"), WAIT_SECONDS)
    TRUTH.check(again, BLOCKS, range(TOKENS))


def test_one_transfer_that_is_refused_does_not_hold_up_another(cache: KvCache, sender: KvSender) -> None:
    other = cache_of()
    with receiving(other) as receiver:
        receiver.expect(expect_of(key_of("good"), TOKENS, BLOCKS))
        for transfer_id in ("bad", "good"):
            sender.begin(send_of(key_of(transfer_id), receiver.endpoint, TOKENS, BLOCKS))
        for layer in range(NUM_LAYERS):
            sender.layer_ready(key_of("bad"), layer)
            sender.layer_ready(key_of("good"), layer)
        sender.finish(key_of("good"), WAIT_SECONDS)
        receiver.wait_sealed(key_of("good"), WAIT_SECONDS)
        with pytest.raises(TransferError, match="'bad' attempt 1 is not expected here"):
            sender.finish(key_of("bad"), WAIT_SECONDS)
    TRUTH.check(other, BLOCKS, range(TOKENS))


# --- failures of the source ------------------------------------------------------------------------------------------


def test_layers_that_never_become_ready_end_finish_at_its_timeout(
    sender: KvSender, destination: HandDestination
) -> None:
    begin_and_send_layers(sender, destination, num_layers=1)
    with pytest.raises(TransferError, match=f"has {NUM_LAYERS - 1} parts that were not sent in time"):
        sender.finish(key_of(), 0.05)
    destination.receive()
    assert destination.receive()[0] == AbandonFrame(key_of(), "it was abandoned")


def test_abandoning_tells_the_destination_and_ends_finish(sender: KvSender, destination: HandDestination) -> None:
    begin_and_send_layers(sender, destination)
    with ThreadPoolExecutor(1) as pool:
        finishing = pool.submit(sender.finish, key_of(), WAIT_SECONDS)
        for _ in range(NUM_LAYERS + 1):
            destination.receive()
        sender.abandon(key_of())
        sender.abandon(key_of())
        with pytest.raises(TransferError, match="was abandoned"):
            finishing.result(WAIT_SECONDS)
    assert destination.receive()[0] == AbandonFrame(key_of(), "it was abandoned")
    # Later layers of the running step are ignored.
    sender.layer_ready(key_of(), 0)
    assert sender.num_open == 0


def test_of_an_abandoned_transfer_no_frame_is_sent_after_the_one_under_way(
    cache: KvCache, destination: HandDestination, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, releasing, gate = (threading.Event() for _ in range(3))
    send, release = DestinationConnection.send, Lane.release

    def send_at_gate(connection: DestinationConnection, frame: TransferFrame, payload: list[memoryview]) -> None:
        begun.set()
        assert gate.wait(WAIT_SECONDS)
        send(connection, frame, payload)

    def note_release(lane: Lane, transfer: OutgoingTransfer) -> None:
        releasing.set()
        release(lane, transfer)

    monkeypatch.setattr(DestinationConnection, "send", send_at_gate)
    monkeypatch.setattr(Lane, "release", note_release)
    monkeypatch.setattr("ringserve.workers.kv.sender.FRAME_BYTES", LAYER_BYTES)
    with sending(cache, held_bytes=1 << 30) as sender, ThreadPoolExecutor(1) as pool:
        begin_and_send_layers(sender, destination)
        assert begun.wait(WAIT_SECONDS)
        abandoning = pool.submit(sender.abandon, key_of())
        assert releasing.wait(WAIT_SECONDS)
        gate.set()
        abandoning.result(WAIT_SECONDS)
        frame, _ = destination.receive()
        assert isinstance(frame, LayerFrame)
        assert frame.layers == range(1)
        assert destination.receive()[0] == AbandonFrame(key_of(), "it was abandoned")


def big_cache() -> KvCache:
    """Make 32 MiB of KV in one layer: more than socket buffers hold, so the send blocks until the peer reads."""
    cache = KvCache(num_layers=1, num_blocks=2048, block_tokens=16, num_kv_heads=2, head_dim=64)
    cache.k_layers[0].fill_(1.0)
    cache.v_layers[0].fill_(1.0)
    return cache


BIG_TOKENS, BIG_BLOCKS = 2048 * 16, tuple(range(2048))


def test_no_block_is_read_after_finish_gave_up_on_a_destination_that_takes_nothing() -> None:
    cache = big_cache()
    with sending(cache) as sender, hand_destination() as destination:
        sender.begin(send_of(key_of(), destination.endpoint, BIG_TOKENS, BIG_BLOCKS))
        sender.layer_ready(key_of(), 0)
        destination.accept()
        ones, nans = (torch.full((8,), value).view(torch.uint8).numpy().tobytes() for value in (1.0, torch.nan))
        received = destination.receive_until(ones)  # by then the sender reads the blocks
        with pytest.raises(TransferError, match="has 1 parts that were not sent in time"):
            sender.finish(key_of(), 0.0)
        cache.k_layers[0].fill_(torch.nan)
        cache.v_layers[0].fill_(torch.nan)
        sender.close()
        received += destination.drain()
    assert nans not in received
    assert len(received) < cache.k_layers[0].nbytes + cache.v_layers[0].nbytes


def test_a_stuck_destination_does_not_hold_up_another() -> None:
    with sending(big_cache()) as sender, hand_destination() as stuck, receiving(big_cache()) as receiver:
        sender.begin(send_of(key_of("stuck"), stuck.endpoint, BIG_TOKENS, BIG_BLOCKS))
        sender.layer_ready(key_of("stuck"), 0)
        stuck.accept()
        receiver.expect(expect_of(key_of("quick"), BIG_TOKENS, BIG_BLOCKS))
        sender.send_all(send_of(key_of("quick"), receiver.endpoint, BIG_TOKENS, BIG_BLOCKS), WAIT_SECONDS)
        receiver.wait_sealed(key_of("quick"), WAIT_SECONDS)
        with pytest.raises(TransferError, match="has 1 parts that were not sent in time"):
            sender.finish(key_of("stuck"), 0.05)


@pytest.mark.parametrize(
    ("piece", "fault"),
    [
        (KvPiece(TokenRange(0, 4), 9, 0, NUM_KV_HEADS), "3 blocks do not hold the stored indices 9 to 12"),
        (KvPiece(TokenRange(0, 4), 0, 1, 3), r"KV heads \[1, 3\) are not on this rank"),
    ],
)
def test_pieces_that_are_not_on_this_rank_fail_the_transfer(
    sender: KvSender, destination: HandDestination, piece: KvPiece, fault: str
) -> None:
    send = KvSend(key_of(), BLOCKS, (KvPart(destination.endpoint, (piece,)),))
    with pytest.raises(TransferError, match=fault):
        sender.send_all(send, WAIT_SECONDS)


def test_pieces_that_do_not_ascend_fail_the_transfer(sender: KvSender, destination: HandDestination) -> None:
    pieces = (KvPiece(TokenRange(4, 6), 0, 0, 2), KvPiece(TokenRange(0, 2), 2, 0, 2))
    with pytest.raises(TransferError, match="do not ascend"):
        sender.send_all(KvSend(key_of(), BLOCKS, (KvPart(destination.endpoint, pieces),)), WAIT_SECONDS)


def test_an_endpoint_that_is_none_fails_the_transfer(sender: KvSender) -> None:
    with pytest.raises(Unavailable, match="endpoint 'nowhere' is not allowed; it must be HOST:PORT"):
        sender.send_all(send_of(key_of(), "nowhere", TOKENS, BLOCKS), WAIT_SECONDS)


def test_a_layer_that_no_share_waits_for_is_a_bug_and_says_so(sender: KvSender, destination: HandDestination) -> None:
    begin_and_send_layers(sender, destination, num_layers=1)
    with pytest.raises(TransferError, match="does not wait for layer 0"):
        sender.layer_ready(key_of(), 0)


def test_a_transfer_of_another_life_of_the_ring_is_not_begun(sender: KvSender) -> None:
    stale = dataclasses.replace(key_of(), source="prefill-0/0")
    with pytest.raises(StaleIncarnation, match=f"names source 'prefill-0/0', this is '{SOURCE}'"):
        sender.begin(KvSend(stale, (), ()))


def test_finishing_what_was_not_begun_is_an_error(sender: KvSender) -> None:
    with pytest.raises(TransferError, match="was not begun here"):
        sender.finish(key_of(), 1.0)


def test_closing_fails_what_is_open_and_leaves_no_thread(cache: KvCache) -> None:
    before = set(threading.enumerate())
    with sending(cache) as sender, hand_destination() as destination:
        begin_and_send_layers(sender, destination)
        with ThreadPoolExecutor(1) as pool:
            finishing = pool.submit(sender.finish, key_of(), WAIT_SECONDS)
            for _ in range(NUM_LAYERS + 1):
                destination.receive()
            sender.close()
            with pytest.raises(TransferError, match="was abandoned"):
                finishing.result(WAIT_SECONDS)
        with pytest.raises(Unavailable, match="the KV sender is closed"):
            sender.begin(send_of(key_of("late"), destination.endpoint, TOKENS, BLOCKS))
    assert set(threading.enumerate()) <= before


def test_a_report_counts_bytes_and_the_time_they_took(cache: KvCache, sender: KvSender) -> None:
    with receiving(cache_of()) as receiver:
        receiver.expect(expect_of(key_of(), TOKENS, BLOCKS))
        sent = sender.send_all(send_of(key_of(), receiver.endpoint, TOKENS, BLOCKS), WAIT_SECONDS)
        received = receiver.wait_sealed(key_of(), WAIT_SECONDS)
    assert isinstance(sent, TransferReport)
    assert sent.payload_bytes == received.payload_bytes == NUM_LAYERS * LAYER_BYTES
    assert 0 < received.seconds < WAIT_SECONDS
    assert 0 < sent.seconds < WAIT_SECONDS
