"""Helpers: sequences cut over the ranks of an in-process ring, prefilled or decoded, and put together again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TypeVar

import torch

from ringserve.cp_core.attention.partial import AttentionBackend
from ringserve.cp_core.attention.torch_cpu import TorchCpuFlash
from ringserve.cp_core.layout.shards import PrefillLayout, ShardMap, TokenRange, coalesce
from ringserve.cp_core.layout.sparsity import Sparsity
from ringserve.cp_core.layout.step_plans import KvRun, PrefillPlan, SequencePlan
from ringserve.cp_core.ring.prefill import RingPrefill
from ringserve.cp_core.transport.inprocess import InProcessRing
from ringserve.cp_core.transport.interface import RingTransport, TransportStats, Work
from tests.oracles import Tokens
from tests.waiting import WAIT_SECONDS

Answer = TypeVar("Answer")


def on_every_rank(transports: Sequence[RingTransport], act: Callable[[RingTransport], Answer]) -> list[Answer]:
    """Run `act` on one thread a rank. The first failure closes the ring, so that no rank waits for a dead one."""

    def guarded(transport: RingTransport) -> Answer:
        try:
            return act(transport)
        except BaseException:
            for each in transports:
                each.close()
            raise

    with ThreadPoolExecutor(len(transports)) as pool:
        futures = [pool.submit(guarded, transport) for transport in transports]
        return [future.result(timeout=WAIT_SECONDS) for future in futures]


class PoisoningTransport:
    """Transport that fills every tensor with NaN before it is received: a missing message shows in the result."""

    def __init__(self, inner: RingTransport) -> None:
        self._inner = inner
        self.rank = inner.rank
        self.size = inner.size
        self.stats = inner.stats
        self.is_on_stream = inner.is_on_stream

    def exchange(self, send: torch.Tensor, dst: int, recv: torch.Tensor, src: int) -> Work:
        return self._inner.exchange(send, dst, recv.fill_(torch.nan), src)

    def all_to_all(self, send: Sequence[torch.Tensor], recv: Sequence[torch.Tensor]) -> Work:
        return self._inner.all_to_all(send, [each.fill_(torch.nan) for each in recv])

    def gather_all(self, send: torch.Tensor, recv: Sequence[torch.Tensor]) -> Work:
        return self._inner.gather_all(send, [each if each is send else each.fill_(torch.nan) for each in recv])

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        return self._inner.broadcast(tensor if source == self.rank else tensor.fill_(torch.nan), source)

    def await_event(self, event: torch.Event) -> None:
        self._inner.await_event(event)

    def close(self) -> None:
        self._inner.close()


@dataclass(frozen=True)
class PlacedSequence:
    """Sequence whose first tokens are cached: position p on rank `cached_owner[p]`, in runs of `run` tokens."""

    tokens: Tokens
    layout: PrefillLayout
    cached_owner: tuple[int, ...]
    run: int = 1 << 30
    sparsity: Sparsity | None = None

    @property
    def plan(self) -> SequencePlan:
        cached = tuple(self.cached_owner.count(rank) for rank in range(self.layout.num_ranks))
        tail = ShardMap.of(
            coalesce(TokenRange(place, place + 1) for place, owner in enumerate(self.cached_owner) if owner == rank)
            for rank in range(self.layout.num_ranks)
        )
        return SequencePlan(self.layout, cached, sparsity=self.sparsity, tail=tail)

    def new_positions(self, rank: int) -> list[int]:
        return [position for each in self.layout.ranges[rank] for position in range(each.start, each.stop)]

    def cached_runs(self, rank: int) -> list[KvRun]:
        """Return views of one strided cache tensor, so that runs are no more contiguous than a paged cache's."""
        positions = [p for p, owner in enumerate(self.cached_owner) if owner == rank]
        cache = torch.stack([self.tokens.k[positions], self.tokens.v[positions]], dim=1)
        return [
            KvRun(cache[at : at + self.run, 0], cache[at : at + self.run, 1])
            for at in range(0, len(positions), self.run)
        ]


@dataclass(frozen=True)
class PrefillResult:
    """Output `outs[i][T_i, H, D]` of each sequence's new tokens by position, and each rank's transport counts."""

    outs: list[torch.Tensor]
    stats: list[TransportStats] = field(default_factory=list)


def prefill_on_threads(
    sequences: Sequence[PlacedSequence],
    size: int,
    algorithm: str,
    scale: float,
    backend: AttentionBackend | None = None,
    transports: Sequence[RingTransport] = (),
    order: Sequence[int] = (),
    num_segments: int = 1,
    layer: int = 0,
    num_layers: int = 1,
    window: int = 0,
    sink: torch.Tensor | None = None,
) -> PrefillResult:
    """Run one layer over the given ring, or else an in-process one of `size` ranks.

    A chain takes `order`, sp_ntp takes `num_segments`. The layer has this window and sink[H].
    """
    plan = PrefillPlan(tuple(sequence.plan for sequence in sequences), tuple(order), num_segments)
    transports = [PoisoningTransport(each) for each in transports or InProcessRing(size).transports]
    shape = sequences[0].tokens if sequences else Tokens(*(torch.zeros(0, 2, 64),) * 3)

    def act(transport: RingTransport) -> torch.Tensor:
        rank = transport.rank

        def pack(pick: Callable[[Tokens], torch.Tensor]) -> torch.Tensor:
            rows = [pick(each.tokens)[each.new_positions(rank)] for each in sequences]
            return torch.cat([pick(shape)[:0], *rows])

        windows, sinks = [window] * num_layers, [sink] * num_layers
        ring = RingPrefill(plan, transport, backend or TorchCpuFlash(), algorithm, num_layers, 0, windows, sinks)
        cached = [each.cached_runs(rank) for each in sequences]
        q, k, v = (pack(attrgetter(name)) for name in ("q", "k", "v"))
        out = ring.attend(layer, q, k, v, lambda _: cached, scale)
        ring.finish()
        return out

    outs = on_every_rank(transports, act)
    joined = [
        torch.full((each.layout.num_tokens, *each.tokens.q.shape[1:]), torch.nan, dtype=each.tokens.q.dtype)
        for each in sequences
    ]
    for rank, out in enumerate(outs):
        at = 0
        for each, whole in zip(sequences, joined, strict=True):
            positions = torch.tensor(each.new_positions(rank), dtype=torch.long) - each.layout.start
            whole[positions] = out[at : at + len(positions)]
            at += len(positions)
        assert at == out.shape[0]
    return PrefillResult(joined, [transport.stats for transport in transports])
