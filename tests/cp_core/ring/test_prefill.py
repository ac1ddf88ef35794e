"""Ring prefill against the fp64 oracle, over the edge grid: uneven shards, empty ranks, fused sequences, many turns."""

from __future__ import annotations

import itertools
import random
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringserve.cp_core.attention import partial
from ringserve.cp_core.attention.reference import ReferenceAttention
from ringserve.cp_core.cost.model import CHAIN, PREFILL_ALGORITHMS
from ringserve.cp_core.errors import ConfigError, InvalidRequest
from ringserve.cp_core.layout.shards import (
    PrefillLayout,
    TokenRange,
    balanced_layout,
    chunked_layout,
    coalesce,
    whole_layout,
)
from ringserve.cp_core.layout.step_plans import KvRun, PrefillPlan, SequencePlan
from ringserve.cp_core.ring.prefill import ring_prefill
from ringserve.cp_core.transport.inprocess import InProcessRing
from tests.cp_core.rings import PlacedSequence, prefill_on_threads
from tests.oracles import fp32_bound, largest, oracle_causal, random_tokens

ALGORITHMS = [name for name in PREFILL_ALGORITHMS if name != CHAIN]
"""Algorithms that take any layout; a chain has tests of its own."""
SIZES = [1, 2, 3, 4, 8]
SCALE = 0.125


def placed(
    new_tokens: int, cached_owner: list[int], slots: list[int], *, seed: int = 0, run: int = 1 << 30
) -> PlacedSequence:
    num_cached = len(cached_owner)
    tokens = random_tokens(num_cached + new_tokens, seed=seed)
    return PlacedSequence(tokens, chunked_layout(num_cached, new_tokens, slots), tuple(cached_owner), run)


def check(
    sequences: list[PlacedSequence],
    size: int,
    scale: float = SCALE,
    *,
    window: int = 0,
    sink: torch.Tensor | None = None,
    num_segments: int = 1,
) -> None:
    """All are within 2 * err1 + 2e-7 * max |v| of the oracle, and those that merge alike of the same bits."""
    results = [
        prefill_on_threads(sequences, size, algorithm, scale, window=window, sink=sink, num_segments=num_segments).outs
        for algorithm in ALGORITHMS
    ]
    for sequence, *outs in zip(sequences, *results, strict=True):
        right = oracle_causal(sequence.tokens, scale, window=window, sink=sink)[sequence.layout.start :]
        bound = fp32_bound(sequence.tokens, scale, window=window, sink=sink)
        of = dict(zip(ALGORITHMS, outs, strict=True))
        for algorithm, out in of.items():
            assert largest(out.double() - right) <= bound, algorithm
        is_one_run = max(len(sequence.cached_runs(rank)) for rank in range(size)) <= 1
        for algorithm in ("pass_q", "gather_kv"):
            difference = largest(of["pass_kv"] - of[algorithm])
            assert difference <= (0 if is_one_run else 4e-7 * largest(sequence.tokens.v)), algorithm


@pytest.mark.parametrize("size", SIZES)
def test_full_prefill_of_every_edge_length(size: int) -> None:
    for new_tokens in {0, 1, 2, size - 1, 2 * size - 1, 2 * size, 2 * size + 1, 127}:
        check([placed(new_tokens, [], list(range(size)))], size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_cached", [1, 63, 65])
def test_partial_prefill_wherever_the_cached_tokens_lie(size: int, num_cached: int) -> None:
    draw = random.Random(size * 1000 + num_cached)
    homes = [
        [0] * num_cached,
        [size - 1] * num_cached,
        [position % size for position in range(num_cached)],
        [draw.randrange(size) ** 2 // size for _ in range(num_cached)],
    ]
    lengths = [1, size - 1, 2 * size + 1, 33]
    for place, cached_owner in enumerate(homes):
        for new_tokens in (lengths[place], lengths[place - num_cached % 3 - 1]):
            check([placed(new_tokens, cached_owner, list(range(size)))], size)


@pytest.mark.parametrize("slots", list(itertools.permutations(range(3))))
def test_ranks_may_stand_in_any_slots(slots: tuple[int, ...]) -> None:
    for new_tokens in (2, 5, 7, 40):
        check([placed(new_tokens, [2, 0, 0, 2, 2], list(slots))], 3)


def test_a_cache_in_many_short_runs() -> None:
    owner = [position // 16 % 2 for position in range(700)]
    check([placed(40, owner, [1, 0], run=16)], 2)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_fused_sequences_where_ranks_hold_no_q_no_kv_or_neither(size: int) -> None:
    order = list(range(size))
    check(
        [
            placed(0, [0] * 20, order, seed=1),
            placed(1, [], order, seed=2),
            placed(33, [size - 1] * 17, order[::-1], seed=3),
            placed(0, [], order, seed=4),
            placed(2, [0, size - 1], order, seed=5),
        ],
        size,
    )


def test_a_step_without_sequences_moves_nothing() -> None:
    for algorithm in ALGORITHMS:
        result = prefill_on_threads([], 2, algorithm, SCALE)
        assert result.outs == []
        assert [stats.bytes_sent for stats in result.stats] == [0, 0]


@pytest.mark.parametrize("size", [2, 3])
def test_turns_whose_cached_tokens_do_not_divide_by_2n(size: int) -> None:
    """Each turn's new tokens become the next one's cached ones, on the ranks that computed them."""
    owner: list[int] = []
    for turn, new_tokens in enumerate([13, 1, 5, 22]):
        layout = balanced_layout(len(owner), new_tokens, [owner.count(rank) for rank in range(size)])
        tokens = random_tokens(len(owner) + new_tokens, seed=turn)
        check([PlacedSequence(tokens, layout, tuple(owner))], size)
        owner += [layout.owner_of(position)[0] for position in range(len(owner), len(owner) + new_tokens)]


@st.composite
def steps(draw: st.DrawFn) -> tuple[int, list[PlacedSequence]]:
    size = draw(st.sampled_from(SIZES))
    sequences = [
        placed(
            draw(st.integers(0, 40)),
            draw(st.lists(st.integers(0, size - 1), max_size=40)),
            list(draw(st.permutations(range(size)))),
            seed=draw(st.integers(0, 100)),
            run=draw(st.sampled_from([3, 16, 1 << 30])),
        )
        for _ in range(draw(st.integers(0, 3)))
    ]
    return size, sequences


@st.composite
def layouts_of_any_ranges(draw: st.DrawFn, start: int, size: int) -> PrefillLayout:
    """Draw runs of tokens, each on a rank of its own choice: uneven, without an order, some ranks empty."""
    ranges: list[list[TokenRange]] = [[] for _ in range(size)]
    stop = start
    for length, rank in draw(st.lists(st.tuples(st.integers(1, 12), st.integers(0, size - 1)), max_size=9)):
        ranges[rank].append(TokenRange(stop, stop + length))
        stop += length
    return PrefillLayout(start, stop - start, tuple(map(coalesce, ranges)))


@st.composite
def steps_of_any_ranges(draw: st.DrawFn) -> tuple[int, list[PlacedSequence]]:
    size = draw(st.sampled_from(SIZES))
    sequences = []
    for _ in range(draw(st.integers(0, 3))):
        owner = draw(st.lists(st.integers(0, size - 1), max_size=20))
        layout = draw(layouts_of_any_ranges(len(owner), size))
        tokens = random_tokens(layout.tokens.stop, seed=draw(st.integers(0, 100)))
        sequences.append(PlacedSequence(tokens, layout, tuple(owner), draw(st.sampled_from([3, 1 << 30]))))
    return size, sequences


@given(steps() | steps_of_any_ranges())
@settings(max_examples=100, deadline=None)
def test_any_step_on_any_ring_matches_the_oracle(step: tuple[int, list[PlacedSequence]]) -> None:
    size, sequences = step
    check(sequences, size)


SINK = torch.tensor([0.5, -2.0, 4.0, 9.0])


@given(
    steps() | steps_of_any_ranges(),
    st.integers(1, 50),
    st.sampled_from([None, SINK]),
    st.integers(1, 3),
)
@settings(max_examples=70, deadline=None)
def test_any_step_in_a_layer_with_a_window_and_sinks_matches_the_oracle(
    step: tuple[int, list[PlacedSequence]], window: int, sink: torch.Tensor | None, num_segments: int
) -> None:
    """Windows are shorter and longer than chunks, than the cached prefix and than everything."""
    size, sequences = step
    check(sequences, size, window=window, sink=sink, num_segments=num_segments)


@pytest.mark.parametrize("window", [1, 100, 129, 300, 700])
def test_windows_about_as_long_as_what_is_attended_together(window: int) -> None:
    check([placed(600, [position % 2 for position in range(200)], [0, 1])], 2, window=window, sink=SINK)


@given(steps(), st.integers(2, 50))
@settings(max_examples=40, deadline=None)
def test_keys_that_all_rows_of_a_window_see_are_attended_without_a_mask(
    step: tuple[int, list[PlacedSequence]], window: int
) -> None:
    """Few rows together and few keys, as many rows and a long window make in a long prompt."""
    size, sequences = step
    with patch.multiple(partial, BAND_ROWS=4, MASKED_KEYS=2):
        check(sequences, size, window=window)


def test_sinks_of_a_layer_without_a_window() -> None:
    check([placed(40, [0] * 9, [1, 0]), placed(7, [], [0, 1], seed=3)], 2, sink=SINK)


@pytest.mark.parametrize("algorithm", ["pass_kv", "gather_kv", "sp_ntp"])
def test_cached_keys_before_every_window_are_not_sent(algorithm: str) -> None:
    """Of 100 cached tokens a window of 4 leaves the last 3, and two of these lie on rank 0."""
    sequence = placed(2, [position % 2 for position in range(99)] + [0], [0, 1])
    sent = [
        sum(each.bytes_sent for each in prefill_on_threads([sequence], 2, algorithm, SCALE, window=window).stats)
        for window in (0, 4)
    ]
    assert sent[0] - sent[1] == 97 * 2 * 2 * 64 * 4 / (1 if algorithm != "sp_ntp" else 2)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (4, 1), (8, 1)])
def test_every_head_shape(head_dim: int, num_heads: int, num_kv_heads: int) -> None:
    tokens = random_tokens(70, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    owner = tuple(position % 2 for position in range(31))
    check([PlacedSequence(tokens, chunked_layout(31, 39, (0, 1)), owner)], 2, head_dim**-0.5)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_lose_no_more_than_the_rounding_of_the_output(algorithm: str, dtype: torch.dtype) -> None:
    """Partials are fp32, so at most 1.05 of the output dtype's rounding floor."""
    tokens = random_tokens(130, dtype=dtype)
    sequence = PlacedSequence(tokens, chunked_layout(63, 67, (0, 2, 1)), tuple(p % 3 for p in range(63)))
    out = prefill_on_threads([sequence], 3, algorithm, SCALE).outs[0]
    right = oracle_causal(tokens, SCALE)[63:]
    assert out.dtype == dtype
    assert largest(out.double() - right) <= 1.05 * largest(right.to(dtype).double() - right)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_reference_backend_serves_a_ring_too(algorithm: str) -> None:
    sequence = placed(21, [0, 1, 1], [1, 0])
    out = prefill_on_threads([sequence], 2, algorithm, SCALE, ReferenceAttention()).outs[0]
    assert largest(out.double() - oracle_causal(sequence.tokens, SCALE)[3:]) <= fp32_bound(sequence.tokens, SCALE)


@pytest.mark.parametrize("size", SIZES)
def test_n_minus_1_exchanges_and_in_pass_q_one_all_to_all(size: int) -> None:
    sequences = [placed(40, [0] * 5, list(range(size))), placed(7, [], list(range(size)))]
    for algorithm, num_all_to_alls in (("pass_kv", 0), ("pass_q", int(size > 1))):
        for stats in prefill_on_threads(sequences, size, algorithm, SCALE).stats:
            assert stats.exchanges == size - 1
            assert stats.all_to_alls == num_all_to_alls
            assert (stats.gathers, stats.broadcasts) == (0, 0)


def test_messages_have_the_exact_length_of_what_the_sender_holds() -> None:
    """T=5 on N=2: chunks of 2, 1, 1, 1, so rank 0 holds 3 new tokens and rank 1 holds 2; rank 1 has 7 cached."""
    sequence = placed(5, [1] * 7, [0, 1])
    token_bytes = 2 * 64 * 4
    kv = prefill_on_threads([sequence], 2, "pass_kv", SCALE).stats
    assert [stats.bytes_sent for stats in kv] == [2 * 3 * token_bytes, 2 * (7 + 2) * token_bytes]
    # Rank 1's cached tokens are seen by all 3 queries of rank 0, rank 0's new ones by both of rank 1.
    row_bytes = 4 * (64 + 1) * 4
    q = prefill_on_threads([sequence], 2, "pass_q", SCALE).stats
    assert [stats.bytes_sent for stats in q] == [
        3 * 4 * 64 * 4 + 2 * row_bytes,
        2 * 4 * 64 * 4 + 3 * row_bytes,
    ]


def test_queries_that_see_no_key_of_a_rank_are_not_returned() -> None:
    """Without cached tokens the low chunk of slot 0 sees nothing of slot 1: only its high chunk comes back."""
    stats = prefill_on_threads([placed(4, [], [0, 1])], 2, "pass_q", SCALE).stats
    query_bytes, row_bytes = 2 * 4 * 64 * 4, 4 * (64 + 1) * 4
    assert [each.bytes_sent for each in stats] == [query_bytes + 2 * row_bytes, query_bytes + 1 * row_bytes]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sequences_that_lie_whole_on_one_rank_send_nothing(algorithm: str) -> None:
    """Nor do those beside them that a rank has cached alone, but the ones that lie on several ranks do."""
    whole = [
        PlacedSequence(random_tokens(20 + rank, seed=rank), whole_layout(0, 20 + rank, rank, 3), ())
        for rank in range(3)
    ]
    followed = PlacedSequence(random_tokens(25), whole_layout(18, 7, 1, 3), (1,) * 18)
    for stats in prefill_on_threads([*whole, followed], 3, algorithm, SCALE).stats:
        assert stats.bytes_sent == 0
    check([*whole, followed], 3)
    shared = placed(12, [], [0, 1, 2])
    alone, beside = (prefill_on_threads(each, 3, algorithm, SCALE).stats for each in ([shared], [*whole, shared]))
    assert [each.bytes_sent for each in beside] == [each.bytes_sent for each in alone]
    check([whole[0], shared, *whole[1:]], 3)


def test_kv_goes_only_as_far_as_a_rank_sees_it() -> None:
    """Rank 0 has the first tokens, rank 1 the next: rank 2 sees nothing, and its queries need nothing."""
    layout = PrefillLayout(0, 30, ((TokenRange(0, 10),), (TokenRange(10, 30),), ()))
    sequence = PlacedSequence(random_tokens(30), layout, ())
    check([sequence], 3)
    stats = prefill_on_threads([sequence], 3, "pass_kv", SCALE).stats
    assert [each.bytes_sent for each in stats] == [10 * 2 * 2 * 64 * 4, 0, 0]


def test_other_algorithms_are_refused_by_name() -> None:
    transport = InProcessRing(1).transports[0]
    nothing = torch.zeros(0, 1, 64)
    with pytest.raises(ConfigError, match="algorithm is 'ring'; allowed are pass_kv, pass_q, gather_kv, chain, sp_ntp"):
        ring_prefill(nothing, nothing, nothing, [], PrefillPlan(()), transport, ReferenceAttention(), 1.0, "ring")


def test_a_plan_whose_counts_do_not_fit_the_ring_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="one count >= 0 for each of 2"):
        SequencePlan(chunked_layout(0, 4, (0, 1)), (1, 2, 3))


def test_runs_that_hold_other_than_the_planned_tokens_are_a_fault_of_the_caller() -> None:
    transport = InProcessRing(1).transports[0]
    rows = torch.zeros(2, 1, 64)
    plan = PrefillPlan((SequencePlan(chunked_layout(3, 2, (0,)), (3,)),))
    with pytest.raises(AssertionError, match="the runs hold 2 cached tokens, the plan says 3"):
        ring_prefill(rows, rows, rows, [[KvRun(rows, rows)]], plan, transport, ReferenceAttention(), 1.0, "pass_kv")
