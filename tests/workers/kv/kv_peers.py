"""Caches with known content, and peers that speak the KV protocol by hand."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from ringserve.cp_core.layout.reshard import KvPiece
from ringserve.cp_core.layout.shards import ShardMap, TokenRange
from ringserve.cp_core.transport.peer_tls import PeerTls
from ringserve.workers.kv.cache import KvCache
from ringserve.workers.kv.frames import PREFIX, Frame, LayerFrame, RefusedFrame, decode_header, decode_prefix, encode
from ringserve.workers.kv.pulls import PullAgent
from ringserve.workers.kv.receiver import KvReceiver
from ringserve.workers.kv.sender import KvSender
from ringserve.workers.kv.staging import SlotPool
from ringserve.workers.protocol.transfers import KvExpect, KvPart, KvSend, TransferKey
from tests.waiting import WAIT_SECONDS

NUM_LAYERS, NUM_BLOCKS, BLOCK_TOKENS, NUM_KV_HEADS, HEAD_DIM = 3, 48, 4, 2, 8
SOURCE, DESTINATION = "prefill-0/1", "decode-0/1"


def cache_of(dtype: torch.dtype = torch.float32, *, heads: range = range(NUM_KV_HEADS)) -> KvCache:
    """Make a cache full of NaN."""
    return KvCache(
        num_layers=NUM_LAYERS,
        num_blocks=NUM_BLOCKS,
        block_tokens=BLOCK_TOKENS,
        num_kv_heads=len(heads),
        head_dim=HEAD_DIM,
        dtype=dtype,
        head_start=heads.start,
        poisoned=True,
    )


def key_of(transfer_id: str = "turn-1", *, attempt: int = 1) -> TransferKey:
    return TransferKey(transfer_id, attempt, SOURCE, DESTINATION)


def shuffled_blocks(count: int, seed: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).sample(range(NUM_BLOCKS), count))


@dataclass(frozen=True)
class Truth:
    """Known KV of every position of a sequence: k and v are [layers, positions, K, D]."""

    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def random(cls, num_tokens: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Truth:
        generator = torch.Generator().manual_seed(seed)
        k, v = torch.randn(2, NUM_LAYERS, num_tokens, NUM_KV_HEADS, HEAD_DIM, generator=generator).to(dtype)
        return cls(k, v)

    def store(self, cache: KvCache, blocks: Sequence[int], positions: Sequence[int], *, first: int = 0) -> None:
        for layer in range(NUM_LAYERS):
            self.store_layer(cache, layer, blocks, positions, first=first)

    def store_layer(
        self, cache: KvCache, layer: int, blocks: Sequence[int], positions: Sequence[int], *, first: int = 0
    ) -> None:
        heads = slice(cache.heads.start, cache.heads.stop)
        chosen = torch.tensor(positions, dtype=torch.int64)
        cache.write(layer, blocks, first, self.k[layer, chosen, heads], self.v[layer, chosen, heads])

    def check(self, cache: KvCache, blocks: Sequence[int], positions: Sequence[int], *, first: int = 0) -> None:
        """Check that these positions are stored from stored index `first` on, and that every other slot is NaN."""
        heads = slice(cache.heads.start, cache.heads.stop)
        chosen = torch.tensor(positions, dtype=torch.int64)
        slots = cache.index(cache.runs(blocks, len(positions), first=first)) if positions else chosen
        for layer in range(NUM_LAYERS):
            for stored, truth in ((cache.k_layers[layer], self.k[layer]), (cache.v_layers[layer], self.v[layer])):
                assert torch.equal(stored[slots], truth[chosen, heads])
                others = torch.ones(len(stored), dtype=torch.bool)
                others[slots] = False
                assert stored[others].isnan().all()

    def payload(self, layer: int, positions: Sequence[int]) -> bytes:
        """Return the payload of a layer frame of these positions, all heads."""
        chosen = torch.tensor(positions, dtype=torch.int64)
        both = torch.stack([self.k[layer, chosen], self.v[layer, chosen]]).contiguous()
        return both.view(torch.uint8).numpy().tobytes()


TOKENS = 10
BLOCKS = (7, 3, 30)
TRUTH = Truth.random(TOKENS)
LAYER_BYTES = len(TRUTH.payload(0, range(TOKENS)))


def is_untouched(cache: KvCache) -> bool:
    return all(bool(tensor.isnan().all()) for tensor in (*cache.k_layers, *cache.v_layers))


def positions_of(shards: ShardMap, rank: int) -> list[int]:
    return [position for item in shards.ranks[rank] for position in range(item.start, item.stop)]


def expect_of(key: TransferKey, num_tokens: int, blocks: tuple[int, ...], *, stored_start: int = 0) -> KvExpect:
    """Expect all positions [0, num_tokens) on one rank."""
    return KvExpect(key, (TokenRange(0, num_tokens),), stored_start, blocks)


def send_of(key: TransferKey, endpoint: str, num_tokens: int, blocks: tuple[int, ...]) -> KvSend:
    """Send all positions [0, num_tokens) from one rank to one rank."""
    return KvSend(key, blocks, (KvPart(endpoint, (KvPiece(TokenRange(0, num_tokens), 0, 0, NUM_KV_HEADS),)),))


def layer_frame(key: TransferKey, layer: int, pieces: Sequence[tuple[int, int]], dtype: str = "float32") -> LayerFrame:
    starts, counts = np.array(pieces, dtype=np.int64).reshape(-1, 2).T
    return LayerFrame(key, layer, dtype, 0, NUM_KV_HEADS, starts, counts)


def receive_exactly(connection: socket.socket, count: int) -> bytes:
    received = bytearray()
    while len(received) < count:
        part = connection.recv(count - len(received))
        assert part, "the peer closed the connection"
        received += part
    return bytes(received)


def receive_frame(connection: socket.socket) -> tuple[Frame, int]:
    """Receive the next frame -> (frame, bytes of payload that follow)."""
    header_bytes, payload_bytes = decode_prefix(receive_exactly(connection, PREFIX.size))
    return decode_header(receive_exactly(connection, header_bytes), payload_bytes), payload_bytes


class HandSource:
    """Source whose test writes every frame."""

    def __init__(self, endpoint: str) -> None:
        host, port = endpoint.split(":")
        self.connection = socket.create_connection((host, int(port)), timeout=WAIT_SECONDS)

    def send(self, frame: Frame, payload: bytes = b"") -> None:
        self.connection.sendall(encode(frame, len(payload)) + payload)

    def send_rows(self, truth: Truth, layer: int, pieces: Sequence[tuple[int, int]], *, name: str = "turn-1") -> None:
        """Send a layer of the positions of these (start, count) pieces."""
        positions = [position for start, count in pieces for position in range(start, start + count)]
        self.send(layer_frame(key_of(name), layer, pieces), truth.payload(layer, positions))

    def send_whole(self, truth: Truth, *, name: str = "turn-1") -> None:
        """Send every layer of every position."""
        for layer in range(NUM_LAYERS):
            self.send_rows(truth, layer, [(0, truth.k.shape[1])], name=name)

    def reply(self) -> Frame:
        return receive_frame(self.connection)[0]

    def refusal(self) -> RefusedFrame:
        reply = self.reply()
        assert isinstance(reply, RefusedFrame)
        return reply

    def is_cut_off(self) -> bool:
        """Wait for the receiver to end the connection."""
        try:
            return self.connection.recv(1) == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self.connection.close()


class HandDestination:
    """Destination whose test reads and answers every frame."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        # Connections inherit the buffer's size, so an unread one blocks its sender soon on every machine.
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        self.listener.settimeout(WAIT_SECONDS)
        self.endpoint = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.connection: socket.socket | None = None

    def accept(self) -> None:
        self.connection, _ = self.listener.accept()
        self.connection.settimeout(WAIT_SECONDS)

    def receive(self) -> tuple[Frame, bytes]:
        assert self.connection is not None
        frame, payload_bytes = receive_frame(self.connection)
        return frame, receive_exactly(self.connection, payload_bytes)

    def receive_until(self, wanted: bytes) -> bytes:
        """Receive until these bytes have come -> everything so far."""
        assert self.connection is not None
        received = bytearray()
        while wanted not in received:
            part = self.connection.recv(1 << 16)
            assert part, "the source ended the connection before"
            received += part
        return bytes(received)

    def drain(self) -> bytes:
        """Receive everything until the source ends the connection."""
        assert self.connection is not None
        received = bytearray()
        while part := self.connection.recv(1 << 16):
            received += part
        return bytes(received)

    def reply(self, frame: Frame) -> None:
        assert self.connection is not None
        self.connection.sendall(encode(frame))

    def hang_up(self) -> None:
        assert self.connection is not None
        self.connection.close()

    def close(self) -> None:
        self.listener.close()
        if self.connection is not None:
            self.connection.close()


def receiving(
    cache: KvCache,
    *,
    port: int = 0,
    tls: PeerTls | None = None,
    greeting_seconds: float = WAIT_SECONDS,
    agent: PullAgent | None = None,
    stall_seconds: float = WAIT_SECONDS,
) -> closing[KvReceiver]:
    return closing(
        KvReceiver(
            cache,
            DESTINATION,
            port=port,
            tls=tls,
            greeting_seconds=greeting_seconds,
            agent=agent,
            stall_seconds=stall_seconds,
        )
    )


def sending(
    cache: KvCache,
    *,
    tls: PeerTls | None = None,
    agent: PullAgent | None = None,
    stall_seconds: float = WAIT_SECONDS,
    held_bytes: int = 0,
) -> closing[KvSender]:
    return closing(KvSender(cache, SOURCE, tls=tls, agent=agent, stall_seconds=stall_seconds, held_bytes=held_bytes))


@dataclass(frozen=True)
class Way:
    """Way of KV between ranks: plain sockets, sockets with TLS, or NIXL on host memory, by slots of a few tokens.

    Layers are sent together once they have `held_bytes`.
    """

    tls: PeerTls | None = None
    is_nixl: bool = False
    held_bytes: int = 0

    @contextmanager
    def receiving(self, cache: KvCache) -> Iterator[KvReceiver]:
        with ExitStack() as stack:
            agent = self._agent(stack, DESTINATION)
            yield stack.enter_context(receiving(cache, tls=self.tls, agent=agent))

    @contextmanager
    def sending(self, cache: KvCache) -> Iterator[KvSender]:
        with ExitStack() as stack:
            agent = self._agent(stack, SOURCE)
            sender = stack.enter_context(sending(cache, tls=self.tls, agent=agent, held_bytes=self.held_bytes))
            yield sender
            if agent is not None:
                assert sender.counts.socket_bytes == sender.counts.fallbacks == 0
                wait_for_slots(agent.out, agent.out.num_slots)

    def _agent(self, stack: ExitStack, name: str) -> PullAgent | None:
        if not self.is_nixl:
            return None
        device = torch.device("cpu")
        return stack.enter_context(closing(PullAgent(name, device, slot_bytes=SLOT_BYTES, is_required=True)))


SLOT_BYTES = 4096


def wait_for_slots(pool: SlotPool, num_slots: int) -> None:
    """Wait until as many slots are free."""
    with pool._changed:
        assert pool._changed.wait_for(lambda: len(pool._free) == num_slots, WAIT_SECONDS), f"{pool._free} are free"


def hand_source(endpoint: str) -> closing[HandSource]:
    return closing(HandSource(endpoint))


def hand_destination() -> closing[HandDestination]:
    return closing(HandDestination())


def check_transfer(receiver: KvReceiver, cache: KvCache, tls: PeerTls | None, *, name: str = "afterwards") -> None:
    """Check that a whole transfer of a new sender arrives in the receiver's cache."""
    source, key = cache_of(), key_of(name)
    TRUTH.store(source, BLOCKS, range(TOKENS))
    with sending(source, tls=tls) as sender:
        receiver.expect(expect_of(key, TOKENS, BLOCKS))
        sender.send_all(send_of(key, receiver.endpoint, TOKENS, BLOCKS), WAIT_SECONDS)
    receiver.wait_sealed(key, WAIT_SECONDS)
    TRUTH.check(cache, BLOCKS, range(TOKENS))
