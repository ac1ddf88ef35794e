"""Ring pass-KV prefill, fused over sequences of any length (arXiv 2411.01783, algorithm 2).

Every rank keeps its queries. The packed KV of all sequences goes round the ring, N - 1 hops.

Shapes: T query tokens, S stored tokens, K key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cp_core.attention.partial import AttentionBackend, KeyShard, RowPartial, attend_pair
from cp_core.layout.step_plans import KvRun, PrefillPlan, Shard
from cp_core.transport.interface import RingTransport

SequenceParts = list[list[RowPartial]]


def pass_kv(
    q_of_sequence: Sequence[torch.Tensor],
    keys_of_sequence: Sequence[KeyShard],
    plan: PrefillPlan,
    transport: RingTransport,
    backend: AttentionBackend,
    scale: float,
) -> list[SequenceParts]:
    """Return the parts of this rank's queries: result[source][sequence]. The next KV is sent while one is attended.

    q_of_sequence[i][T, H, D] are this rank's queries, keys_of_sequence[i] its keys. Raises Unavailable.
    """
    rank, size = transport.rank, transport.size
    queries = plan.of_rank(rank)
    parts: list[SequenceParts] = [[] for _ in range(size)]
    keys = keys_of_sequence
    if size > 1:
        message = pack_keys(keys_of_sequence, keys_of_sequence[0].new.k)
        # The packed copy exists already, and takes fewer calls where the cache is in pieces.
        if any(len(shard.cached) > 1 for shard in keys_of_sequence):
            keys = unpack_keys(message, queries)
    for hop in range(size):
        source, following = (rank - hop) % size, (rank - hop - 1) % size
        is_last = hop == size - 1
        if not is_last:
            received = message.new_empty(2, plan.stored_on(following), *message.shape[2:])
            work = transport.exchange(message, (rank + 1) % size, received, (rank - 1) % size)
        parts[source] = [
            attend_pair(backend, q_thd, shard, held, scale)
            for q_thd, shard, held in zip(q_of_sequence, queries, keys, strict=True)
        ]
        if not is_last:
            work.wait()
            message = received
            keys = unpack_keys(message, plan.of_rank(following))
    return parts


def pack_keys(shards: Sequence[KeyShard], like: torch.Tensor) -> torch.Tensor:
    """Return [2, S, K, D]: k, then v, of all sequences' cached, low and high tokens. `like` is any k[.., K, D]."""
    num_stored = sum(keys.shard.stored for keys in shards)
    packed = like.new_empty(2, num_stored, *like.shape[1:])
    at = 0
    for keys in shards:
        for run in (*keys.cached, keys.new):
            stop = at + run.k.shape[0]
            packed[0, at:stop] = run.k
            packed[1, at:stop] = run.v
            at = stop
    assert at == num_stored, f"{at} tokens for a message of {num_stored}"
    return packed


def unpack_keys(packed: torch.Tensor, shards: Sequence[Shard]) -> list[KeyShard]:
    """Return views of each sequence's keys in a packed[2, S, K, D] that holds the given shards."""
    keys = []
    at = 0
    for shard in shards:
        new, stop = at + shard.cached, at + shard.stored
        keys.append(
            KeyShard(
                shard, [KvRun(packed[0, at:new], packed[1, at:new])], KvRun(packed[0, new:stop], packed[1, new:stop])
            )
        )
        at = stop
    return keys
