"""Ring pass-KV prefill, fused over sequences of any length (arXiv 2411.01783, algorithm 2).

Every rank keeps its queries; the packed KV of all sequences goes round the ring, N - 1 hops.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cp_core.attention.interface import AttentionBackend
from cp_core.attention.pair import KeyShard, RowPartial, attend_pair
from cp_core.layout.prefill_plan import PrefillPlan
from cp_core.ring.packing import pack_keys, unpack_keys
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
    """The parts of this rank's queries: result[source][sequence]. The next KV travels while this one is attended.

    q_of_sequence[i][T, H, D] are this rank's queries, keys_of_sequence[i] its keys. Raises Unavailable.
    """
    rank, size = transport.rank, transport.size
    queries = plan.of_rank(rank)
    parts: list[SequenceParts] = [[] for _ in range(size)]
    keys = keys_of_sequence
    if size > 1:
        message = pack_keys(keys_of_sequence, keys_of_sequence[0].new.k)
        # The packed copy exists anyway: where the cache is in pieces it takes fewer calls.
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
