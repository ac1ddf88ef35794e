"""Head-parallel prefill: each rank attends a share of the heads for all tokens (SP-NTP of CSPS, arXiv 2409.15104).

One all-to-all brings q, k and v from shares of the tokens to shares of the heads, with the cached KV of those heads; a
second one brings finished outputs back, without LSE. KV at rest stays where its tokens are. Between pass-KV and pass-Q
in bytes at middle miss rates.

Shapes: T new tokens of this rank, P cached tokens, H query heads, K KV heads, h and k those of one rank's share, D head
dimension, N ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from cp_core.attention.partial import Accumulator, AttentionBackend, KeyShard, attend_pair, merge_rows
from cp_core.layout.head_shares import HeadShare, head_shares
from cp_core.layout.step_plans import KvRun, PrefillPlan, Shard
from cp_core.transport.interface import RingTransport


@dataclass(frozen=True, slots=True)
class SharePart:
    """One rank's tokens of one sequence, for one share of heads: q[T, h, D], new k and v[T, k, D], cached runs."""

    q: torch.Tensor
    new: KvRun
    cached: Sequence[KvRun]

    @classmethod
    def of_own(cls, q_thd: torch.Tensor, keys: KeyShard, share: HeadShare) -> SharePart:
        """Return views of this rank's own tokens."""
        kv = slice(share.kv_heads.start, share.kv_heads.stop)
        new, *cached = (KvRun(run.k[:, kv], run.v[:, kv]) for run in (keys.new, *keys.cached))
        return cls(q_thd[:, share.heads.start : share.heads.stop], new, cached)

    @classmethod
    def of_message(cls, rows: torch.Tensor, shard: Shard, share: HeadShare) -> SharePart:
        """Return views of what `packed` has put into rows[.., D]."""
        num_kv = len(share.kv_heads)
        counts = (shard.new * len(share.heads), *(shard.new * num_kv,) * 2, *(shard.cached * num_kv,) * 2)
        q, k, v, cached_k, cached_v = rows.split(counts)
        head_dim = rows.shape[1]

        def heads(part: torch.Tensor, count: int, tokens: int) -> torch.Tensor:
            return part.view(tokens, count, head_dim)

        return cls(
            heads(q, len(share.heads), shard.new),
            KvRun(heads(k, num_kv, shard.new), heads(v, num_kv, shard.new)),
            [KvRun(heads(cached_k, num_kv, shard.cached), heads(cached_v, num_kv, shard.cached))],
        )

    def packed(self) -> Iterator[torch.Tensor]:
        """Yield the tensors of the message, each [.., D]."""
        head_dim = self.q.shape[2]
        cached_k, cached_v = (run.k for run in self.cached), (run.v for run in self.cached)
        for tensor in (self.q, self.new.k, self.new.v, *cached_k, *cached_v):
            yield tensor.reshape(-1, head_dim)


def sp_ntp(
    q_of_sequence: Sequence[torch.Tensor],
    keys_of_sequence: Sequence[KeyShard],
    plan: PrefillPlan,
    transport: RingTransport,
    backend: AttentionBackend,
    scale: float,
    out_of_sequence: Sequence[torch.Tensor],
) -> None:
    """Fill out_of_sequence[i][T, H, D], this rank's rows, for its queries q_of_sequence[i][T, H, D].

    keys_of_sequence[i] are this rank's keys. A sequence whose keys no other rank's queries see is attended where it
    lies. Raises Unavailable.
    """
    rank, size = transport.rank, transport.size
    num_heads, head_dim = q_of_sequence[0].shape[1:]
    shares = head_shares(size, num_heads, keys_of_sequence[0].new.k.shape[1])
    spread = [index for index in range(len(plan.sequences)) if any(reach[index] for reach in plan.kv_reach)]
    nothing = q_of_sequence[0].new_empty(0, head_dim)

    def part(index: int, share: HeadShare) -> SharePart:
        return SharePart.of_own(q_of_sequence[index], keys_of_sequence[index], share)

    sends = [
        nothing
        if peer == rank
        else torch.cat([nothing, *(rows for index in spread for rows in part(index, share).packed())])
        for peer, share in enumerate(shares)
    ]
    served = shares[rank]
    counts = [[_num_sent(plan.of_rank(peer)[index], served) for index in spread] for peer in range(size)]
    arrived = [nothing.new_empty(0 if peer == rank else sum(each), head_dim) for peer, each in enumerate(counts)]
    work = transport.all_to_all(sends, arrived)
    for index in sorted(set(range(len(plan.sequences))) - set(spread)):
        whole = attend_pair(backend, q_of_sequence[index], plan.of_rank(rank)[index], keys_of_sequence[index], scale)
        merge_rows(whole, out_of_sequence[index])
    work.wait()

    answers: list[list[torch.Tensor]] = [[] for _ in range(size)]
    messages = [
        rows.split(each) if peer != rank else () for peer, (rows, each) in enumerate(zip(arrived, counts, strict=True))
    ]
    for place, index in enumerate(spread):
        shards = [plan.of_rank(peer)[index] for peer in range(size)]
        parts = [
            part(index, served) if peer == rank else SharePart.of_message(messages[peer][place], shards[peer], served)
            for peer in range(size)
        ]
        for peer, rows in enumerate(_attend_share(parts, shards, served, backend, scale)):
            answers[peer].append(rows)

    own_rows = [plan.of_rank(rank)[index].new for index in spread]
    backs = [
        nothing if peer == rank else torch.cat([nothing, *(each.reshape(-1, head_dim) for each in rows)])
        for peer, rows in enumerate(answers)
    ]
    returned = [
        nothing.new_empty(0 if peer == rank else sum(own_rows) * len(share.heads), head_dim)
        for peer, share in enumerate(shares)
    ]
    transport.all_to_all(backs, returned).wait()
    for peer, share in enumerate(shares):
        outs = (
            answers[rank]
            if peer == rank
            else returned[peer].view(sum(own_rows), len(share.heads), head_dim).split(own_rows)
        )
        for index, rows in zip(spread, outs, strict=True):
            out_of_sequence[index][:, share.heads.start : share.heads.stop] = rows


def _num_sent(shard: Shard, share: HeadShare) -> int:
    """Return the rows [.., D] that a rank with `shard` sends for a share."""
    return shard.new * len(share.heads) + 2 * shard.stored * len(share.kv_heads)


def _attend_share(
    parts: Sequence[SharePart], shards: Sequence[Shard], share: HeadShare, backend: AttentionBackend, scale: float
) -> list[torch.Tensor]:
    """Return out[T, h, D] of each rank's queries of one sequence, in q's dtype; parts[r], shards[r] are of rank r."""
    # Places of every range of positions: (first position, rank, first row there, rows).
    places = []
    for peer, shard in enumerate(shards):
        rows = accumulate(map(len, shard.ranges), initial=0)
        places += [(each.start, peer, row, len(each)) for each, row in zip(shard.ranges, rows, strict=False)]
    places.sort()

    def by_position(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([tensors[peer][row : row + count] for _, peer, row, count in places])

    q = by_position([each.q for each in parts])
    k, v = by_position([each.new.k for each in parts]), by_position([each.new.v for each in parts])
    cached = [run for each in parts for run in each.cached if run.k.shape[0]]
    out = torch.empty_like(q)
    for heads, kv_heads in share.runs():
        q_run, kv = q[:, heads.start : heads.stop], slice(kv_heads.start, kv_heads.stop)
        merged = Accumulator()
        for run in cached:
            merged.add(backend.partial_attention(q_run, run.k[:, kv], run.v[:, kv], causal=False, scale=scale))
        merged.add(backend.partial_attention(q_run, k[:, kv], v[:, kv], causal=True, scale=scale))
        out[:, heads.start : heads.stop] = merged.result().out
    outs = [torch.empty_like(each.q, memory_format=torch.contiguous_format) for each in parts]
    at = 0
    for _, peer, row, count in places:
        outs[peer][row : row + count] = out[at : at + count]
        at += count
    return outs
