"""Choice of keys in sparse prefill: other ranks get a few fixed ones and those that sampled queries attend to most.

In every sparse layer the ranks first exchange the queries at a few positions of each sequence, including its last. Each
rank then sums the attention that each of its keys gets from these queries. For each KV head and each partition (see
layout.sparsity) it chooses the first keys, the newest keys and those with the largest sums. CSPS (arXiv 2409.15104)
does not say who scores the keys; decision 0032 compares rules. The first and the last layer are exact. RingPrefill
makes a chooser for each step with sparse sequences.

Shapes: T new tokens of this rank, S stored tokens, M sampled queries, H query heads, K KV heads, G = H // K, D head
dimension, C chosen keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ringserve.cp_core.attention.partial import KeyShard
from ringserve.cp_core.layout.sparsity import sampled_rows
from ringserve.cp_core.layout.step_plans import KvRun, PrefillPlan, SequencePlan, Shard
from ringserve.cp_core.ring.pass_kv import pack_keys
from ringserve.cp_core.transport.interface import RingTransport

SCORED_AT_ONCE = 16
"""Sampled queries scored at a time: each needs H * S numbers in memory."""


class KeyChooser:
    """Chooser of keys for all layers of one step on one rank. RingPrefill makes it."""

    def __init__(self, plan: PrefillPlan, transport: RingTransport, num_layers: int) -> None:
        self._plan = plan
        self._transport = transport
        self._sparse = [index for index, sequence in enumerate(plan.sequences) if sequence.is_sparse]
        self._is_needed = bool(self._sparse) and transport.size > 1
        self._last_layer = num_layers - 1
        # (row, position) of every sampled query, by sparse sequence, then rank.
        self._sampled = [
            [list(sampled_rows(plan.sequences[index].layout, rank)) for rank in range(transport.size)]
            for index in self._sparse
        ]

    def is_sparse(self, layer: int) -> bool:
        """Return whether other ranks get only some of the keys in a layer."""
        return self._is_needed and 0 < layer < self._last_layer

    def thin(
        self, q_of_sequence: Sequence[torch.Tensor], keys_of_sequence: Sequence[KeyShard], scale: float
    ) -> list[KeyShard]:
        """Choose the keys that other ranks get from this rank, by sequence. Collective. Raises Unavailable."""
        thinned = list(keys_of_sequence)
        for index, ranks, q_mhd in zip(self._sparse, self._sampled, self._gather(q_of_sequence), strict=True):
            keys, sequence = keys_of_sequence[index], self._plan.sequences[index]
            if not keys.shard.stored:
                continue
            packed = pack_keys([keys], keys.new.k)
            positions = [position for rows in ranks for _, position in rows]
            importance = importance_of(q_mhd, packed[0], keys.shard, positions, scale)
            thinned[index] = _chosen_keys(packed, importance, sequence, keys.shard, self._transport.rank)
        return thinned

    def _gather(self, q_of_sequence: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Gather every sparse sequence's sampled queries q[M, H, D], in rank order."""
        rank, size = self._transport.rank, self._transport.size
        own = torch.cat(
            [
                q_of_sequence[index][[row for row, _ in ranks[rank]]]
                for index, ranks in zip(self._sparse, self._sampled, strict=True)
            ]
        )
        counts = [[len(ranks[source]) for ranks in self._sampled] for source in range(size)]
        received = [
            own if source == rank else own.new_empty(sum(each), *own.shape[1:]) for source, each in enumerate(counts)
        ]
        self._transport.gather_all(own, received).wait()
        split = [rows.split(each) for rows, each in zip(received, counts, strict=True)]
        return [torch.cat([rows[place] for rows in split]) for place in range(len(self._sparse))]


def importance_of(
    q_mhd: torch.Tensor, k_skd: torch.Tensor, shard: Shard, positions: Sequence[int], scale: float
) -> torch.Tensor:
    """Return the attention that each stored key gets from the sampled queries at `positions`, as fp32[K, S].

    It is summed over queries and over the query heads of a KV head. Each head of a query adds 1 in total to the keys of
    this shard that the query sees.
    """
    num_kv_heads, group = k_skd.shape[1], q_mhd.shape[1] // k_skd.shape[1]
    device, total = k_skd.device, torch.zeros(num_kv_heads, k_skd.shape[0], device=k_skd.device)
    places = torch.cat(
        [torch.full((shard.cached,), -1), *(torch.arange(each.start, each.stop) for each in shard.ranges)]
    ).to(device)
    k_k1ds = k_skd.float().permute(1, 2, 0)[:, None]
    for q_part, at in zip(q_mhd.split(SCORED_AT_ONCE), torch.tensor(positions).split(SCORED_AT_ONCE), strict=True):
        q_kgmd = q_part.float().unflatten(1, (num_kv_heads, group)).permute(1, 2, 0, 3)
        unseen_ms = places > at.to(device)[:, None]
        weights = (q_kgmd @ k_k1ds * scale).masked_fill_(unseen_ms, -torch.inf).softmax(dim=-1)
        # The softmax of a query that sees no key here is NaN; it counts as 0.
        total += weights.masked_fill_(unseen_ms, 0.0).sum(dim=(1, 2))
    return total


def _chosen_keys(
    packed: torch.Tensor, importance: torch.Tensor, sequence: SequencePlan, shard: Shard, rank: int
) -> KeyShard:
    """Return the chosen keys of packed[2, S, K, D], in stored order, as many as other ranks expect."""
    sparsity, thinned = sequence.sparsity, sequence.thinned(rank)
    assert sparsity is not None, "the sequence is not sparse"
    chosen, begin = [], 0
    for length in (shard.cached, *map(len, shard.ranges)):
        scores = importance[:, begin : begin + length].clone()
        scores[:, : sparsity.sinks] = torch.inf
        scores[:, max(0, length - sparsity.window) :] = torch.inf
        best = scores.topk(sparsity.chosen(length), dim=1, sorted=False).indices
        chosen.append(begin + best.sort(dim=1).values)
        begin += length
    index_ck = torch.cat(chosen, dim=1).T
    runs = packed.gather(1, index_ck[None, :, :, None].expand(2, -1, -1, packed.shape[3]))
    new = KvRun(runs[0, thinned.cached :], runs[1, thinned.cached :])
    return KeyShard(thinned, [KvRun(runs[0, : thinned.cached], runs[1, : thinned.cached])], new)
