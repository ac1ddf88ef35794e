"""Turns a reshard plan into what each source rank is told to send."""

from __future__ import annotations

from collections.abc import Sequence

from cp_core.layout import ShardMap, TokenRange
from cp_core.reshard import plan_reshard
from workers.steps import KvPart, KvSend, TransferKey


def sends_for(
    key: TransferKey,
    source: ShardMap,
    destination: ShardMap,
    tokens: TokenRange,
    *,
    blocks: Sequence[tuple[int, ...]],
    kv_endpoints: Sequence[str],
    num_kv_heads: int,
) -> list[KvSend]:
    """One `KvSend` per source rank that moves `tokens` from `source` to where `destination` wants them.

    Raises ReshardError when either map does not hold every token of `tokens` exactly once.
    """
    plan = plan_reshard(source, destination.within(tokens), tokens, num_kv_heads=num_kv_heads)
    parts: list[list[KvPart]] = [[] for _ in range(source.num_ranks)]
    for (source_rank, destination_rank), pieces in sorted(plan.pieces.items()):
        parts[source_rank].append(KvPart(kv_endpoints[destination_rank], tuple(pieces)))
    return [KvSend(key, table, tuple(own)) for table, own in zip(blocks, parts, strict=True)]
