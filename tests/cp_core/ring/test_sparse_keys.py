"""Sparse prefill against a plain fp64 reference over the same chosen keys, and the choice of chosen keys itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from unittest import mock

import pytest
import torch

from ringserve.cp_core.attention.partial import KeyShard
from ringserve.cp_core.errors import InvalidRequest
from ringserve.cp_core.layout.shards import PrefillLayout, TokenRange, balanced_layout, whole_layout
from ringserve.cp_core.layout.sparsity import LATEST, STRIDED, Sparsity, sampled_positions
from ringserve.cp_core.layout.step_plans import PrefillPlan, Shard
from ringserve.cp_core.ring import prefill as prefill_module
from ringserve.cp_core.ring.sparse_keys import KeyChooser, importance_of
from ringserve.cp_core.transport.inprocess import InProcessRing
from tests.cp_core.rings import PlacedSequence, PrefillResult, prefill_on_threads
from tests.oracles import fp32_bound, largest, oracle_causal, random_tokens

SCALE = 0.125
SPARSE = Sparsity(keep=0.25, sinks=2, window=3)


def prefill(
    sequences: Sequence[PlacedSequence], size: int
) -> tuple[PrefillResult, dict[tuple[int, int], torch.Tensor]]:
    """Run a layer between others. Return its result, and the keys that each rank sends: bool[K, tokens], by position.

    They are by rank and sequence. Random keys differ: a row of a message says which token it is.
    """
    sent: dict[tuple[int, int], torch.Tensor] = {}

    class Recorder(KeyChooser):
        def thin(
            self, q_of_sequence: Sequence[torch.Tensor], keys_of_sequence: Sequence[KeyShard], scale: float
        ) -> list[KeyShard]:
            thinned = super().thin(q_of_sequence, keys_of_sequence, scale)
            for index, each in enumerate(thinned):
                rows = torch.cat([*(run.k for run in each.cached), each.new.k])
                found = (sequences[index].tokens.k[None] == rows[:, None]).all(dim=3)  # [rows, tokens, K]
                assert bool((found.sum(dim=1) == 1).all())
                sent[self._transport.rank, index] = found.any(dim=0).T
            return thinned

    with mock.patch.object(prefill_module, "KeyChooser", Recorder):
        return prefill_on_threads(sequences, size, "pass_kv", SCALE, layer=1, num_layers=3), sent


def owners(sequence: PlacedSequence) -> list[int]:
    new = range(sequence.layout.start, sequence.layout.tokens.stop)
    return [*sequence.cached_owner, *(sequence.layout.owner_of(position)[0] for position in new)]


def reference(index: int, sequence: PlacedSequence, chosen: dict[tuple[int, int], torch.Tensor]) -> torch.Tensor:
    """Return fp64 out of new tokens: each sees its own rank's keys and the chosen ones of others, causally."""
    tokens, home = sequence.tokens, torch.tensor(owners(sequence))
    q, k, v = (each.double() for each in (tokens.q, tokens.k, tokens.v))
    num_kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    out = torch.empty_like(q)
    for head in range(q.shape[1]):
        kv = head // group
        told = torch.zeros(len(home), dtype=torch.bool)
        for rank in set(home.tolist()):
            told |= chosen[rank, index][kv]
        sees = (home[:, None] == home[None, :]) | told[None, :]
        sees &= torch.ones(len(home), len(home)).tril().bool()
        logits = (q[:, head] @ k[:, kv].T * SCALE).masked_fill(~sees, -torch.inf)
        out[:, head] = logits.softmax(dim=1) @ v[:, kv]
    assert num_kv_heads * group == q.shape[1]
    return out[sequence.layout.start :]


def placed(
    new: int,
    owner: Sequence[int],
    size: int,
    *,
    seed: int = 0,
    sparsity: Sparsity | None = SPARSE,
    num_heads: int = 4,
    num_kv_heads: int = 2,
) -> PlacedSequence:
    layout = balanced_layout(len(owner), new, [list(owner).count(rank) for rank in range(size)])
    tokens = random_tokens(len(owner) + new, seed=seed, num_heads=num_heads, num_kv_heads=num_kv_heads)
    return PlacedSequence(tokens, layout, tuple(owner), 7, sparsity)


def check(sequences: Sequence[PlacedSequence], size: int) -> None:
    result, sent = prefill(sequences, size)
    for index, (sequence, out) in enumerate(zip(sequences, result.outs, strict=True)):
        right = reference(index, sequence, sent)
        assert largest(out.double() - right) <= fp32_bound(sequence.tokens, SCALE)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (6, 1), (3, 3)])
def test_queries_see_their_own_ranks_keys_and_the_kept_ones_of_others(
    size: int, num_heads: int, num_kv_heads: int
) -> None:
    check([placed(97, [], size, num_heads=num_heads, num_kv_heads=num_kv_heads)], size)


@pytest.mark.parametrize("size", [2, 4])
def test_cached_tokens_are_partitions_of_their_own_wherever_they_lie(size: int) -> None:
    for owner in ([0] * 50, [size - 1] * 50, [position % size for position in range(50)]):
        check([placed(new, owner, size, seed=new) for new in (1, 33)], size)


def test_fused_sequences_with_empty_ranks_and_an_exact_one() -> None:
    size = 3
    whole = random_tokens(40, seed=9)
    exact = placed(41, [0] * 30, size, seed=5, sparsity=None)
    sequences = [
        placed(0, [0] * 20, size, seed=1),
        placed(2, [2] * 40, size, seed=2),
        exact,
        PlacedSequence(whole, whole_layout(0, 40, 1, size), (), sparsity=SPARSE),
        placed(70, [0] * 17, size, seed=3),
    ]
    outs = prefill(sequences, size)[0].outs
    alone = prefill_on_threads([exact], size, "pass_kv", SCALE).outs[0]
    assert largest(outs[2] - alone) <= 4e-7 * largest(exact.tokens.v)
    right = oracle_causal(whole, SCALE)  # all lies on one rank
    assert largest(outs[3].double() - right) <= fp32_bound(whole, SCALE)
    check(sequences, size)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_where_all_keys_are_kept_it_is_exact(size: int) -> None:
    wide = Sparsity(keep=0.1, sinks=0, window=1000)
    for sparsity in (wide, Sparsity(keep=1.0)):
        sequences = [placed(61, [position % size for position in range(30)], size, sparsity=sparsity)]
        result, _ = prefill(sequences, size)
        right = oracle_causal(sequences[0].tokens, SCALE)[30:]
        assert largest(result.outs[0].double() - right) <= fp32_bound(sequences[0].tokens, SCALE)


def test_a_rank_sends_the_share_that_is_kept_and_its_sampled_queries() -> None:
    size, new, head_dim, heads, kv_heads = 4, 800, 64, 4, 2
    sequence = placed(new, [], size, num_heads=heads, num_kv_heads=kv_heads)
    stats = prefill([sequence], size)[0].stats
    chosen = 2 * math.ceil(0.25 * new / (2 * size))  # of each rank's two ranges
    queries = (size - 1) * (LATEST + STRIDED) * heads
    keys = 2 * (size - 1) * size * chosen * kv_heads
    assert sum(each.bytes_sent for each in stats) == (keys + queries) * head_dim * 4


def test_the_kept_keys_are_those_with_the_most_attention_and_the_ends_of_a_partition() -> None:
    sequence = placed(300, [0] * 80, 2, seed=3)
    _, sent = prefill([sequence], 2)
    tokens, positions = sequence.tokens, sampled_positions(sequence.layout)
    shard = sequence.plan.shard(0)
    stored = [*range(80), *sequence.new_positions(0)]
    chosen = sent[0, 0][:, stored]
    q, k = tokens.q[positions].double(), tokens.k[stored].double()
    for head in range(2):
        weights = torch.zeros(len(stored), dtype=torch.float64)
        for place, position in enumerate(positions):
            seen = torch.tensor([each <= position for each in stored])
            for each in (2 * head, 2 * head + 1):
                logits = (q[place, each] @ k[:, head].T * SCALE).masked_fill(~seen, -torch.inf)
                weights += logits.softmax(dim=0)
        begin = 0
        for length in (shard.cached, *map(len, shard.ranges)):
            part, own = weights[begin : begin + length].clone(), chosen[head, begin : begin + length]
            assert int(own.sum()) == SPARSE.chosen(length)
            assert bool(own[: SPARSE.sinks].all())
            assert bool(own[-SPARSE.window :].all())
            part[: SPARSE.sinks] = part[-SPARSE.window :] = 0.0
            free = SPARSE.chosen(length) - SPARSE.sinks - SPARSE.window
            right = float(part.topk(free).values.sum())
            assert float(part[own].sum()) == pytest.approx(right, rel=1e-6)
            begin += length


def test_a_query_before_all_keys_here_says_nothing_of_them() -> None:
    tokens = random_tokens(8)
    shard = Shard(0, (TokenRange(4, 12),))
    importance = importance_of(tokens.q[:2], tokens.k, shard, [3, 6], SCALE)
    assert importance.sum(dim=1).tolist() == pytest.approx([2.0, 2.0])  # of position 6 alone, by two heads
    assert not importance[:, 3:].any()


def test_the_first_and_the_last_layer_are_exact() -> None:
    plan = PrefillPlan((placed(40, [], 2).plan,))
    chooser = KeyChooser(plan, InProcessRing(2).transports[0], num_layers=4)
    assert [chooser.is_sparse(layer) for layer in range(4)] == [False, True, True, False]
    exact = PrefillPlan((placed(40, [], 2, sparsity=Sparsity(keep=1.0)).plan, placed(9, [], 2, sparsity=None).plan))
    assert not KeyChooser(exact, InProcessRing(2).transports[0], num_layers=4).is_sparse(1)


def test_sampled_queries_are_the_last_ones_and_others_at_even_distances() -> None:
    assert sampled_positions(PrefillLayout(5, 3, ((TokenRange(5, 8),),))) == [5, 6, 7]
    positions = sampled_positions(whole_layout(100, 1000, 0, 2))
    assert len(positions) == LATEST + STRIDED
    assert positions[STRIDED:] == list(range(1100 - LATEST, 1100))
    assert positions[0] == 100
    assert max(after - before for before, after in pairwise(positions)) <= 15


@pytest.mark.parametrize(
    ("keep", "length", "chosen"), [(0.1, 300, 30), (0.25, 10, 5), (0.25, 3, 3), (1.0, 9, 9), (0.3, 0, 0)]
)
def test_the_number_of_kept_keys_follows_from_the_length(keep: float, length: int, chosen: int) -> None:
    assert Sparsity(keep=keep, sinks=2, window=3).chosen(length) == chosen


@pytest.mark.parametrize("keep", [0.0, -0.5, 1.01, math.nan])
def test_a_share_out_of_range_is_refused(keep: float) -> None:
    with pytest.raises(InvalidRequest, match="keep is"):
        Sparsity(keep=keep).check()
