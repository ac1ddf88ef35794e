"""Attention of one layer of a decode step over sharded KV: each rank attends its shard, the parts are merged.

There are two variants. In `sharded_decode` every rank has every query, and parts are gathered and merged everywhere
(vLLM RFC #26133). In `ring_decode` each rank has the queries of its own rows, which go round the ring, and parts return
(arXiv 2411.01783, algorithm 4). A rank that holds nothing of a sequence sends no part of it, so sequences on one rank
add no messages to those that are spread.

Shapes: B sequences with one new token each, b of them this rank's own, S stored tokens, H query heads, K key/value
heads, D head dimension, N ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ringserve.cp_core.attention.paged import PagedShards, attend_pages, takes_pages
from ringserve.cp_core.attention.partial import (
    Accumulator,
    AttentionBackend,
    Partial,
    PartialBuffer,
    attends_rows,
    empty_partial,
    finished_out,
    kernels_on,
    merge,
)
from ringserve.cp_core.layout.step_plans import DecodePlan, KvRun, PassQRoute, RowIndices, Visit
from ringserve.cp_core.transport.interface import RingTransport

Shards = Sequence[Sequence[KvRun]] | PagedShards
"""Shards of this rank, one a sequence: runs, attended as views one by one, or pages for a backend that takes them."""


def sharded_decode(
    q: torch.Tensor,
    shards: Shards,
    transport: RingTransport,
    backend: AttentionBackend,
    scale: float,
    plan: DecodePlan | None = None,
) -> torch.Tensor:
    """Return out[B, H, D], in q's dtype and with the same bits on every rank, of q[B, H, D].

    `shards[i]` are this rank's runs of sequence i, the new token's KV among them on the rank that stores it; a shard
    may be empty. `plan` says which; without it every rank answers for every sequence. The parts are gathered (one
    gather, none if B is 0 or N is 1) and merged in rank order.
    Raises Unavailable when a peer is lost.
    """
    batch, num_heads, head_dim = q.shape
    assert len(shards) == batch, f"{len(shards)} shards for a batch of {batch}"
    if not batch:
        return torch.empty_like(q)
    held = [range(batch)] * transport.size if plan is None else plan.holders
    indices = RowIndices() if plan is None else plan.indices
    rows = held[transport.rank]
    mine = attend_rows(q, rows, rows, shards, backend, scale, indices)
    if transport.size == 1 and len(mine) == 1 and len(rows) == batch:
        # Pages give (0, -inf) where nothing is stored, and NaN where the LSE is NaN.
        return (mine[0].out if isinstance(shards, PagedShards) else merged_out(mine)).to(q.dtype)
    buffers = [PartialBuffer(len(rows), num_heads, head_dim, q.device) for rows in held]
    own = buffers[transport.rank]
    own.fill(mine)
    if transport.size > 1:
        transport.gather_all(own.flat, [buffer.flat for buffer in buffers]).wait()
    return _merged(q, buffers, held, indices)


def ring_decode(
    q: torch.Tensor,
    shards: Shards,
    route: PassQRoute,
    transport: RingTransport,
    backend: AttentionBackend,
    scale: float,
) -> torch.Tensor:
    """Return out[b, H, D], in q's dtype, of the queries q[b, H, D] of this rank's own rows, in their order.

    `shards[i]` are this rank's runs of row i of the whole batch. The next queries are sent while these attend: N-1
    exchanges and one all-to-all, or nothing if B is 0 or N is 1. b may be 0, and B less than N: nothing is padded.
    Within 4e-7 relative of `sharded_decode` for the same queries; the bits may differ, since how vectors are cut
    depends on the number of rows. Raises as that does.
    """
    assert len(shards) == route.batch, f"{len(shards)} shards for a batch of {route.batch}"
    assert q.shape[0] == len(route.own), f"{q.shape[0]} queries for {len(route.own)} rows"
    rank, size = transport.rank, transport.size
    num_heads, head_dim = q.shape[1:]

    def buffers_of(sizes: Sequence[int]) -> list[PartialBuffer]:
        return [PartialBuffer(number, num_heads, head_dim, q.device) for number in sizes]

    if not route.batch:
        return torch.empty_like(q)
    # No message goes to the rank itself: its own part is put where the others' arrive.
    arrived = buffers_of([len(places) for places in route.returns])
    outgoing = buffers_of([0] * size)
    message = q.contiguous()
    for hop, visit in enumerate(route.visits):
        is_last = hop == size - 1
        if not is_last:
            received = message.new_empty(len(route.visits[hop + 1].rows), num_heads, head_dim)
            work = transport.exchange(
                _onward(message, visit, route.indices), (rank + 1) % size, received, (rank - 1) % size
            )
        answer = arrived[rank] if visit.source == rank else buffers_of([len(visit.answered)])[0]
        rows = [visit.rows[place] for place in visit.answered]
        answer.fill(attend_rows(message, visit.answered, rows, shards, backend, scale, route.indices))
        if visit.source != rank:
            outgoing[visit.source] = answer
        if not is_last:
            work.wait()
            message = received
    if size > 1:
        own = arrived[rank]
        # The transport copies the own part of an all-to-all: there is none.
        arrived[rank] = outgoing[rank]
        transport.all_to_all([buffer.flat for buffer in outgoing], [buffer.flat for buffer in arrived]).wait()
        arrived[rank] = own
    return _merged(q, arrived, route.returns, route.indices)


def _onward(message_bhd: torch.Tensor, visit: Visit, indices: RowIndices) -> torch.Tensor:
    """Return the queries to send on: a copy only if some have no reader further on."""
    if len(visit.onward) == len(visit.rows):
        return message_bhd
    return message_bhd[indices.of(visit.onward, message_bhd.device)]


def attend_rows(
    q_bhd: torch.Tensor,
    places: Sequence[int],
    rows: Sequence[int],
    shards: Shards,
    backend: AttentionBackend,
    scale: float,
    indices: RowIndices,
) -> list[Partial]:
    """Return the parts of queries q[places], which belong to these rows of the batch, over this rank's shards."""
    # Places ascend and differ, so as many as queries are all of them.
    queries = q_bhd if len(places) == q_bhd.shape[0] else q_bhd[indices.of(places, q_bhd.device)]
    if isinstance(shards, PagedShards):
        assert takes_pages(backend, shards.k.shape[1]), f"{backend.name} takes no pages of {shards.k.shape[1]} tokens"
        return [attend_pages(backend, queries, shards.of(rows, indices), scale, indices)]
    runs = [shards[row] for row in rows]
    if rows and attends_rows(backend) and all(len(each) == 1 and len(each[0].k) for each in runs):
        return [backend.attend_rows(queries, [each[0] for each in runs], scale=scale)]
    return [_attend_shard(queries[number : number + 1], each, backend, scale) for number, each in enumerate(runs)]


def _attend_shard(q_1hd: torch.Tensor, runs: Sequence[KvRun], backend: AttentionBackend, scale: float) -> Partial:
    """Return the part of one rank. The last merge checks the LSE of a single run, the common case."""
    filled = [run for run in runs if run.k.shape[0]]
    if len(filled) == 1:
        return backend.partial_attention(q_1hd, filled[0].k, filled[0].v, causal=False, scale=scale)
    if not filled:
        return empty_partial(q_1hd)
    merged = Accumulator()
    for run in filled:
        merged.add(backend.partial_attention(q_1hd, run.k, run.v, causal=False, scale=scale))
    return merged.result()


def _merged(
    q_bhd: torch.Tensor, buffers: Sequence[PartialBuffer], rows: Sequence[Sequence[int]], indices: RowIndices
) -> torch.Tensor:
    """Merge the ranks' parts in rank order: buffers[r] holds the parts of rows[r] of q."""
    batch = q_bhd.shape[0]
    if not batch:
        return torch.empty_like(q_bhd)
    parts = []
    for buffer, answered in zip(buffers, rows, strict=True):
        part = Partial(buffer.out, buffer.lse)
        if len(answered) < batch:
            some, part = part, empty_partial(q_bhd)
            index = indices.of(answered, q_bhd.device)
            part.out[index], part.lse[index] = some.out, some.lse
        parts.append(part)
    return merged_out(parts).to(q_bhd.dtype)


def merged_out(parts: Sequence[Partial]) -> torch.Tensor:
    """Return the merged out[B, H, D] of M parts, with 0 where nothing was attended; it may be the out of one part."""
    if kernels := kernels_on(parts[0].lse.device):
        return kernels.merge_parts(parts).out
    lse_mbh = torch.stack([part.lse for part in parts]) if len(parts) > 1 else parts[0].lse[None]
    # One number read from the device decides: a NaN is the least of all, and no part is empty if the least is finite.
    if not math.isfinite(lse_mbh.amin().item()):
        return finished_out(merge(parts))
    if len(parts) == 1:
        return parts[0].out
    # exp(lse_i) / sum_j exp(lse_j): with every lse finite, the weights of `merge` in one call.
    weights_mbh1 = lse_mbh.softmax(dim=0)[..., None]
    out_bhd = parts[0].out * weights_mbh1[0]
    for part, weight_bh1 in zip(parts[1:], weights_mbh1[1:], strict=True):
        out_bhd.addcmul_(part.out, weight_bh1)
    return out_bhd
