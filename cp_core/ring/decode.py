"""Decode attention of one layer over sharded KV: each rank attends its shard, and the parts are merged.

There are two variants. In `sharded_decode` every rank has every query, and all ranks gather and merge the parts (vLLM
RFC #26133). In `ring_decode` each rank has the queries of its own rows; queries travel round the ring, and parts return
(arXiv 2411.01783, algorithm 4). A rank that holds no tokens of a sequence sends no part of it. Decode steps call one
for each layer; nothing is kept between calls.

Shapes: B sequences with one new token each, b of them this rank's own, S stored tokens, H query heads, K key/value
heads, D head dimension, N ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from ringserve.cp_core.attention.partial import (
    Accumulator,
    AttentionBackend,
    PagedShards,
    Partial,
    PartialBuffer,
    attend_band,
    attend_pages,
    attends_newest,
    attends_rows,
    empty_partial,
    finished_out,
    join_runs,
    kernels_on,
    merge,
    merge_in_kernel,
    sink_part,
    takes_pages,
)
from ringserve.cp_core.layout.step_plans import Band, DecodePlan, KvRun, PassQRoute, RowIndices, Rows, Visit
from ringserve.cp_core.transport.interface import RingTransport


@dataclass(frozen=True, slots=True)
class DraftedShards:
    """This rank's shards for queries of which several, side by side, may be the newest tokens of one sequence.

    `runs[i]` has the whole shard of query i's sequence, the same object for all queries of a sequence. Query i does not
    see the last `hidden[i]` tokens of the shard: the new tokens behind the query, if this rank stores them, else none.
    In a layer with a window the shard begins at the window of the sequence's first query, and query i does not see its
    first `passed[i]` tokens.
    """

    runs: Sequence[Sequence[KvRun]]
    hidden: Sequence[int]
    passed: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.runs)


Shards = Sequence[Sequence[KvRun]] | PagedShards | DraftedShards
"""This rank's shards, one per query: runs, pages for a paged backend, or the runs of a step with drafts."""


def sharded_decode(
    q: torch.Tensor,
    shards: Shards,
    transport: RingTransport,
    backend: AttentionBackend,
    scale: float,
    plan: DecodePlan | None = None,
    sink_h: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend q[B, H, D]. Return out[B, H, D] in q's dtype, with the same bits on every rank.

    `shards[i]` has this rank's runs of sequence i, possibly none. The new token's KV is among them on the rank that
    stores it. `plan` says which ranks hold which sequences; without it, every rank sends a part of every sequence. The
    parts are gathered (one gather, or none if B is 0 or N is 1) and merged in rank order, then with the layer's sinks
    if it has any. Raises Unavailable if a peer is lost.
    """
    batch, num_heads, head_dim = q.shape
    assert len(shards) == batch, f"{len(shards)} shards for a batch of {batch}"
    if not batch:
        return torch.empty_like(q)
    held = [range(batch)] * transport.size if plan is None else plan.held_rows
    indices = RowIndices() if plan is None else plan.indices
    rows = held[transport.rank]
    mine = attend_rows(q, rows, rows, shards, backend, scale, indices)
    if transport.size == 1 and len(mine) == 1 and len(rows) == batch:
        if sink_h is not None:
            return merged_out([*mine, sink_part(q, sink_h)]).to(q.dtype)
        # A paged kernel's out needs no check: it is 0 for an empty shard, and NaN if the LSE is NaN.
        return (mine[0].out if isinstance(shards, PagedShards) else merged_out(mine)).to(q.dtype)
    buffers = [PartialBuffer(len(rows), num_heads, head_dim, q.device) for rows in held]
    own = buffers[transport.rank]
    own.fill(mine)
    if transport.size > 1:
        transport.gather_all(own.flat, [buffer.flat for buffer in buffers]).wait()
    return _merged(q, buffers, held, indices, sink_h)


def ring_decode(
    q: torch.Tensor,
    shards: Shards,
    route: PassQRoute,
    transport: RingTransport,
    backend: AttentionBackend,
    scale: float,
    sink_h: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend q[b, H, D], the queries of this rank's own rows. Return out[b, H, D] in q's dtype.

    `shards[i]` has this rank's runs of row i of the whole batch. A rank sends queries on while it attends them. There
    are N-1 exchanges and one all-to-all, or no message if B is 0 or N is 1. b may be 0, and B less than N: nothing is
    padded. The result is within 4e-7 relative of `sharded_decode`. Bits may differ, since kernels vectorise by the
    number of rows. Raises Unavailable if a peer is lost.
    """
    assert len(shards) == route.batch, f"{len(shards)} shards for a batch of {route.batch}"
    assert q.shape[0] == len(route.own), f"{q.shape[0]} queries for {len(route.own)} rows"
    rank, size = transport.rank, transport.size
    num_heads, head_dim = q.shape[1:]

    def buffers_of(sizes: Sequence[int]) -> list[PartialBuffer]:
        return [PartialBuffer(number, num_heads, head_dim, q.device) for number in sizes]

    if not route.batch:
        return torch.empty_like(q)
    # No message goes to the rank itself: its own part is put beside the parts that arrive.
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
        # The transport would copy the rank's own part of an all-to-all, so that part is left empty.
        arrived[rank] = outgoing[rank]
        transport.all_to_all([buffer.flat for buffer in outgoing], [buffer.flat for buffer in arrived]).wait()
        arrived[rank] = own
    return _merged(q, arrived, route.returns, route.indices, sink_h)


def _onward(message_bhd: torch.Tensor, visit: Visit, indices: RowIndices) -> torch.Tensor:
    """Return the queries to send on. They are copied only if later ranks do not need all of them."""
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
    """Return the parts of queries q[places] over this rank's shards. rows[i] is the batch row of q[places[i]]."""
    # Places ascend without repeats, so if there are as many places as queries, they are all the queries.
    queries = q_bhd if len(places) == q_bhd.shape[0] else q_bhd[indices.of(places, q_bhd.device)]
    if isinstance(shards, PagedShards):
        assert takes_pages(backend, shards.k.shape[1]), f"{backend.name} takes no pages of {shards.k.shape[1]} tokens"
        return [attend_pages(backend, queries, shards.of(rows, indices), scale, indices)]
    if isinstance(shards, DraftedShards):
        together = [list(same) for _, same in groupby(range(len(rows)), lambda place: id(shards.runs[rows[place]]))]
        return [
            _attend_drafts(
                queries[group[0] : group[-1] + 1],
                shards.runs[rows[group[0]]],
                [shards.hidden[rows[place]] for place in group],
                [shards.passed[rows[place]] for place in group] if shards.passed else (),
                backend,
                scale,
            )
            for group in together
        ]
    runs = [shards[row] for row in rows]
    if rows and attends_rows(backend) and all(len(each) == 1 and len(each[0].k) for each in runs):
        return [backend.attend_rows(queries, [each[0] for each in runs], scale=scale)]
    return [_attend_shard(queries[number : number + 1], each, backend, scale) for number, each in enumerate(runs)]


def _attend_shard(q_thd: torch.Tensor, runs: Sequence[KvRun], backend: AttentionBackend, scale: float) -> Partial:
    """Return this rank's part. With a single run, the common case, only the final merge checks its LSE."""
    filled = [run for run in runs if run.k.shape[0]]
    if len(filled) == 1:
        return backend.partial_attention(q_thd, filled[0].k, filled[0].v, causal=False, scale=scale)
    if not filled:
        return empty_partial(q_thd)
    merged = Accumulator()
    for run in filled:
        merged.add(backend.partial_attention(q_thd, run.k, run.v, causal=False, scale=scale))
    return merged.result()


def _attend_drafts(
    q_thd: torch.Tensor,
    runs: Sequence[KvRun],
    hidden: Sequence[int],
    passed: Sequence[int],
    backend: AttentionBackend,
    scale: float,
) -> Partial:
    """Return the part of T queries of one sequence. Query i does not see the last `hidden[i]` tokens of `runs`.

    If this rank stores the new tokens, they are the last T, and query i sees them up to itself. In a layer with a
    window it does not see the first `passed[i]` tokens either.
    """
    if any(passed):
        held = join_runs(runs)
        first, behind = np.array(passed), np.array(hidden)
        band = Band(Rows(0, len(hidden)), first, held.k.shape[0] - behind)
        return attend_band(backend, q_thd, held, band, scale)
    if not any(hidden):
        return _attend_shard(q_thd, runs, backend, scale)
    num_new = len(hidden)
    assert list(hidden) == list(range(num_new))[::-1], f"hidden is {hidden}; it must count down to 0"
    filled = [run for run in runs if run.k.shape[0]]
    if len(filled) == 1 and attends_newest(backend):
        return backend.attend_newest(q_thd, filled[0].k, filled[0].v, scale=scale)
    earlier, newest = _split(runs, num_new)
    merged = Accumulator()
    if any(len(run.k) for run in earlier):
        merged.add(_attend_shard(q_thd, earlier, backend, scale))
    merged.add(backend.partial_attention(q_thd, newest.k, newest.v, causal=True, scale=scale))
    return merged.result()


def _split(runs: Sequence[KvRun], num_last: int) -> tuple[list[KvRun], KvRun]:
    """Return the runs before a shard's last tokens, and the last tokens as one run: a copy if they lie in several."""
    earlier, last = list(runs), list[KvRun]()
    while num_last:
        run = earlier.pop()
        count = min(num_last, len(run.k))
        last.insert(0, KvRun(run.k[len(run.k) - count :], run.v[len(run.v) - count :]))
        if count < len(run.k):
            earlier.append(KvRun(run.k[:-count], run.v[:-count]))
        num_last -= count
    if len(last) == 1:
        return earlier, last[0]
    return earlier, KvRun(torch.cat([run.k for run in last]), torch.cat([run.v for run in last]))


def _merged(
    q_bhd: torch.Tensor,
    buffers: Sequence[PartialBuffer],
    rows: Sequence[Sequence[int]],
    indices: RowIndices,
    sink_h: torch.Tensor | None,
) -> torch.Tensor:
    """Merge the ranks' parts in rank order, then the sinks. buffers[r] holds rank r's parts, of query rows rows[r]."""
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
    if sink_h is not None:
        parts.append(sink_part(q_bhd, sink_h))
    return merged_out(parts).to(q_bhd.dtype)


def merged_out(parts: Sequence[Partial]) -> torch.Tensor:
    """Merge M parts to out[B, H, D], with 0 in rows that attended nothing. The result may be a part's own out."""
    if (kernels := kernels_on(parts[0].lse.device)) and parts[0].lse.dtype == torch.float32:
        return merge_in_kernel(kernels, parts).out
    lse_mbh = torch.stack([part.lse for part in parts]) if len(parts) > 1 else parts[0].lse[None]
    # Only one number is read from the device: `amin` is NaN if any LSE is NaN, and finite only if no part is empty.
    if not math.isfinite(lse_mbh.amin().item()):
        return finished_out(merge(parts))
    if len(parts) == 1:
        return parts[0].out
    # exp(lse_i) / sum_j exp(lse_j), the same weights as in `merge`: all LSEs are finite, so one call computes them.
    weights_mbh1 = lse_mbh.softmax(dim=0)[..., None]
    out_bhd = parts[0].out * weights_mbh1[0]
    for part, weight_bh1 in zip(parts[1:], weights_mbh1[1:], strict=True):
        out_bhd.addcmul_(part.out, weight_bh1)
    return out_bhd
