"""KV transfers between rings through real sockets and by NIXL on host memory, checked bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch

from ringserve.cp_core.errors import TransferError
from ringserve.cp_core.layout.reshard import plan_reshard
from ringserve.cp_core.layout.shards import ShardMap, TokenRange, balanced_layout, spread
from ringserve.workers.kv.cache import KvCache
from ringserve.workers.kv.receiver import KvReceiver
from ringserve.workers.kv.sender import KvSender
from ringserve.workers.protocol.transfers import KvExpect, KvPart, KvSend, TransferReport
from tests.cp_core.layout.decoded import decoded
from tests.services.auth.certificates import Authority
from tests.waiting import WAIT_SECONDS
from tests.workers.kv.kv_peers import (
    BLOCK_TOKENS,
    NUM_BLOCKS,
    NUM_KV_HEADS,
    NUM_LAYERS,
    Truth,
    Way,
    cache_of,
    expect_of,
    key_of,
    positions_of,
    receiving,
    send_of,
    sending,
    shuffled_blocks,
)

NUM_BLOCKS_USED = 40
PLAIN = Way()


@pytest.fixture(params=["plain", "tls", "nixl", "layers together", "layers together by nixl"])
def way(request: pytest.FixtureRequest, authority: Authority) -> Way:
    tls = authority.peer() if request.param == "tls" else None
    return Way(tls, is_nixl="nixl" in request.param, held_bytes=1 << 30 if "together" in request.param else 0)


class Rings:
    """Source ring with a sequence and destination ring full of NaN, each rank with its own sockets."""

    def __init__(
        self,
        stack: ExitStack,
        source: ShardMap,
        destination: ShardMap,
        held: Sequence[int],
        dtype: torch.dtype,
        *,
        source_tp: int = 1,
        destination_tp: int = 1,
        way: Way = PLAIN,
    ) -> None:
        self.source, self.destination, self.held = source, destination, held
        self.source_tp, self.destination_tp = source_tp, destination_tp
        self.truth = Truth.random(source.num_tokens, dtype)
        self.sources = self._caches(source.num_ranks, source_tp, dtype)
        self.destinations = self._caches(destination.num_ranks, destination_tp, dtype)
        self.source_blocks = [
            shuffled_blocks(-(-count // BLOCK_TOKENS), seed) for seed, count in enumerate(source.held)
        ]
        self.destination_blocks = [
            shuffled_blocks(-(-(old + count) // BLOCK_TOKENS), seed + 10)
            for seed, (old, count) in enumerate(zip(held, destination.held, strict=True))
        ]
        self.receivers: list[KvReceiver] = [stack.enter_context(way.receiving(cache)) for cache in self.destinations]
        self.senders: list[KvSender] = [stack.enter_context(way.sending(cache)) for cache in self.sources]
        self.pool = stack.enter_context(ThreadPoolExecutor(8))

    @staticmethod
    def _caches(num_ranks: int, tp: int, dtype: torch.dtype) -> list[KvCache]:
        share = NUM_KV_HEADS // tp
        heads = [range(rank * share, (rank + 1) * share) for rank in range(tp)]
        return [cache_of(dtype, heads=heads[rank % tp]) for rank in range(num_ranks * tp)]

    def fill(self) -> None:
        for rank, cache in enumerate(self.sources):
            cp_rank = rank // self.source_tp
            self.truth.store(cache, self.source_blocks[cp_rank], positions_of(self.source, cp_rank))

    def expect(self) -> None:
        for rank, receiver in enumerate(self.receivers):
            cp_rank = rank // self.destination_tp
            ranges, blocks = self.destination.ranks[cp_rank], self.destination_blocks[cp_rank]
            receiver.expect(KvExpect(key_of(), tuple(ranges), self.held[cp_rank], blocks))

    def sends(self, tokens: TokenRange) -> list[KvSend]:
        plan = plan_reshard(
            self.source,
            self.destination.within(tokens),
            tokens,
            num_kv_heads=NUM_KV_HEADS,
            source_tp=self.source_tp,
            destination_tp=self.destination_tp,
        )
        return [
            KvSend(
                key_of(),
                self.source_blocks[rank // self.source_tp],
                tuple(
                    KvPart(self.receivers[route.destination].endpoint, route.pieces)
                    for route in plan.routes
                    if route.source == rank
                ),
            )
            for rank in range(len(self.senders))
        ]

    def seal(self) -> list[TransferReport]:
        return [receiver.wait_sealed(key_of(), WAIT_SECONDS) for receiver in self.receivers]

    def check(self) -> None:
        for rank, cache in enumerate(self.destinations):
            cp_rank = rank // self.destination_tp
            positions = positions_of(self.destination, cp_rank)
            self.truth.check(cache, self.destination_blocks[cp_rank], positions, first=self.held[cp_rank])

    def move(self, tokens: TokenRange) -> None:
        self.fill()
        self.expect()
        sent = list(
            self.pool.map(
                lambda pair: pair[0].send_all(pair[1], WAIT_SECONDS),
                zip(self.senders, self.sends(tokens), strict=True),
            )
        )
        sealed = self.seal()
        assert sum(report.payload_bytes for report in sent) == sum(report.payload_bytes for report in sealed)
        self.check()


def conversation(num_ranks: int) -> ShardMap:
    """Make the shards of two turns: a prefill of 37 tokens, 11 decoded tokens, and a prefill of 20."""
    first = balanced_layout(0, 37, (0,) * num_ranks).shard_map()
    answered = first.extend(decoded(37, 11, first.held))
    return answered.extend(balanced_layout(48, 20, answered.held).shard_map())


@pytest.mark.parametrize("num_destinations", [1, 2, 3])
@pytest.mark.parametrize("num_sources", [1, 2, 3])
def test_a_conversation_moves_between_rings_of_any_size_bit_for_bit(
    num_sources: int, num_destinations: int, way: Way
) -> None:
    source, held = conversation(num_sources), (5, 0, 3)[:num_destinations]
    with ExitStack() as stack:
        rings = Rings(stack, source, spread(0, 68, held), held, torch.float32, way=way)
        rings.move(TokenRange(0, 68))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_decoded_tokens_move_back_one_by_one_in_every_dtype(dtype: torch.dtype, way: Way) -> None:
    source = spread(0, 20, (0, 0)).extend(decoded(20, 60, (10, 10)))
    with ExitStack() as stack:
        destination = decoded(20, 60, (7, 9, 7))
        rings = Rings(stack, source, destination, (7, 9, 7), dtype, way=way)
        rings.move(TokenRange(20, 80))


def test_ranks_that_hold_or_want_nothing_take_part(way: Way) -> None:
    source = ShardMap.of(((), (TokenRange(0, 9),), ()))
    destination = ShardMap.of(((TokenRange(0, 9),), (), ()))
    with ExitStack() as stack:
        Rings(stack, source, destination, (0, 0, 4), torch.float32, way=way).move(TokenRange(0, 9))


def test_an_empty_transfer_is_sealed_at_once() -> None:
    with receiving(cache_of()) as receiver, sending(cache_of()) as sender:
        receiver.expect(KvExpect(key_of(), (), 0, ()))
        assert receiver.wait_sealed(key_of(), 0.0) == TransferReport(payload_bytes=0, seconds=0.0)
        report = sender.send_all(KvSend(key_of(), (), ()), 0.0)
        assert report == TransferReport(payload_bytes=0, seconds=0.0)


@pytest.mark.parametrize(("source_tp", "destination_tp"), [(1, 2), (2, 1), (2, 2)])
def test_heads_are_cut_anew_between_rings_of_different_tensor_parallelism(
    source_tp: int, destination_tp: int, way: Way
) -> None:
    with ExitStack() as stack:
        rings = Rings(
            stack,
            conversation(2),
            spread(0, 68, (1, 2)),
            (1, 2),
            torch.bfloat16,
            source_tp=source_tp,
            destination_tp=destination_tp,
            way=way,
        )
        rings.move(TokenRange(0, 68))


def test_chunks_stream_layer_by_layer_while_later_ones_are_not_computed_yet(way: Way) -> None:
    num_tokens, held = 60, (2, 0, 1)
    chunks = [TokenRange(0, 24), TokenRange(24, 41), TokenRange(41, 60)]
    source = ShardMap.empty(2)
    for chunk in chunks:
        source = source.extend(balanced_layout(chunk.start, len(chunk), source.held).shard_map())
    with ExitStack() as stack:
        rings = Rings(stack, source, spread(0, num_tokens, held), held, torch.float32, way=way)
        rings.expect()
        stored = [0, 0]
        for chunk in chunks:
            for sender, send in zip(rings.senders, rings.sends(chunk), strict=True):
                sender.begin(send)
            own = [positions_of(source.within(chunk), rank) for rank in range(2)]
            for layer in range(NUM_LAYERS):
                for rank, sender in enumerate(rings.senders):
                    cache, blocks = rings.sources[rank], rings.source_blocks[rank]
                    rings.truth.store_layer(cache, layer, blocks, own[rank], first=stored[rank])
                    sender.layer_ready(key_of(), layer)
            stored = [before + len(positions) for before, positions in zip(stored, own, strict=True)]
        for sender in rings.senders:
            sender.finish(key_of(), WAIT_SECONDS)
        rings.seal()
        rings.check()


def test_many_transfers_share_one_connection_and_do_not_mix(way: Way) -> None:
    blocks = shuffled_blocks(NUM_BLOCKS_USED, 3)
    truths = [Truth.random(BLOCK_TOKENS * 4, seed=number) for number in range(10)]
    source, destination = cache_of(), cache_of()
    with (
        way.receiving(destination) as receiver,
        way.sending(source) as sender,
        ThreadPoolExecutor(10) as pool,
    ):

        def move(number: int) -> None:
            own = blocks[number * 4 : number * 4 + 4]
            positions = range(BLOCK_TOKENS * 4)
            truths[number].store(source, own, positions)
            receiver.expect(expect_of(key_of(f"turn-{number}"), len(positions), own))
            sender.send_all(send_of(key_of(f"turn-{number}"), receiver.endpoint, len(positions), own), WAIT_SECONDS)
            receiver.wait_sealed(key_of(f"turn-{number}"), WAIT_SECONDS)

        list(pool.map(move, range(10)))
        assert receiver.num_open == sender.num_open == 0
    for layer in range(NUM_LAYERS):
        assert torch.equal(source.k_layers[layer].nan_to_num(7), destination.k_layers[layer].nan_to_num(7))
        assert torch.equal(source.v_layers[layer].nan_to_num(7), destination.v_layers[layer].nan_to_num(7))


@pytest.mark.parametrize("layers_before_drop", range(NUM_LAYERS + 1))
def test_blocks_of_a_dropped_transfer_belong_to_the_next_one_alone(layers_before_drop: int, way: Way) -> None:
    num_tokens = NUM_BLOCKS_USED * BLOCK_TOKENS
    positions, blocks = range(num_tokens), shuffled_blocks(NUM_BLOCKS_USED, 4)
    first, second = Truth.random(num_tokens, seed=1), Truth.random(num_tokens, seed=2)
    source, other_source, destination = cache_of(), cache_of(), cache_of()
    first.store(source, blocks, positions)
    second.store(other_source, blocks, positions)
    with (
        way.receiving(destination) as receiver,
        way.sending(source) as sender,
        way.sending(other_source) as other_sender,
    ):
        receiver.expect(expect_of(key_of("first"), num_tokens + 1, (*blocks, *unused(blocks))))
        sender.begin(send_of(key_of("first"), receiver.endpoint, num_tokens, blocks))
        for layer in range(layers_before_drop):
            sender.layer_ready(key_of("first"), layer)
        receiver.drop(key_of("first"))
        receiver.expect(expect_of(key_of("second"), num_tokens, blocks))
        for layer in range(layers_before_drop, NUM_LAYERS):
            sender.layer_ready(key_of("first"), layer)
        other_sender.send_all(send_of(key_of("second"), receiver.endpoint, num_tokens, blocks), WAIT_SECONDS)
        receiver.wait_sealed(key_of("second"), WAIT_SECONDS)
        with pytest.raises(TransferError, match=r"dropped by its destination|is not expected here"):
            sender.finish(key_of("first"), WAIT_SECONDS)
    second.check(destination, blocks, positions)


def unused(blocks: Sequence[int]) -> tuple[int, ...]:
    return tuple(block for block in range(NUM_BLOCKS) if block not in blocks)[:1]
