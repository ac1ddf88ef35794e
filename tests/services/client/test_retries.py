"""Decisions about retries of a turn, without a network."""

from __future__ import annotations

import pytest

from cp_core.errors import (
    Busy,
    CapacityExceeded,
    DeadlineExceeded,
    InvalidRequest,
    NotBegun,
    NotFound,
    RingserveError,
    TurnCancelled,
    Unavailable,
)
from services.client.requests import Message, Sampling, is_repeatable, request_of
from services.client.retries import NO_RETRIES, Retries, RetryPolicy

POLICY = RetryPolicy(max_attempts=4, first_delay_seconds=1.0, max_delay_seconds=3.0)
FULL = CapacityExceeded("full")
LOST = Unavailable("lost")
NOT_BEGUN = NotBegun("no ring")
RUNNING = Busy("still running")


def retries(*, is_repeatable: bool = True, deadline: float | None = None) -> Retries:
    return Retries(POLICY, is_repeatable=is_repeatable, deadline=deadline)


def delay(of: Retries, failure: RingserveError, *, has_tokens: bool = False, now: float = 0.0) -> float | None:
    return of.delay_after(failure, has_tokens=has_tokens, now=now)


def test_the_delay_doubles_to_its_limit_and_the_attempts_end() -> None:
    attempts = retries()
    delays = [delay(attempts, FULL) for _ in range(4)]
    for seconds, most in zip(delays[:3], (1.0, 2.0, 3.0), strict=True):
        assert seconds is not None
        assert most / 2 <= seconds <= most
    assert delays[3] is None


def test_the_server_is_given_the_time_it_asks_for() -> None:
    assert delay(retries(), CapacityExceeded("full", 7.0)) == 7.0


@pytest.mark.parametrize("failure", [FULL, LOST, NOT_BEGUN])
def test_nothing_is_tried_again_after_the_first_token(failure: RingserveError) -> None:
    assert delay(retries(), failure, has_tokens=True) is None


def test_a_loss_is_tried_again_only_where_that_cannot_add_to_a_conversation_twice() -> None:
    assert delay(retries(is_repeatable=False), LOST) is None
    assert delay(retries(is_repeatable=True), LOST) is not None
    assert delay(retries(is_repeatable=False), FULL) is not None  # refused whole
    assert delay(retries(is_repeatable=False), NOT_BEGUN) is not None  # the same


def test_a_request_id_that_still_runs_is_waited_for_only_where_it_may_be_ours() -> None:
    assert delay(retries(), RUNNING) is None
    for failure in (LOST, NOT_BEGUN):
        after_a_loss = retries()
        assert delay(after_a_loss, failure) is not None
        assert delay(after_a_loss, RUNNING) is not None


@pytest.mark.parametrize("kind", [InvalidRequest, NotFound, DeadlineExceeded, TurnCancelled, RingserveError])
def test_what_would_fail_again_is_not_tried_again(kind: type[RingserveError]) -> None:
    assert delay(retries(), kind("no")) is None


def test_no_attempt_begins_after_the_deadline() -> None:
    assert delay(retries(deadline=10.0), FULL, now=9.9) is None
    assert delay(retries(deadline=10.0), FULL, now=5.0) is not None


def test_retries_can_be_switched_off() -> None:
    assert Retries(NO_RETRIES, is_repeatable=True, deadline=None).delay_after(FULL, has_tokens=False, now=0.0) is None


@pytest.mark.parametrize(
    ("prompt", "conversation", "mode", "expected"),
    [
        ("text", "", "auto", True),
        ("text", "c", "auto", False),
        ("text", "c", "append", False),
        ("text", "c", "whole_history", True),
        ([Message(role="user", content="x")], "c", "auto", True),
    ],
)
def test_a_request_is_repeatable_where_it_cannot_add_to_a_conversation(
    prompt: object, conversation: str, mode: str, expected: bool
) -> None:
    request = request_of(prompt, conversation, mode, Sampling(), "")  # type: ignore[arg-type]
    assert is_repeatable(request) is expected


@pytest.mark.parametrize(
    ("prompt", "mode", "sampling", "said"),
    [
        ("x", "sometimes", Sampling(), "mode: 'sometimes' is not allowed"),
        ([1, "x"], "auto", Sampling(), "prompt: give a text"),
        ([-1], "auto", Sampling(), "prompt: "),
        ("x", "auto", Sampling(max_tokens=-1), "sampling_params.max_tokens: -1 is not allowed"),
        ("x", "auto", Sampling(stop_token_ids=(1, -2)), "sampling_params.stop_token_ids"),
        ("x", "auto", Sampling(seed="x"), "sampling_params.seed: 'x'"),  # type: ignore[arg-type]
    ],
)
def test_what_the_contract_cannot_carry_is_refused_by_name(
    prompt: object, mode: str, sampling: Sampling, said: str
) -> None:
    with pytest.raises(InvalidRequest, match=said.replace("(", r"\(")):
        request_of(prompt, "", mode, sampling, "").SerializeToString()  # type: ignore[arg-type]
