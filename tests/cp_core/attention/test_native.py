"""Compiled kernels of CPUs: what they have beside the contract of all backends (`test_backends`)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hatch_build import X86, compile_kernels
from ringserve.cp_core.attention import native
from ringserve.cp_core.attention.native import HEAD_DIMS, MAX_SINGLE_TOKENS, NativeCpu, multiply, pack_weight
from ringserve.cp_core.attention.partial import PagedShards, Partial, merge, merge_in_kernel
from ringserve.cp_core.cost.model import PREFILL_ALGORITHMS
from ringserve.cp_core.layout.shards import chunked_layout
from ringserve.cp_core.layout.step_plans import KvRun
from tests.cp_core.attention.test_paged import scattered
from tests.cp_core.rings import PlacedSequence, prefill_on_threads
from tests.oracles import largest, oracle_causal, oracle_partial, random_tokens
from tests.programs import require
from tests.test_repository import ROOT

KERNEL = NativeCpu()
CAPABILITY = torch.backends.cpu.get_cpu_capability().lower()
COMPILED = {path.stem.removeprefix("native-") for path in compile_kernels(ROOT)}
KINDS = sorted(COMPILED - ({"avx512"} if CAPABILITY != "avx512" else set()))
"""Instruction sets of the libraries here that this processor has."""
FOUND = native.library()
HAS_TILES = FOUND is not None and bool(FOUND.ringserve_use_tiles(True))
HAS_PAIRS = FOUND is not None and bool(FOUND.ringserve_use_pairs(True))
WAYS = ["vectors", *["pairs"] * HAS_PAIRS, *["tiles"] * HAS_TILES]
"""Ways in which many rows are multiplied and attended here."""


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    found = native.library()
    assert found is not None
    found.ringserve_use_tiles(request.param == "tiles")
    found.ringserve_use_pairs(request.param != "vectors")
    yield request.param
    found.ringserve_use_tiles(True)
    found.ringserve_use_pairs(True)


@pytest.fixture(autouse=True)
def compiled() -> None:
    """Skip tests without a compiler. With a compiler, fail them if there is no library."""
    if native.library() is None:
        require("c++", "g++", "clang++")
        pytest.fail("there is a compiler and no library: pip install -e . again")


@given(
    shape=st.tuples(st.integers(0, 70), st.integers(1, 5), st.sampled_from([5, 16, 64, 80])),
    num_parts=st.sampled_from([1, 2, 5, 64, 65, 130]),
    seed=st.integers(0, 100),
)
@settings(max_examples=60, deadline=None)
def test_parts_merge_as_in_fp64(shape: tuple[int, int, int], num_parts: int, seed: int) -> None:
    """Some parts attended nothing in some rows, and their outs there are NaN; some lie transposed."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for number in range(num_parts):
        out, lse = torch.randn(shape, generator=generator), 9 * torch.randn(shape[:2], generator=generator)
        blind = torch.rand(shape[:2], generator=generator) < 0.3
        out[blind], lse[blind] = torch.nan, -torch.inf
        if number % 2:
            out, lse = out.transpose(0, 1).contiguous().transpose(0, 1), lse.t().contiguous().t()
        parts.append(Partial(out, lse))
    found = merge_in_kernel(native, parts)
    right = merge([*(Partial(part.out.double(), part.lse.double()) for part in parts)] * 2)  # twice: more than one part
    assert largest(found.out - right.out) <= 5e-6  # the difference of two LSEs of 30 is rounded by 2e-6
    assert torch.equal(found.lse.isneginf(), right.lse.isneginf())
    assert torch.allclose(found.lse, (right.lse - torch.log(torch.tensor(2.0))).float(), rtol=1e-6, atol=1e-6)
    narrow = torch.zeros(shape[0] + 2, *shape[1:], dtype=torch.bfloat16)
    merge_in_kernel(native, parts, into=narrow[1:-1])
    assert torch.equal(narrow[1:-1], found.out.bfloat16())
    assert not narrow[0].any()
    assert not narrow[-1].any()


@given(
    lengths=st.lists(st.integers(0, 600), min_size=1, max_size=5),
    page_tokens=st.sampled_from([1, 7, 16, 64]),
    seed=st.integers(0, 100),
)
@settings(max_examples=40, deadline=None)
def test_any_batch_over_pages_matches_the_oracle(lengths: list[int], page_tokens: int, seed: int) -> None:
    """Shards may be empty; what lies behind a sequence's last token was never written."""
    batch = [random_tokens(max(length, 1), seed=seed + row) for row, length in enumerate(lengths)]
    shards = scattered([(each.k[:n], each.v[:n]) for each, n in zip(batch, lengths, strict=True)], page_tokens, seed)
    part = KERNEL.paged_attention(torch.stack([each.q[-1] for each in batch]), shards, scale=0.125)
    for row, (each, length) in enumerate(zip(batch, lengths, strict=True)):
        if not length:
            assert torch.isneginf(part.lse[row]).all()
            assert not part.out[row].any()
            continue
        right = oracle_partial(each.q[-1:], each.k[:length], each.v[:length], causal=False, scale=0.125)
        assert largest(part.out[row].double() - right.out[0]) <= 3e-6 * max(1.0, largest(each.v))
        assert largest(part.lse[row].double() - right.lse[0]) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", sorted(HEAD_DIMS))
def test_drafts_of_a_sequence_have_the_bits_that_each_has_alone(head_dim: int, dtype: torch.dtype) -> None:
    """Rows with one table are read together, between sequences of other tables, of which one holds nothing."""
    tokens = random_tokens(300, num_heads=6, num_kv_heads=2, head_dim=head_dim, dtype=dtype)
    pages = torch.randperm(30).to(torch.int32)
    k, v = (torch.full((30, 16, 2, head_dim), torch.nan, dtype=dtype) for _ in range(2))
    for cached, whole in ((k, tokens.k), (v, tokens.v)):
        for index in range(19):
            cached[pages[index].long(), : len(whole[16 * index : 16 * index + 16])] = whole[
                16 * index : 16 * index + 16
            ]
    table = torch.stack([pages, pages, pages, pages.flip(0), pages])
    stored = (297, 300, 298, 0, 17)
    table[1, 19:] = 0  # behind a row's pages lies what another row left

    def attend(rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        some = tuple(stored[row] for row in rows)
        shards = PagedShards(k, v, table[rows].contiguous(), some, torch.tensor(some, dtype=torch.int32))
        part = KERNEL.paged_attention(tokens.q[rows], shards, scale=head_dim**-0.5)
        return part.out, part.lse

    together = attend([0, 1, 2, 3, 4])
    for row in range(5):
        assert all(torch.equal(alone[0], both[row]) for alone, both in zip(attend([row]), together, strict=True))
    right = oracle_partial(tokens.q[1:2], tokens.k, tokens.v, causal=False, scale=head_dim**-0.5)
    assert largest(together[0][1].double() - right.out[0]) <= 3e-6 * max(1.0, largest(tokens.v.float()))


@pytest.mark.parametrize(("head_dim", "num_heads"), [(8, 4), (24, 4), (120, 4), (160, 4), (16, 194)])
def test_heads_of_other_sizes_are_attended_by_torch(head_dim: int, num_heads: int) -> None:
    """In every form of call; the second shard is empty, and pages that no row has are NaN."""
    tokens = random_tokens(90, num_heads=num_heads, num_kv_heads=2, head_dim=head_dim)
    k, v = (torch.full((8, 16, 2, head_dim), torch.nan) for _ in range(2))
    for cached, whole in ((k, tokens.k), (v, tokens.v)):
        cached[2:].flatten(0, 1)[:90] = whole
    table = torch.stack([torch.arange(2, 8), torch.zeros(6)]).to(torch.int32)
    shards = PagedShards(k, v, table, (90, 0), torch.tensor([90, 0], dtype=torch.int32))
    paged = KERNEL.paged_attention(tokens.q[-2:], shards, scale=0.125)
    assert torch.isneginf(paged.lse[1]).all()
    bounds = torch.zeros(1, dtype=torch.int64), torch.full((1,), 90)
    last = tokens.q[-2:-1]
    right = oracle_partial(last, tokens.k, tokens.v, causal=False, scale=0.125)
    for part in (
        paged.rows(0, 1),
        KERNEL.partial_attention(last, tokens.k, tokens.v, causal=False, scale=0.125),
        KERNEL.attend_between(last, tokens.k, tokens.v, *bounds, scale=0.125),
    ):
        assert largest(part.out.double() - right.out) <= 3e-6 * max(1.0, largest(tokens.v))
        assert largest(part.lse.double() - right.lse) <= 1e-5


@given(
    num_tokens=st.integers(1, 130),
    num_stored=st.integers(1, 400),
    window=st.integers(1, 300),
    heads=st.sampled_from([(1, 1), (9, 3), (6, 1), (3, 3)]),
    head_dim=st.sampled_from([16, 48, 64, 80, 256]),
    dtype=st.sampled_from(native.DTYPES),
    seed=st.integers(0, 100),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_range_of_keys_of_each_query_matches_the_oracle(
    way: str,
    num_tokens: int,
    num_stored: int,
    window: int,
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Some queries see no key; keys that no query sees are never read, and nothing between the runs of keys.

    In bfloat16, weights of tiles are rounded to 16 bits.
    """
    tokens = random_tokens(
        max(num_tokens, num_stored),
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        dtype=dtype,
        seed=seed,
    )
    most = 2e-5 if dtype == torch.bfloat16 and way == "tiles" else 3e-6
    stop = (torch.arange(num_tokens) + num_stored - num_tokens + 1).clamp(0, num_stored)
    first = (stop - window).clamp(0)
    k, v = tokens.k[:num_stored].clone(), tokens.v[:num_stored].clone()
    k[: int(first[0])], v[: int(first[0])] = torch.nan, torch.nan
    part = KERNEL.attend_between(tokens.q[:num_tokens], k, v, first, stop, scale=0.125)
    whole = torch.full_like(tokens.q[:num_tokens], torch.nan)
    cuts = sorted(torch.randint(num_stored + 1, (3,), generator=torch.Generator().manual_seed(seed)).tolist())
    is_whole = KERNEL.serves_whole(whole, k)
    if is_whole:
        runs = [poisoned_run(k[begin:end], v[begin:end]) for begin, end in pairwise([0, *cuts, num_stored])]
        KERNEL.attend_whole(tokens.q[:num_tokens], runs, whole, scale=0.125, bounds=(first, stop))
    assert is_whole == (num_tokens > MAX_SINGLE_TOKENS)
    for row in range(num_tokens):
        seen = slice(int(first[row]), int(stop[row]))
        if seen.start == seen.stop:
            assert torch.isneginf(part.lse[row]).all()
            assert not (is_whole and whole[row].any())
            continue
        right = oracle_partial(tokens.q[row : row + 1], k[seen], v[seen], causal=False, scale=0.125)
        scale = max(1.0, largest(v[seen].float()))
        assert largest(part.out[row].double() - right.out[0]) <= most * scale
        assert largest(part.lse[row].double() - right.lse[0]) <= 1e-5
        rounding = 2**-8 if dtype == torch.bfloat16 else 0.0
        assert not is_whole or largest(whole[row].double() - right.out[0]) <= (most + rounding) * scale


def poisoned_run(k: torch.Tensor, v: torch.Tensor) -> KvRun:
    """Return a copy between numbers that are none, keys and values side by side."""
    both = torch.full((k.shape[0] + 2, 2, *k.shape[1:]), torch.nan, dtype=k.dtype)
    both[1:-1, 0], both[1:-1, 1] = k, v
    return KvRun(both[1:-1, 0], both[1:-1, 1])


@pytest.mark.parametrize("num_tokens", [1, MAX_SINGLE_TOKENS, MAX_SINGLE_TOKENS + 1])
@pytest.mark.parametrize("poisoned", ["q", "k", "v"])
def test_a_number_that_is_none_stays_in_its_rows(poisoned: str, num_tokens: int, way: str) -> None:
    """A NaN query spoils its own row, a NaN key every row that sees it; a NaN value may spoil rows of its block."""
    tokens = random_tokens(40)
    given = {"q": tokens.q[-num_tokens:].clone(), "k": tokens.k.clone(), "v": tokens.v.clone()}
    given[poisoned][-1] = torch.nan
    part = KERNEL.attend_newest(given["q"], given["k"], given["v"], scale=0.125)
    assert part.out[-1].isnan().all()
    if poisoned != "v":
        assert part.out[:-1].isfinite().all()
        assert part.lse[-1].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_in", "num_out"), [(1, 1), (96, 40), (300, 129), (576, 64), (577, 33), (4641, 20)])
def test_a_product_matches_the_oracle_and_its_rows_do_not_know_of_each_other(
    num_in: int, num_out: int, dtype: torch.dtype, way: str
) -> None:
    generator = torch.Generator().manual_seed(num_in)
    rows = torch.randn(100, num_in, generator=generator).to(dtype)
    weight, second = (torch.randn(num_out, num_in, generator=generator).div(num_in**0.5).to(dtype) for _ in range(2))
    bias = torch.randn(num_out, generator=generator).to(dtype)
    packed, gates = pack_weight(weight), pack_weight(second)
    right = rows.double() @ weight.double().T
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2 * max(1.0, largest(right))
    product = multiply(rows, packed, num_out, bias)
    assert product.dtype == dtype
    assert largest(product.double() - right - bias.double()) <= tolerance
    gated = multiply(rows, gates, num_out, second=packed)
    wanted = torch.nn.functional.silu(rows.double() @ second.double().T) * right
    assert largest(gated.double() - wanted) <= tolerance * max(1.0, largest(wanted))
    with native.rows_alone():
        alone = multiply(rows, packed, num_out, bias)
        for count in (1, 2, 5, 6, 7, 8, 9, 97):
            assert torch.equal(multiply(rows[:count], packed, num_out, bias), alone[:count])
    if way != "tiles" or dtype == torch.bfloat16:
        assert torch.equal(product, alone)
        for count in (1, 3, 7, 8):
            assert torch.equal(multiply(rows[:count], gates, num_out, second=packed), gated[:count])
    assert multiply(rows[:0], packed, num_out).shape == (0, num_out)


def test_a_row_of_tiny_numbers_has_the_bits_that_it_has_beside_others(way: str) -> None:
    """Instructions for bfloat16 take subnormal numbers for zeros, as operands and as sums."""
    rows = torch.randn(40, 320).mul(torch.logspace(-37, -39, 320)).bfloat16()
    packed = pack_weight(torch.randn(48, 320).bfloat16())
    product = multiply(rows, packed, 48)
    assert product.any(), "some sums are numbers"
    for count in (1, 5, 7):
        assert torch.equal(multiply(rows[:count], packed, 48), product[:count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [3, 70])
def test_a_gate_of_any_size_opens_as_the_oracles(count: int, dtype: torch.dtype, way: str) -> None:
    """Also gates whose power would be more than any number, in whole vectors of outputs and in the rest."""
    sizes = torch.tensor([0.0, 1e-3, 0.5, 1.0, 3.0, 20.0, 80.0, 87.0, 88.0, 89.0, 200.0, 1e4, 1e30])
    gates = torch.cat([-sizes, sizes, torch.linspace(-10, 10, 14)])
    rows, ups = torch.zeros(count, 64), torch.zeros(40, 64)
    rows[:, 0] = ups[:, 0] = 1.0
    weight = torch.zeros(40, 64)
    weight[:, 0] = gates
    rows, weight, ups = (each.to(dtype) for each in (rows, weight, ups))
    gated = multiply(rows, pack_weight(weight), 40, second=pack_weight(ups))
    wanted = torch.nn.functional.silu(weight[:, 0].double()).expand(count, 40)
    tolerance = 2**-8 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(gated.double(), wanted, atol=1e-30, rtol=tolerance)


@pytest.mark.parametrize(("num_in", "num_out"), [(300, 129), (1500, 40), (40, 200)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_rows_are_multiplied_in_parts_that_may_end_anywhere(
    num_in: int, num_out: int, dtype: torch.dtype, way: str
) -> None:
    """Of several tasks' rows, of one, and of more than there are; weights that are bfloat16 are read as such."""
    rows, weight, second = torch.randn(1000, num_in), *torch.randn(2, num_out, num_in).to(dtype)
    bias, packed, gates = torch.randn(num_out), pack_weight(weight), pack_weight(second)
    product = multiply(rows, packed, num_out, bias)
    right = rows.double() @ weight.double().T
    assert largest(product.double() - right - bias.double()) <= 1e-6 * num_in
    gated = multiply(rows, gates, num_out, second=packed)
    wanted = torch.nn.functional.silu(rows.double() @ second.double().T) * right
    assert largest(gated.double() - wanted) <= 1e-6 * num_in * max(1.0, largest(right))
    for count in (128, 129, 385, 575, 999):
        assert torch.equal(multiply(rows[:count], packed, num_out, bias), product[:count])
        assert torch.equal(multiply(rows[:count], gates, num_out, second=packed), gated[:count])
    with native.rows_alone():
        alone = multiply(rows, packed, num_out, bias)
        for count in (1, 2, 31, 97, 127, 999):
            assert torch.equal(multiply(rows[:count], packed, num_out, bias), alone[:count])
    if dtype == torch.bfloat16 and way == "vectors":
        assert torch.equal(multiply(rows, pack_weight(weight.float()), num_out, bias), product)


def test_numbers_of_every_size_are_split_into_parts(way: str) -> None:
    """Also those whose parts round up, and next to none: a sum is as close as that of fp32 numbers."""
    generator = torch.Generator().manual_seed(3)
    rows, weight = (torch.randn(150, 320, generator=generator) for _ in range(2))
    sizes = torch.logspace(-12, 12, 320)
    rows, weight = rows * sizes, weight / sizes
    rows[0, :] = sizes * (1 + 2**-8 - 2**-23)
    weight[0, :] = (1 - 2**-24) / sizes
    product = multiply(rows, pack_weight(weight), 150)
    right = rows.double() @ weight.double().T
    assert largest(product.double() - right) <= 6e-5
    assert largest(product[0, 0].double() - right[0, 0]) <= 320 * 2**-23 * float(right[0, 0])


@pytest.mark.parametrize("poisoned", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_row_of_many(poisoned: float, way: str) -> None:
    rows, packed = torch.ones(140, 40), pack_weight(torch.full((70, 40), 1 + 2**-20))
    rows[33, 5] = poisoned
    product = multiply(rows, packed, 70)
    assert not product[33].isfinite().any()
    assert product[torch.arange(140) != 33].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", sorted(HEAD_DIMS))
def test_many_queries_have_the_bits_of_fewer(head_dim: int, dtype: torch.dtype, way: str) -> None:
    """For every size of head, over more keys than a block of them, and of any type; the oracle's within rounding."""
    tokens = random_tokens(290, num_heads=6, num_kv_heads=2, head_dim=head_dim, dtype=dtype)
    q, scale = tokens.q.float(), head_dim**-0.5
    whole = KERNEL.partial_attention(q, tokens.k, tokens.v, causal=True, scale=scale)
    right = oracle_partial(q, tokens.k, tokens.v, causal=True, scale=scale)
    assert largest(whole.out.double() - right.out) <= 3e-6 * max(1.0, largest(tokens.v.float()))
    assert largest(whole.lse.double() - right.lse) <= 1e-5
    some = KERNEL.attend_newest(q[-100:], tokens.k, tokens.v, scale=scale)
    assert torch.equal(some.out, whole.out[-100:])
    assert torch.equal(some.lse, whole.lse[-100:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows_dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_stays_in_its_row(dtype: torch.dtype, rows_dtype: torch.dtype) -> None:
    """The last column has no neighbour."""
    rows, packed = torch.ones(3, 33), pack_weight(torch.cat([torch.ones(70, 32), torch.zeros(70, 1)], 1).to(dtype))
    rows[1, 5], rows[2, 7] = torch.nan, torch.inf
    product = multiply(rows.to(dtype if dtype == torch.float32 else rows_dtype), packed, 70)
    assert (product[0] == 32).all()
    assert product[1].isnan().all()
    assert (product[2] == torch.inf).all()


def test_results_have_the_same_bits_with_any_number_of_threads(way: str) -> None:
    tokens, packed = random_tokens(300), pack_weight(torch.randn(200, 256))
    shards = scattered([(tokens.k, tokens.v)], 16)

    def compute() -> list[torch.Tensor]:
        paged = KERNEL.paged_attention(tokens.q[-1:], shards, scale=0.125)
        whole = KERNEL.partial_attention(tokens.q, tokens.k, tokens.v, causal=True, scale=0.125)
        few = KERNEL.attend_newest(tokens.q[-19:], tokens.k, tokens.v, scale=0.125)
        parts = [part for found in (paged, whole, few) for part in (found.out, found.lse)]
        return [*parts, multiply(tokens.q.flatten(1), packed, 200)]

    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found.append(compute())
    finally:
        torch.set_num_threads(threads)
    for each in found[1:]:
        assert all(map(torch.equal, each, found[0]))


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_of_every_instruction_set_match_the_oracle(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other tests call the kernels of one instruction set, the best that this machine has."""
    found = native.load(kind)
    assert found is not None
    monkeypatch.setattr(native, "library", lambda: found)
    for head_dim in (16, 80, 256):
        tokens = random_tokens(150, num_heads=6, num_kv_heads=2, head_dim=head_dim)
        scale = head_dim**-0.5
        right = oracle_partial(tokens.q, tokens.k, tokens.v, causal=True, scale=scale)
        for part, some in (
            (KERNEL.partial_attention(tokens.q, tokens.k, tokens.v, causal=True, scale=scale), slice(None)),
            (KERNEL.attend_newest(tokens.q[-3:], tokens.k, tokens.v, scale=scale), slice(-3, None)),
        ):
            assert largest(part.out.double() - right.out[some]) <= 3e-6 * max(1.0, largest(tokens.v))
            assert largest(part.lse.double() - right.lse[some]) <= 1e-5
    rows, weight = torch.randn(13, 70), torch.randn(45, 70)
    torch.testing.assert_close(multiply(rows, pack_weight(weight), 45), rows @ weight.T, atol=1e-4, rtol=0)
    gated = multiply(rows, pack_weight(weight), 45, second=pack_weight(-weight))
    product = rows @ weight.T
    torch.testing.assert_close(gated, torch.nn.functional.silu(product) * -product, atol=1e-3, rtol=1e-5)
    normed = native.normalize(rows, weight[0], 1e-5)
    torch.testing.assert_close(normed, torch.nn.functional.rms_norm(rows, (70,), weight[0], 1e-5), atol=1e-5, rtol=0)


def test_several_threads_may_call_at_once(way: str) -> None:
    """Each has memory of its own for what it holds between the parts of a call."""
    tokens = random_tokens(200)
    right = KERNEL.partial_attention(tokens.q, tokens.k, tokens.v, causal=True, scale=0.125)
    same: list[bool] = []

    def attend() -> None:
        for _ in range(5):
            part = KERNEL.partial_attention(tokens.q, tokens.k, tokens.v, causal=True, scale=0.125)
            same.append(torch.equal(part.out, right.out))

    running = [threading.Thread(target=attend) for _ in range(4)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert same == [True] * 20


def test_threads_are_those_of_torch() -> None:
    """Otherwise the kernels would use one core, or a second pool that competes with torch's."""
    assert native._pool() is not None


def test_the_libraries_here_are_compiled_from_the_source_beside_them() -> None:
    """`pip install` compiles them; after a change of the source it is repeated."""
    libraries = compile_kernels(ROOT)
    assert {path.stem.removeprefix("native-") for path in libraries} in ({*X86}, {"default"})
    newest = (ROOT / "cp_core/attention/native.cpp").stat().st_mtime
    assert all(path.stat().st_mtime > newest for path in libraries)


@pytest.mark.parametrize("unknown", ["", "-mamx-tile", "-mavx512bf16", "-mavx512f"])
def test_a_compiler_that_does_not_know_all_flags_is_given_fewer(
    unknown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old one has no tiles, or no bfloat16: the same libraries without. Without AVX-512 there is nothing instead."""
    compiler = tmp_path / "compiler"
    refuse = f'case " $* " in *" {unknown} "*) echo "unknown option" >&2; exit 1;; esac' if unknown else ":"
    compiler.write_text(f'#!/bin/sh\n{refuse}\necho "$*" > "$(echo "$*" | sed "s/.*-o \\([^ ]*\\).*/\\1/")"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    (tmp_path / "cp_core/attention").mkdir(parents=True)
    (tmp_path / "cp_core/attention/native.cpp").touch()
    if unknown == "-mavx512f":
        with pytest.raises(RuntimeError, match="unknown option"):
            compile_kernels(tmp_path)
        return
    made = {path.stem: path.read_text() for path in compile_kernels(tmp_path)}
    assert set(made) == {"native-avx512", "native-avx2"}
    assert ("-mamx-tile" in made["native-avx512"]) is (not unknown)
    assert ("-mavx512bf16" in made["native-avx512"]) is (unknown != "-mavx512bf16")
    assert "-mavx512f" in made["native-avx512"]


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("dtype", native.DTYPES)
@pytest.mark.parametrize("algorithm", PREFILL_ALGORITHMS)
def test_a_lone_rank_attends_sequences_of_any_length_in_any_runs(
    algorithm: str, dtype: torch.dtype, window: int, way: str
) -> None:
    """Sequences without new tokens, with so few that they are attended singly, and without cached ones."""
    sequences = [
        PlacedSequence(
            random_tokens(num_cached + num_new, dtype=dtype, seed=num_new),
            chunked_layout(num_cached, num_new, (0,)),
            (0,) * num_cached,
            run=run,
        )
        for num_cached, num_new, run in [
            (30, 0, 16),
            (40, 3, 7),
            (0, 70, 1),
            (129, 50, 64),
            (3, MAX_SINGLE_TOKENS + 1, 2),
        ]
    ]
    most = 1e-5 if dtype == torch.float32 else 2**-8
    outs = prefill_on_threads(sequences, 1, algorithm, 0.125, KERNEL, window=window).outs
    for sequence, out in zip(sequences, outs, strict=True):
        right = oracle_causal(sequence.tokens, 0.125, window=window)[sequence.layout.start :]
        assert largest(out.double() - right) <= most * max(1.0, largest(sequence.tokens.v.float()))
