"""Decisions about retries of a turn, without a network."""

from __future__ import annotations

import pytest

from ringserve.client.requests import Sampling, make_request
from ringserve.client.retries import MAX_RESUMPTIONS, NO_RETRIES, Retries, RetryPolicy
from ringserve.cp_core.errors import (
    Busy,
    CapacityExceeded,
    DeadlineExceeded,
    InvalidRequest,
    NotBegun,
    NotFinite,
    NotFound,
    RingserveError,
    Stopping,
    TurnCancelled,
    Unavailable,
    Unreachable,
)

POLICY = RetryPolicy(max_attempts=4, first_delay_seconds=1.0, max_delay_seconds=3.0)
FULL = CapacityExceeded("full")
LOST = Unreachable("lost")
NOT_BEGUN = NotBegun("no ring")
RUNNING = Busy("still running")


def retries(deadline: float | None = None) -> Retries:
    return Retries(POLICY, deadline=deadline)


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


@pytest.mark.parametrize("failure", [LOST, Stopping("the gateway is stopping")])
def test_a_lost_turn_goes_on_for_a_while_which_tokens_begin_anew(failure: RingserveError) -> None:
    attempts = retries()
    assert delay(attempts, failure, has_tokens=True, now=0.0) is not None
    assert delay(attempts, failure, now=POLICY.resume_seconds - 1) is not None
    assert delay(attempts, failure, has_tokens=True, now=POLICY.resume_seconds) is not None
    assert delay(attempts, failure, now=2 * POLICY.resume_seconds - 1) is not None
    assert delay(attempts, failure, now=2 * POLICY.resume_seconds) is None


def test_a_gateway_that_starts_again_is_looked_for_several_times_a_second() -> None:
    attempts = retries()
    assert all((delay(attempts, LOST) or 9.0) <= 0.25 for _ in range(9))


def test_a_turn_that_its_gateway_gave_up_is_not_tried_again() -> None:
    """Its own prompt may be what ends the rings."""
    assert delay(retries(), Unavailable("the turn lost a ring 3 times")) is None


@pytest.mark.parametrize("failure", [FULL, NOT_BEGUN, RUNNING])
def test_a_refusal_does_not_end_a_turn_that_was_lost(failure: RingserveError) -> None:
    attempts = retries()
    assert delay(attempts, LOST) is not None
    assert all(delay(attempts, failure, now=float(second)) is not None for second in range(20))
    assert delay(attempts, failure, now=POLICY.resume_seconds) is None


def test_a_gateway_that_never_answered_is_looked_for_as_long_as_the_policy_says() -> None:
    at_once = RetryPolicy(max_attempts=1, connect_seconds=0.0)
    assert Retries(at_once, deadline=None).delay_after(LOST, has_tokens=False, now=0.0, has_answered=False) is None
    begun = Retries(at_once, deadline=None)
    assert begun.delay_after(LOST, has_tokens=False, now=0.0, has_answered=True) is not None
    stopping = Retries(at_once, deadline=None).delay_after(Stopping("x"), has_tokens=False, now=0.0, has_answered=False)
    assert stopping is not None, "it had the call"


def test_resumptions_end_though_each_brings_a_token() -> None:
    attempts = retries()
    delays = [delay(attempts, LOST, has_tokens=True) for _ in range(MAX_RESUMPTIONS + 1)]
    assert None not in delays[:-1]
    assert delays[-1] is None


def test_a_request_id_that_still_runs_is_waited_for_only_where_it_may_be_ours() -> None:
    assert delay(retries(), RUNNING) is None
    for failure in (LOST, NOT_BEGUN):
        after_a_loss = retries()
        assert delay(after_a_loss, failure) is not None
        assert delay(after_a_loss, RUNNING) is not None


@pytest.mark.parametrize("kind", [InvalidRequest, NotFound, NotFinite, DeadlineExceeded, TurnCancelled, RingserveError])
def test_what_would_fail_again_is_not_tried_again(kind: type[RingserveError]) -> None:
    assert delay(retries(), kind("no")) is None


def test_no_attempt_begins_after_the_deadline() -> None:
    assert delay(retries(deadline=10.0), FULL, now=9.9) is None
    assert delay(retries(deadline=10.0), FULL, now=5.0) is not None


def test_retries_can_be_switched_off() -> None:
    for failure in (FULL, LOST):
        assert Retries(NO_RETRIES, deadline=None).delay_after(failure, has_tokens=False, now=0.0) is None


def test_attempts_at_one_request_draw_the_same_tokens() -> None:
    first, second = (make_request("x", {}).sampling_params for _ in range(2))
    assert first.HasField("seed")
    assert first.seed != second.seed
    assert make_request("x", {"sampling": Sampling(seed=0)}).sampling_params.seed == 0


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
        make_request(prompt, {"mode": mode, "sampling": sampling}).SerializeToString()  # type: ignore[arg-type]
