"""Attention of one layer of a prefill step on one rank of a ring: fused sequences, full or partial prefill, exact.

Shapes: T new tokens of this rank over all sequences, S stored tokens, H query heads, K key/value heads,
D head dimension, N ranks. On a rank the new tokens of a sequence lie together, its low chunk before its high chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cp_core.attention.partial import AttentionBackend, KeyShard, merge_rows
from cp_core.errors import ConfigError
from cp_core.layout.step_plans import KvRun, PrefillPlan, split_new
from cp_core.ring.pass_kv import pass_kv
from cp_core.ring.pass_q import pass_q
from cp_core.transport.interface import RingTransport


def ring_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cached: Sequence[Sequence[KvRun]],
    plan: PrefillPlan,
    transport: RingTransport,
    backend: AttentionBackend,
    scale: float,
    algorithm: str,
) -> torch.Tensor:
    """Return out[T, H, D], in q's dtype, of q[T, H, D] over cached and new keys of all ranks; k, v[T, K, D] are new.

    `cached[i]` are this rank's runs of sequence i without its new tokens; they are attended in place. `algorithm` is
    "pass_kv" or "pass_q" (arXiv 2411.01783, algorithms 2 and 3). Both give the same bits where a rank's cached tokens
    of each sequence are one run; otherwise they differ by at most 4e-7 of max |v|. Every rank calls with the same plan
    and algorithm: N - 1 exchanges, and in pass-Q one all-to-all.

    Raises Unavailable when a peer is lost, FloatingPointError when a log-sum-exp is NaN, ConfigError for another
    algorithm.
    """
    shards = plan.of_rank(transport.rank)
    num_new = plan.new_on(transport.rank)
    assert len(cached) == len(plan.sequences), f"{len(cached)} cached sequences for {len(plan.sequences)} planned"
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        assert tensor.shape[0] == num_new, f"{name} has {tensor.shape[0]} tokens, the plan says {num_new}"
    if algorithm not in ("pass_kv", "pass_q"):
        raise ConfigError(f"algorithm is {algorithm!r}; allowed are pass_kv, pass_q")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not plan.sequences:
        return out

    q_of_sequence = split_new(q, shards)
    keys_of_sequence = [
        KeyShard(shard, runs, KvRun(k_new, v_new))
        for shard, runs, k_new, v_new in zip(shards, cached, split_new(k, shards), split_new(v, shards), strict=True)
    ]
    if algorithm == "pass_kv":
        parts = pass_kv(q_of_sequence, keys_of_sequence, plan, transport, backend, scale)
    else:
        parts = pass_q(q.contiguous(), keys_of_sequence, plan, transport, backend, scale)

    for index, (shard, out_rows) in enumerate(zip(shards, split_new(out, shards), strict=True)):
        merge_rows([part for source in parts for part in source[index]], shard, out_rows)
    return out
