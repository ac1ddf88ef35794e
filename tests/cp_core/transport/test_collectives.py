"""Sums over ranks: correct, the same bits on every rank, and the least bytes on the wire."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from ringserve.cp_core.layout.shards import even_share
from ringserve.cp_core.transport.collectives import (
    ONE_ROUND_BYTES,
    all_reduce,
    gather_rows,
    join_last_dim,
    reduce_scatter_rows,
)
from ringserve.cp_core.transport.inprocess import InProcessRing
from ringserve.cp_core.transport.interface import RingTransport

Answer = TypeVar("Answer")
LARGE = ONE_ROUND_BYTES // 4 + 7
"""Elements of fp32: more than one round's bytes, and a number that no ring size divides."""


def on_all(size: int, call: Callable[[RingTransport], Answer]) -> tuple[list[Answer], list[RingTransport]]:
    """Call on every rank at the same time. Return the results, and the transports for their counts."""
    transports = InProcessRing(size).transports
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(call, transports)), list(transports)


def partials(size: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(size)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(size)]


@pytest.mark.parametrize("shape", [(1, 1, 8), (3, 5), (0, 4), (1, LARGE)], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-10)]
)
def test_every_rank_gets_the_same_sum(shape: tuple[int, ...], size: int, dtype: torch.dtype, tolerance: float) -> None:
    parts = partials(size, shape, dtype)
    sums, _ = on_all(size, lambda transport: all_reduce(parts[transport.rank], transport))
    exact = torch.stack(parts).double().sum(0)
    for total in sums:
        assert total.dtype == dtype
        assert total.shape == shape
        assert torch.equal(total, sums[0])
        assert ((total.double() - exact).abs() <= tolerance * exact.abs().clamp(min=1.0)).all()


def test_strided_partials_are_summed_as_they_read() -> None:
    parts = partials(2, (6, 4))
    sums, _ = on_all(2, lambda transport: all_reduce(parts[transport.rank].T, transport))
    assert torch.equal(sums[0], (parts[0] + parts[1]).T)


@pytest.mark.parametrize(
    ("size", "elements", "gathers", "all_to_alls"), [(2, LARGE, 1, 0), (4, 64, 1, 0), (4, LARGE, 1, 1)]
)
def test_large_sums_of_many_ranks_go_in_parts(size: int, elements: int, gathers: int, all_to_alls: int) -> None:
    parts = partials(size, (elements,))
    _, transports = on_all(size, lambda transport: all_reduce(parts[transport.rank], transport))
    for transport in transports:
        assert (transport.stats.gathers, transport.stats.all_to_alls) == (gathers, all_to_alls)
        most = 2 * (size - 1) / size if all_to_alls else size - 1
        assert transport.stats.bytes_sent <= most * 4 * (elements + size)


@pytest.mark.parametrize("widths", [(3,), (2, 2), (3, 2, 2)], ids=str)
def test_parts_are_joined_in_rank_order(widths: tuple[int, ...]) -> None:
    whole = torch.arange(5.0 * sum(widths)).view(5, -1)
    parts = whole.split(list(widths), dim=-1)
    joined, _ = on_all(len(widths), lambda transport: join_last_dim(parts[transport.rank], widths, transport))
    assert all(torch.equal(each, whole) for each in joined)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("num_rows", [0, 1, 3, 10])
def test_rows_of_a_sum_are_those_of_the_whole_sum_and_gathered_they_are_it(size: int, num_rows: int) -> None:
    """Bit for bit, with uneven and empty shares; both together move the bytes of a sum in parts."""
    parts = partials(size, (1, num_rows, 7))

    def act(transport: RingTransport) -> tuple[Tensor, Tensor]:
        rows = reduce_scatter_rows(parts[transport.rank], transport)
        return rows, gather_rows(rows, num_rows, transport)

    found, transports = on_all(size, act)
    whole = functools.reduce(torch.add, parts)
    for rank, (rows, gathered) in enumerate(found):
        start, stop = even_share(num_rows, rank, size)
        assert torch.equal(rows, whole[:, start:stop])
        assert torch.equal(gathered, whole)
    sent = sum(transport.stats.bytes_sent for transport in transports)
    assert sent == 2 * (size - 1) * whole.nbytes
