"""Layouts: every token on exactly one rank, and no rank with much more than another."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringserve.cp_core.errors import ReshardError
from ringserve.cp_core.layout.shards import (
    ShardMap,
    StoredRanges,
    TokenRange,
    appended,
    assign_owners,
    balanced_layout,
    chunked_layout,
    coalesce,
    level_counts,
    spread,
)
from tests.cp_core.layout.decoded import decoded, lone_owners

Tokens = list[int]

rings = st.integers(1, 8)
edge_sizes = st.sampled_from([0, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 63, 64, 65, 127, 257])
helds = st.lists(st.integers(0, 40), min_size=1, max_size=8)


def positions(shards: ShardMap) -> list[Tokens]:
    """Return the positions that each rank stores, token by token."""
    return [[token for item in ranges for token in range(item.start, item.stop)] for ranges in shards.ranks]


@st.composite
def conversations(draw: st.DrawFn) -> ShardMap:
    """Layout of a conversation after some turns, each prefilled in 2N chunks and then decoded."""
    shards = ShardMap.empty(draw(rings))
    for _ in range(draw(st.integers(0, 4))):
        new = balanced_layout(shards.num_tokens, draw(st.integers(0, 60)), shards.held)
        shards = shards.extend(new.shard_map())
        shards = shards.extend(decoded(shards.num_tokens, draw(st.integers(0, 12)), shards.held))
    return shards


# --- stored ranges ---------------------------------------------------------------------------------------------------

ascending = st.lists(st.tuples(st.sampled_from([0, 1, 1, 2, 5]), st.sampled_from([0, 1, 1, 2, 7])), max_size=40)


def ranges_of(steps: list[tuple[int, int]]) -> list[TokenRange]:
    """Return ranges by their gaps and lengths."""
    ranges, at = [], 0
    for gap, length in steps:
        ranges.append(TokenRange(at + gap, at + gap + length))
        at += gap + length
    return ranges


@given(ascending, st.data())
def test_stored_ranges_are_the_joined_ranges_however_they_were_put_together(
    steps: list[tuple[int, int]], data: st.DataObject
) -> None:
    ranges = ranges_of(steps)
    stored, end = StoredRanges.of(ranges), ranges[-1].stop if ranges else 0
    assert tuple(stored) == coalesce(ranges)
    assert (len(stored), stored.num_tokens) == (len(coalesce(ranges)), sum(map(len, ranges)))
    cut = data.draw(st.integers(0, len(ranges)))
    assert StoredRanges.of(ranges[:cut]).extend(StoredRanges.of(ranges[cut:])) == stored
    start, stop = sorted((data.draw(st.integers(0, end)), data.draw(st.integers(0, end))))
    within = stored.within(start, stop)
    assert within == StoredRanges.of(item.intersect(TokenRange(start, stop)) for item in ranges)
    assert stored.within(0, start).extend(within).extend(stored.within(stop, end)) == stored


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_tokens_that_go_from_rank_to_rank_take_one_run_a_rank(num_ranks: int) -> None:
    decoded_tokens = appended(100, [number % num_ranks for number in range(1000)], num_ranks)
    shards = spread(0, 100, (0,) * num_ranks).extend(decoded_tokens)
    assert [len(ranges.runs) for ranges in shards.ranks] == [8] * num_ranks
    shards.check(TokenRange(0, 1100))


# --- the 2N chunks of a step -----------------------------------------------------------------------------------------


@given(rings, st.integers(0, 1000), st.integers(0, 500) | edge_sizes)
def test_2n_chunks_cut_the_new_tokens_in_order_and_differ_by_at_most_one(ring: int, start: int, count: int) -> None:
    layout = chunked_layout(start, count, range(ring))
    layout.shard_map().check(TokenRange(start, start + count))
    size, remainder = divmod(count, 2 * ring)
    sizes = [size + (chunk < remainder) for chunk in range(2 * ring)]  # the remainder goes to the first chunks
    for rank, stored in enumerate(positions(layout.shard_map())):
        low, high = sum(sizes[:rank]), sum(sizes[: 2 * ring - 1 - rank])
        assert stored == [
            *range(start + low, start + low + sizes[rank]),
            *range(start + high, start + high + sizes[2 * ring - 1 - rank]),
        ]


@given(helds, st.integers(0, 1000), edge_sizes)
def test_a_prefill_layout_holds_every_new_token_once_with_rank_totals_within_two(
    held: list[int], start: int, count: int
) -> None:
    layout = balanced_layout(start, count, held)
    layout.shard_map().check(layout.tokens)
    totals = [layout.tokens_on(rank) for rank in range(layout.num_ranks)]
    assert tuple(totals) == layout.shard_map().held
    assert max(totals) - min(totals) <= 2
    assert sorted(layout.ranges) == sorted(chunked_layout(start, count, range(len(held))).ranges)


@given(helds, st.integers(0, 50), st.integers(1, 60))
def test_owner_of_finds_each_new_token_where_the_shard_map_stores_it(held: list[int], start: int, count: int) -> None:
    layout = balanced_layout(start, count, held)
    stored = positions(layout.shard_map())
    for position in range(start, start + count):
        rank, index = layout.owner_of(position)
        assert stored[rank][index] == position


def test_a_rank_computes_one_early_and_one_late_chunk() -> None:
    layout = chunked_layout(100, 10, (0, 1))
    # Sizes 3, 3, 2, 2.
    assert layout.ranges == ((TokenRange(100, 103), TokenRange(108, 110)), (TokenRange(103, 108),))
    assert layout.owner_of(108) == (0, 3)


def test_asking_for_the_owner_of_a_token_that_is_not_new_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="position 9 is not among the new tokens"):
        chunked_layout(10, 4, (0, 1)).owner_of(9)


@given(rings, st.lists(st.integers(1, 9) | edge_sizes, max_size=30))
def test_many_turns_stay_within_two_tokens_of_each_other(ring: int, turns: list[int]) -> None:
    held = [0] * ring
    for count in turns:
        layout = balanced_layout(sum(held), count, held)
        held = [own + layout.tokens_on(rank) for rank, own in enumerate(held)]
        assert max(held) - min(held) <= 2


@given(rings, st.lists(st.integers(1, 9) | edge_sizes, max_size=70))
def test_sequences_of_one_step_spread_their_remainders_over_the_ranks(ring: int, counts: list[int]) -> None:
    """Prompts of a token each do not meet on one rank."""
    load = [0] * ring
    for count in counts:
        layout = balanced_layout(0, count, (0,) * ring, load)
        load = [own + layout.tokens_on(rank) for rank, own in enumerate(load)]
        assert max(load) - min(load) <= 2


# --- levelling -------------------------------------------------------------------------------------------------------


@st.composite
def batch_changes(draw: st.DrawFn) -> list[tuple[set[int], int]]:
    """For each step of a batch: the rows that leave it, by their place, and how many join."""
    changes = st.tuples(st.sets(st.integers(0, 15), max_size=8), st.integers(0, 6))
    return draw(st.lists(changes, max_size=60))


@given(st.integers(1, 8), st.integers(0, 16), batch_changes(), st.data())
def test_a_rank_owns_its_part_of_a_batch_and_shards_stay_level_whatever_rows_join_and_leave(
    num_ranks: int, num_rows: int, changes: list[tuple[set[int], int]], data: st.DataObject
) -> None:
    def joining(count: int) -> list[list[int]]:
        return [list(level_counts((0,) * num_ranks, data.draw(st.integers(0, 30)))) for _ in range(count)]

    rows = joining(num_rows)
    for leaving, num_joining in changes:
        rows = [row for place, row in enumerate(rows) if place not in leaving] + joining(num_joining)
        owners = assign_owners(rows, [[1000] * num_ranks] * len(rows))
        assert max(map(owners.count, owners), default=0) <= -(-len(rows) // num_ranks)
        for row, owner in zip(rows, owners, strict=True):
            row[owner] += 1
        assert all(max(row) - min(row) <= 4 for row in rows), "well within a block"


@given(st.integers(2, 8), st.integers(1, 64))
def test_shards_stay_within_a_block_where_only_unlucky_rows_remain(num_ranks: int, num_rows: int) -> None:
    """The rows that get a token on rank 0 leave: the others lack it ever more, and come first in the next step."""
    rows = [[0] * num_ranks for _ in range(num_rows)]
    while rows:
        owners = assign_owners(rows, [[1000] * num_ranks] * len(rows))
        for row, owner in zip(rows, owners, strict=True):
            row[owner] += 1
        assert all(max(row) - min(row) <= 8 for row in rows)
        rows = [row for row, owner in zip(rows, owners, strict=True) if owner]


@given(st.integers(1, 6), st.lists(st.lists(st.integers(0, 5), min_size=6, max_size=6), max_size=12))
def test_every_slot_of_a_row_is_used_before_the_row_is_full(num_ranks: int, free: list[list[int]]) -> None:
    """Tables of any sizes: an owner has a free slot, and as many tokens are stored as there are slots."""
    rows = {number: [0] * num_ranks for number in range(len(free))}
    room = {number: slots[:num_ranks] for number, slots in enumerate(free)}
    while rows := {number: row for number, row in rows.items() if sum(row) < sum(room[number])}:
        owners = assign_owners(list(rows.values()), [room[number] for number in rows])
        for (number, row), owner in zip(rows.items(), owners, strict=True):
            row[owner] += 1
            assert row[owner] <= room[number][owner]


@given(helds, st.integers(0, 150))
def test_level_counts_are_those_of_appending_one_by_one(held: list[int], count: int) -> None:
    owners = lone_owners(held, count)
    assert level_counts(held, count) == tuple(owners.count(rank) for rank in range(len(held)))


@given(helds, st.integers(0, 500), st.integers(0, 150))
def test_decoded_tokens_lie_where_they_were_appended_one_by_one(held: list[int], start: int, count: int) -> None:
    shards = decoded(start, count, held)
    shards.check(TokenRange(start, start + count))
    for place, owner in enumerate(lone_owners(held, count)):
        assert start + place in positions(shards)[owner]


@given(helds, st.integers(0, 500), st.integers(0, 150))
def test_spread_gives_each_rank_one_run_and_levels_what_they_hold(held: list[int], start: int, count: int) -> None:
    shards = spread(start, count, held)
    shards.check(TokenRange(start, start + count))
    assert all(len(ranges) <= 1 for ranges in shards.ranks)
    assert shards.held == level_counts(held, count)
    after = [own + more for own, more in zip(held, shards.held, strict=True)]
    grown = [total for total, more in zip(after, shards.held, strict=True) if more]
    # A rank that got a token has no more than one above the emptiest.
    assert not grown or max(grown) - min(after) <= 1


@given(st.integers(1, 8), st.integers(0, 200))
def test_appending_to_an_even_ring_is_round_robin(ring: int, count: int) -> None:
    assert lone_owners([7] * ring, count) == [place % ring for place in range(count)]


# --- shard maps ------------------------------------------------------------------------------------------------------


@given(conversations())
def test_a_conversation_of_many_turns_lies_on_each_rank_once_and_ascending(shards: ShardMap) -> None:
    shards.check(TokenRange(0, shards.num_tokens))
    assert all(tokens == sorted(tokens) for tokens in positions(shards))


@given(conversations(), st.integers(0, 300))
def test_truncating_keeps_a_prefix_of_every_ranks_stored_order(shards: ShardMap, keep: int) -> None:
    cut = shards.truncate(keep)
    cut.check(TokenRange(0, min(keep, shards.num_tokens)))
    for before, after in zip(positions(shards), positions(cut), strict=True):
        assert after == before[: len(after)]
    assert cut.truncate(keep) == cut


@given(conversations(), st.integers(0, 150), st.integers(0, 150))
def test_within_keeps_exactly_the_positions_asked_for(shards: ShardMap, start: int, count: int) -> None:
    asked = TokenRange(start, start + count)
    expected = [[token for token in tokens if start <= token < start + count] for tokens in positions(shards)]
    assert positions(shards.within(asked)) == expected


@given(conversations(), st.integers(0, 300))
def test_a_map_cut_in_two_and_joined_is_itself(shards: ShardMap, cut: int) -> None:
    later = shards.within(TokenRange(cut, max(cut, shards.num_tokens)))
    assert shards.truncate(cut).extend(later) == shards


def test_maps_of_rings_of_different_size_are_not_joined() -> None:
    with pytest.raises(AssertionError, match="different size"):
        ShardMap.empty(2).extend(ShardMap.empty(3))


@given(st.lists(st.integers(0, 5), max_size=10))
def test_coalesce_leaves_no_neighbours_and_no_empties(sizes: list[int]) -> None:
    ranges, position = [], 0
    for number, size in enumerate(sizes):
        position += number % 2
        ranges.append(TokenRange(position, position + size))
        position += size
    joined = coalesce(ranges)
    assert positions(ShardMap.of((joined,))) == positions(ShardMap.of((tuple(ranges),)))
    assert all(len(item) for item in joined)
    assert all(before.stop < after.start for before, after in pairwise(joined))


def test_ranges_that_do_not_meet_share_nothing() -> None:
    assert len(TokenRange(0, 4).intersect(TokenRange(6, 9))) == 0
    assert TokenRange(0, 7).intersect(TokenRange(6, 9)) == TokenRange(6, 7)
    with pytest.raises(AssertionError, match="no range"):
        TokenRange(3, 2)


# --- refusals --------------------------------------------------------------------------------------------------------


def shard_map(*ranks: list[tuple[int, int]]) -> ShardMap:
    return ShardMap.of(tuple(tuple(TokenRange(*item) for item in ranges) for ranges in ranks))


@pytest.mark.parametrize(
    ("shards", "says"),
    [
        (shard_map([(0, 4)], [(5, 10)]), "position 4 is missing"),
        (shard_map([(0, 4)], [(4, 9)]), "position 9 is missing"),
        (shard_map([(1, 4)], [(4, 10)]), "position 0 is missing"),
        (shard_map([], []), "position 0 is missing"),
        (shard_map([(0, 6)], [(5, 10)]), "position 5 is held twice"),
        (shard_map([(0, 4)], [(4, 12)]), "position 10 is missing or outside"),
        (shard_map([(4, 10), (0, 4)], []), "rank 0 stores position 0 after position 9"),
    ],
)
def test_a_map_that_is_not_whole_is_refused_by_its_first_wrong_position(shards: ShardMap, says: str) -> None:
    with pytest.raises(ReshardError, match=says):
        shards.check(TokenRange(0, 10))


@given(conversations(), st.data())
def test_a_map_that_lost_a_token_or_holds_one_twice_is_refused(shards: ShardMap, data: st.DataObject) -> None:
    total = shards.num_tokens
    if not total:
        return
    position = data.draw(st.integers(0, total - 1))
    before, after = shards.truncate(position), shards.within(TokenRange(position + 1, total))
    with pytest.raises(ReshardError, match=f"position {position} is missing"):
        before.extend(after).check(TokenRange(0, total))
    doubled = ShardMap.of((*shards.ranks, (TokenRange(position, position + 1),)))
    with pytest.raises(ReshardError, match="is held twice"):
        doubled.check(TokenRange(0, total))
