"""Head-parallel prefill where heads do not divide by the ranks, and the bytes that it sends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringserve.cp_core.layout.head_shares import HeadShare
from ringserve.cp_core.layout.shards import TokenRange, balanced_layout, segment_layout, whole_layout
from tests.cp_core.rings import PlacedSequence, prefill_on_threads
from tests.oracles import fp32_bound, largest, oracle_causal, random_tokens

SCALE = 0.125


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 7))
def test_shares_have_each_query_head_once_and_the_kv_heads_that_it_reads(
    num_ranks: int, num_kv_heads: int, group: int
) -> None:
    num_heads = num_kv_heads * group
    shares = [HeadShare.of_rank(rank, num_ranks, num_heads, num_kv_heads) for rank in range(num_ranks)]
    assert [head for share in shares for head in range(share.heads.start, share.heads.stop)] == [*range(num_heads)]
    sizes = [len(share.heads) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert sum(len(share.kv_heads) for share in shares) <= num_kv_heads + num_ranks - 1
    for share in shares:
        reads = {}
        runs = list(share.runs())
        assert len(runs) <= 3
        for heads, kv_heads in runs:
            each, rest = divmod(len(heads), len(kv_heads))
            assert not rest
            for place in range(len(heads)):
                reads[share.heads.start + heads.start + place] = share.kv_heads.start + kv_heads.start + place // each
        assert reads == {head: head // group for head in range(share.heads.start, share.heads.stop)}


@pytest.mark.parametrize("num_segments", [1, 2, 8])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "size"), [(6, 2, 4), (6, 3, 4), (7, 7, 3), (12, 4, 5), (2, 1, 8), (9, 3, 2)]
)
def test_heads_that_do_not_divide_by_the_ranks(num_heads: int, num_kv_heads: int, size: int, num_segments: int) -> None:
    """Segments are exact on any layout: with fewer tokens than segments, and with one that lies whole on a rank."""
    owner = tuple(position % size for position in range(21)) + (size - 1,) * 9
    held = [owner.count(rank) for rank in range(size)]
    sequences = [
        PlacedSequence(
            random_tokens(30 + new, num_heads=num_heads, num_kv_heads=num_kv_heads, seed=new), layout, owner, run
        )
        for new, layout, run in (
            (37, balanced_layout(30, 37, held), 4),
            (43, segment_layout(30, [9 + (rank == 1) * (43 - 9 * size) for rank in range(size)], num_segments), 4)
            if size < 5
            else (11, segment_layout(30, [11, *(0,) * (size - 1)], num_segments), 4),
            (1, balanced_layout(30, 1, held), 1 << 30),
            (12, whole_layout(30, 12, 0, size), 1 << 30),
        )
    ]
    outs = prefill_on_threads(sequences, size, "sp_ntp", SCALE, num_segments=num_segments).outs
    for sequence, out in zip(sequences, outs, strict=True):
        right = oracle_causal(sequence.tokens, SCALE)[30:]
        assert largest(out.double() - right) <= fp32_bound(sequence.tokens, SCALE)


@pytest.mark.parametrize(("new", "cached", "num_segments"), [(40, 0, 1), (16, 48, 1), (8, 400, 1), (32, 48, 4)])
def test_bytes_are_those_of_the_formula(new: int, cached: int, num_segments: int) -> None:
    """With N dividing K, a rank sends (N-1)/N^2 (2 H T + 2 K (T + P)) D e bytes of even shards, in any segments."""
    size, num_heads, num_kv_heads, head_dim, number_bytes = 4, 8, 4, 64, 4
    owner = tuple(position % size for position in range(cached))
    tokens = random_tokens(cached + new, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    sequence = PlacedSequence(tokens, segment_layout(cached, [new // size] * size, num_segments), owner)
    elements = 2 * num_heads * new + 2 * num_kv_heads * (new + cached)
    sent = (size - 1) * elements // size**2 * head_dim * number_bytes
    for stats in prefill_on_threads([sequence], size, "sp_ntp", SCALE, num_segments=num_segments).stats:
        assert stats.bytes_sent == sent
        assert stats.all_to_alls == 2 * num_segments


def test_a_share_of_no_heads_reads_nothing() -> None:
    share = HeadShare.of_rank(0, 8, 2, 1)
    assert share.heads == TokenRange(0, 0)
    assert not len(share.kv_heads)
    assert not list(share.runs())
