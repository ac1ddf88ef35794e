"""Cases of Triton's kernels against the fp64 oracle, which `test_triton.py` runs in a process of its own.

Triton decides at its first import whether kernels are compiled or interpreted: with TRITON_INTERPRET=1 they run on CPU
tensors, otherwise on the GPU (`make gpu`). The interpreter multiplies the bits of bfloat16 as integers; here it widens
them first, which is exact.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime import interpreter

from ringserve.cp_core.attention import triton_kernels
from ringserve.cp_core.attention.partial import PagedShards, Partial, empty_partial, merge, merge_in_kernel
from ringserve.cp_core.attention.triton_decode import TritonDecode
from ringserve.cp_core.attention.triton_kernels import attend_pages
from ringserve.cp_core.layout.step_plans import RowIndices
from ringserve.cp_core.ring.decode import sharded_decode
from ringserve.cp_core.transport.inprocess import InProcessRing
from tests.oracles import Tokens, largest, oracle_partial, random_tokens

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
# Numpy warns where the logarithm of 0 gives the -inf that is wanted, and where NaN is subtracted.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
settings.register_profile("kernels", deadline=None, derandomize=True)
settings.load_profile("kernels")

NO_PAGE = 1 << 30


@pytest.fixture(autouse=True)
def _bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = interpreter.InterpreterBuilder.create_dot

    def widened(self: Any, left: Any, right: Any, *others: Any) -> Any:
        return multiply(self, _widen(left), _widen(right), *others)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", widened)


def _widen(operand: Any) -> Any:
    language = interpreter.tl
    if operand.dtype.scalar != language.bfloat16:
        return operand
    data = (operand.data.astype("uint32") << 16).view("float32")
    return interpreter.TensorHandle(data, language.float32)


def paged(sequences: list[Tokens], page_tokens: int, seed: int = 0) -> PagedShards:
    """Scatter sequences over pages in random order of a cache full of NaN; unused entries of the table name no page."""
    lengths = [tokens.k.shape[0] for tokens in sequences]
    needed = [-(-length // page_tokens) for length in lengths]
    order = torch.randperm(sum(needed) + 3, generator=torch.Generator().manual_seed(seed)).tolist()
    shape = (len(order), page_tokens, *sequences[0].k.shape[1:])
    pages = [torch.full(shape, torch.nan, dtype=sequences[0].k.dtype) for _ in range(2)]
    table = torch.full((len(sequences), max(needed) + 1), NO_PAGE, dtype=torch.int32)
    for row, tokens in enumerate(sequences):
        for index in range(needed[row]):
            table[row, index] = number = order.pop()
            for kind, source in zip(pages, (tokens.k, tokens.v), strict=True):
                piece = source[index * page_tokens : (index + 1) * page_tokens]
                kind[number, : piece.shape[0]] = piece
    k, v = (each.to(DEVICE) for each in pages)
    return PagedShards(k, v, table.to(DEVICE), tuple(lengths), torch.tensor(lengths, dtype=torch.int32, device=DEVICE))


def check(q_bhd: torch.Tensor, sequences: list[Tokens], part: Partial) -> None:
    """Out within 2e-6 of max |v| in fp32, 3 roundings of the weights in 16 bits; LSE within 4e-6."""
    is_wide = q_bhd.dtype == torch.float32
    relative = 2e-6 if is_wide else 3 * torch.finfo(q_bhd.dtype).eps
    assert part.out.dtype == part.lse.dtype == torch.float32
    for row, tokens in enumerate(sequences):
        if not tokens.k.shape[0]:
            assert torch.equal(part.out[row].cpu(), torch.zeros(q_bhd.shape[1:]))
            assert torch.isneginf(part.lse[row]).all()
            continue
        right = oracle_partial(q_bhd[row : row + 1], tokens.k, tokens.v, causal=False, scale=q_bhd.shape[-1] ** -0.5)
        assert largest(part.out[row].cpu().double() - right.out[0]) <= relative * largest(tokens.v.float())
        assert largest(part.lse[row].cpu().double() - right.lse[0]) <= 4e-6 * max(1.0, largest(right.lse))


def attend(q_bhd: torch.Tensor, shards: PagedShards, num_splits: int) -> Partial:
    scale = q_bhd.shape[-1] ** -0.5
    return Partial(*attend_pages(q_bhd.to(DEVICE), shards.k, shards.v, shards.table, shards.lengths, scale, num_splits))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "page_tokens"),
    [(8, 1, 64, 16), (4, 4, 80, 1), (6, 2, 96, 48), (4, 1, 128, 256), (34, 2, 64, 16), (2, 1, 256, 16)],
)
def test_every_shape_matches_the_oracle(
    num_heads: int, num_kv_heads: int, head_dim: int, page_tokens: int, dtype: torch.dtype
) -> None:
    """Uneven lengths and one of 0; 17 query heads of a KV head take two tiles of rows."""
    sequences = [
        random_tokens(
            length, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype, seed=length
        )
        for length in (70, 0, 1)
    ]
    q = random_tokens(3, num_heads=num_heads, head_dim=head_dim, dtype=dtype, seed=9).q
    check(q, sequences, attend(q, paged(sequences, page_tokens), 2))


@given(
    lengths=st.lists(st.sampled_from([0, 1, 15, 16, 17, 63, 64, 65, 130]), min_size=1, max_size=3),
    page_tokens=st.sampled_from([1, 16, 64]),
    num_splits=st.sampled_from([1, 2, 5, 17]),
)
@settings(max_examples=8)
def test_any_lengths_over_any_pages_in_any_splits_match_the_oracle(
    lengths: list[int], page_tokens: int, num_splits: int
) -> None:
    sequences = [random_tokens(length, num_heads=2, num_kv_heads=1, seed=length) for length in lengths]
    q = random_tokens(len(lengths), num_heads=2, seed=9).q
    check(q, sequences, attend(q, paged(sequences, page_tokens), num_splits))


@given(
    lengths=st.lists(st.sampled_from([0, 1, 17, 64, 130]), min_size=1, max_size=3),
    window=st.sampled_from([1, 16, 40, 200]),
    page_tokens=st.sampled_from([1, 16, 64]),
    num_splits=st.sampled_from([0, 1, 3, 17]),
)
@settings(max_examples=8)
def test_a_window_hides_the_first_tokens_whose_pages_are_not_read(
    lengths: list[int], window: int, page_tokens: int, num_splits: int
) -> None:
    sequences = [random_tokens(length, num_heads=2, num_kv_heads=1, seed=length) for length in lengths]
    q = random_tokens(len(lengths), num_heads=2, seed=9).q
    shards = paged(sequences, page_tokens)
    firsts = [max(0, length - window) for length in lengths]
    for row, first in enumerate(firsts):
        shards.table[row, : first // page_tokens] = NO_PAGE
    shards = replace(shards, firsts=torch.tensor(firsts, dtype=torch.int32, device=DEVICE), most_seen=window)
    seen = [replace(each, k=each.k[first:], v=each.v[first:]) for each, first in zip(sequences, firsts, strict=True)]
    pages = (q.to(DEVICE), shards.k, shards.v, shards.table, shards.lengths)
    check(q, seen, Partial(*attend_pages(*pages, 0.125, num_splits, shards.firsts, shards.most_seen)))
    check(q, seen, TritonDecode().paged_attention(q.to(DEVICE), shards, scale=0.125))


@given(
    sequences=st.lists(st.tuples(st.sampled_from([8, 17, 64, 130]), st.integers(1, 8)), min_size=1, max_size=3),
    window=st.sampled_from([0, 1, 10, 70]),
    num_padding=st.integers(0, 2),
    num_splits=st.sampled_from([0, 1, 3, 17]),
    num_heads=st.sampled_from([2, 3, 8]),
)
@settings(max_examples=10)
def test_queries_of_one_sequence_are_attended_together(
    sequences: list[tuple[int, int]], window: int, num_padding: int, num_splits: int, num_heads: int
) -> None:
    """The newest token and drafts behind it; those that other ranks store see no token here that is hidden."""
    stored = [random_tokens(length, num_kv_heads=1, seed=length) for length, _ in sequences]
    shards = paged(stored, 16)
    counts = [count for _, count in sequences]
    seen = [length - count + 1 + place for length, count in sequences for place in range(count)]
    firsts = [max(0, last - window) if window else 0 for last in seen]
    rows = torch.tensor([row for row, count in enumerate(counts) for _ in range(count)], device=DEVICE)
    table = torch.cat([shards.table[rows], torch.full_like(shards.table[:1], NO_PAGE).expand(num_padding, -1)])
    lengths, bounds = ([*each, *[0] * num_padding] for each in (seen, firsts))
    ends = [sum(counts[: number + 1]) for number in range(len(counts))] + [sum(counts)] * num_padding
    together = replace(
        shards,
        table=table.contiguous(),
        stored=tuple(lengths),
        lengths=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        firsts=torch.tensor(bounds, dtype=torch.int32, device=DEVICE) if window else None,
        most_seen=window,
        ends=torch.tensor(ends, dtype=torch.int32, device=DEVICE),
    )
    q = random_tokens(len(lengths), num_heads=num_heads, seed=9).q
    pages = (q.to(DEVICE), together.k, together.v, together.table, together.lengths)
    part = Partial(*attend_pages(*pages, 0.125, num_splits, together.firsts, window, together.ends))
    visible = [
        replace(stored[row], k=stored[row].k[first:last], v=stored[row].v[first:last])
        for row, first, last in zip(rows.tolist(), firsts, seen, strict=True)
    ]
    nothing = [replace(stored[0], k=stored[0].k[:0], v=stored[0].v[:0])] * num_padding
    check(q, [*visible, *nothing], part)


SHAPES = ((4, 2, 64), (3, 1, 80), (2, 2, 128), (2, 1, 256))


@pytest.mark.parametrize(
    ("band", "num_heads", "num_kv_heads", "head_dim", "dtype"),
    [
        *((band, *SHAPES[0], torch.float32) for band in ("window", "causal", "blind", "full")),
        *(("scattered", *shape, dtype) for shape in SHAPES for dtype in (torch.float32, torch.bfloat16)),
    ],
)
def test_bands_of_keys_match_the_oracle(
    band: str, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    """Queries in two tiles; what lies outside of the bands is NaN. Rows see nothing at both ends of a blind band."""
    num_rows, num_stored = 150, 230
    if num_heads > 3 or dtype == torch.bfloat16:
        num_rows, num_stored = 131, 140
    at = torch.arange(num_rows)
    low, high = {
        "window": (at - 20, at + 1),
        "causal": (at * 0, at + 1),
        "scattered": (at // 3 * 4, at // 3 * 4 + at % 3 + 50),
        "blind": ((at - 70) * 2, (at - 60) * 2),
        "full": (at * 0 + 3, at * 0 + num_stored - 2),
    }[band]
    low, high = (each.cummax(0).values.clamp(0, num_stored) for each in (low, high))
    keys = random_tokens(num_stored, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype, seed=3)
    q = random_tokens(num_rows, num_heads=num_heads, head_dim=head_dim, dtype=dtype, seed=4).q
    k, v = keys.k.clone(), keys.v.clone()
    for each in (k, v):
        each[int(high.max()) :] = each[: int(low.min())] = torch.nan
    bounds = [each.int().to(DEVICE) for each in (low, high)]
    part = TritonDecode().attend_between(*(each.to(DEVICE) for each in (q, k, v)), *bounds, scale=head_dim**-0.5)
    relative = 2e-6 if dtype == torch.float32 else 3 * torch.finfo(dtype).eps
    for row in range(num_rows):
        first, stop = int(low[row]), int(high[row])
        if first >= stop:
            assert torch.equal(part.out[row].cpu(), torch.zeros(num_heads, head_dim))
            assert torch.isneginf(part.lse[row]).all()
            continue
        seen = keys.k[first:stop], keys.v[first:stop]
        right = oracle_partial(q[row : row + 1], *seen, causal=False, scale=head_dim**-0.5)
        assert largest(part.out[row].cpu().double() - right.out[0]) <= relative * largest(seen[1].float())
        assert largest(part.lse[row].cpu().double() - right.lse[0]) <= 4e-6 * max(1.0, largest(right.lse))


def test_an_empty_batch_is_answered_without_a_launch() -> None:
    part = attend(torch.zeros(0, 2, 64), paged([random_tokens(3, num_kv_heads=1)], 16), 2)
    assert (part.out.shape, part.lse.shape) == ((0, 2, 64), (0, 2))


def test_a_query_of_nan_makes_its_own_rows_nan_and_no_others() -> None:
    sequences = [random_tokens(length, seed=length) for length in (20, 40)]
    q = random_tokens(2, seed=9).q
    q[0, 1] = torch.nan
    part = attend(q, paged(sequences, 16), 3)
    assert part.out[0, 1].isnan().all()
    assert part.lse[0, 1].isnan()
    q[0, 1] = 0.0
    assert torch.equal(part.out[1], attend(q, paged(sequences, 16), 3).out[1])
    assert part.out[0, 0].isfinite().all()


def test_the_backend_decodes_over_pages_of_any_size_and_reads_lengths_on_the_device() -> None:
    """One rank: the part is the answer. Strided queries, as a model's fused projection gives them."""
    sequences = [random_tokens(length, seed=length, dtype=torch.float16) for length in (33, 0)]
    shards = paged(sequences, 16)
    fused = random_tokens(2, num_heads=6, seed=9, dtype=torch.float16).q.to(DEVICE)
    q = fused[:, 1:5]
    part = TritonDecode().paged_attention(q, shards, scale=0.125)
    check(q.cpu(), sequences, part)
    (transport,) = InProcessRing(1).transports
    out = sharded_decode(q, shards, transport, TritonDecode(), 0.125)
    assert torch.equal(out, part.out.half())
    assert RowIndices().of([1], DEVICE).tolist() == [1]


@given(
    kinds=st.lists(st.sampled_from(["whole", "narrow", "nothing", "blind", "strided"]), min_size=1, max_size=9),
    head_dim=st.sampled_from([1, 64, 80]),
    seed=st.integers(0, 99),
)
@settings(max_examples=12)
def test_any_parts_merge_as_plain_tensors_do(kinds: list[str], head_dim: int, seed: int) -> None:
    """Within 4e-7 of the largest number. Parts that attended nothing are NaN, in whole or in some rows."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for kind in kinds:
        out = torch.randn(7, 3, head_dim, generator=generator)
        lse = 4 * torch.randn(7, 3, generator=generator)
        if kind == "narrow":
            out = out.bfloat16()
        if kind in ("nothing", "blind"):
            rows = slice(None) if kind == "nothing" else slice(2, 4)
            out[rows], lse[rows] = torch.nan, -torch.inf
        if kind == "strided":
            out = out.transpose(0, 1).contiguous().transpose(0, 1)
            lse = lse.t().contiguous().t()
        parts.append(Partial(out.to(DEVICE), lse.to(DEVICE)))
    merged = merge_in_kernel(triton_kernels, parts)
    none = empty_partial(parts[0].out)
    right = merge([*(Partial(part.out.float().cpu(), part.lse.cpu()) for part in parts), Partial(*_on_cpu(none))])
    assert largest(merged.out.cpu() - right.out) <= 4e-7 * 5
    assert torch.equal(torch.isneginf(merged.lse).cpu(), torch.isneginf(right.lse))
    assert torch.allclose(merged.lse.cpu(), right.lse, rtol=4e-7, atol=1e-6)


def _on_cpu(part: Partial) -> tuple[torch.Tensor, torch.Tensor]:
    return part.out.float().cpu(), part.lse.cpu()


def test_a_merge_writes_in_the_dtype_of_the_model_and_passes_a_nan_on() -> None:
    parts = [Partial(torch.ones(3, 2, 64, device=DEVICE), torch.zeros(3, 2, device=DEVICE)) for _ in range(2)]
    parts[1].lse[1, 0] = torch.nan
    whole = torch.full((5, 2, 64), 7.0, dtype=torch.bfloat16, device=DEVICE)
    merged = merge_in_kernel(triton_kernels, parts, whole[1:4])
    assert torch.equal(whole[::4], torch.full((2, 2, 64), 7.0, dtype=torch.bfloat16, device=DEVICE))
    assert merged.out.data_ptr() == whole[1:4].data_ptr()
    assert merged.out[1, 0].isnan().all()
    assert merged.lse[1, 0].isnan()
    assert int(merged.out.isnan().sum()) == 64
    nothing = merge_in_kernel(triton_kernels, [Partial(part.out[:0], part.lse[:0]) for part in parts])
    assert nothing.out.shape == (0, 2, 64)
