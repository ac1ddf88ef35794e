"""Source ranks are told to send exactly the parts that destination ranks expect, once each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringserve.cp_core.errors import ReshardError
from ringserve.cp_core.layout.shards import ShardMap, TokenRange, balanced_layout, spread
from ringserve.orchestration.ring.kv_transfers import sends_for
from ringserve.workers.protocol.transfers import KvSend, TransferKey
from tests.cp_core.layout.decoded import decoded as lay_decoded

KEY = TransferKey("turn", 1, "from", "to")
NUM_KV_HEADS = 12
TP = (1, 2, 3, 4, 6)


def sends(
    source: ShardMap, destination: ShardMap, tokens: TokenRange, source_tp: int = 1, destination_tp: int = 1
) -> list[KvSend]:
    return sends_for(
        KEY,
        source,
        destination,
        tokens,
        blocks=[(rank,) for rank in range(source.num_ranks)],
        kv_endpoints=[f"rank{rank}:1" for rank in range(destination.num_ranks * destination_tp)],
        num_kv_heads=NUM_KV_HEADS,
        source_tp=source_tp,
        destination_tp=destination_tp,
    )


@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from(TP),
    st.sampled_from(TP),
    st.integers(1, 40),
    st.integers(0, 20),
    st.data(),
)
def test_every_token_and_head_goes_once_from_where_it_is_stored_to_where_it_is_wanted(
    num_source: int,
    num_destination: int,
    source_tp: int,
    destination_tp: int,
    prompt: int,
    decoded: int,
    data: st.DataObject,
) -> None:
    source = balanced_layout(0, prompt, [0] * num_source).shard_map()
    source = source.extend(lay_decoded(prompt, decoded, source.held))
    start = data.draw(st.integers(0, prompt + decoded - 1))
    tokens = TokenRange(start, prompt + decoded)
    destination = spread(start, len(tokens), [0] * num_destination)
    stored = [[token for item in ranges for token in range(item.start, item.stop)] for ranges in source.ranks]

    arrived: list[tuple[int, int, int]] = []
    planned = sends(source, destination, tokens, source_tp, destination_tp)
    assert len(planned) == num_source * source_tp
    for number, send in enumerate(planned):
        rank, share = divmod(number, source_tp)
        assert send.key == KEY
        assert send.blocks == (rank,)
        for part in send.parts:
            receiver = int(part.endpoint.removeprefix("rank").removesuffix(":1"))
            for piece in part.pieces:
                heads = range(piece.head_start, piece.head_stop)
                assert all(head * source_tp // NUM_KV_HEADS == share for head in heads)
                for offset, token in enumerate(range(piece.tokens.start, piece.tokens.stop)):
                    assert stored[rank][piece.source_stored + offset] == token
                    arrived += [(token, head, receiver) for head in heads]
    wanted = [
        (token, head, rank * destination_tp + head * destination_tp // NUM_KV_HEADS)
        for rank, ranges in enumerate(destination.ranks)
        for item in ranges
        for token in range(item.start, item.stop)
        for head in range(NUM_KV_HEADS)
    ]
    assert sorted(arrived) == sorted(wanted)


def test_each_source_rank_has_a_send_also_where_it_has_nothing_to_give() -> None:
    source = ShardMap.of(((TokenRange(0, 3),), ()))
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
        (ShardMap.of(((TokenRange(0, 6),), (TokenRange(2, 3),))), spread(0, 6, (0,)), "2"),
    ],
)
def test_maps_that_do_not_hold_every_token_once_are_refused(source: ShardMap, destination: ShardMap, says: str) -> None:
    with pytest.raises(ReshardError, match=says):
        sends(source, destination, TokenRange(0, 6))
