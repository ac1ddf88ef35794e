"""Attention of one layer of a prefill step on one rank of a ring: fused sequences, full or partial prefill, exact.

Shapes: T new tokens of this rank over all sequences, S stored tokens, H query heads, K key/value heads,
D head dimension, N ranks. On a rank the new tokens of a sequence lie together, in the order of their positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from cp_core.attention.partial import AttentionBackend, KeyShard, merge_rows
from cp_core.cost.model import GATHER_KV, PASS_KV, PASS_Q, PREFILL_ALGORITHMS, SP_NTP
from cp_core.errors import ConfigError
from cp_core.layout.step_plans import KvRun, PrefillPlan, split_new
from cp_core.ring.gather_kv import gather_kv
from cp_core.ring.pass_kv import pass_kv
from cp_core.ring.pass_q import pass_q
from cp_core.ring.sp_ntp import sp_ntp
from cp_core.transport.interface import RingTransport

Thin = Callable[[Sequence[torch.Tensor], Sequence[KeyShard], float], Sequence[KeyShard]]
"""Choice of keys in a sparse layer: (queries, keys, scale) -> keys that other ranks get; all by sequence."""


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
    thin: Thin | None = None,
) -> torch.Tensor:
    """Return out[T, H, D], in q's dtype, of q[T, H, D] over cached and new keys of all ranks; k, v[T, K, D] are new.

    `cached[i]` are this rank's runs of sequence i without its new tokens; they are attended in place. `algorithm` is
    one of PREFILL_ALGORITHMS. All but sp_ntp give the same bits where a rank's cached tokens of each sequence are one
    run; otherwise they differ by at most 4e-7 of max |v|. Every rank calls with the same plan and algorithm. Only what
    another rank sees is sent. `thin` makes the layer sparse, with pass_kv alone: it returns what other ranks get of
    this rank's keys, in the lengths of `plan.thinned`. Every rank calls with it or none.

    Raises Unavailable when a peer is lost, ConfigError for another algorithm.
    """
    shards = plan.of_rank(transport.rank)
    num_new = plan.new_on(transport.rank)
    assert len(cached) == len(plan.sequences), f"{len(cached)} cached sequences for {len(plan.sequences)} planned"
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        assert tensor.shape[0] == num_new, f"{name} has {tensor.shape[0]} tokens, the plan says {num_new}"
    if algorithm not in PREFILL_ALGORITHMS:
        raise ConfigError(f"algorithm is {algorithm!r}; allowed are {', '.join(PREFILL_ALGORITHMS)}")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not plan.sequences:
        return out

    q_of_sequence = split_new(q, shards)
    keys_of_sequence = [
        KeyShard(shard, runs, KvRun(k_new, v_new))
        for shard, runs, k_new, v_new in zip(shards, cached, split_new(k, shards), split_new(v, shards), strict=True)
    ]
    if algorithm == SP_NTP:
        sp_ntp(q_of_sequence, keys_of_sequence, plan, transport, backend, scale, split_new(out, shards))
        return out
    if thin is not None:
        assert algorithm == PASS_KV, f"a sparse layer by {algorithm}"
        thinned = thin(q_of_sequence, keys_of_sequence, scale)
        parts = pass_kv(q_of_sequence, keys_of_sequence, plan, transport, backend, scale, thinned)
    elif algorithm == PASS_Q:
        parts = pass_q(q.contiguous(), keys_of_sequence, plan, transport, backend, scale)
    else:
        attend = gather_kv if algorithm == GATHER_KV else pass_kv
        parts = attend(q_of_sequence, keys_of_sequence, plan, transport, backend, scale)
    for index, out_rows in enumerate(split_new(out, shards)):
        merge_rows([part for source in parts for part in source[index]], out_rows)
    return out
