"""Errors that clients raise for failed calls."""

from __future__ import annotations

from dataclasses import dataclass

import grpc
import pytest

from ringserve.client.failures import error_from_call
from ringserve.cp_core.errors import (
    CapacityExceeded,
    DeadlineExceeded,
    NotBegun,
    RingserveError,
    Unauthenticated,
    Unavailable,
    Unreachable,
)
from ringserve.services.rpc.errors import make_metadata

CODE = grpc.StatusCode


@dataclass(frozen=True)
class Call:
    """A failed call. What a server of ours refuses names its error in the metadata."""

    status: grpc.StatusCode
    text: str = ""
    metadata: tuple[tuple[str, str], ...] = ()

    def code(self) -> grpc.StatusCode:
        return self.status

    def details(self) -> str:
        return self.text

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return self.metadata


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (Call(CODE.UNAVAILABLE, "failed to connect"), Unreachable, "the gateway at here:1 cannot be reached"),
        (Call(CODE.CANCELLED, "CANCELLED"), Unreachable, "the gateway at here:1 is ending"),
        (Call(CODE.DEADLINE_EXCEEDED), DeadlineExceeded, "the deadline passed"),
        (Call(CODE.RESOURCE_EXHAUSTED, "too large"), CapacityExceeded, "too large"),
        (Call(CODE.UNAUTHENTICATED, "no"), Unauthenticated, "no"),
        (Call(CODE.UNAVAILABLE, "no ring", make_metadata(NotBegun("no ring"))), NotBegun, "no ring"),
    ],
)
def test_a_failed_call_is_the_error_that_it_names_or_what_grpc_found(
    call: Call, kind: type[RingserveError], said: str
) -> None:
    error = error_from_call(call, "here:1")
    assert type(error) is kind
    assert said in str(error)


@pytest.mark.parametrize("details", ["Locally cancelled by application!", "Channel closed!"])
def test_a_call_that_this_side_ended_is_not_taken_for_a_loss(details: str) -> None:
    assert not isinstance(error_from_call(Call(CODE.CANCELLED, details), "here:1"), Unavailable)
