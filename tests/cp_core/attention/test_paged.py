"""Decode attention that follows block tables, against the fp64 oracle: scattered pages, unused ones full of NaN."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringserve.cp_core.attention.partial import PagedShards, Partial, attend_pages, takes_pages
from ringserve.cp_core.attention.reference import ReferenceAttention
from ringserve.cp_core.attention.torch_cpu import TorchCpuFlash
from ringserve.cp_core.cost.decode import GATHER, VARIANTS
from ringserve.cp_core.layout.step_plans import DecodePlan, PassQRoute, RowIndices
from ringserve.cp_core.ring.decode import ring_decode, sharded_decode
from ringserve.cp_core.transport.inprocess import InProcessRing
from ringserve.cp_core.transport.interface import RingTransport
from tests.cp_core.rings import PoisoningTransport, on_every_rank
from tests.oracles import Tokens, largest, oracle_causal, random_tokens

SCALE = 0.125


def scattered(stored: list[tuple[torch.Tensor, torch.Tensor]], page_tokens: int, seed: int = 0) -> PagedShards:
    """Scatter sequences of k[S, K, D] and v[S, K, D] over pages in random order of a cache that is otherwise NaN."""
    needed = [-(-k.shape[0] // page_tokens) for k, _ in stored]
    numbers = random.Random(seed).sample(range(sum(needed) + 3), sum(needed))
    shape = (sum(needed) + 3, page_tokens, 2, 64)
    k_pages, v_pages = (torch.full(shape, torch.nan) for _ in range(2))
    table = torch.zeros(len(stored), max(needed, default=0), dtype=torch.int32)
    for row, (k, v) in enumerate(stored):
        for index in range(needed[row]):
            page, tokens = numbers.pop(), slice(index * page_tokens, (index + 1) * page_tokens)
            table[row, index] = page
            k_pages[page, : k[tokens].shape[0]] = k[tokens]
            v_pages[page, : v[tokens].shape[0]] = v[tokens]
    lengths = [k.shape[0] for k, _ in stored]
    return PagedShards(k_pages, v_pages, table, tuple(lengths), torch.tensor(lengths, dtype=torch.int32))


@given(
    variant=st.sampled_from(VARIANTS),
    size=st.sampled_from([1, 2, 3, 4]),
    lengths=st.lists(st.integers(1, 70), max_size=7),
    page_tokens=st.sampled_from([1, 16, 64]),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_any_spread_of_any_batch_over_pages_matches_the_oracle(
    variant: str, size: int, lengths: list[int], page_tokens: int, data: st.DataObject
) -> None:
    """Ranks may hold nothing of some sequences, or of all; the last tokens of some pages were never written."""
    batch = [random_tokens(length, seed=index) for index, length in enumerate(lengths)]
    owners = [data.draw(st.lists(st.integers(0, size - 1), min_size=each, max_size=each)) for each in lengths]
    for row, out in enumerate(decode_over_pages(variant, batch, owners, size, page_tokens)):
        assert largest(out.double() - oracle_causal(batch[row], SCALE)[-1]) <= 2e-6 * largest(batch[row].v)


def decode_over_pages(
    variant: str, batch: list[Tokens], owners: list[list[int]], size: int, page_tokens: int
) -> torch.Tensor:
    q_bhd = torch.stack([tokens.q[-1] for tokens in batch]) if batch else torch.zeros(0, 4, 64)
    held = tuple(tuple(owner.count(rank) for rank in range(size)) for owner in owners)
    plan = DecodePlan(size, tuple(owner[-1] for owner in owners), held)

    def act(transport: RingTransport) -> torch.Tensor:
        mine = [[at for at, rank in enumerate(owner) if rank == transport.rank] for owner in owners]
        stored = [(tokens.k[own], tokens.v[own]) for tokens, own in zip(batch, mine, strict=True)]
        shards = scattered(stored, page_tokens, transport.rank)
        if variant == GATHER:
            return sharded_decode(q_bhd, shards, transport, ReferenceAttention(), SCALE, plan)
        route = PassQRoute(plan, transport.rank)
        return ring_decode(q_bhd[route.own], shards, route, transport, ReferenceAttention(), SCALE)

    outs = on_every_rank([PoisoningTransport(each) for each in InProcessRing(size).transports], act)
    if variant == GATHER:
        return outs[0]
    whole = torch.full_like(q_bhd, torch.nan)
    for rank, out in enumerate(outs):
        whole[plan.rows_of(rank)] = out
    return whole


def test_no_kernel_sees_a_sequence_of_which_nothing_is_stored() -> None:
    class Watching(ReferenceAttention):
        def paged_attention(self, q: torch.Tensor, shards: PagedShards, *, scale: float) -> Partial:
            assert all(shards.stored)
            assert q.shape[0] == len(shards) > 0
            return super().paged_attention(q, shards, scale=scale)

    tokens = [random_tokens(length, seed=length) for length in (5, 0, 33, 0)]
    shards = scattered([(each.k, each.v) for each in tokens], 16)
    q_bhd = random_tokens(4, seed=9).q
    part = attend_pages(Watching(), q_bhd, shards, SCALE, RowIndices())
    assert torch.isneginf(part.lse[[1, 3]]).all()
    assert torch.isfinite(part.lse[[0, 2]]).all()
    nothing = attend_pages(Watching(), q_bhd[[1]], shards.of([1], RowIndices()), SCALE, RowIndices())
    assert torch.equal(nothing.lse, torch.full((1, 4), -torch.inf))


def test_a_backend_without_block_tables_is_not_given_any() -> None:
    assert not takes_pages(TorchCpuFlash(), 256)
    shards = scattered([(random_tokens(3).k, random_tokens(3).v)], 16)
    (transport,) = InProcessRing(1).transports
    with pytest.raises(AssertionError, match="torch_cpu_flash takes no pages of 16 tokens"):
        sharded_decode(torch.ones(1, 4, 64), shards, transport, TorchCpuFlash(), SCALE)
