"""Helix attention of one layer: every rank has all rows and its columns of the output projection's input.

Each rank attends every query over its own KV shard. One all-to-all gives rank r its columns of every rank's part:
outputs, and the log-sum-exps of the heads that these columns touch. The rank merges the parts, and the model multiplies
the result by the rank's rows of the output projection (Helix parallelism, arXiv 2507.07120). A cut between columns may
lie inside a head. Prefill and decode steps call this for each layer; it keeps nothing between calls.

Shapes: T rows, H query heads, K key/value heads, D head dimension, C = H * D columns, N ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ringserve.cp_core.attention.partial import (
    Accumulator,
    AttentionBackend,
    KeyShard,
    Partial,
    attend_pair,
    attend_runs,
    attend_together,
    empty_partial,
    newest_tokens,
)
from ringserve.cp_core.layout.shards import TokenRange, even_share
from ringserve.cp_core.layout.step_plans import DecodePlan, KvRun, RowIndices, Shard
from ringserve.cp_core.ring.decode import Shards, attend_rows, merged_out
from ringserve.cp_core.transport.interface import RingTransport


class HelixColumns:
    """Each rank's columns of a layer's C columns, and the heads that they touch: the same in all layers of a model."""

    def __init__(self, num_heads: int, head_dim: int, rank: int, num_ranks: int, device: torch.device) -> None:
        size = num_heads * head_dim
        self._columns = [slice(*even_share(size, each, num_ranks)) for each in range(num_ranks)]
        self._heads = [slice(cut.start // head_dim, -(-cut.stop // head_dim)) for cut in self._columns]
        self._own, self._own_heads = self._columns[rank], self._heads[rank]
        # Head of each own column, counted from this rank's first head.
        own = torch.arange(self._own.start, self._own.stop, device=device)
        self._head_of_column = own // head_dim - self._own_heads.start

    def __len__(self) -> int:
        """Return the number of this rank's columns."""
        return self._own.stop - self._own.start

    @property
    def numbers_per_row(self) -> int:
        """Numbers per row in a message to this rank: its columns, then the log-sum-exps of its heads."""
        return len(self) + self._own_heads.stop - self._own_heads.start

    def message(self, part: Partial, rank: int) -> torch.Tensor:
        """Return the flat message to a rank: its columns of `part`, then the log-sum-exps of its heads."""
        out_tc = part.out.flatten(1)
        return torch.cat([out_tc[:, self._columns[rank]].reshape(-1), part.lse[:, self._heads[rank]].reshape(-1)])

    def part(self, flat: torch.Tensor, rows: Sequence[int], num_rows: int, indices: RowIndices) -> Partial:
        """Read a message of `rows` as out[T, C / N, 1] and lse[T, C / N], so that each column merges like a head."""
        num_out = len(rows) * len(self)
        out_tc1 = flat[:num_out].view(len(rows), len(self), 1)
        lse_tc = flat[num_out:].view(len(rows), self.numbers_per_row - len(self))[:, self._head_of_column]
        if len(rows) == num_rows:
            return Partial(out_tc1, lse_tc)
        whole = empty_partial(flat.new_empty(num_rows, len(self), 1))
        index = indices.of(rows, flat.device)
        whole.out[index], whole.lse[index] = out_tc1, lse_tc
        return whole


@dataclass(frozen=True, slots=True)
class NewRows:
    """Rows `rows` of a packed step: all new tokens of one sequence, by position.

    `stored` has the row ranges, ascending, whose keys this rank stores. `cached` has this rank's runs of earlier
    tokens. In a layer with a `window` only those of them count that some row sees; `tail` has their positions. The
    first row is at position `start`.
    """

    rows: TokenRange
    stored: tuple[TokenRange, ...]
    cached: Sequence[KvRun]
    start: int = 0
    window: int = 0
    tail: tuple[TokenRange, ...] = ()


def helix_decode(
    q: torch.Tensor,
    shards: Shards,
    plan: DecodePlan,
    columns: HelixColumns,
    transport: RingTransport,
    backend: AttentionBackend,
    scale: float,
) -> torch.Tensor:
    """Attend q[B, H, D], one query per sequence. Return this rank's columns out[B, C / N] in q's dtype.

    `shards[i]` has this rank's runs of sequence i, possibly none. The new token's KV is among them on the rank that
    stores it. A rank that holds no tokens of a sequence sends no part of it. There are no messages if B is 0 or N is 1.
    Raises Unavailable if a peer is lost.
    """
    batch = q.shape[0]
    assert len(shards) == batch == len(plan), f"{len(shards)} shards for {batch} queries of {len(plan)} rows"
    rows = plan.held_rows[transport.rank]
    parts = attend_rows(q, rows, rows, shards, backend, scale, plan.indices)
    own = parts[0] if len(parts) == 1 else _stacked(q, parts)
    return _merged_columns(q, own, plan.held_rows, columns, transport, plan.indices)


def helix_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sequences: Sequence[NewRows],
    columns: HelixColumns,
    transport: RingTransport,
    backend: AttentionBackend,
    scale: float,
) -> torch.Tensor:
    """Attend q[T, H, D] over cached tokens and k, v[T, K, D]. Return this rank's columns out[T, C / N] in q's dtype.

    Every rank has all new keys, but attends only those that it stores. A token sees all cached keys, and the new keys
    up to itself. Raises Unavailable if a peer is lost.
    """
    own = empty_partial(q)
    # For each sequence all rows attend the cached keys. A stored chunk's keys are attended by its own rows, then by all
    # later rows.
    cached, same, later = {}, {}, {}
    for index, sequence in enumerate(sequences):
        if sequence.window:
            _fill_windowed(own, q, k, v, sequence, backend, scale)
            continue
        rows = sequence.rows
        if len(rows) and any(run.k.shape[0] for run in sequence.cached):
            cached[index] = q[rows.start : rows.stop], sequence.cached
        for chunk in filter(len, sequence.stored):
            keys = KvRun(k[chunk.start : chunk.stop], v[chunk.start : chunk.stop])
            same[index, chunk] = q[chunk.start : chunk.stop], keys
            if chunk.stop < rows.stop:
                later[index, chunk] = q[chunk.stop : rows.stop], keys
    over_cached = attend_runs(backend, cached, scale)
    own_rows = attend_together(backend, same, causal=True, scale=scale)
    rows_behind = attend_together(backend, later, causal=False, scale=scale)
    for index, sequence in enumerate(sequences):
        if sequence.window:
            continue
        start, stop = sequence.rows.start, sequence.rows.stop
        merged = Accumulator()
        merged.add(own.rows(start, stop))
        if index in over_cached:
            merged.add(over_cached[index])
        for chunk in filter(len, sequence.stored):
            found = [own_rows[index, chunk], *([rows_behind[index, chunk]] if chunk.stop < stop else [])]
            part = empty_partial(q[start:stop])
            part.out[chunk.start - start :] = torch.cat([each.out for each in found])
            part.lse[chunk.start - start :] = torch.cat([each.lse for each in found])
            merged.add(part)
        whole = merged.result()
        own.out[start:stop], own.lse[start:stop] = whole.out, whole.lse
    return _merged_columns(q, own, [range(q.shape[0])] * transport.size, columns, transport, RowIndices())


def _fill_windowed(
    own: Partial,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sequence: NewRows,
    backend: AttentionBackend,
    scale: float,
) -> None:
    """Fill the rows of a sequence in `own`, in a layer with a window. Rows attend as in `helix_prefill`."""
    rows, window = sequence.rows, sequence.window

    def at(part: TokenRange) -> tuple[TokenRange, ...]:
        shift = sequence.start - rows.start
        return (TokenRange(part.start + shift, part.stop + shift),) if len(part) else ()

    nothing = KvRun(k[:0], v[:0])
    held = sum(map(len, sequence.tail))
    pairs = [(rows, KeyShard(Shard(held, (), window, sequence.tail), newest_tokens(sequence.cached, held), nothing))]
    for chunk in filter(len, sequence.stored):
        keys = KeyShard(
            Shard(0, at(chunk), window), [], KvRun(k[chunk.start : chunk.stop], v[chunk.start : chunk.stop])
        )
        pairs += [(chunk, keys), (TokenRange(chunk.stop, rows.stop), keys)]
    merged = Accumulator()
    merged.add(own.rows(rows.start, rows.stop))
    for queries, keys in pairs:
        for found in attend_pair(backend, q[queries.start : queries.stop], Shard(0, at(queries)), keys, scale):
            part, first = empty_partial(q[rows.start : rows.stop]), queries.start - rows.start + found.rows.start
            part.out[first : first + len(found.rows)] = found.partial.out
            part.lse[first : first + len(found.rows)] = found.partial.lse
            merged.add(part)
    whole = merged.result()
    own.out[rows.start : rows.stop], own.lse[rows.start : rows.stop] = whole.out, whole.lse


def _stacked(q_bhd: torch.Tensor, parts: Sequence[Partial]) -> Partial:
    """Join parts, one after another, to one part. Without parts it has no rows."""
    if not parts:
        return empty_partial(q_bhd[:0])
    return Partial(torch.cat([part.out for part in parts]), torch.cat([part.lse for part in parts]))


def _merged_columns(
    q_thd: torch.Tensor,
    own: Partial,
    held: Sequence[Sequence[int]],
    columns: HelixColumns,
    transport: RingTransport,
    indices: RowIndices,
) -> torch.Tensor:
    """Exchange the parts and merge this rank's columns of all T rows. Rank r's part has the rows held[r]."""
    num_rows = q_thd.shape[0]
    if not num_rows:
        return q_thd.new_empty(0, len(columns))
    outgoing = [columns.message(own, rank) for rank in range(transport.size)]
    if transport.size > 1:
        arrived = [own.out.new_empty(len(rows) * columns.numbers_per_row) for rows in held]
        transport.all_to_all(outgoing, arrived).wait()
    else:
        arrived = outgoing
    parts = [columns.part(flat, rows, num_rows, indices) for flat, rows in zip(arrived, held, strict=True)]
    return merged_out(parts).view(num_rows, len(columns)).to(q_thd.dtype)
