"""Blocks reserved before a prompt is cut into chunks suffice for every way to cut it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from ringserve.cp_core.layout.shards import balanced_layout, spread
from ringserve.orchestration.prefill.scheduler import worst_case_held


def held_after(held: Sequence[int], pulled: int, chunks: Sequence[int]) -> list[int]:
    """Return each rank's tokens after `pulled` fetched tokens and computed chunks of these sizes."""
    now = [own + more for own, more in zip(held, spread(0, pulled, held).held, strict=True)]
    for size in chunks:
        layout = balanced_layout(0, size, now)
        now = [own + layout.tokens_on(rank) for rank, own in enumerate(now)]
    return now


def is_enough(held: Sequence[int], pulled: int, chunks: Sequence[int]) -> bool:
    most = worst_case_held(held, pulled + sum(chunks))
    return all(own <= limit for own, limit in zip(held_after(held, pulled, chunks), most, strict=True))


def ways_to_cut(num_tokens: int) -> Iterator[list[int]]:
    for size in range(1, num_tokens + 1):
        for rest in ways_to_cut(num_tokens - size):
            yield [size, *rest]
    if not num_tokens:
        yield []


def test_every_way_to_cut_eight_tokens_finds_room() -> None:
    for num_ranks in (1, 2, 3):
        for held in itertools.product((0, 1, 5), repeat=num_ranks):
            for pulled in (0, 1, 4):
                assert all(is_enough(held, pulled, chunks) for chunks in ways_to_cut(8 - pulled)), held


@settings(max_examples=500, deadline=None)
@given(
    held=st.lists(st.integers(0, 300), min_size=1, max_size=8),
    pulled=st.integers(0, 100),
    chunks=st.lists(st.integers(1, 20), max_size=60),
)
def test_any_chunks_find_room(held: list[int], pulled: int, chunks: list[int]) -> None:
    assert is_enough(held, pulled, chunks)


@settings(max_examples=300, deadline=None)
@given(
    held=st.lists(st.integers(0, 300), min_size=2, max_size=6),
    size=st.integers(1, 12),
    count=st.integers(1, 200),
)
def test_many_equal_chunks_find_room(held: list[int], size: int, count: int) -> None:
    """Chunks smaller than the ring are the worst: they always go to the same, emptier ranks."""
    assert is_enough(held, 0, [size] * count)


def test_a_ring_that_is_even_holds_no_more_than_its_share() -> None:
    assert worst_case_held((10, 10), 7) == [15, 15]
    assert worst_case_held((10, 4), 0) == [10, 4]
