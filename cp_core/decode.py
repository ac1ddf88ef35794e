"""One layer's attention of a decode step over sharded KV (vLLM RFC #26133: every rank has every query).

Shapes: B sequences with one new token each, S stored tokens, H query heads, K key/value heads, D head dimension,
N ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cp_core.attention import AttentionBackend, Partial, empty_partial
from cp_core.merge import Accumulator, finished_out, merge
from cp_core.packing import PartialBuffer
from cp_core.prefill_plan import KvRun
from cp_core.transport import RingTransport


def sharded_decode(
    q: torch.Tensor,
    shards: Sequence[Sequence[KvRun]],
    transport: RingTransport,
    backend: AttentionBackend,
    scale: float,
) -> torch.Tensor:
    """out[B, H, D], in q's dtype and with the same bits on every rank, of q[B, H, D].

    `shards[i]` are this rank's runs of sequence i, the new token's KV among them on the rank that stores it; a shard
    may be empty. The ranks' partials are gathered (one gather, none if B is 0 or N is 1) and merged in rank order.
    Raises Unavailable when a peer is lost, FloatingPointError when a log-sum-exp is NaN.
    """
    batch, num_heads, head_dim = q.shape
    assert len(shards) == batch, f"{len(shards)} shards for a batch of {batch}"
    if not batch:
        return torch.empty_like(q)
    buffers = [PartialBuffer(batch, num_heads, head_dim, q.device) for _ in range(transport.size)]
    own = buffers[transport.rank]
    own.fill([_attend_shard(q[row : row + 1], runs, backend, scale) for row, runs in enumerate(shards)])
    if transport.size > 1:
        transport.gather_all(own.flat, [buffer.flat for buffer in buffers]).wait()
    return finished_out(merge([Partial(buffer.out, buffer.lse) for buffer in buffers])).to(q.dtype)


def _attend_shard(q_1hd: torch.Tensor, runs: Sequence[KvRun], backend: AttentionBackend, scale: float) -> Partial:
    """The part of one rank. A single run, the common case, is left to the last merge to check."""
    filled = [run for run in runs if run.k.shape[0]]
    if len(filled) == 1:
        return backend.partial_attention(q_1hd, filled[0].k, filled[0].v, causal=False, scale=scale)
    if not filled:
        return empty_partial(q_1hd)
    merged = Accumulator()
    for run in filled:
        merged.add(backend.partial_attention(q_1hd, run.k, run.v, causal=False, scale=scale))
    return merged.result()
