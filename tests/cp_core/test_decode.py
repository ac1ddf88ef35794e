"""Decode over sharded KV against the fp64 oracle."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_core.backends.torch_cpu import TorchCpuFlash
from cp_core.decode import sharded_decode
from cp_core.inprocess import InProcessRing
from cp_core.layout import append_owner
from cp_core.prefill import KvRun
from cp_core.transport import RingTransport, TransportStats
from tests.cp_core.rings import PoisoningTransport, on_every_rank
from tests.oracles import Tokens, largest, oracle_causal, random_tokens

SCALE = 0.125


def decode_on_threads(
    batch: list[Tokens], owners: list[list[int]], size: int, run: int = 1 << 30
) -> tuple[torch.Tensor, list[TransportStats]]:
    """The last token of each sequence over all its tokens, token p on rank owners[i][p]: [B, H, D], proven the same on
    every rank.
    """
    q_bhd = torch.stack([tokens.q[-1] for tokens in batch]) if batch else torch.zeros(0, 4, 64)
    transports = [PoisoningTransport(each) for each in InProcessRing(size).transports]

    def act(transport: RingTransport) -> torch.Tensor:
        shards = []
        for tokens, owner in zip(batch, owners, strict=True):
            mine = [position for position, rank in enumerate(owner) if rank == transport.rank]
            k, v = tokens.k[mine], tokens.v[mine]
            shards.append([KvRun(k[at : at + run], v[at : at + run]) for at in range(0, len(mine), run)])
        return sharded_decode(q_bhd, shards, transport, TorchCpuFlash(), SCALE)

    outs = on_every_rank(transports, act)
    assert all(torch.equal(out, outs[0]) for out in outs)
    return outs[0], [transport.stats for transport in transports]


def check(batch: list[Tokens], owners: list[list[int]], size: int, run: int = 1 << 30) -> None:
    """Within 2e-6 of max |v| in fp32, or 1.05 of the rounding floor of a narrow dtype."""
    out, _ = decode_on_threads(batch, owners, size, run)
    for row, tokens in zip(out, batch, strict=True):
        right = oracle_causal(tokens, SCALE)[-1]
        floor = 1.05 * largest(right.to(row.dtype).double() - right)
        assert largest(row.double() - right) <= max(floor, 2e-6 * largest(tokens.v))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("batch", [1, 2, 5, 9])
def test_batches_smaller_and_larger_than_the_ring(size: int, batch: int) -> None:
    sequences = [random_tokens(length, seed=length) for length in (1, 2, 63, 64, 65, 7, 130, 3, 16)[:batch]]
    owners = [[position % size for position in range(tokens.q.shape[0])] for tokens in sequences]
    check(sequences, owners, size)


@pytest.mark.parametrize("size", [2, 3])
def test_a_sequence_that_lies_on_one_rank_beside_one_that_is_spread(size: int) -> None:
    alone, spread = random_tokens(40, seed=1), random_tokens(41, seed=2)
    check([alone, spread], [[size - 1] * 40, [position % size for position in range(41)]], size)


def test_a_shard_in_many_short_runs() -> None:
    tokens = random_tokens(500)
    check([tokens], [[position // 50 % 2 for position in range(500)]], 2, run=16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_lose_no_more_than_the_rounding_of_the_output(dtype: torch.dtype) -> None:
    tokens = random_tokens(130, dtype=dtype)
    check([tokens], [[position % 3 for position in range(130)]], 3)


def test_round_robin_appends_stay_exact_over_many_steps() -> None:
    whole = random_tokens(60)
    held = [12, 11, 12]
    owner = [position % 3 for position in range(35)]
    for length in range(36, 61):
        rank = append_owner(held)
        held[rank] += 1
        owner.append(rank)
        check([Tokens(whole.q[:length], whole.k[:length], whole.v[:length])], [owner], 3)
    assert held == [20, 20, 20]


@given(
    size=st.sampled_from([1, 2, 3, 4, 8]),
    lengths=st.lists(st.integers(1, 70), max_size=4),
    run=st.sampled_from([1, 16, 1 << 30]),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_any_spread_of_any_batch_matches_the_oracle(
    size: int, lengths: list[int], run: int, data: st.DataObject
) -> None:
    batch = [random_tokens(length, seed=index) for index, length in enumerate(lengths)]
    ranks = st.integers(0, size - 1)
    owners = [data.draw(st.lists(ranks, min_size=length, max_size=length)) for length in lengths]
    check(batch, owners, size, run)


def test_one_gather_a_call_and_none_where_there_is_nothing_to_gather() -> None:
    tokens = random_tokens(10)
    owner = [position % 2 for position in range(10)]
    for batch, size, num_gathers in (([tokens, tokens], 2, 1), ([], 2, 0), ([tokens], 1, 0)):
        owners = [[rank % size for rank in owner]] * len(batch)
        out, stats = decode_on_threads(batch, owners, size)
        assert out.shape == (len(batch), 4, 64)
        for each in stats:
            assert each.gathers == num_gathers
            assert (each.exchanges, each.all_to_alls, each.broadcasts) == (0, 0, 0)
            assert each.bytes_sent == num_gathers * len(batch) * 4 * (64 + 1) * 4
