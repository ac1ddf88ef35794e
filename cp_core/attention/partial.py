"""Partial attention: interfaces of kernels, exact merge, and calls that attend sequences over runs of keys or pages.

Ring algorithms and decode steps call it. It writes only to memory of its own and to the outs that callers give it.

Shapes: M parts, T query tokens, S stored tokens, H query heads, K key/value heads (H is a multiple of K), D head
dimension; for paged attention: B queries (one per sequence, or several with drafts), P pages of a cache, G tokens per
page, W pages in the longest table. Parts merge in fp32, in their order (arXiv 2411.01783, 3.3 and appendix B):

    out = sum_i exp(lse_i) out_i / sum_i exp(lse_i)         lse = log sum_i exp(lse_i)

Stable: m = max_i lse_i (0 if all are -inf), w_i = exp(lse_i - m), s = sum_i w_i, out = sum_i (w_i / s) out_i, lse = m +
log s. A part that attended nothing has lse -inf and possibly a NaN out. The merge leaves this out away instead of
multiplying it by 0, because 0 * NaN is NaN. For equal bits on every rank, pass the parts in source-rank order.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Protocol, TypeGuard, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ringserve.cp_core.layout.step_plans import Band, KvRun, RowIndices, Rows, Shard, bands, seen_keys

# Maximum query rows that are attended together under a mask. With more rows, the window would hide most of the keys
# between the first row's first key and the last row's last key.
BAND_ROWS = 256
# If all rows of a group of BAND_ROWS see more than this many keys in common, those keys get a call without a mask,
# between masked calls for the keys on either side. Otherwise one masked call takes all keys: it costs less than two
# more calls and a merge.
MASKED_KEYS = 1024
# Parts of one sequence that a GPU holds at a time. Each part is as large as the queries.
MAX_HELD_PARTS = 4
MAX_TOGETHER = 8
"""Maximum queries of one sequence in a call over pages. This many, times the query heads of a KV head, fill one tile of
the kernel."""
Key = TypeVar("Key")
"""Key of one sequence, or of a part of it, in a call for several sequences."""


@dataclass(frozen=True, slots=True)
class Partial:
    """Attention over a part of the keys, to be merged with the other parts.

    out[T, H, D] and lse[T, H] are fp32 for any input dtype (fp64 from the oracle). GPU kernels that return a 16-bit out
    keep it. lse is the natural log of the softmax denominator. If lse is -inf, the row attended nothing and its out is
    undefined, possibly NaN.
    """

    out: torch.Tensor
    lse: torch.Tensor

    def rows(self, start: int, stop: int) -> Partial:
        """Return query rows [start, stop) as views."""
        return Partial(self.out[start:stop], self.lse[start:stop])


class AttentionBackend(Protocol):
    """One attention kernel."""

    name: ClassVar[str]

    def partial_attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
    ) -> Partial:
        """Attend q[T, H, D] over k[S, K, D], v[S, K, D]. Query head h reads KV head h // (H // K).

        Inputs may be strided views with a contiguous last dimension; fp32 inputs are not copied. T or S may be 0.
        `causal` needs T == S: query t sees keys 0..t.
        """
        ...


class RowAttention(AttentionBackend, Protocol):
    """Backend that attends many single queries, each over its own keys, cheaper than one call per query."""

    def attend_rows(self, q: torch.Tensor, runs: Sequence[KvRun], *, scale: float) -> Partial:
        """Attend query b of q[B, H, D] over k[S, K, D] and v[S, K, D] of runs[b], with S >= 1.

        The result has the same bits as B calls of `partial_attention`.
        """
        ...


class NewestAttention(AttentionBackend, Protocol):
    """Backend that attends the newest tokens of a sequence over all of its keys in one call."""

    def attend_newest(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float) -> Partial:
        """Attend q[T, H, D] over k[S, K, D] and v[S, K, D], whose last T tokens are the queries' own: S >= T >= 1.

        Query t sees keys 0..S - T + t.
        """
        ...


class MaskedAttention(AttentionBackend, Protocol):
    """Backend that attends under any mask."""

    def attend_masked(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor, *, scale: float
    ) -> Partial:
        """Attend q[T, H, D] over k[S, K, D] and v[S, K, D], T and S >= 1. Query t does not see key s if hidden[t, s].

        The LSE of a query that sees no key is -inf.
        """
        ...


class BandAttention(AttentionBackend, Protocol):
    """Backend that attends queries over a range of keys each, in one call."""

    def attend_between(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        first: torch.Tensor,
        stop: torch.Tensor,
        *,
        scale: float,
    ) -> Partial:
        """Attend q[T, H, D] over k[S, K, D] and v[S, K, D]: query t sees keys [first[t], stop[t]).

        Both bounds ascend. As `Band.bounds_on` makes them, they are int64 on a CPU and int32 elsewhere. The LSE of a
        query that sees no key is -inf.
        """
        ...


class WholeAttention(AttentionBackend, Protocol):
    """Backend that attends all keys of a sequence in one call, straight into the layer's result."""

    def serves_whole(self, q: torch.Tensor, k: torch.Tensor) -> bool:
        """Return whether `attend_whole` takes queries and keys of these sizes and dtypes."""
        ...

    def attend_whole(
        self,
        q: torch.Tensor,
        runs: Sequence[KvRun],
        out: torch.Tensor,
        *,
        scale: float,
        bounds: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Attend q[T, H, D] over k[S, K, D] and v[S, K, D] of runs, read as one sequence of keys, into out[T, H, D].

        The queries are the newest T tokens of the runs, and each sees all keys up to itself. With bounds (first, stop),
        both int64 and ascending, query t sees keys [first[t], stop[t]). `out` is contiguous, in the queries' dtype.
        """
        ...


def attends_whole(backend: AttentionBackend) -> TypeGuard[WholeAttention]:
    """Return whether the backend attends all keys of a sequence in one call."""
    return hasattr(backend, "attend_whole")


def attends_between(backend: AttentionBackend) -> TypeGuard[BandAttention]:
    """Return whether the backend attends a range of keys for each query."""
    return hasattr(backend, "attend_between")


def attends_masked(backend: AttentionBackend) -> TypeGuard[MaskedAttention]:
    """Return whether the backend attends under any mask."""
    return hasattr(backend, "attend_masked")


def attends_newest(backend: AttentionBackend) -> TypeGuard[NewestAttention]:
    """Return whether the backend attends newest tokens in one call."""
    return hasattr(backend, "attend_newest")


def attends_rows(backend: AttentionBackend) -> TypeGuard[RowAttention]:
    """Return whether the backend attends many single queries in one call."""
    return hasattr(backend, "attend_rows")


def empty_partial(q_thd: torch.Tensor, dtype: torch.dtype = torch.float32) -> Partial:
    """Return a part that attended nothing: (0, -inf)."""
    return Partial(
        torch.zeros(q_thd.shape, dtype=dtype, device=q_thd.device),
        torch.full(q_thd.shape[:2], -torch.inf, dtype=dtype, device=q_thd.device),
    )


class PartialBuffer:
    """Message of T rows' partials: views out[T, H, D], then lse[T, H], of one flat fp32 buffer."""

    def __init__(self, num_rows: int, num_heads: int, head_dim: int, device: torch.device) -> None:
        num_out = num_rows * num_heads * head_dim
        self.flat = torch.empty(num_out + num_rows * num_heads, dtype=torch.float32, device=device)
        self.out = self.flat[:num_out].view(num_rows, num_heads, head_dim)
        self.lse = self.flat[num_out:].view(num_rows, num_heads)

    def fill(self, partials: Sequence[Partial]) -> None:
        """Copy the partials of all rows, in order."""
        at = 0
        for partial in partials:
            stop = at + partial.lse.shape[0]
            self.out[at:stop] = partial.out
            self.lse[at:stop] = partial.lse
            at = stop
        assert at == self.lse.shape[0], f"{at} rows for a message of {self.lse.shape[0]}"


class MergeKernels(Protocol):
    """Merge of parts in one call, without a wait on the host: `triton_kernels` and `native` in `cp_core.attention`.

    With MERGES_EARLY, a sequence's parts are merged before all have come, to hold few of them in a GPU's memory.
    Without it they are merged once, in their order, so that every algorithm gives the same bits.
    """

    MERGES_EARLY: bool

    def merge_parts(
        self, outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], into: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Merge parts like `merge` to (out, lse). Rows that no part attended get an out of 0.

        If `into` is given, write out there.
        """
        ...


@cache
def kernels_on(device: torch.device) -> MergeKernels | None:
    """Return the merge kernels for this device, or None if plain tensor operations merge parts."""
    kernels: Any = None
    if device.type == "cpu":
        kernels = importlib.import_module("ringserve.cp_core.attention.native")
        if kernels.library() is None:
            return None
    elif device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        kernels = importlib.import_module("ringserve.cp_core.attention.triton_kernels")
    found: MergeKernels | None = kernels
    return found


def merge_in_kernel(kernels: MergeKernels, parts: Sequence[Partial], into: torch.Tensor | None = None) -> Partial:
    """Merge parts as `MergeKernels.merge_parts` does."""
    return Partial(*kernels.merge_parts([part.out for part in parts], [part.lse for part in parts], into))


def merge(parts: Sequence[Partial]) -> Partial:
    """Merge M >= 1 parts of the same rows. A single part is returned as it is; otherwise the result is new memory.

    out and lse have the parts' dtype (fp32). If a part's lse is NaN in some row, that row of the result is NaN, and no
    other row: its query was not finite, or a kernel or memory failed. Sampling then ends the row's sequence.

    Example: two parts of one row with lse 0 and out 1 and 3 merge to out 2 and lse log 2.
    """
    assert parts, "nothing to merge"
    if len(parts) == 1:
        # GPU kernels return a NaN out for a NaN LSE.
        return parts[0] if parts[0].lse.device.type == "cuda" else _with_nan_outs(parts[0])
    kernels = kernels_on(parts[0].lse.device)
    if kernels is not None and parts[0].lse.dtype == torch.float32:
        return merge_in_kernel(kernels, parts)
    weights_mth, lse_th, has_unseen = _weights(torch.stack([part.lse for part in parts]))
    out_thd: torch.Tensor | None = None
    for part, weight_th in zip(parts, weights_mth, strict=True):
        weight_th1 = weight_th[..., None]
        part_out = torch.where(weight_th1 > 0.0, part.out, 0.0) if has_unseen else part.out
        out_thd = part_out * weight_th1 if out_thd is None else out_thd.addcmul_(part_out, weight_th1)
    assert out_thd is not None
    return Partial(out_thd, lse_th)


class Accumulator:
    """Merge of parts that arrive one by one, holding at most `max_pending` of them.

    With up to `max_pending` parts the result has the bits of one `merge`. With more, it differs by at most 2e-7
    relative.
    """

    def __init__(self, max_pending: int = 8) -> None:
        assert max_pending >= 2, "a merge takes two parts"
        self._max_pending = max_pending
        self._pending: list[Partial] = []

    def add(self, part: Partial) -> None:
        """Add one more part of the same rows."""
        if len(self._pending) == self._max_pending:
            self._pending = [merge(self._pending)]
        self._pending.append(part)

    def result(self) -> Partial:
        """Return the merge of all parts so far, at least one."""
        self._pending = [merge(self._pending)]
        return self._pending[0]


def finished_out(part: Partial) -> torch.Tensor:
    """Return the part's out with 0 in rows that attended nothing, so that it can be used without lse."""
    nothing_th = part.lse == -torch.inf
    return part.out.masked_fill(nothing_th[..., None], 0.0) if bool(nothing_th.any()) else part.out


def _weights(lse_mth: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Return (w_i / s, merged lse, whether any weight is 0). The out of a part with weight 0 must not be used."""
    highest_th = lse_mth.amax(dim=0)
    weights_mth = torch.exp(lse_mth - highest_th.masked_fill(highest_th == -torch.inf, 0.0))
    total_th = weights_mth.sum(dim=0)
    # A row without any key has s = 0. Dividing by 1 leaves its weights and its out at 0.
    weights_mth.div_(total_th.masked_fill(total_th == 0.0, 1.0))
    return weights_mth, highest_th + total_th.log(), not bool(weights_mth.all())


def _with_nan_outs(part: Partial) -> Partial:
    """Set out to NaN in rows with a NaN lse."""
    if not part.lse.numel() or not bool(part.lse.amax().isnan()):  # amax passes a NaN on
        return part
    return Partial(part.out.masked_fill(part.lse.isnan()[..., None], torch.nan), part.lse)


@dataclass(frozen=True, slots=True)
class RowPartial:
    """Partial attention of query rows `rows`."""

    rows: Rows
    partial: Partial


@dataclass(frozen=True, slots=True)
class KeyShard:
    """KV of `shard`: runs of cached tokens, and the new tokens in stored order, as one run."""

    shard: Shard
    cached: Sequence[KvRun]
    new: KvRun

    def __post_init__(self) -> None:
        held = sum(run.k.shape[0] for run in self.cached)
        assert held == self.shard.cached, f"the runs hold {held} cached tokens, the plan says {self.shard.cached}"
        held = self.new.k.shape[0]
        assert held == self.shard.new, f"the run holds {held} new tokens, the plan says {self.shard.new}"


def attend_in_tensors(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor | None, scale: float, dtype: torch.dtype
) -> Partial:
    """Attend as `MaskedAttention` does, in plain tensor operations in `dtype`, with all [H, T, S] scores in memory."""
    queries_per_kv = q.shape[1] // k.shape[1]
    k_shd, v_shd = (each.to(dtype).repeat_interleave(queries_per_kv, dim=1) for each in (k, v))
    scores_hts = torch.einsum("thd,shd->hts", q.to(dtype), k_shd) * scale
    if hidden is not None:
        scores_hts.masked_fill_(hidden, -torch.inf)
    lse_ht = scores_hts.logsumexp(dim=-1)
    weights_hts = torch.exp(scores_hts - lse_ht.masked_fill(lse_ht == -torch.inf, 0.0)[..., None])
    out_thd = torch.einsum("hts,shd->thd", weights_hts, v_shd)
    return Partial(out_thd.contiguous(), lse_ht.transpose(0, 1).contiguous())


def attend_band(
    backend: AttentionBackend,
    q_thd: torch.Tensor,
    keys: KvRun,
    band: Band,
    scale: float,
) -> Partial:
    """Return the part of q[T, H, D], the rows of a band, over the keys that it sees.

    Only keys that some of BAND_ROWS queries see are read. The LSE of a query that sees none is -inf.
    """
    if attends_between(backend) and q_thd.shape[0]:
        return backend.attend_between(q_thd, keys.k, keys.v, *band.bounds_on(q_thd.device), scale=scale)
    parts = []
    for begin in range(0, q_thd.shape[0], BAND_ROWS):
        end = min(begin + BAND_ROWS, q_thd.shape[0])
        q, low, high = q_thd[begin:end], band.first[begin:end], band.stop[begin:end]
        least, most = int(low[0]), int(high[-1])
        borders = [least, most]
        if high[0] - low[-1] > MASKED_KEYS:
            borders[1:1] = [int(low[-1]), int(high[0])]
        spans = [(start, end) for start, end in pairwise(borders) if start < end]
        found = [_attend_span(backend, q, keys, span, low, high, scale) for span in spans]
        parts.append(merge(found) if found else empty_partial(q))
    if len(parts) == 1:
        return parts[0]
    return Partial(torch.cat([part.out for part in parts]), torch.cat([part.lse for part in parts]))


def _attend_span(
    backend: AttentionBackend,
    q: torch.Tensor,
    keys: KvRun,
    span: tuple[int, int],
    first: npt.NDArray[np.int64],
    stop: npt.NDArray[np.int64],
    scale: float,
) -> Partial:
    """Return the part of q[T, H, D] over the keys of a span that lie in [first[t], stop[t])."""
    k, v = keys.k[slice(*span)], keys.v[slice(*span)]
    if first[-1] <= span[0] and span[1] <= stop[0]:
        return backend.partial_attention(q, k, v, causal=False, scale=scale)
    at = np.arange(*span)
    hidden = torch.from_numpy((at < first[:, None]) | (at >= stop[:, None])).to(q.device, non_blocking=True)
    if attends_masked(backend):
        return backend.attend_masked(q, k, v, hidden, scale=scale)
    return attend_in_tensors(q, k, v, hidden, scale, torch.float32)


def attend_pair(
    backend: AttentionBackend, q_thd: torch.Tensor, queries: Shard, keys: KeyShard, scale: float
) -> list[RowPartial]:
    """Return one RowPartial for each range of `seen_rows(queries, keys.shard)`, in that order.

    q_thd[T, H, D] holds the queries in stored order. Cached and new keys are always attended in separate calls, even if
    they lie side by side as in pass-KV, so pass-KV and pass-Q have the same bits.
    """
    if (cut := bands(queries, keys.shard)) is not None:
        return _attend_bands(backend, q_thd, cut, keys, scale)
    seen = [each for each in seen_keys(queries, keys.shard) if each.count or keys.shard.cached]
    if not seen:
        return []
    cached = Accumulator()
    for run in keys.cached:
        if run.k.shape[0]:
            cached.add(backend.partial_attention(q_thd, run.k, run.v, causal=False, scale=scale))
    answers = []
    for each in seen:
        rows = each.rows
        parts = [cached.result().rows(rows.start, rows.stop)] if keys.shard.cached else []
        if each.count:
            part = backend.partial_attention(
                q_thd[rows.start : rows.stop],
                keys.new.k[: each.count],
                keys.new.v[: each.count],
                causal=keys.shard.ranges == queries.ranges,
                scale=scale,
            )
            parts.append(part)
        # NaN is looked for once, when the parts of all ranks are merged.
        answers.append(RowPartial(rows, merge(parts) if len(parts) > 1 else parts[0]))
    return answers


def attend_alone(
    backend: WholeAttention, q_thd: torch.Tensor, queries: Shard, keys: KeyShard, scale: float, out_thd: torch.Tensor
) -> None:
    """Attend queries of a rank that holds all keys of their sequence, in any number of runs, into out_thd[T, H, D]."""
    if not backend.serves_whole(q_thd, keys.new.k):
        merge_rows(attend_pair(backend, q_thd, queries, keys, scale), out_thd)
        return
    runs = [*keys.cached, keys.new]
    if (cut := bands(queries, keys.shard)) is None:
        backend.attend_whole(q_thd, runs, out_thd, scale=scale)
        return
    for band in cut:
        rows = slice(band.rows.start, band.rows.stop)
        bounds = band.bounds_on(q_thd.device)
        backend.attend_whole(q_thd[rows], runs, out_thd[rows], scale=scale, bounds=bounds)


def _attend_bands(
    backend: AttentionBackend, q_thd: torch.Tensor, seen: Sequence[Band], keys: KeyShard, scale: float
) -> list[RowPartial]:
    held = join_runs([*keys.cached, keys.new])
    return [
        RowPartial(
            each.rows,
            attend_band(backend, q_thd[each.rows.start : each.rows.stop], held, each, scale),
        )
        for each in seen
    ]


def newest_tokens(runs: Sequence[KvRun], count: int) -> list[KvRun]:
    """Return views of the last `count` tokens of some runs."""
    newest: list[KvRun] = []
    for run in reversed(runs):
        if not count:
            break
        taken = min(count, run.k.shape[0])
        newest.insert(0, KvRun(run.k[run.k.shape[0] - taken :], run.v[run.v.shape[0] - taken :]))
        count -= taken
    return newest


def join_runs(runs: Sequence[KvRun]) -> KvRun:
    """Join runs into one, a copy if several have tokens."""
    filled = [run for run in runs if run.k.shape[0]] or runs[:1]
    if len(filled) == 1:
        return filled[0]
    return KvRun(torch.cat([run.k for run in filled]), torch.cat([run.v for run in filled]))


def sink_part(q_thd: torch.Tensor, sink_h: torch.Tensor) -> Partial:
    """Return the part of an attention sink: a key with the logit sink[h] for every query, and a value of 0.

    The layer's finished attention is the merge of all parts with this one (gpt-oss).
    """
    return Partial(
        torch.zeros(q_thd.shape, dtype=torch.float32, device=q_thd.device),
        sink_h.float().expand(q_thd.shape[:2]).contiguous(),
    )


def merge_rows(parts: Sequence[RowPartial], out_thd: torch.Tensor, sink_h: torch.Tensor | None = None) -> None:
    """Merge one sequence's parts, in source-rank order, into out_thd[T, H, D] (cast to its dtype).

    Every row is in some part, since it sees at least itself. If the layer has sinks[H], they are the last part.
    """
    if sink_h is not None:
        parts = [*parts, RowPartial(Rows(0, out_thd.shape[0]), sink_part(out_thd, sink_h))]
    kernels = kernels_on(out_thd.device) if out_thd.dtype != torch.float64 else None
    for rows, covering in _by_rows(parts):
        if kernels is not None and out_thd.is_contiguous():
            merge_in_kernel(kernels, covering, into=out_thd[rows.start : rows.stop])
        else:
            out_thd[rows.start : rows.stop] = merge(covering).out


def merge_held(parts: list[RowPartial], like_thd: torch.Tensor) -> list[RowPartial]:
    """Merge a sequence's parts into one if there are too many to hold on a GPU: see `MergeKernels`."""
    kernels = kernels_on(like_thd.device)
    if len(parts) <= MAX_HELD_PARTS or kernels is None or not kernels.MERGES_EARLY:
        return parts
    whole = empty_partial(like_thd)
    for rows, covering in _by_rows(parts):
        some = merge(covering)
        whole.out[rows.start : rows.stop], whole.lse[rows.start : rows.stop] = some.out, some.lse
    return [RowPartial(Rows(0, like_thd.shape[0]), whole)]


def _by_rows(parts: Sequence[RowPartial]) -> Iterator[tuple[Rows, list[Partial]]]:
    """Yield ranges of rows with the parts that cover them, in order."""
    borders = sorted({border for part in parts for border in (part.rows.start, part.rows.stop)})
    for start, stop in pairwise(borders):
        covering = [
            part.partial.rows(start - part.rows.start, stop - part.rows.start)
            for part in parts
            if part.rows.start <= start and stop <= part.rows.stop
        ]
        if covering:
            yield Rows(start, stop), covering


@dataclass(frozen=True, slots=True)
class PagedShards:
    """One rank's shards of a batch: pages k[P, G, K, D] and v[P, G, K, D] of one layer, in any order.

    table[B, W] (int32, on the same device) lists each sequence's pages in stored order. Entries after the last page are
    never read, but must be valid page numbers. `stored` has each sequence's token count on this rank, possibly 0.
    `lengths` has the same counts as int32[B] on the device, for kernels that read them there.

    If the layer has a window, query b sees no token before firsts[b] (int32[B] on the device) and at most `most_seen`
    tokens in all. A sequence with drafts has several queries, side by side and with the same table. `ends` (int32[E] on
    the device, E sequences) then has, for each sequence, the index of its last query plus one. Queries from ends[-1] on
    are padding.

    Example: if ends is (3, 4), queries 0 to 2 are of one sequence and query 3 is of another.
    """

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    stored: tuple[int, ...]
    lengths: torch.Tensor
    firsts: torch.Tensor | None = None
    most_seen: int = 0
    ends: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.stored)

    def of(self, rows: Sequence[int], indices: RowIndices) -> PagedShards:
        """Return the shards of the queries whose indices are `rows` (ascending).

        The result has no `ends`, but self is returned as it is if `rows` names all queries.
        """
        if len(rows) == len(self):
            return self
        index = indices.of(rows, self.table.device)
        stored = tuple(self.stored[row] for row in rows)
        firsts = None if self.firsts is None else self.firsts[index]
        return PagedShards(self.k, self.v, self.table[index], stored, self.lengths[index], firsts, self.most_seen)


class PagedBackend(AttentionBackend, Protocol):
    """Kernel that takes block tables. Its pages hold a multiple of `page_multiple` tokens.

    A kernel with `skips_empty` reads the lengths on the device and returns (0, -inf) for empty shards. One that
    `takes_bounds` takes shards with `firsts` and `ends`, of at most MAX_TOGETHER queries a sequence.
    """

    page_multiple: ClassVar[int]
    skips_empty: ClassVar[bool]
    takes_bounds: ClassVar[bool]

    def paged_attention(self, q: torch.Tensor, shards: PagedShards, *, scale: float) -> Partial:
        """Attend each query of q[B, H, D] over its sequence's shard.

        B is 1 or more, and so is every `stored` unless the backend has `skips_empty`. If a row's LSE is NaN, so is its
        out.
        """
        ...


def takes_pages(backend: AttentionBackend, page_tokens: int) -> TypeGuard[PagedBackend]:
    """Return whether the backend follows block tables over pages of `page_tokens` tokens."""
    multiple = getattr(backend, "page_multiple", 0)
    return bool(multiple) and page_tokens % multiple == 0


def attend_pages(
    backend: PagedBackend, q_bhd: torch.Tensor, shards: PagedShards, scale: float, indices: RowIndices
) -> Partial:
    """Return the part of q[B, H, D] over the shards. The LSE of an empty shard is -inf.

    A backend with `skips_empty` finds empty shards on the device, so one CUDA graph serves all lengths.
    """
    if backend.skips_empty and len(shards):
        return backend.paged_attention(q_bhd, shards, scale=scale)
    filled = [row for row, stored in enumerate(shards.stored) if stored]
    if not filled:
        return empty_partial(q_bhd)
    if len(filled) == len(shards):
        return backend.paged_attention(q_bhd, shards, scale=scale)
    part, index = empty_partial(q_bhd), indices.of(filled, q_bhd.device)
    some = backend.paged_attention(q_bhd[index], shards.of(filled, indices), scale=scale)
    part.out[index], part.lse[index] = some.out, some.lse
    return part


@lru_cache(maxsize=64)
def cumulative(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return the cumulative lengths int32[B + 1] that varlen kernels take: (2, 3) gives 0, 2, 5.

    All layers of a step ask for the same lengths. Only the first layer uploads them, without waiting for the device.
    """
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, pin_memory=device.type == "cuda")
    return ends.to(device, non_blocking=True)


class VarlenAttention(AttentionBackend, Protocol):
    """Backend that attends several sequences in one call."""

    def attend_many(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        queries: Sequence[int],
        keys: Sequence[int],
        *,
        causal: bool,
        scale: float,
    ) -> Partial:
        """Attend the next queries[i] rows of q[T, H, D] over the next keys[i] rows of k and v[S, K, D], for every i.

        All counts are 1 or more. `causal` needs queries[i] == keys[i].
        """
        ...

    def fills(self, queries: Sequence[int], num_heads: int) -> bool:
        """Return whether one call for these queries keeps the device busy without splitting the keys."""
        ...


def attends_many(backend: AttentionBackend) -> TypeGuard[VarlenAttention]:
    """Return whether the backend attends several sequences in one call."""
    return hasattr(backend, "attend_many")


def attend_pairs(
    backend: AttentionBackend,
    q_of_sequence: Sequence[torch.Tensor],
    shards: Sequence[Shard],
    keys: Mapping[int, KeyShard],
    scale: float,
) -> list[list[RowPartial]]:
    """Return `attend_pair` of each sequence's queries and keys, or [] for a sequence without keys here.

    A backend that takes several sequences per call needs one call for all cached keys, one for the rank's own new keys,
    and two for another rank's new keys, which are two position ranges. A cache in several runs is copied to one run,
    which costs less than a call per run.
    """
    if not attends_many(backend) or any(shard.window for shard in shards):
        return [
            attend_pair(backend, q_thd, shard, keys[index], scale) if index in keys else []
            for index, (q_thd, shard) in enumerate(zip(q_of_sequence, shards, strict=True))
        ]
    seen = [
        [each for each in seen_keys(shard, keys[index].shard) if each.count or keys[index].shard.cached]
        if index in keys
        else []
        for index, shard in enumerate(shards)
    ]
    cached = attend_runs(
        backend,
        {
            index: (q_of_sequence[index], each.cached)
            for index, each in keys.items()
            if seen[index] and each.shard.cached
        },
        scale,
    )
    answers: list[list[RowPartial]] = [[] for _ in shards]
    for place in range(max(map(len, seen), default=0)):
        for causal in (True, False):
            calls = {}
            for index, each in keys.items():
                if place >= len(seen[index]) or causal != (each.shard.ranges == shards[index].ranges):
                    continue
                rows, count = seen[index][place].rows, seen[index][place].count
                if count:
                    new = KvRun(each.new.k[:count], each.new.v[:count])
                    calls[index] = q_of_sequence[index][rows.start : rows.stop], new
            new_parts = attend_together(backend, calls, causal=causal, scale=scale)
            for index, part in new_parts.items():
                answers[index].append(RowPartial(seen[index][place].rows, part))
    for index, part in cached.items():
        by_start = {answer.rows.start: answer.partial for answer in answers[index]}
        answers[index] = [
            RowPartial(each.rows, merge([part.rows(each.rows.start, each.rows.stop), *_part_at(by_start, each.rows)]))
            for each in seen[index]
        ]
    return answers


def _part_at(parts: dict[int, Partial], rows: Rows) -> list[Partial]:
    """Return [the part whose first row is rows.start], or [] if there is none."""
    return [parts[rows.start]] if rows.start in parts else []


def attend_runs(
    backend: AttentionBackend, calls: Mapping[Key, tuple[torch.Tensor, Sequence[KvRun]]], scale: float
) -> dict[Key, Partial]:
    """Return the part of each call's queries q[T, H, D] over all its runs of keys. Each call has at least one key.

    A backend that takes several sequences per call attends everything in one call. Other backends attend run by run and
    merge the parts.
    """
    if attends_many(backend):
        joined = {key: (q, join_runs(runs)) for key, (q, runs) in calls.items()}
        return attend_together(backend, joined, causal=False, scale=scale)
    parts = {}
    for key, (q, runs) in calls.items():
        merged = Accumulator()
        for run in runs:
            if run.k.shape[0]:
                merged.add(backend.partial_attention(q, run.k, run.v, causal=False, scale=scale))
        parts[key] = merged.result()
    return parts


def attend_together(
    backend: AttentionBackend, calls: Mapping[Key, tuple[torch.Tensor, KvRun]], *, causal: bool, scale: float
) -> dict[Key, Partial]:
    """Return the part of each call's queries q[T, H, D] over its keys. Neither may be empty.

    A backend that takes several sequences attends all of them in one call. If all queries are too few to fill the
    device and the call is not causal, each sequence gets its own call, so that the kernel can split the keys.
    """
    queries, runs = [q for q, _ in calls.values()], [run for _, run in calls.values()]
    lengths = [q.shape[0] for q in queries]
    in_one_call = len(calls) > 1 and attends_many(backend) and (causal or backend.fills(lengths, queries[0].shape[1]))
    if not in_one_call:
        return {
            key: backend.partial_attention(q, run.k, run.v, causal=causal, scale=scale)
            for key, (q, run) in calls.items()
        }
    assert attends_many(backend)
    part = backend.attend_many(
        torch.cat(queries),
        torch.cat([run.k for run in runs]),
        torch.cat([run.v for run in runs]),
        lengths,
        [run.k.shape[0] for run in runs],
        causal=causal,
        scale=scale,
    )
    outs, lses = part.out.split(lengths), part.lse.split(lengths)
    return {key: Partial(out, lse) for key, out, lse in zip(calls, outs, lses, strict=True)}
