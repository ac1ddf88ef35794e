"""Turns a reshard plan into what each source rank is told to send."""

from __future__ import annotations

from collections.abc import Sequence

from cp_core.layout.reshard import plan_reshard
from cp_core.layout.shards import ShardMap, TokenRange
from workers.protocol.steps import KvPart, KvSend, TransferKey


def sends_for(
    key: TransferKey,
    source: ShardMap,
    destination: ShardMap,
    tokens: TokenRange,
    *,
    blocks: Sequence[tuple[int, ...]],
    kv_endpoints: Sequence[str],
    num_kv_heads: int,
    source_tp: int = 1,
    destination_tp: int = 1,
) -> list[KvSend]:
    """One `KvSend` per source process that moves `tokens` from `source` to where `destination` wants them.

    `source`, `destination` and `blocks` are by cp rank; the `tp` processes of one share them. `kv_endpoints` and the
    result are by process (cp_rank * tp + tp_rank). Raises ReshardError when either map does not hold every token of
    `tokens` exactly once, or when a tp does not divide the KV heads.
    """
    plan = plan_reshard(
        source,
        destination.within(tokens),
        tokens,
        num_kv_heads=num_kv_heads,
        source_tp=source_tp,
        destination_tp=destination_tp,
    )
    parts: list[list[KvPart]] = [[] for _ in range(source.num_ranks * source_tp)]
    for (source_rank, destination_rank), pieces in sorted(plan.pieces.items()):
        parts[source_rank].append(KvPart(kv_endpoints[destination_rank], tuple(pieces)))
    return [KvSend(key, blocks[rank // source_tp], tuple(own)) for rank, own in enumerate(parts)]
