"""Helix over new tokens of several sequences against the fp64 oracle: each rank has its columns of every row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringserve.cp_core.attention.partial import AttentionBackend
from ringserve.cp_core.attention.torch_cpu import TorchCpuFlash
from ringserve.cp_core.layout.shards import TokenRange, balanced_layout
from ringserve.cp_core.layout.step_plans import KvRun
from ringserve.cp_core.ring.helix import HelixColumns, NewRows, helix_prefill
from ringserve.cp_core.transport.inprocess import InProcessRing
from ringserve.cp_core.transport.interface import RingTransport
from tests.cp_core.rings import PoisoningTransport, on_every_rank
from tests.cp_core.together import Together
from tests.oracles import Tokens, fp32_bound, largest, oracle_causal, random_tokens

SCALE = 0.125


def prefill_on_threads(
    sequences: list[tuple[Tokens, tuple[int, ...]]],
    size: int,
    backend: AttentionBackend | None = None,
    window: int = 0,
) -> list[torch.Tensor]:
    """Attend the tokens of each sequence behind those that are cached, `cached[r]` on rank r -> [T, H, D] of each.

    Cached tokens lie on the ranks in order of position, each shard in two runs with NaN around them.
    """
    transports = [PoisoningTransport(each) for each in InProcessRing(size).transports]
    new = [(tokens.q[sum(cached) :], tokens.k[sum(cached) :], tokens.v[sum(cached) :]) for tokens, cached in sequences]
    q_thd, k_tkd, v_tkd = (torch.cat(parts) for parts in zip(*new, strict=True))

    def act(transport: RingTransport) -> torch.Tensor:
        placed, begin = [], 0
        for tokens, cached in sequences:
            old, new = sum(cached), tokens.q.shape[0] - sum(cached)
            layout = balanced_layout(old, new, cached)
            first = sum(cached[: transport.rank])
            stop = first + cached[transport.rank]
            middle = (first + stop) // 2
            shift = begin - old
            stored = (TokenRange(each.start + shift, each.stop + shift) for each in layout.ranges[transport.rank])
            runs = [poisoned_run(tokens, *cut) for cut in ((first, middle), (middle, stop))]
            seen = TokenRange(max(0, old - window + 1), old).intersect(TokenRange(first, stop)) if window else None
            tail = (seen,) if seen is not None and len(seen) else ()
            placed.append(NewRows(TokenRange(begin, begin + new), tuple(stored), runs, old, window, tail))
            begin += new
        columns = HelixColumns(q_thd.shape[1], q_thd.shape[2], transport.rank, size, q_thd.device)
        return helix_prefill(q_thd, k_tkd, v_tkd, placed, columns, transport, backend or TorchCpuFlash(), SCALE)

    out = torch.cat(on_every_rank(transports, act), dim=1).view(q_thd.shape)
    return list(out.split([tokens.q.shape[0] - sum(cached) for tokens, cached in sequences]))


def poisoned_run(tokens: Tokens, start: int, stop: int) -> KvRun:
    """Return keys and values of [start, stop) as views into memory that is NaN before and behind them."""
    memory = [torch.full((stop - start + 4, *each.shape[1:]), torch.nan) for each in (tokens.k, tokens.v)]
    for each, values in zip(memory, (tokens.k, tokens.v), strict=True):
        each[2:-2] = values[start:stop]
    return KvRun(memory[0][2:-2], memory[1][2:-2])


def check(
    sequences: list[tuple[Tokens, tuple[int, ...]]],
    size: int,
    backend: AttentionBackend | None = None,
    window: int = 0,
) -> None:
    for out, (tokens, cached) in zip(prefill_on_threads(sequences, size, backend, window), sequences, strict=True):
        right = oracle_causal(tokens, SCALE, window=window)[sum(cached) :]
        assert largest(out.double() - right) <= fp32_bound(tokens, SCALE, window=window)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("new", [1, 2, 3, 7, 8, 17, 127])
def test_new_tokens_of_any_number_behind_uneven_shards(new: int, size: int) -> None:
    uneven = tuple(5 * rank % 7 for rank in range(size))
    on_one = (40, *(0,) * (size - 1))
    cases = [(0,) * size, uneven, on_one, on_one[::-1]]
    check([(random_tokens(sum(cached) + new, seed=new), cached) for cached in cases], size)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 1), (9, 3)])
def test_columns_are_cut_through_heads_of_every_shape(head_dim: int, num_heads: int, num_kv_heads: int) -> None:
    tokens = random_tokens(70, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    for size, cached in ((2, (50, 1)), (3, (0, 30, 9)), (4, (13, 13, 13, 13))):
        check([(tokens, cached)], size)


@given(
    size=st.sampled_from([1, 2, 3, 4]),
    few=st.sampled_from([None, 0, 20]),
    window=st.just(0) | st.integers(1, 40),
    data=st.data(),
)
@settings(max_examples=80, deadline=None)
def test_any_batch_of_prompts_matches_the_oracle(size: int, few: int | None, window: int, data: st.DataObject) -> None:
    """Also if a backend takes several sequences in a call, all of them or those of more than `few` queries."""
    counts = st.lists(st.integers(0, 20), min_size=size, max_size=size).map(tuple)
    prompts = data.draw(st.lists(st.tuples(st.integers(0, 30), counts), min_size=1, max_size=4))
    backend = None if few is None else Together(few)
    check([(random_tokens(new + sum(cached), seed=new), cached) for new, cached in prompts], size, backend, window)


@pytest.mark.parametrize(("size", "calls"), [(1, 2), (3, 8)])
def test_a_rank_calls_once_for_cached_keys_and_twice_for_the_new_ones_that_it_stores(size: int, calls: int) -> None:
    """Eight sequences, their caches in two runs: rows beside the keys are one call, all rows behind them another."""
    backend = Together()
    check([(random_tokens(20 + 8 * size, seed=seed), (8,) * size) for seed in range(8)], size, backend)
    assert backend.num_alone == 0
    assert backend.num_together in (calls, 3 * size)
