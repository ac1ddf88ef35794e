"""Every variant of decode over sharded KV against the fp64 oracle."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringserve.cp_core.attention.partial import AttentionBackend
from ringserve.cp_core.attention.reference import ReferenceAttention
from ringserve.cp_core.attention.torch_cpu import TorchCpuFlash
from ringserve.cp_core.cost.decode import GATHER, HELIX, VARIANTS
from ringserve.cp_core.cost.model import PASS_Q
from ringserve.cp_core.layout.step_plans import DecodePlan, KvRun, PassQRoute
from ringserve.cp_core.ring.decode import DraftedShards, ring_decode, sharded_decode
from ringserve.cp_core.ring.helix import HelixColumns, helix_decode
from ringserve.cp_core.transport.inprocess import InProcessRing
from ringserve.cp_core.transport.interface import RingTransport, TransportStats
from tests.cp_core.layout.decoded import lone_owners
from tests.cp_core.rings import PoisoningTransport, on_every_rank
from tests.oracles import Tokens, largest, oracle_causal, oracle_partial, random_tokens, relative_difference

SCALE = 0.125


def decode_on_threads(
    variant: str, batch: list[Tokens], owners: list[list[int]], size: int, run: int = 1 << 30
) -> tuple[torch.Tensor, list[TransportStats]]:
    """Decode the last token of each sequence over all its tokens, token p on rank owners[i][p]: [B, H, D].

    Gathered it is proven the same on every rank; in pass-Q the rank that stores a sequence's last token computes it,
    in helix each rank its columns. Shards are cut from memory full of NaN.
    """
    q_bhd = torch.stack([tokens.q[-1] for tokens in batch]) if batch else torch.zeros(0, 4, 64)
    transports = [PoisoningTransport(each) for each in InProcessRing(size).transports]
    held = tuple(tuple(owner.count(rank) for rank in range(size)) for owner in owners)
    plan = DecodePlan(size, tuple(owner[-1] for owner in owners), held)

    def act(transport: RingTransport) -> torch.Tensor:
        shards = []
        for tokens, owner in zip(batch, owners, strict=True):
            mine = [position for position, rank in enumerate(owner) if rank == transport.rank]
            k, v = poisoned_around(tokens.k[mine]), poisoned_around(tokens.v[mine])
            shards.append([KvRun(k[at : at + run], v[at : at + run]) for at in range(0, len(mine), run)])
        if variant == GATHER:
            return sharded_decode(q_bhd, shards, transport, TorchCpuFlash(), SCALE, plan)
        if variant == HELIX:
            columns = HelixColumns(q_bhd.shape[1], q_bhd.shape[2], transport.rank, size, q_bhd.device)
            return helix_decode(q_bhd, shards, plan, columns, transport, TorchCpuFlash(), SCALE)
        route = PassQRoute(plan, transport.rank)
        return ring_decode(q_bhd[route.own], shards, route, transport, TorchCpuFlash(), SCALE)

    outs = on_every_rank(transports, act)
    stats = [transport.stats for transport in transports]
    if variant == GATHER:
        assert all(torch.equal(out, outs[0]) for out in outs)
        return outs[0], stats
    if variant == HELIX:
        assert max(out.shape[1] for out in outs) - min(out.shape[1] for out in outs) <= 1, "columns are shared evenly"
        return torch.cat(outs, dim=1).view(q_bhd.shape), stats
    whole = torch.full_like(q_bhd, torch.nan)
    for rank, out in enumerate(outs):
        assert out.shape[0] == len(plan.rows_of(rank)), "a rank computes its own rows and no padding"
        whole[plan.rows_of(rank)] = out
    return whole, stats


def poisoned_around(stored: torch.Tensor) -> torch.Tensor:
    """Return the same values as a view into memory that is NaN before and behind them."""
    memory = torch.full((stored.shape[0] + 4, *stored.shape[1:]), torch.nan, dtype=stored.dtype)
    memory[2:-2] = stored
    return memory[2:-2]


def check(batch: list[Tokens], owners: list[list[int]], size: int, run: int = 1 << 30) -> None:
    """Within 2e-6 of max |v| in fp32, or 1.05 of the rounding floor of a narrow dtype, in every variant.

    They are within 4e-7 relative of each other, or one rounding of a narrow dtype.
    """
    outs = [decode_on_threads(variant, batch, owners, size, run)[0] for variant in VARIANTS]
    for out in outs:
        for row, tokens in zip(out, batch, strict=True):
            right = oracle_causal(tokens, SCALE)[-1]
            floor = 1.05 * largest(right.to(row.dtype).double() - right)
            assert largest(row.double() - right) <= max(floor, 2e-6 * largest(tokens.v))
    relative = 4e-7 if outs[0].dtype == torch.float32 else torch.finfo(outs[0].dtype).eps
    assert all(relative_difference(outs[0], out) <= relative for out in outs[1:])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("batch", [0, 1, 2, 5, 9])
def test_batches_smaller_and_larger_than_the_ring(size: int, batch: int) -> None:
    sequences = [random_tokens(length, seed=length) for length in (1, 2, 63, 64, 65, 7, 130, 3, 16)[:batch]]
    owners = [[position % size for position in range(tokens.q.shape[0])] for tokens in sequences]
    check(sequences, owners, size)


@pytest.mark.parametrize("size", [2, 3])
def test_a_sequence_that_lies_on_one_rank_beside_one_that_is_spread(size: int) -> None:
    alone, spread = random_tokens(40, seed=1), random_tokens(41, seed=2)
    check([alone, spread], [[size - 1] * 40, [position % size for position in range(41)]], size)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 1), (8, 1), (16, 2)])
def test_every_head_shape_matches_the_oracle(head_dim: int, num_heads: int, num_kv_heads: int) -> None:
    sequences = [
        random_tokens(length, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, seed=length)
        for length in (65, 256, 3)
    ]
    owners = [[position % 3 for position in range(tokens.q.shape[0])] for tokens in sequences]
    check(sequences, owners, 3)


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
    for length, rank in enumerate(lone_owners(held, 25), 36):
        held[rank] += 1
        owner.append(rank)
        check([Tokens(whole.q[:length], whole.k[:length], whole.v[:length])], [owner], 3)
    assert held == [20, 20, 20]


@given(
    size=st.sampled_from([1, 2, 3, 4, 8]),
    lengths=st.lists(st.integers(1, 70), max_size=9),
    run=st.sampled_from([1, 16, 1 << 30]),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_any_spread_of_any_batch_matches_the_oracle(
    size: int, lengths: list[int], run: int, data: st.DataObject
) -> None:
    """Each sequence lies on any of the ranks: on all, on some, on one."""
    batch = [random_tokens(length, seed=index) for index, length in enumerate(lengths)]
    owners = []
    for length in lengths:
        holders = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=size))
        owners.append(data.draw(st.lists(st.sampled_from(holders), min_size=length, max_size=length)))
    check(batch, owners, size, run)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_sequence_of_which_nobody_holds_anything_gives_zeros(variant: str) -> None:
    plan = DecodePlan(2, (1,), ((0, 0),))
    nothing = KvRun(torch.empty(0, 2, 64), torch.empty(0, 2, 64))

    def act(transport: RingTransport) -> torch.Tensor:
        q_bhd, shards = torch.ones(1, 4, 64), [[nothing]]
        if variant == GATHER:
            return sharded_decode(q_bhd, shards, transport, TorchCpuFlash(), SCALE, plan)
        if variant == HELIX:
            columns = HelixColumns(4, 64, transport.rank, 2, q_bhd.device)
            return helix_decode(q_bhd, shards, plan, columns, transport, TorchCpuFlash(), SCALE)
        route = PassQRoute(plan, transport.rank)
        return ring_decode(q_bhd[route.own], shards, route, transport, TorchCpuFlash(), SCALE)

    zeros = torch.zeros(1, 128) if variant == HELIX else torch.zeros(1, 4, 64)
    assert torch.equal(on_every_rank(InProcessRing(2).transports, act)[1], zeros)


def test_one_gather_a_call_and_none_where_there_is_nothing_to_gather() -> None:
    tokens = random_tokens(10)
    owner = [position % 2 for position in range(10)]
    for batch, size, num_gathers in (([tokens, tokens], 2, 1), ([], 2, 0), ([tokens], 1, 0)):
        owners = [[rank % size for rank in owner]] * len(batch)
        out, stats = decode_on_threads(GATHER, batch, owners, size)
        assert out.shape == (len(batch), 4, 64)
        for each in stats:
            assert each.gathers == num_gathers
            assert (each.exchanges, each.all_to_alls, each.broadcasts) == (0, 0, 0)
            assert each.bytes_sent == num_gathers * len(batch) * 4 * (64 + 1) * 4


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_pass_q_takes_one_exchange_less_than_ranks_and_one_all_to_all(size: int) -> None:
    for batch in (0, 1, 5):
        sequences = [random_tokens(10, seed=index) for index in range(batch)]
        owners = [[(position + index) % size for position in range(10)] for index in range(batch)]
        _, stats = decode_on_threads(PASS_Q, sequences, owners, size)
        counts = (size - 1, 1, 0, 0) if batch and size > 1 else (0, 0, 0, 0)
        for each in stats:
            assert (each.exchanges, each.all_to_alls, each.gathers, each.broadcasts) == counts


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_helix_takes_one_all_to_all_of_columns_and_of_the_heads_that_they_touch(size: int) -> None:
    """Cut 256 columns of four heads: of three ranks the second touches three heads, of eight each touches one."""
    heads = {1: (4,), 2: (2, 2), 3: (2, 2, 2), 8: (1,) * 8}[size]
    for batch in (0, 1, 5):
        sequences = [random_tokens(10, seed=index) for index in range(batch)]
        owners = [[position % size for position in range(10)]] * batch
        _, stats = decode_on_threads(HELIX, sequences, owners, size)
        counts = (0, 1, 0, 0) if batch and size > 1 else (0, 0, 0, 0)
        for rank, each in enumerate(stats):
            assert (each.exchanges, each.all_to_alls, each.gathers, each.broadcasts) == counts
            widths = [(256 * (peer + 1) // size - 256 * peer // size, heads[peer]) for peer in range(size)]
            sent = sum(columns + touched for peer, (columns, touched) in enumerate(widths) if peer != rank)
            assert each.bytes_sent == 4 * batch * sent


def test_messages_are_as_long_as_what_is_held_and_no_longer() -> None:
    """Three ranks; one sequence on rank 2 alone, one on ranks 0 and 1 and computed by rank 1."""
    batch = [random_tokens(6, seed=1), random_tokens(6, seed=2)]
    owners = [[2] * 6, [0, 1] * 3]
    part, query = 4 * (64 + 1) * 4, 4 * 64 * 4
    _, gathered = decode_on_threads(GATHER, batch, owners, 3)
    assert [each.bytes_sent for each in gathered] == [2 * part, 2 * part, 2 * part]
    _, passed = decode_on_threads(PASS_Q, batch, owners, 3)
    # Rank 1's query reaches rank 0 by way of rank 2; rank 0 answers. The other sequence never leaves its rank.
    assert [each.bytes_sent for each in passed] == [part, query, query]


@pytest.mark.parametrize("backend", [TorchCpuFlash(), ReferenceAttention()])
@given(data=st.data())
@settings(max_examples=25)
def test_newest_tokens_of_a_sequence_see_what_is_before_each_of_them(
    backend: AttentionBackend, data: st.DataObject
) -> None:
    """Two sequences with several queries, in runs cut anywhere; on a rank without the new tokens all keys are seen."""
    queries, runs_of, hidden, right = [], list[list[KvRun]](), list[int](), []
    for seed in range(2):
        num_new, stores = data.draw(st.integers(1, 6)), data.draw(st.booleans())
        stored = data.draw(st.integers(num_new if stores else 0, 40))
        tokens = random_tokens(max(stored, num_new), seed=seed)
        k, v, q = tokens.k[:stored], tokens.v[:stored], tokens.q[-num_new:]
        cuts = sorted(data.draw(st.sets(st.integers(0, stored), max_size=4)) | {0, stored})
        runs = [KvRun(k[start:stop], v[start:stop]) for start, stop in itertools.pairwise(cuts)]
        for place in range(num_new):
            behind = num_new - 1 - place if stores else 0
            seen = stored - behind
            queries.append(q[place])
            runs_of.append(runs)
            hidden.append(behind)
            right.append(oracle_partial(q[place : place + 1], k[:seen], v[:seen], causal=False, scale=SCALE).out)
    (transport,) = InProcessRing(1).transports
    out = sharded_decode(torch.stack(queries), DraftedShards(runs_of, hidden), transport, backend, SCALE)
    expected = torch.cat(right).nan_to_num(0.0)
    assert largest(out.double() - expected) <= 1e-5
