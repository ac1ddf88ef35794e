"""Merge of parts: exact with empty parts and in any order and nesting."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringserve.cp_core.attention.partial import Accumulator, Partial, empty_partial, finished_out, merge
from ringserve.cp_core.attention.torch_cpu import TorchCpuFlash
from tests.oracles import Tokens, largest, oracle_partial, random_tokens, relative_difference

SCALE = 0.125
NAN_PART = Partial(torch.full((4, 4, 64), torch.nan), torch.full((4, 4), -torch.inf))


def _parts(tokens: Tokens, bounds: list[int]) -> list[Partial]:
    """Attend the first four queries over the keys between each two bounds."""
    return [
        TorchCpuFlash().partial_attention(
            tokens.q[:4], tokens.k[start:stop], tokens.v[start:stop], causal=False, scale=SCALE
        )
        for start, stop in pairwise(bounds)
    ]


@given(
    inner=st.lists(st.integers(0, 120), max_size=7),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_parts_of_any_cut_merge_to_the_whole(inner: list[int], dtype: torch.dtype, seed: int) -> None:
    tokens = random_tokens(120, dtype=dtype, seed=seed)
    merged = merge(_parts(tokens, [0, *sorted(inner), 120]))
    right = oracle_partial(tokens.q[:4], tokens.k, tokens.v, causal=False, scale=SCALE)
    at_once = TorchCpuFlash().partial_attention(tokens.q[:4], tokens.k, tokens.v, causal=False, scale=SCALE)
    error = largest(at_once.out.double() - right.out)
    assert largest(merged.out.double() - right.out) <= 2 * error + 2e-7 * largest(tokens.v)
    assert largest((merged.lse.double() - right.lse) / right.lse.abs().clamp(min=1.0)) <= 2e-6


@given(order=st.permutations(range(6)), seed=st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_the_order_and_the_grouping_of_parts_change_only_the_last_bits(order: list[int], seed: int) -> None:
    """Permuted or folded parts differ by at most 2e-7 of max |v|."""
    tokens = random_tokens(120, seed=seed)
    parts = _parts(tokens, [0, 20, 21, 60, 80, 110, 120])
    whole = merge(parts)
    folded = parts[order[0]]
    for index in order[1:]:
        folded = merge((folded, parts[index]))
    for other in (merge([parts[index] for index in order]), folded):
        assert largest(other.out - whole.out) <= 2e-7 * largest(tokens.v)
        assert relative_difference(other.lse, whole.lse) <= 4e-7


def test_an_accumulator_has_the_bits_of_a_merge_until_its_parts_are_too_many() -> None:
    tokens = random_tokens(120)
    parts = _parts(tokens, list(range(0, 121, 10)))
    few, many = Accumulator(), Accumulator()
    for part in parts[:8]:
        few.add(part)
    for part in parts:
        many.add(part)
    assert torch.equal(few.result().out, merge(parts[:8]).out)
    assert largest(many.result().out - merge(parts).out) <= 2e-7 * largest(tokens.v)


def test_the_nan_of_a_part_that_attended_nothing_never_gets_out() -> None:
    tokens = random_tokens(10)
    part = _parts(tokens, [0, 10])[0]
    for parts in ([part, NAN_PART], [NAN_PART, part], [NAN_PART, part, NAN_PART]):
        merged = merge(parts)
        assert torch.equal(merged.out, part.out)
        assert torch.equal(merged.lse, part.lse)


def test_nothing_but_empty_parts_merge_to_the_empty_part() -> None:
    merged = merge([NAN_PART, NAN_PART])
    assert torch.equal(merged.out, torch.zeros(4, 4, 64))
    assert torch.equal(merged.lse, torch.full((4, 4), -torch.inf))
    assert torch.equal(finished_out(merge([NAN_PART])), torch.zeros(4, 4, 64))


def test_rows_that_a_part_does_not_see_come_from_the_others() -> None:
    tokens = random_tokens(20)
    left, right = _parts(tokens, [0, 10, 20])
    blind_out, blind_lse = right.out.clone(), right.lse.clone()
    blind_out[1:3], blind_lse[1:3] = torch.nan, -torch.inf
    merged = merge([left, Partial(blind_out, blind_lse)])
    assert torch.equal(merged.out[1:3], left.out[1:3])
    assert torch.equal(merged.out[::3], merge([left, right]).out[::3])


def test_weights_that_underflow_leave_the_heavier_part_alone() -> None:
    heavy = Partial(torch.ones(1, 1, 8), torch.full((1, 1), 1e4))
    light = Partial(torch.full((1, 1, 8), 5.0), torch.full((1, 1), -1e4))
    assert torch.equal(merge([light, heavy]).out, heavy.out)
    assert torch.equal(merge([light, heavy]).lse, heavy.lse)


@pytest.mark.parametrize("others", [0, 1, 2])
def test_a_nan_lse_makes_its_own_row_nan_and_no_other(others: int) -> None:
    broken = Partial(torch.ones(2, 1, 8), torch.tensor([[0.0], [torch.nan]]))
    merged = merge([broken, *[empty_partial(broken.out)] * others])
    assert merged.out[1].isnan().all()
    assert merged.lse[1].isnan().all()
    assert torch.equal(merged.out[0], broken.out[0])
    assert torch.equal(merged.lse[0], broken.lse[0])


def test_a_merge_over_no_rows_is_empty() -> None:
    nothing = Partial(torch.zeros(0, 4, 64), torch.zeros(0, 4))
    assert merge([nothing, nothing]).out.shape == (0, 4, 64)
    assert merge([nothing]).lse.shape == (0, 4)
