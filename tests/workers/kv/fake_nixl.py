"""NIXL of one process without NIXL: READs are copies of memory, and tests hold them back or let them fail."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing

import torch

from ringserve.workers.kv.nixl_agent import Disconnected, NixlAgent, NixlRead, Unfinished
from ringserve.workers.kv.pulls import PullAgent
from ringserve.workers.kv.receiver import KvReceiver
from ringserve.workers.kv.sender import KvSender
from tests.waiting import WAIT_SECONDS
from tests.workers.kv.kv_peers import (
    BLOCKS,
    DESTINATION,
    NUM_LAYERS,
    SLOT_BYTES,
    SOURCE,
    TOKENS,
    TRUTH,
    cache_of,
    expect_of,
    key_of,
    receiving,
    send_of,
    sending,
)


class FakeNetwork:
    """Network of agents. READs of slots wait while `gate` is closed; `fail` decides about each by its number."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.posted = threading.Event()
        self.num_reads = 0
        self.names: set[str] = set()
        self.removed: list[str] = []
        self.fail: Callable[[int], Exception | None] = lambda number: None

    def agent(
        self, name: str, *, num_slots: int = 4, slot_bytes: int = SLOT_BYTES, is_required: bool = True
    ) -> PullAgent:
        device = torch.device("cpu")
        return PullAgent(
            name,
            device,
            slot_bytes=slot_bytes,
            num_slots=num_slots,
            is_required=is_required,
            make=lambda own, _: FakeNixl(self, own),
        )

    def open_agent(self, name: str) -> closing[PullAgent]:
        return closing(self.agent(name))


class FakeNixl(NixlAgent):
    """Agent in a `FakeNetwork`. Its metadata are its name."""

    def __init__(self, network: FakeNetwork, name: str) -> None:
        self._network = network
        self._name = name
        network.names.add(name)

    def register(self, memory: torch.Tensor) -> None:
        assert memory.is_contiguous()

    def metadata(self) -> bytes:
        return self._name.encode()

    def add(self, name: str, metadata: bytes) -> None:
        if metadata.decode() not in self._network.names:
            raise Disconnected("nobody has this name")
        if metadata.decode() != name:
            raise Disconnected(f"its metadata are those of {metadata.decode()!r}")

    def remove(self, name: str) -> None:
        self._network.removed.append(name)

    def read(self, peer: str, here: torch.Tensor, address: int, device: str, device_index: int) -> NixlRead:
        network = self._network
        # Words are read by 8 bytes, probes by 64; payloads of tests are longer.
        if here.nbytes > 64:
            network.num_reads += 1
            error = network.fail(network.num_reads)
            if isinstance(error, Disconnected):
                raise error
            if error is not None:
                raise Unfinished(str(error), NixlRead((here, address)))
            network.posted.set()
        read = NixlRead((here, address))
        self.look(read)
        return read

    def look(self, read: NixlRead) -> None:
        here, address = read.handle
        if self._network.gate.is_set() or here.nbytes <= 64:
            ctypes.memmove(here.data_ptr(), address, here.nbytes)
            read.is_done = True

    def progress(self) -> None:
        """Do nothing: reads need no help."""

    def close(self) -> None:
        self._network.names.discard(self._name)


class Pair:
    """Source with a sequence of `TRUTH` and empty destination, each with an agent of the network."""

    def __init__(self, stack: ExitStack, network: FakeNetwork, *, stall_seconds: float = WAIT_SECONDS) -> None:
        self.source_agent, self.agent = (
            stack.enter_context(network.open_agent(name)) for name in (SOURCE, DESTINATION)
        )
        self.source, self.cache = cache_of(), cache_of()
        TRUTH.store(self.source, BLOCKS, range(TOKENS))
        self.receiver: KvReceiver = stack.enter_context(
            receiving(self.cache, agent=self.agent, stall_seconds=stall_seconds)
        )
        self.sender: KvSender = stack.enter_context(sending(self.source, agent=self.source_agent))

    def begin(self, name: str, *, blocks: tuple[int, ...] = BLOCKS, layers: int = NUM_LAYERS) -> None:
        self.receiver.expect(expect_of(key_of(name), TOKENS, blocks))
        self.sender.begin(send_of(key_of(name), self.receiver.endpoint, TOKENS, BLOCKS))
        for layer in range(layers):
            self.sender.layer_ready(key_of(name), layer)

    def finish(self, name: str) -> None:
        self.sender.finish(key_of(name), WAIT_SECONDS)
        self.receiver.wait_sealed(key_of(name), WAIT_SECONDS)
