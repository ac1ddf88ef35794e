"""Moves of retained KV between rings, as tests ask for them and look at the result."""

from __future__ import annotations

import uuid

import torch
from torch import Tensor

from ringserve.orchestration.decode.leader import DecodeLeader
from ringserve.orchestration.prefill.leader import PrefillLeader
from ringserve.orchestration.protocol.turns import TakeKv
from ringserve.workers.kv.cache import slots_of

Leader = PrefillLeader | DecodeLeader


def take(source: Leader, kv_id: str, *, transfer_id: str = "", deadline: float = 30.0) -> TakeKv:
    """Return the request to take over all that a ring retains under an id."""
    return TakeKv(
        transfer_id=transfer_id or f"move-{uuid.uuid4().hex}",
        attempt=1,
        kv_id=kv_id,
        num_tokens=source.ring.pool.num_retained(kv_id),
        source_role=source.settings.role,
        source_endpoint=source.endpoint,
        source_incarnation=source.ring.incarnation,
        deadline_seconds=deadline,
    )


def kv_of(leader: Leader, kv_id: str) -> Tensor:
    """Return the KV of all retained tokens by position: [T, 2 * layers, K, D]."""
    sequence = leader.ring.pool.get(kv_id)
    assert sequence is not None
    tp, size = leader.settings.ranks.tp, leader.settings.ranks.block_tokens
    by_position: dict[int, Tensor] = {}
    for rank, ranges in enumerate(sequence.shards.ranks):
        positions = [position for part in ranges for position in range(part.start, part.stop)]
        caches = [port.worker.parts.cache for port in leader.ring.ranks[rank * tp : (rank + 1) * tp]]  # type: ignore[attr-defined]
        slots = torch.from_numpy(slots_of(sequence.table(rank), torch.arange(len(positions)).numpy(), size))
        shares = [torch.stack([layer[slots] for layer in (*cache.k_layers, *cache.v_layers)], 1) for cache in caches]
        by_position |= dict(zip(positions, torch.cat(shares, dim=2), strict=True))
    assert sorted(by_position) == list(range(len(by_position))), "each position once"
    return torch.stack([by_position[position] for position in sorted(by_position)])
