"""Triton kernels: paged decode attention with split keys, attention of bands of keys, and the merge of parts.

The GPU backends and the merge of parts call them. The package `triton` comes with torch's CUDA builds; no other file
imports it. With TRITON_INTERPRET=1 the kernels run on CPU tensors, as the tests do. No launch reads a tensor on the
host, so all of them can be captured in a CUDA graph.

Shapes: B sequences with one query each, P pages of G tokens, M pages of the longest table, H query heads, K key/value
heads, D head dimension, N splits; T rows of parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl

from ringserve.cp_core.attention.partial import MAX_TOGETHER

# Maximum bytes of one tile of keys. Shared memory must hold it, its tile of values, and the next tile of each, which is
# being loaded.
TILE_BYTES = 16 << 10
MAX_TILE_KEYS = 64
# Least rows and columns of a product of matrices.
LEAST_TILE = 16
# Maximum queries of a program that attends bands of keys, and their bytes.
BAND_ROWS = 128
BAND_BYTES = 32 << 10
# A program whose tile of sums has at least this many numbers gets 8 warps instead of 4.
LARGE_TILE = 8192
# Programs for each processor of the GPU, and most splits of one sequence.
PROGRAMS_PER_PROCESSOR = 2
MAX_SPLITS = 128
# Splits that the second kernel reads at once.
JOINED_SPLITS = tl.constexpr(16)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Rows of a head that one program merges: enough for a whole warp, few enough for small batches.
MERGED_ROWS = 16


def attend_pages(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    num_splits: int = 0,
    firsts: torch.Tensor | None = None,
    most_seen: int = 0,
    ends: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend q[B, H, D] over the first lengths[b] tokens in the pages table[b, :] of k, v[P, G, K, D]; any G.

    Return fp32 out[B, H, D] and lse[B, H].

    `table` int32[B, M] and `lengths` int32[B] are on the device. A length of 0 gives (0, -inf). Entries of a table
    after its last page are not read, nor are tokens after the length. If a row's LSE is NaN, so is its out. With
    `firsts` int32[B] query b sees tokens [firsts[b], lengths[b]), at most `most_seen` of them; pages that end before
    firsts[b] are not read.

    If `ends` int32[E] is given, queries [ends[e - 1], ends[e]) are one sequence's, at most MAX_TOGETHER, with equal
    rows of the table: its pages are read once for all of them. Queries from ends[E - 1] on see nothing and get
    (0, -inf).

    Each sequence is cut into `num_splits` ranges of keys; 0 chooses enough to keep the GPU busy if every row of the
    table is full.
    """
    batch, num_heads, head_dim = q.shape
    page_tokens, num_kv_heads = k_pages.shape[1:3]
    group, num_sequences = num_heads // num_kv_heads, batch if ends is None else ends.shape[0]
    padded_dim = triton.next_power_of_2(head_dim)
    keys = max(LEAST_TILE, min(MAX_TILE_KEYS, TILE_BYTES // (padded_dim * k_pages.element_size())))
    if not num_splits:
        capacity = table.shape[1] * page_tokens
        capacity = min(capacity, most_seen) if firsts is not None else capacity
        num_splits = _num_splits(num_sequences * num_kv_heads, capacity, keys, q.device)
    if ends is None:
        part_out = q.new_empty(batch, num_heads, num_splits, head_dim, dtype=torch.float32)
        part_lse = q.new_empty(batch, num_heads, num_splits, dtype=torch.float32)
    else:
        part_out = q.new_zeros(batch, num_heads, num_splits, head_dim, dtype=torch.float32)
        part_lse = q.new_full((batch, num_heads, num_splits), -torch.inf, dtype=torch.float32)
    rows = max(LEAST_TILE, triton.next_power_of_2(group * (1 if ends is None else MAX_TOGETHER)))
    if batch:
        _attend_split[num_sequences, num_kv_heads, num_splits](
            q,
            k_pages,
            v_pages,
            table,
            lengths,
            lengths if firsts is None else firsts,
            lengths if ends is None else ends,
            part_out,
            part_lse,
            *(q.stride(0), q.stride(1), table.stride(0)),
            *(k_pages.stride(0), k_pages.stride(1), k_pages.stride(2)),
            *(v_pages.stride(0), v_pages.stride(1), v_pages.stride(2)),
            scale * LOG2_E.value,
            PAGE_TOKENS=page_tokens,
            GROUP=group,
            ROWS=rows,
            HEAD_DIM=head_dim,
            PADDED_DIM=padded_dim,
            KEYS=keys,
            PRECISION=_precision(q),
            HAS_FIRSTS=firsts is not None,
            IS_TOGETHER=ends is not None,
            num_warps=8 if rows * padded_dim >= LARGE_TILE else 4,
            num_stages=3,
        )
    if num_splits == 1:
        return part_out[:, :, 0], part_lse[:, :, 0]
    out = part_out.new_empty(batch, num_heads, head_dim)
    lse = part_lse.new_empty(batch, num_heads)
    if batch:
        _join_splits[(batch * num_heads,)](
            part_out, part_lse, out, lse, num_splits, HEAD_DIM=head_dim, PADDED_DIM=padded_dim, num_warps=4
        )
    return out, lse


def attend_between(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first: torch.Tensor,
    stop: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend q[T, H, D] over k[S, K, D] and v[S, K, D]: query t sees keys [first[t], stop[t]), both ascending.

    Return fp32 out[T, H, D] and lse[T, H]; a query that sees no key has (0, -inf). `first` and `stop` int32[T] are on
    the device. A program reads every key that at least one of its queries sees, so queries with few keys take as long
    as those with the most.
    """
    num_rows, num_heads, head_dim = q.shape
    padded_dim = triton.next_power_of_2(head_dim)
    rows = max(LEAST_TILE, min(BAND_ROWS, BAND_BYTES // (padded_dim * q.element_size())))
    out = q.new_empty(num_rows, num_heads, head_dim, dtype=torch.float32)
    lse = q.new_empty(num_rows, num_heads, dtype=torch.float32)
    if num_rows:
        _attend_band[triton.cdiv(num_rows, rows), num_heads](
            q,
            k,
            v,
            first,
            stop,
            out,
            lse,
            num_rows,
            *(q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
            scale * LOG2_E.value,
            GROUP=num_heads // k.shape[1],
            ROWS=rows,
            HEAD_DIM=head_dim,
            PADDED_DIM=padded_dim,
            KEYS=max(LEAST_TILE, min(MAX_TILE_KEYS, TILE_BYTES // (padded_dim * k.element_size()))),
            PRECISION=_precision(q),
            num_warps=8 if rows == BAND_ROWS else 4,
            num_stages=2,
        )
    return out, lse


MERGES_EARLY = True
"""See `MergeKernels`."""


def merge_parts(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], into: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge one or more parts of the same T rows, of any dtype and strides -> fp32 out[T, H, D] and lse[T, H].

    If `into` (contiguous [T, H, D], any dtype) is given, out is written there. The out of a part is not read if its lse
    is -inf or its weight is 0. Rows that no part attended give (0, -inf). A row with an lse of NaN in a part is NaN in
    the result.
    """
    num_rows, num_heads, head_dim = outs[0].shape
    out = outs[0].new_empty(num_rows, num_heads, head_dim, dtype=torch.float32) if into is None else into
    assert out.is_contiguous(), "rows of the result lie side by side"
    lse = lses[0].new_empty(num_rows, num_heads, dtype=torch.float32)
    if num_rows:
        _merge_parts[(triton.cdiv(num_rows * num_heads, MERGED_ROWS),)](
            tuple(_last_contiguous(part) for part in outs),
            tuple(lses),
            tuple(part.stride(0) for part in outs),
            tuple(part.stride(1) for part in outs),
            tuple(part.stride(0) for part in lses),
            tuple(part.stride(1) for part in lses),
            out,
            lse,
            num_rows * num_heads,
            num_heads,
            NUM_PARTS=len(outs),
            HEAD_DIM=head_dim,
            PADDED_DIM=triton.next_power_of_2(head_dim),
            ROWS=MERGED_ROWS,
            num_warps=4,
        )
    return out, lse


def _last_contiguous(out: torch.Tensor) -> torch.Tensor:
    assert out.stride(-1) == 1, "the numbers of a head lie side by side"
    return out


def _num_splits(num_programs: int, capacity: int, keys: int, device: torch.device) -> int:
    """Return the number of splits for every sequence, from sizes on the host: one captured graph serves all lengths."""
    wanted = -(-PROGRAMS_PER_PROCESSOR * _num_processors(device) // max(1, num_programs))
    return max(1, min(wanted, -(-capacity // keys), MAX_SPLITS))


def _precision(q: torch.Tensor) -> str:
    return "ieee" if q.dtype == torch.float32 else "tf32"


@cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def _attend_split(
    q,
    k_pages,
    v_pages,
    table,
    lengths,
    firsts,
    ends,
    part_out,
    part_lse,
    q_row,
    q_head,
    table_row,
    k_page,
    k_token,
    k_head,
    v_page,
    v_token,
    v_head,
    scale_log2,
    PAGE_TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_FIRSTS: tl.constexpr,
    IS_TOGETHER: tl.constexpr,
):
    """Attend the GROUP query heads of one KV head over one split of a sequence's keys.

    The ROWS rows are these heads for all queries of the sequence, padded.
    """
    number, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_splits = tl.num_programs(2)
    rows, dims, keys = tl.arange(0, ROWS), tl.arange(0, PADDED_DIM), tl.arange(0, KEYS)
    is_dim = dims < HEAD_DIM
    if IS_TOGETHER:
        query = tl.load(ends + number - 1, mask=number > 0, other=0)
        count = tl.load(ends + number) - query
        if count <= 0:
            return
        queries, is_row = query + rows // GROUP, rows < count * GROUP
        highs = tl.load(lengths + queries, mask=is_row, other=0)
        lows = tl.load(firsts + queries, mask=is_row, other=2147483647) if HAS_FIRSTS else tl.zeros([ROWS], tl.int32)
        length, first = tl.max(highs, 0), tl.min(lows, 0)
    else:
        query = number
        queries, is_row = query + tl.zeros([ROWS], tl.int32), rows < GROUP
        length = tl.load(lengths + query)
        first = tl.load(firsts + query) if HAS_FIRSTS else 0
    size = tl.cdiv(tl.cdiv(length - first, num_splits), KEYS) * KEYS
    begin = first + split * size
    end = tl.minimum(begin + size, length)
    heads = kv_head * GROUP + rows % GROUP
    place = (queries * tl.num_programs(1) * GROUP + heads) * num_splits + split
    if begin >= end:
        tl.store(part_lse + place, float("-inf"), mask=is_row)
        # With one split no second kernel follows that would skip this out by its LSE, so it must be 0.
        if num_splits == 1:
            to = part_out + place[:, None] * HEAD_DIM + dims[None, :]
            tl.store(to, tl.zeros([ROWS, PADDED_DIM], tl.float32), mask=is_row[:, None] & is_dim[None, :])
        return
    q_rd = tl.load(
        q + queries[:, None].to(tl.int64) * q_row + heads[:, None] * q_head + dims[None, :],
        mask=is_row[:, None] & is_dim[None, :],
        other=0.0,
    )
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    for at in range(begin, end, KEYS):
        tokens = at + keys
        is_key = tokens < end
        pages = tl.load(table + query.to(tl.int64) * table_row + tokens // PAGE_TOKENS, mask=is_key, other=0)
        pages = pages.to(tl.int64)
        within = tokens % PAGE_TOKENS
        k_at = pages * k_page + within * k_token + kv_head * k_head
        is_read = is_key[:, None] & is_dim[None, :]
        k_sd = tl.load(k_pages + k_at[:, None] + dims[None, :], mask=is_read, other=0.0)
        scores = tl.dot(q_rd, tl.trans(k_sd), input_precision=PRECISION) * scale_log2
        is_seen = is_key[None, :]
        if IS_TOGETHER:
            is_seen &= (lows[:, None] <= tokens[None, :]) & (tokens[None, :] < highs[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        # Of several queries some may have seen no key yet.
        base = tl.where(higher == float("-inf"), 0.0, higher) if IS_TOGETHER else higher
        shrink = tl.exp2(highest - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * shrink + tl.sum(weights, 1)
        v_at = pages * v_page + within * v_token + kv_head * v_head
        v_sd = tl.load(v_pages + v_at[:, None] + dims[None, :], mask=is_read, other=0.0)
        sums = sums * shrink[:, None] + tl.dot(weights.to(v_sd.dtype), v_sd, input_precision=PRECISION)
        highest = higher
    if IS_TOGETHER:
        sums /= tl.where(total == 0.0, 1.0, total)[:, None]
        highest = tl.where(highest == float("-inf"), 0.0, highest)
    else:
        sums /= total[:, None]
    to = part_out + place[:, None] * HEAD_DIM + dims[None, :]
    tl.store(to, sums, mask=is_row[:, None] & is_dim[None, :])
    tl.store(part_lse + place, (highest + tl.log2(total)) * LN_2, mask=is_row)


@triton.jit
def _attend_band(
    q,
    k,
    v,
    first,
    stop,
    out,
    lse,
    num_rows,
    q_row,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    scale_log2,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend ROWS queries of one head over the keys that at least one of them sees."""
    # If no window hides keys, the last rows see the most of them, so they begin first.
    tile, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    rows, dims, keys = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED_DIM), tl.arange(0, KEYS)
    is_row, is_dim = rows < num_rows, dims < HEAD_DIM
    # Padding rows, after the last query, repeat the last query and are not stored.
    held = tl.minimum(rows, num_rows - 1)
    low, high = tl.load(first + held), tl.load(stop + held)
    # Keys that some rows see, and keys that all rows see: whole tiles of the latter need no mask.
    begin, end = tl.min(low, 0), tl.max(high, 0)
    all_from, all_to = tl.max(low, 0), tl.min(high, 0)
    q_rd = tl.load(
        q + held[:, None].to(tl.int64) * q_row + head * q_head + dims[None, :], mask=is_dim[None, :], other=0.0
    )
    k += (head // GROUP).to(tl.int64) * k_head
    v += (head // GROUP).to(tl.int64) * v_head
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    whole = tl.minimum(begin + tl.cdiv(tl.maximum(all_from - begin, 0), KEYS) * KEYS, end)
    partly = whole + tl.maximum(all_to - whole, 0) // KEYS * KEYS
    for part in tl.static_range(3):
        from_ = begin if part == 0 else (whole if part == 1 else partly)
        to = whole if part == 0 else (partly if part == 1 else end)
        for at in range(from_, to, KEYS):
            tokens = at + keys
            is_read = is_dim[None, :] if part == 1 else (tokens < end)[:, None] & is_dim[None, :]
            k_sd = tl.load(k + tokens[:, None].to(tl.int64) * k_token + dims[None, :], mask=is_read, other=0.0)
            scores = tl.dot(q_rd, tl.trans(k_sd), input_precision=PRECISION) * scale_log2
            if part != 1:
                is_seen = (low[:, None] <= tokens[None, :]) & (tokens[None, :] < high[:, None])
                scores = tl.where(is_seen, scores, float("-inf"))
            higher = tl.maximum(highest, tl.max(scores, 1))
            # Rows that have seen no key yet have -inf here, and -inf - -inf would be NaN.
            base = tl.where(higher == float("-inf"), 0.0, higher)
            shrink = tl.exp2(highest - base)
            weights = tl.exp2(scores - base[:, None])
            total = total * shrink + tl.sum(weights, 1)
            v_sd = tl.load(v + tokens[:, None].to(tl.int64) * v_token + dims[None, :], mask=is_read, other=0.0)
            sums = sums * shrink[:, None] + tl.dot(weights.to(v_sd.dtype), v_sd, input_precision=PRECISION)
            highest = higher
    place = rows.to(tl.int64) * tl.num_programs(1) + head
    sums /= tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + place[:, None] * HEAD_DIM + dims[None, :], sums, mask=is_row[:, None] & is_dim[None, :])
    base = tl.where(highest == float("-inf"), 0.0, highest)
    tl.store(lse + place, (base + tl.log2(total)) * LN_2, mask=is_row)


@triton.jit
def _join_splits(part_out, part_lse, out, lse, num_splits, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr):
    """Merge the splits of one head of one sequence: part_out[B * H, N, D], part_lse[B * H, N]."""
    row = tl.program_id(0).to(tl.int64)
    dims, some = tl.arange(0, PADDED_DIM), tl.arange(0, JOINED_SPLITS)
    is_dim = dims < HEAD_DIM
    highest = tl.full([], float("-inf"), tl.float32)
    for first in range(0, num_splits, JOINED_SPLITS):
        here = tl.load(part_lse + row * num_splits + first + some, mask=first + some < num_splits, other=float("-inf"))
        highest = tl.maximum(highest, tl.max(here, 0))
    base = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.zeros([], tl.float32)
    sums = tl.zeros([PADDED_DIM], tl.float32)
    for first in range(0, num_splits, JOINED_SPLITS):
        splits = first + some
        here = tl.load(part_lse + row * num_splits + splits, mask=splits < num_splits, other=float("-inf"))
        weights = tl.exp2((here - base) * LOG2_E)
        is_read = (weights > 0.0)[:, None] & is_dim[None, :]
        from_ = part_out + (row * num_splits + splits)[:, None] * HEAD_DIM + dims[None, :]
        sums += tl.sum(tl.load(from_, mask=is_read, other=0.0) * weights[:, None], 0)
        total += tl.sum(weights, 0)
    # Without any key the sums are 0 and stay 0.
    tl.store(out + row * HEAD_DIM + dims, sums / tl.where(total == 0.0, 1.0, total), mask=is_dim)
    tl.store(lse + row, base + tl.log2(total) * LN_2)


@triton.jit
def _merge_parts(
    outs,
    lses,
    out_rows,
    out_heads,
    lse_rows,
    lse_heads,
    out,
    lse,
    num_places,
    num_heads,
    NUM_PARTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Merge ROWS (row, head) places of all parts."""
    places = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED_DIM)
    is_place, is_dim = places < num_places, dims < HEAD_DIM
    rows, heads = places // num_heads, places % num_heads
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    for part in tl.static_range(NUM_PARTS):
        lse_at = lses[part] + rows * lse_rows[part] + heads * lse_heads[part]
        here = tl.load(lse_at, mask=is_place, other=float("-inf")).to(tl.float32)
        highest = tl.maximum(highest, here)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    for part in tl.static_range(NUM_PARTS):
        lse_at = lses[part] + rows * lse_rows[part] + heads * lse_heads[part]
        here = tl.load(lse_at, mask=is_place, other=float("-inf")).to(tl.float32)
        weights = tl.exp2((here - base) * LOG2_E)
        out_at = outs[part] + (rows * out_rows[part] + heads * out_heads[part])[:, None] + dims[None, :]
        is_read = (weights > 0.0)[:, None] & is_dim[None, :]
        sums += tl.load(out_at, mask=is_read, other=0.0).to(tl.float32) * weights[:, None]
        total += weights
    merged = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + places[:, None] * HEAD_DIM + dims[None, :], merged, mask=is_place[:, None] & is_dim[None, :])
    tl.store(lse + places, base + tl.log2(total) * LN_2, mask=is_place)
