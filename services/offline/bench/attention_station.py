"""One rank of the attention bench: the same layer by our rings, by torch's own ring, and by one plain call.

T tokens of this rank, H query heads, K KV heads, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.tensor.experimental import _attention as torch_attention

from cp_core.attention.interface import select_backend
from cp_core.layout.shards import balanced_layout, level_counts
from cp_core.ring.prefill import KvRun, PrefillPlan, SequencePlan, ring_prefill
from cp_core.transport.rendezvous import find_store
from services.offline.bench.figures import GEMM
from services.offline.bench.ring_processes import RING_TIMEOUT_SECONDS, Seat
from services.offline.bench.sample import Sample, timed, timed_gemm

PASS_KV = "pass-KV"
PASS_Q = "pass-Q"
TORCH_GATHER = "torch all-gather"
TORCH_SHIFT = "torch all-to-all"
SDPA = "SDPA"
RINGS = {PASS_KV: "pass_kv", PASS_Q: "pass_q"}
TORCH_RINGS = {TORCH_GATHER: "allgather", TORCH_SHIFT: "alltoall"}

# fp32 on the same inputs; the two sum in another order.
MOST_DIFFERENCE = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class AttentionTask:
    """`what` over `tokens` new tokens of the whole ring after `cached` ones, `repeats` times.

    Only our own rings know cached tokens; `threads` only matter to SDPA.
    """

    what: str
    tokens: int
    cached: int = 0
    repeats: int = 1
    threads: int = 1


class AttentionStation:
    """A rank with inputs of its own. Whatever is compared is checked to give the same output."""

    def __init__(self, shape: AttentionShape, seat: Seat) -> None:
        self._shape = shape
        self._seat = seat
        self._backend = select_backend("auto", "cpu", torch.float32)
        self._prepared: tuple[int, int] | None = None
        self._plan: PrefillPlan
        self._q: Tensor
        self._k: Tensor
        self._v: Tensor
        self._cached: list[KvRun]
        self._expected: Tensor | None = None
        if seat.num_ranks > 1:
            store = PrefixStore("torch", find_store(seat.host, seat.port, RING_TIMEOUT_SECONDS))
            distributed.init_process_group("gloo", store=store, rank=seat.rank, world_size=seat.num_ranks)

    def measure(self, task: AttentionTask) -> Sample:
        if task.what == GEMM:
            return timed_gemm(self._seat.transport)
        self._prepare(task.tokens, task.cached)
        outs: list[Tensor] = []

        def attend() -> None:
            outs[:] = [self._attend(task.what)]

        torch.set_num_threads(task.threads)
        sample = timed(self._seat.transport, attend, task.repeats)
        torch.set_num_threads(1)
        self._check(task.what, outs[0])
        return sample

    def close(self) -> None:
        if distributed.is_initialized():
            distributed.destroy_process_group()

    def _prepare(self, tokens: int, cached: int) -> None:
        """Draw q[T,H,D], k and v[T,K,D] of this rank and what it has cached; the same for all contenders of a size."""
        if self._prepared == (tokens, cached):
            return
        size, rank, shape = self._seat.num_ranks, self._seat.rank, self._shape
        held = level_counts((0,) * size, cached)
        layout = balanced_layout(cached, tokens, held)
        self._plan = PrefillPlan((SequencePlan(layout, held),))
        generator = torch.Generator().manual_seed(rank)

        def draw(count: int, heads: int) -> Tensor:
            return torch.randn(count, heads, shape.head_dim, generator=generator)

        num_new = layout.tokens_on(rank)
        self._q = draw(num_new, shape.num_heads)
        self._k, self._v = (draw(num_new, shape.num_kv_heads) for _ in range(2))
        self._cached = [KvRun(*(draw(held[rank], shape.num_kv_heads) for _ in range(2)))]
        self._prepared, self._expected = (tokens, cached), None

    def _attend(self, what: str) -> Tensor:
        """-> [T,H,D]."""
        if what in RINGS:
            return ring_prefill(
                self._q,
                self._k,
                self._v,
                [self._cached],
                self._plan,
                self._seat.transport,
                self._backend,
                self._shape.head_dim**-0.5,
                RINGS[what],
            )
        # torch's layout is [1, heads, tokens, D].
        q, k, v = (rows.transpose(0, 1).unsqueeze(0) for rows in (self._q, self._k, self._v))
        if what == SDPA:
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            out = self._torch_ring(TORCH_RINGS[what], q, k, v)
        return out.squeeze(0).transpose(0, 1)

    def _torch_ring(self, rotation: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Private, and without types: what `context_parallel` calls, without its dispatcher."""
        private: Any = torch_attention
        private.set_rotate_method(rotation)
        out: Tensor = private._templated_ring_attention(
            distributed.group.WORLD, 2, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, q, k, v, True
        )[0]
        return out

    def _check(self, what: str, out: Tensor) -> None:
        if self._expected is None:
            self._expected = out
        difference = float((out - self._expected).abs().max())
        assert difference <= MOST_DIFFERENCE, f"{what} differs from the others by {difference:g}"
