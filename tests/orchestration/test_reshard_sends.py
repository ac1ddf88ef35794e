"""What the source ranks are told to send is what the destination ranks wait for, once each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cp_core.errors import ReshardError
from cp_core.layout import ShardMap, TokenRange, appended, balanced_layout, spread
from orchestration.reshard_sends import sends_for
from workers.steps import KvSend, TransferKey

KEY = TransferKey("turn", 1, "from", "to")
NUM_KV_HEADS = 3


def sends(source: ShardMap, destination: ShardMap, tokens: TokenRange) -> list[KvSend]:
    return sends_for(
        KEY,
        source,
        destination,
        tokens,
        blocks=[(rank,) for rank in range(source.num_ranks)],
        kv_endpoints=[f"rank{rank}:1" for rank in range(destination.num_ranks)],
        num_kv_heads=NUM_KV_HEADS,
    )


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 60), st.integers(0, 20), st.data())
def test_every_token_goes_once_from_where_it_is_stored_to_where_it_is_wanted(
    num_source: int, num_destination: int, prompt: int, decoded: int, data: st.DataObject
) -> None:
    source = balanced_layout(0, prompt, [0] * num_source).shard_map()
    source = source.extend(appended(prompt, decoded, source.held))
    start = data.draw(st.integers(0, prompt + decoded - 1))
    tokens = TokenRange(start, prompt + decoded)
    destination = spread(start, len(tokens), [0] * num_destination)
    stored = [[token for item in ranges for token in range(item.start, item.stop)] for ranges in source.ranks]

    arrived: list[tuple[int, int]] = []
    for rank, send in enumerate(sends(source, destination, tokens)):
        assert send.key == KEY
        assert send.blocks == (rank,)
        for part in send.parts:
            receiver = int(part.endpoint.removeprefix("rank").removesuffix(":1"))
            for piece in part.pieces:
                assert (piece.head_start, piece.head_stop) == (0, NUM_KV_HEADS)
                for offset, token in enumerate(range(piece.tokens.start, piece.tokens.stop)):
                    assert stored[rank][piece.source_stored + offset] == token
                    arrived.append((token, receiver))
    wanted = [
        (token, rank)
        for rank, ranges in enumerate(destination.ranks)
        for item in ranges
        for token in range(item.start, item.stop)
    ]
    assert sorted(arrived) == sorted(wanted)


def test_each_source_rank_has_a_send_also_where_it_has_nothing_to_give() -> None:
    source = ShardMap(((TokenRange(0, 3),), ()))
    first, second = sends(source, spread(0, 3, (0,)), TokenRange(0, 3))
    assert len(first.parts) == 1
    assert second.parts == ()


def test_what_the_destination_wants_beyond_the_tokens_is_left_out() -> None:
    source = spread(0, 8, (0, 0))
    moved = sends(source, spread(0, 8, (0,)), TokenRange(2, 6))
    pieces = [piece for send in moved for part in send.parts for piece in part.pieces]
    assert sum(len(piece.tokens) for piece in pieces) == 4


@pytest.mark.parametrize(
    ("source", "destination", "says"),
    [
        (spread(0, 5, (0, 0)), spread(0, 6, (0,)), "5"),
        (spread(0, 6, (0, 0)), spread(0, 5, (0,)), "5"),
        (ShardMap(((TokenRange(0, 6),), (TokenRange(2, 3),))), spread(0, 6, (0,)), "2"),
    ],
)
def test_maps_that_do_not_hold_every_token_once_are_refused(source: ShardMap, destination: ShardMap, says: str) -> None:
    with pytest.raises(ReshardError, match=says):
        sends(source, destination, TokenRange(0, 6))
