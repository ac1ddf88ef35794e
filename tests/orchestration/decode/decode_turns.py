"""Turns on a decode ring as its leader makes them, without a leader."""

from __future__ import annotations

import itertools

from ringserve.cp_core.layout.shards import ShardMap, level_counts, spread
from ringserve.orchestration.decode.turn import Attempt, DecodeTurn, DecodeTurnState
from ringserve.orchestration.protocol.turns import Reservation, Reserve
from ringserve.orchestration.ring.kv_pool import KvPool
from ringserve.workers.protocol.transfers import TransferKey
from ringserve.workers.sampling.parameters import SamplingParameters
from tests.cp_core.layout.decoded import lone_owners

BLOCK_TOKENS = 4
PROMPT_TOKENS = 10
ARRIVALS = itertools.count()


def decode_turn(
    name: str = "turn",
    *,
    num_ranks: int = 2,
    max_tokens: int = 8,
    stop_token_ids: tuple[int, ...] = (),
    first_token: int | None = 50,
) -> DecodeTurn:
    """Return a turn whose prompt is whole on the ring; with `first_token` it is ready to join the batch."""
    pool = KvPool(num_ranks, 64, BLOCK_TOKENS)
    sequence = pool.pin(name, name, 0)
    coming = spread(0, PROMPT_TOKENS, (0,) * num_ranks)
    growth = level_counts(coming.held, max_tokens)
    pool.make_room(sequence, [own + more for own, more in zip(coming.held, growth, strict=True)])
    sequence.shards = sequence.shards.extend(coming)
    request = Reserve(
        turn_id=name,
        attempt=1,
        kv_id=name,
        match_tokens=0,
        num_tokens=PROMPT_TOKENS,
        deadline_seconds=60.0,
        source_incarnation="prefill",
        sampling=SamplingParameters(max_tokens=max_tokens, stop_token_ids=stop_token_ids),
    )
    reservation = Reservation(
        incarnation="decode", retained_tokens=0, shards=ShardMap.empty(num_ranks), kv_endpoints=("kv:0",) * num_ranks
    )
    turn = DecodeTurn(
        Attempt(request, TransferKey(name, 1, "prefill", "decode"), reservation),
        pool,
        sequence,
        arrival=next(ARRIVALS),
        prompt_tokens=PROMPT_TOKENS,
        room=PROMPT_TOKENS + max_tokens,
        state=DecodeTurnState.ADMITTED,
    )
    if first_token is not None:
        turn.answer.tokens.append(first_token)
    return turn


def decode_alone(turn: DecodeTurn, num_tokens: int) -> None:
    """Add tokens 0.. to the answer as a lone turn of a batch gets them; the first of an answer is the prompt's."""
    turn.answer.tokens += range(num_tokens)
    held = turn.held
    turn.owners += lone_owners(held, turn.kv_tokens - sum(held))
