"""Turn on a decode ring: its admission to the batch, its end, and the shards of its KV afterwards."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringserve.cp_core.errors import InvalidRequest
from ringserve.cp_core.layout.shards import TokenRange
from ringserve.workers.protocol.steps import FinishReason
from ringserve.workers.sampling.parameters import SamplingParameters, TokenHistory
from tests.orchestration.decode.decode_turns import BLOCK_TOKENS, PROMPT_TOKENS, decode_alone, decode_turn


def test_a_turn_joins_with_its_first_token_whose_kv_is_the_first_to_compute() -> None:
    turn = decode_turn(num_ranks=3, first_token=50, max_tokens=8)
    admission = turn.admission()
    assert (admission.sequence_id, admission.token_id, admission.history.num_generated) == ("turn", 50, 1)
    assert admission.position == PROMPT_TOKENS == sum(admission.held)
    assert admission.held == (4, 3, 3)
    assert admission.sampling is turn.request.sampling


@given(st.integers(1, 5), st.integers(1, 40))
def test_the_tables_have_room_for_the_whole_answer(num_ranks: int, max_tokens: int) -> None:
    turn = decode_turn(num_ranks=num_ranks, max_tokens=max_tokens)
    decode_alone(turn, max_tokens - 1)
    shards = turn.note_decoded()
    for held, table in zip(shards.held, turn.admission().blocks, strict=True):
        assert held <= len(table) * BLOCK_TOKENS
    turn.pool.check_integrity()


@given(st.integers(1, 5), st.integers(1, 30))
def test_all_but_the_newest_token_have_their_kv_and_lie_evenly(num_ranks: int, num_tokens: int) -> None:
    turn = decode_turn(num_ranks=num_ranks, max_tokens=30, first_token=None)
    decode_alone(turn, num_tokens)
    shards = turn.note_decoded()
    shards.check(TokenRange(0, PROMPT_TOKENS + num_tokens - 1))
    assert max(shards.held) - min(shards.held) <= 1
    assert turn.sequence.shards == shards


@pytest.mark.parametrize(
    ("token", "num_tokens", "reason"),
    [
        (9, 1, FinishReason.STOP),
        (9, 3, FinishReason.STOP),  # the stop token as the last allowed one
        (5, 3, FinishReason.LENGTH),
        (5, 2, None),
    ],
)
def test_a_turn_ends_with_a_stop_token_or_its_last_allowed_one(
    token: int, num_tokens: int, reason: FinishReason | None
) -> None:
    turn = decode_turn(max_tokens=3, stop_token_ids=(8, 9), first_token=None)
    turn.answer.tokens += [5] * (num_tokens - 1) + [token]
    assert turn.reason_to_end() is reason


async def test_stopped_timers_never_fire() -> None:
    loop, turn = asyncio.get_running_loop(), decode_turn()
    timers = [loop.call_later(0, lambda: None) for _ in range(2)]
    turn.tasks.timers = list(timers)
    turn.tasks.stop_timers()
    assert all(timer.cancelled() for timer in timers)


@given(st.integers(1, 5), st.integers(1, 20), st.integers(1, 20))
def test_a_finished_turn_has_the_kv_of_the_tokens_that_count(num_ranks: int, num_tokens: int, counted: int) -> None:
    turn = decode_turn(num_ranks=num_ranks, max_tokens=30, first_token=None)
    decode_alone(turn, num_tokens)
    if counted > num_tokens:
        with pytest.raises(InvalidRequest, match=f"num_tokens: {counted} is out of range; turn turn has {num_tokens}"):
            turn.finish(counted)
        return
    turn.finish(counted)
    turn.finish(1)  # too late
    turn.cut()
    assert turn.answer.tokens == list(range(counted))
    turn.note_decoded().check(TokenRange(0, PROMPT_TOKENS + counted - 1))
    turn.pool.check_integrity()


def test_a_turn_that_ended_by_itself_stopped_only_if_its_reader_says_less() -> None:
    for counted, reason in [(3, FinishReason.LENGTH), (2, FinishReason.STOP)]:
        turn = decode_turn(max_tokens=3, first_token=None)
        turn.answer.tokens += [5, 6, 7]
        turn.answer.own_end = FinishReason.LENGTH
        turn.finish(counted)
        assert turn.answer.finish_reason is reason


def test_a_turn_joins_with_the_past_that_its_sampling_looks_at() -> None:
    turn = decode_turn(first_token=50)
    assert turn.admission().history == TokenHistory(num_generated=1)
    sampling = SamplingParameters(repetition_penalty=1.5)
    turn.attempt = replace(turn.attempt, request=replace(turn.request, sampling=sampling, penalized_ids=(3, 4)))
    assert turn.admission().history == TokenHistory(num_generated=1, prompt_ids=(3, 4), answer_ids=(50,))
