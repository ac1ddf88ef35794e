"""The reshard planner against a brute-force oracle that walks every (token, head)."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringserve.cp_core.errors import ReshardError
from ringserve.cp_core.layout.reshard import KvPiece, ReshardPlan, Route, plan_reshard, prove
from ringserve.cp_core.layout.shards import ShardMap, TokenRange, balanced_layout, spread
from tests.cp_core.layout.decoded import decoded


@st.composite
def conversations(draw: st.DrawFn, max_ranks: int = 4) -> ShardMap:
    """Draw a shard map as turns make it: prefilled chunks, decoded tokens, received ranges, sometimes cut short."""
    num_ranks = draw(st.integers(1, max_ranks))
    shards = ShardMap.empty(num_ranks)
    for _ in range(draw(st.integers(1, 4))):
        start, count = shards.num_tokens, draw(st.integers(0, 30))
        kind = draw(st.sampled_from(["prefill", "decode", "receive"]))
        if kind == "prefill":
            shards = shards.extend(balanced_layout(start, count, shards.held).shard_map())
        elif kind == "decode":
            shards = shards.extend(decoded(start, count, shards.held))
        else:
            shards = shards.extend(spread(start, count, shards.held))
        if draw(st.booleans()):
            shards = shards.truncate(draw(st.integers(0, shards.num_tokens)))
    return shards


def owners(owner_of_position: list[int]) -> ShardMap:
    """Return the map of an owner for each position: any layout, also with ranks that hold nothing."""
    ranks: list[list[TokenRange]] = [[] for _ in range(5)]
    for position, owner in enumerate(owner_of_position):
        ranks[owner].append(TokenRange(position, position + 1))
    return ShardMap.of(tuple(map(tuple, ranks)))


def positions(shards: ShardMap, rank: int) -> list[int]:
    return [position for item in shards.ranks[rank] for position in range(item.start, item.stop)]


def deliveries(
    plan: ReshardPlan, source: ShardMap, source_tp: int, head_share: int
) -> dict[int, list[tuple[int, int]]]:
    """Return the (position, head) pairs that reach each destination rank, each checked against its piece."""
    arrived: dict[int, list[tuple[int, int]]] = {}
    stored = [positions(source, rank) for rank in range(source.num_ranks)]
    for route in plan.routes:
        cp_rank, tp_rank = divmod(route.source, source_tp)
        for piece in route.pieces:
            taken = stored[cp_rank][piece.source_stored : piece.source_stored + len(piece.tokens)]
            assert taken == list(range(piece.tokens.start, piece.tokens.stop))
            for head in range(piece.head_start, piece.head_stop):
                assert head // head_share == tp_rank
                arrived.setdefault(route.destination, []).extend((position, head) for position in taken)
    return arrived


def check_exact(
    source: ShardMap, destination: ShardMap, tokens: TokenRange, num_kv_heads: int, source_tp: int, destination_tp: int
) -> ReshardPlan:
    plan = plan_reshard(
        source, destination, tokens, num_kv_heads=num_kv_heads, source_tp=source_tp, destination_tp=destination_tp
    )
    arrived = deliveries(plan, source, source_tp, num_kv_heads // source_tp)
    share = num_kv_heads // destination_tp
    for rank in range(destination.num_ranks):
        for tp_rank in range(destination_tp):
            heads = range(tp_rank * share, (tp_rank + 1) * share)
            wanted = [(position, head) for position in positions(destination, rank) for head in heads]
            assert sorted(arrived.get(rank * destination_tp + tp_rank, [])) == sorted(wanted)
    return plan


@given(conversations(), st.integers(1, 4), st.data())
def test_every_token_and_head_arrives_exactly_once_whatever_the_turns_were(
    source: ShardMap, num_destinations: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, source.num_tokens), label="start")
    stop = data.draw(st.integers(start, source.num_tokens), label="stop")
    held = data.draw(st.lists(st.integers(0, 40), min_size=num_destinations, max_size=num_destinations), label="held")
    lay = data.draw(st.sampled_from([spread, decoded]), label="lay")
    source_tp, destination_tp = data.draw(st.tuples(*[st.sampled_from([1, 2, 4])] * 2), label="tp")
    check_exact(source, lay(start, stop - start, held), TokenRange(start, stop), 4, source_tp, destination_tp)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=40))
def test_every_token_arrives_exactly_once_from_any_layout_to_any_layout(pairs: list[tuple[int, int]]) -> None:
    source, destination = owners([giver for giver, _ in pairs]), owners([taker for _, taker in pairs])
    check_exact(source, destination, TokenRange(0, len(pairs)), 1, 1, 1)


@given(conversations(), st.integers(1, 7))
def test_chunks_of_a_transfer_together_deliver_what_one_plan_delivers(source: ShardMap, chunk: int) -> None:
    destination = spread(0, source.num_tokens, (3, 0, 5))
    arrived: dict[int, list[tuple[int, int]]] = {}
    for start in range(0, source.num_tokens, chunk):
        tokens = TokenRange(start, min(start + chunk, source.num_tokens))
        plan = check_exact(source, destination.within(tokens), tokens, 1, 1, 1)
        for rank, pairs in deliveries(plan, source, 1, 1).items():
            arrived.setdefault(rank, []).extend(pairs)
    for rank in range(3):
        assert sorted(arrived.get(rank, [])) == [(position, 0) for position in positions(destination, rank)]


@given(conversations(), st.data())
def test_a_source_that_lacks_a_token_is_refused_by_position(source: ShardMap, data: st.DataObject) -> None:
    more = source.num_tokens + data.draw(st.integers(1, 5))
    with pytest.raises(ReshardError, match=f"position {source.num_tokens} is missing on the source side"):
        plan_reshard(source, spread(0, more, (0, 0)), TokenRange(0, more), num_kv_heads=2)


def test_a_hole_in_the_source_is_refused_by_position() -> None:
    holed = ShardMap.of(((TokenRange(0, 4),), (TokenRange(5, 9),)))
    with pytest.raises(ReshardError, match="position 4 is missing on the source side"):
        plan_reshard(holed, spread(0, 9, (0,)), TokenRange(0, 9), num_kv_heads=1)


def test_a_token_held_by_two_source_ranks_is_refused() -> None:
    doubled = ShardMap.of(((TokenRange(0, 5),), (TokenRange(4, 9),)))
    with pytest.raises(ReshardError, match="position 4 is held twice or lies outside on the source side"):
        plan_reshard(doubled, spread(0, 9, (0,)), TokenRange(0, 9), num_kv_heads=1)


def test_a_source_rank_out_of_order_is_refused() -> None:
    backwards = ShardMap.of(((TokenRange(4, 8), TokenRange(0, 4)),))
    with pytest.raises(ReshardError, match="rank 0 stores position 0 after position 7"):
        plan_reshard(backwards, spread(0, 8, (0,)), TokenRange(0, 8), num_kv_heads=1)


@pytest.mark.parametrize(
    ("destination", "fault"),
    [
        (ShardMap.of(((TokenRange(0, 3),), (TokenRange(4, 8),))), "position 3 is missing on the destination side"),
        (ShardMap.of(((TokenRange(0, 5),), (TokenRange(4, 8),))), "position 4 is held twice or lies outside"),
        (ShardMap.of(((TokenRange(0, 9),),)), "position 8 is held twice or lies outside"),
        (ShardMap.of(((), ())), "position 0 is missing on the destination side"),
    ],
)
def test_a_destination_that_is_not_exactly_the_tokens_is_refused(destination: ShardMap, fault: str) -> None:
    with pytest.raises(ReshardError, match=fault):
        plan_reshard(spread(0, 12, (0, 0)), destination, TokenRange(0, 8), num_kv_heads=1)


@pytest.mark.parametrize(("source_tp", "destination_tp"), [(3, 1), (1, 3), (8, 1), (0, 1)])
def test_heads_that_do_not_divide_are_refused_with_the_allowed_values(source_tp: int, destination_tp: int) -> None:
    shards = spread(0, 4, (0,))
    with pytest.raises(ReshardError, match=r"does not divide 4 KV heads: allowed are \[1, 2, 4\]"):
        plan_reshard(
            shards, shards, TokenRange(0, 4), num_kv_heads=4, source_tp=source_tp, destination_tp=destination_tp
        )


def test_nothing_to_move_is_an_empty_plan() -> None:
    plan = plan_reshard(spread(0, 9, (0, 0)), ShardMap.empty(3), TokenRange(9, 9), num_kv_heads=2)
    assert plan.routes == ()


def test_stored_indices_count_from_the_beginning_of_the_source_shard() -> None:
    source = ShardMap.of(((TokenRange(0, 10), TokenRange(30, 40)), (TokenRange(10, 30),)))
    plan = plan_reshard(source, ShardMap.of(((TokenRange(25, 35),),)), TokenRange(25, 35), num_kv_heads=2)
    assert plan.routes == (
        Route(0, 0, (KvPiece(TokenRange(30, 35), 10, 0, 2),)),
        Route(1, 0, (KvPiece(TokenRange(25, 30), 15, 0, 2),)),
    )


def test_tensor_parallel_ranks_exchange_only_the_heads_both_have() -> None:
    shards = spread(0, 6, (0,))
    plan = plan_reshard(shards, shards, TokenRange(0, 6), num_kv_heads=4, source_tp=4, destination_tp=2)
    heads = [
        (route.source, route.destination, route.pieces[0].head_start, route.pieces[0].head_stop)
        for route in plan.routes
    ]
    assert heads == [(0, 0, 0, 1), (1, 0, 1, 2), (2, 1, 2, 3), (3, 1, 3, 4)]


@given(conversations(), st.data())
def test_the_proof_notices_any_single_tampered_piece(source: ShardMap, data: st.DataObject) -> None:
    destination = spread(0, source.num_tokens, (0, 2))
    plan = plan_reshard(source, destination, TokenRange(0, source.num_tokens), num_kv_heads=2, source_tp=2)
    if not plan.routes:
        return
    at = data.draw(st.integers(0, len(plan.routes) - 1), label="route")
    route = plan.routes[at]
    which = data.draw(st.integers(0, len(route.pieces) - 1), label="piece")
    piece = route.pieces[which]
    tampered: list[KvPiece] = data.draw(
        st.sampled_from(
            [
                [],
                [piece, piece],
                [replace(piece, source_stored=piece.source_stored + 1)],
                [replace(piece, tokens=TokenRange(piece.tokens.start, piece.tokens.stop + 1))],
                [replace(piece, tokens=TokenRange(piece.tokens.start + 1, piece.tokens.stop + 1))],
                [replace(piece, head_start=0, head_stop=2)],
                [replace(piece, head_start=1 - piece.head_start, head_stop=2 - piece.head_start)],
            ]
        ),
        label="tampered",
    )
    pieces = (*route.pieces[:which], *tampered, *route.pieces[which + 1 :])
    routes = (*plan.routes[:at], replace(route, pieces=pieces), *plan.routes[at + 1 :])
    with pytest.raises(ReshardError):
        prove(ReshardPlan(routes), source, destination, num_kv_heads=2, source_tp=2)


def test_planning_takes_as_long_as_there_are_tokens() -> None:
    """Count lines instead of seconds: a quadratic planner takes minutes for KV that was decoded token by token."""

    def lines_run(num_tokens: int) -> int:
        source, destination = decoded(0, num_tokens, (0, 0)), spread(0, num_tokens, (0, 0, 0))
        counts = {"line": 0}

        def trace(frame: FrameType, event: str, arg: Any) -> Any:
            counts[event] = counts.get(event, 0) + 1
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            plan = plan_reshard(source, destination, TokenRange(0, num_tokens), num_kv_heads=8)
        finally:
            sys.settrace(before)
        assert sum(len(route.pieces) for route in plan.routes) == num_tokens
        return counts["line"]

    assert 0 < lines_run(8_000) < 5 * lines_run(2_000)
