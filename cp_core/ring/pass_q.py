"""Ring pass-Q prefill of sequences of any length in one step (arXiv 2411.01783, algorithm 3).

Every rank keeps its KV. The packed queries travel round the ring, N - 1 hops, and each sequence's queries stop at the
last rank whose keys they see. One all-to-all returns the partial results to the queries' owners. This is cheaper than
pass-KV if few new tokens follow many cached tokens. RingPrefill calls it for each layer; it keeps nothing between
calls.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ringserve.cp_core.attention.partial import (
    AttentionBackend,
    KeyShard,
    Partial,
    PartialBuffer,
    RowPartial,
    attend_pairs,
)
from ringserve.cp_core.layout.step_plans import PrefillPlan, Rows, seen_rows, split_new
from ringserve.cp_core.ring.pass_kv import SequenceParts
from ringserve.cp_core.transport.interface import RingTransport


def pass_q(
    q_thd: torch.Tensor,
    keys_of_sequence: Sequence[KeyShard],
    plan: PrefillPlan,
    transport: RingTransport,
    backend: AttentionBackend,
    scale: float,
) -> list[SequenceParts]:
    """Return this rank's partial results, by the rank whose keys they attended: result[source][sequence].

    A rank sends queries on while it attends them. q_thd[T, H, D] has this rank's queries of all sequences and is
    contiguous; keys_of_sequence[i] has this rank's keys of sequence i. Raises Unavailable if a peer is lost.
    """
    rank, size = transport.rank, transport.size
    num_heads, head_dim = q_thd.shape[1:]
    own = plan.of_rank(rank)
    parts: list[SequenceParts] = [[] for _ in range(size)]
    # Nothing is returned to the rank itself: its own answers are in parts[rank].
    outgoing = [PartialBuffer(0, num_heads, head_dim, q_thd.device)] * size
    queries = dict(enumerate(split_new(q_thd, own)))
    message = q_thd
    for hop in range(size):
        source, following = (rank - hop) % size, (rank - hop - 1) % size
        is_last = hop == size - 1
        if not is_last:
            onward, coming = plan.queries_at(source, hop + 1), plan.queries_at(following, hop + 1)
            if onward != tuple(queries):
                message = torch.cat([q_thd[:0], *(queries[index] for index in onward)])
            arriving = [plan.of_rank(following)[index] for index in coming]
            received = message.new_empty(sum(shard.new for shard in arriving), num_heads, head_dim)
            work = transport.exchange(message, (rank + 1) % size, received, (rank - 1) % size)
        shards = plan.of_rank(source)
        nothing = q_thd[:0]
        answers = attend_pairs(
            backend,
            [queries.get(index, nothing) for index in range(len(keys_of_sequence))],
            shards,
            {index: keys_of_sequence[index] for index in queries},
            scale,
        )
        if source == rank:
            parts[rank] = answers
        else:
            outgoing[source] = _pack(answers, num_heads, head_dim, q_thd.device)
        if not is_last:
            work.wait()
            message = received
            queries = dict(zip(coming, split_new(message, arriving), strict=True))
    if size == 1:
        return parts

    expected = [[seen_rows(mine, theirs) for mine, theirs in zip(own, shards, strict=True)] for shards in plan.shards]
    arrived = [
        PartialBuffer(0 if peer == rank else _num_rows(ranges), num_heads, head_dim, q_thd.device)
        for peer, ranges in enumerate(expected)
    ]
    transport.all_to_all([buffer.flat for buffer in outgoing], [buffer.flat for buffer in arrived]).wait()
    for peer in range(size):
        if peer != rank:
            parts[peer] = _unpack(arrived[peer], expected[peer])
    return parts


def _pack(answers: SequenceParts, num_heads: int, head_dim: int, device: torch.device) -> PartialBuffer:
    partials = [part.partial for sequence in answers for part in sequence]
    buffer = PartialBuffer(sum(partial.lse.shape[0] for partial in partials), num_heads, head_dim, device)
    buffer.fill(partials)
    return buffer


def _unpack(buffer: PartialBuffer, expected: Sequence[Sequence[Rows]]) -> SequenceParts:
    """Return views of the row ranges `expected`, which lie one behind the other in the buffer, sequence by sequence."""
    start = 0
    parts: SequenceParts = []
    for ranges in expected:
        parts.append([])
        for rows in ranges:
            stop = start + len(rows)
            parts[-1].append(RowPartial(rows, Partial(buffer.out[start:stop], buffer.lse[start:stop])))
            start = stop
    return parts


def _num_rows(expected: Sequence[Sequence[Rows]]) -> int:
    return sum(len(rows) for ranges in expected for rows in ranges)
