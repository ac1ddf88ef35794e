"""Head-parallel prefill: each rank attends a share of the heads for all tokens (SP-NTP of CSPS, arXiv 2409.15104).

One all-to-all moves q, k, v and cached KV from token shares to head shares. A second all-to-all returns the finished
outputs, without LSE. New KV is still stored on the rank that has the tokens. If the cache holds a medium share of the
tokens, the bytes sent lie between pass-KV's and pass-Q's. RingPrefill calls it for each layer; it keeps nothing between
calls.

New tokens may be cut into several segments by position; then both all-to-alls overlap with attention. All segments
leave at once, cached KV with the first. Each segment is attended when it has arrived, over cached KV and earlier
segments, and its outputs return while the next segment is attended.

Shapes: T new tokens of this rank, P cached tokens, H query heads, K KV heads, h query heads and k KV heads of one
rank's share, D head dimension, N ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from ringserve.cp_core.attention.partial import (
    Accumulator,
    AttentionBackend,
    KeyShard,
    Partial,
    attend_pair,
    attend_pairs,
    attend_runs,
    attend_together,
    join_runs,
    merge,
    merge_rows,
    sink_part,
)
from ringserve.cp_core.layout.head_shares import HeadShare, head_shares
from ringserve.cp_core.layout.shards import TokenRange, even_share
from ringserve.cp_core.layout.step_plans import KvRun, PrefillPlan, Shard
from ringserve.cp_core.transport.interface import RingTransport


@dataclass(frozen=True, slots=True)
class Piece:
    """One rank's rows [start, stop) of a sequence in one segment. The first segment has all `cached` tokens."""

    start: int
    stop: int
    cached: int

    def __len__(self) -> int:
        return self.stop - self.start

    def num_sent(self, share: HeadShare) -> int:
        """Return the number of rows [.., D] that the piece has in the message to the rank of a head share."""
        return len(self) * len(share.heads) + 2 * (len(self) + self.cached) * len(share.kv_heads)


def pieces_of(shard: Shard, borders: Sequence[int]) -> list[Piece]:
    """Cut a shard into one piece per segment. Borders are positions."""
    below = [sum(len(each.intersect(TokenRange(0, border))) for each in shard.ranges) for border in borders]
    return [Piece(start, stop, 0 if segment else shard.cached) for segment, (start, stop) in enumerate(pairwise(below))]


@dataclass(frozen=True, slots=True)
class SharePart:
    """Tensors of a piece for one share of heads: q[T, h, D], new k and v[T, k, D], cached runs."""

    q: torch.Tensor
    new: KvRun
    cached: Sequence[KvRun]

    @classmethod
    def of_own(cls, q_thd: torch.Tensor, keys: KeyShard, piece: Piece, share: HeadShare) -> SharePart:
        """Return views of this rank's own tokens."""
        rows, kv = slice(piece.start, piece.stop), slice(share.kv_heads.start, share.kv_heads.stop)
        return cls(
            q_thd[rows, share.heads.start : share.heads.stop],
            KvRun(keys.new.k[rows, kv], keys.new.v[rows, kv]),
            [KvRun(run.k[:, kv], run.v[:, kv]) for run in keys.cached] if piece.cached else [],
        )

    @classmethod
    def of_message(cls, rows: torch.Tensor, piece: Piece, share: HeadShare) -> SharePart:
        """Return views of rows[.., D], the message that another rank made with `packed`."""
        num_new, num_kv, head_dim = len(piece), len(share.kv_heads), rows.shape[1]
        counts = (num_new * len(share.heads), *(num_new * num_kv,) * 2, *(piece.cached * num_kv,) * 2)
        q, k, v, cached_k, cached_v = rows.split(counts)

        def heads(part: torch.Tensor, count: int, tokens: int) -> torch.Tensor:
            return part.view(tokens, count, head_dim)

        return cls(
            heads(q, len(share.heads), num_new),
            KvRun(heads(k, num_kv, num_new), heads(v, num_kv, num_new)),
            [KvRun(heads(cached_k, num_kv, piece.cached), heads(cached_v, num_kv, piece.cached))],
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
    sink_h: torch.Tensor | None = None,
) -> None:
    """Attend this rank's queries q_of_sequence[i][T, H, D] and fill its rows out_of_sequence[i][T, H, D].

    keys_of_sequence[i] has this rank's keys. A sequence whose keys no other rank's queries see is attended in place.
    Raises Unavailable if a peer is lost.
    """
    rank, size = transport.rank, transport.size
    num_heads, head_dim = q_of_sequence[0].shape[1:]
    shares = head_shares(size, num_heads, keys_of_sequence[0].new.k.shape[1])
    spread = [index for index in range(len(plan.sequences)) if any(reach[index] for reach in plan.kv_reach)]
    segments = range(plan.num_segments)
    served = [
        _ServedSequence(plan, index, shares[rank], q_of_sequence[index], keys_of_sequence[index]) for index in spread
    ]
    nothing = q_of_sequence[0].new_empty(0, head_dim)

    arriving = []
    for segment in segments:
        sends = [
            nothing
            if peer == rank
            else torch.cat([nothing, *(rows for each in served for rows in each.own(rank, segment, share).packed())])
            for peer, share in enumerate(shares)
        ]
        counts = [[each.pieces[peer][segment].num_sent(shares[rank]) for each in served] for peer in range(size)]
        arrived = [nothing.new_empty(0 if peer == rank else sum(each), head_dim) for peer, each in enumerate(counts)]
        arriving.append((transport.all_to_all(sends, arrived), arrived, counts))
    whole = {index: keys for index, keys in enumerate(keys_of_sequence) if index not in spread}
    for index, found in enumerate(attend_pairs(backend, q_of_sequence, plan.of_rank(rank), whole, scale)):
        merge_rows(found, out_of_sequence[index], sink_h)

    returning = []
    for segment, (work, arrived, counts) in zip(segments, arriving, strict=True):
        work.wait()
        messages = [
            rows.split(each) if peer != rank else ()
            for peer, (rows, each) in enumerate(zip(arrived, counts, strict=True))
        ]
        answers: list[list[torch.Tensor]] = [[] for _ in range(size)]
        parts_of = [
            [
                each.own(rank, segment, shares[rank])
                if peer == rank
                else SharePart.of_message(messages[peer][place], each.pieces[peer][segment], shares[rank])
                for peer in range(size)
            ]
            for place, each in enumerate(served)
        ]
        for parts, each in zip(parts_of, served, strict=True):
            each.take(segment, parts)
        outs = _attend(served, shares[rank], backend, scale, sink_h)
        for parts, each, out in zip(parts_of, served, outs, strict=True):
            for peer, rows in enumerate(each.given_back(parts, out)):
                answers[peer].append(rows)
        backs = [
            nothing if peer == rank else torch.cat([nothing, *(each.reshape(-1, head_dim) for each in rows)])
            for peer, rows in enumerate(answers)
        ]
        own_rows = [len(each.pieces[rank][segment]) for each in served]
        returned = [
            nothing.new_empty(0 if peer == rank else sum(own_rows) * len(share.heads), head_dim)
            for peer, share in enumerate(shares)
        ]
        returning.append((transport.all_to_all(backs, returned), returned, own_rows, answers[rank]))
    for segment, (work, returned, own_rows, own) in zip(segments, returning, strict=True):
        work.wait()
        for peer, share in enumerate(shares):
            outs = (
                own if peer == rank else returned[peer].view(sum(own_rows), len(share.heads), head_dim).split(own_rows)
            )
            for index, each, rows in zip(spread, served, outs, strict=True):
                piece = each.pieces[rank][segment]
                out_of_sequence[index][piece.start : piece.stop, share.heads.start : share.heads.stop] = rows


class _ServedSequence:
    """One sequence on the rank that serves a share of its heads. pieces[r][m] belongs to rank r and segment m.

    `queries` belong to the segment taken last: new tokens [start, stop).
    """

    def __init__(self, plan: PrefillPlan, index: int, share: HeadShare, q_thd: torch.Tensor, keys: KeyShard) -> None:
        layout = plan.sequences[index].layout
        self._shards = [shards[index] for shards in plan.shards]
        self._window = plan.window
        self._share = share
        self._q = q_thd
        self._keys = keys
        self._borders = [
            layout.start + even_share(layout.num_tokens, segment, plan.num_segments)[0]
            for segment in range(plan.num_segments)
        ] + [layout.tokens.stop]
        self.pieces = [pieces_of(shard, self._borders) for shard in self._shards]
        self._cached: list[KvRun] = []
        shape = (layout.num_tokens, len(share.kv_heads), q_thd.shape[2])
        self._new = KvRun(q_thd.new_empty(shape), q_thd.new_empty(shape))
        self._places: list[tuple[int, int, int, int]] = []
        self.queries, self.start, self.stop = q_thd[:0], 0, 0

    def own(self, rank: int, segment: int, share: HeadShare) -> SharePart:
        """Return this rank's own piece for a share."""
        return SharePart.of_own(self._q, self._keys, self.pieces[rank][segment], share)

    def take(self, segment: int, parts: Sequence[SharePart]) -> None:
        """Order a segment's queries and keys by position. parts[r] comes from rank r."""
        tokens = TokenRange(self._borders[segment], self._borders[segment + 1])
        # For every range of positions: (first position, rank, first row in that rank's part, number of rows).
        self._places = []
        for peer, shard in enumerate(self._shards):
            here = [each.intersect(tokens) for each in shard.ranges]
            rows = accumulate(map(len, here), initial=0)
            self._places += [
                (each.start, peer, row, len(each)) for each, row in zip(here, rows, strict=False) if len(each)
            ]
        self._places.sort()

        def by_position(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
            rows = (tensors[peer][row : row + count] for _, peer, row, count in self._places)
            return torch.cat([tensors[0][:0], *rows])

        self.start, self.stop = (border - self._borders[0] for border in (tokens.start, tokens.stop))
        self.queries = by_position([each.q for each in parts])
        self._new.k[self.start : self.stop] = by_position([each.new.k for each in parts])
        self._new.v[self.start : self.stop] = by_position([each.new.v for each in parts])
        held = [[run for run in each.cached if run.k.shape[0]] for each in parts]
        if self._window:  # one run per rank, so that the run's positions are the rank's tail
            held = [[join_runs(runs)] if runs else [] for runs in held]
        self._cached += [run for runs in held for run in runs]

    def over_windows(
        self, backend: AttentionBackend, q_thd: torch.Tensor, heads: slice, scale: float
    ) -> Partial | None:
        """Return the part of the segment's queries over all keys in their windows; None if the layer has no window."""
        if not self._window:
            return None
        first = self._borders[0]
        queries = Shard(0, (TokenRange(first + self.start, first + self.stop),))
        places = [shard.tail for shard in self._shards if shard.cached]
        places += [(TokenRange(first, first + self.start),)] if self.start else []
        merged = Accumulator()
        for ranges, run in zip([*places, queries.ranges], [*self.earlier(heads), self.same(heads)], strict=True):
            keys = KeyShard(Shard(0, ranges, self._window), [], run)
            for part in attend_pair(backend, q_thd, queries, keys, scale):
                merged.add(part.partial)
        return merged.result()

    def earlier(self, heads: slice) -> list[KvRun]:
        """Return the keys before the segment for some KV heads: cached keys and keys of earlier segments."""
        before = [KvRun(self._new.k[: self.start], self._new.v[: self.start])] if self.start else []
        return [KvRun(run.k[:, heads], run.v[:, heads]) for run in (*self._cached, *before)]

    def same(self, heads: slice) -> KvRun:
        """Return the segment's own keys for some KV heads."""
        return KvRun(self._new.k[self.start : self.stop, heads], self._new.v[self.start : self.stop, heads])

    def given_back(self, parts: Sequence[SharePart], out: torch.Tensor) -> list[torch.Tensor]:
        """Split the segment's out[T, h, D] into one tensor per rank, with rows in the order of that rank's queries."""
        outs = [torch.empty_like(each.q, memory_format=torch.contiguous_format) for each in parts]
        at = 0
        for _, peer, row, count in self._places:
            outs[peer][row : row + count] = out[at : at + count]
            at += count
        return outs


def _attend(
    served: Sequence[_ServedSequence],
    share: HeadShare,
    backend: AttentionBackend,
    scale: float,
    sink_h: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Return out[T, h, D] of each sequence's queries in a segment, in q's dtype."""
    outs = [torch.empty_like(each.queries) for each in served]
    for heads, kv_heads in share.runs():
        kv = slice(kv_heads.start, kv_heads.stop)
        queries = {
            index: each.queries[:, heads.start : heads.stop] for index, each in enumerate(served) if len(each.queries)
        }
        parts = {}
        for index, q in queries.items():
            if (part := served[index].over_windows(backend, q, kv, scale)) is not None:
                parts[index] = [part]
        if not parts:
            before = {index: (q, served[index].earlier(kv)) for index, q in queries.items()}
            earlier = attend_runs(backend, {index: each for index, each in before.items() if each[1]}, scale)
            same = {index: (q, served[index].same(kv)) for index, q in queries.items()}
            for index, part in attend_together(backend, same, causal=True, scale=scale).items():
                parts[index] = [earlier[index], part] if index in earlier else [part]
        for index, found in parts.items():
            if sink_h is not None:
                first = share.heads.start
                found.append(sink_part(queries[index], sink_h[first + heads.start : first + heads.stop]))
            outs[index][:, heads.start : heads.stop] = merge(found).out
    return outs
