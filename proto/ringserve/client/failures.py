"""Errors of failed calls: the error that the server named, or gRPC's own. Both Python clients raise them."""

from __future__ import annotations

from typing import Any

import grpc

from ringserve.errors import (
    SHARED,
    CapacityExceeded,
    DeadlineExceeded,
    RingserveError,
    Unauthenticated,
    Unavailable,
    Unreachable,
    read_error,
)

KINDS = {kind.__name__: kind for kind in SHARED}

OWN_ENDS = ("Locally cancelled by application!", "Channel closed!")
"""Details of the status CANCELLED if this side ended the call. Other details come from a server that stops, which
cancels calls that arrive too late."""


def error_from_call(call: Any, target: str) -> RingserveError:
    """Return the error of a failed `call`, a grpc.RpcError."""
    is_down = call.code() is grpc.StatusCode.UNAVAILABLE
    # A server may name an error that clients do not have: one of the cluster's own, or of a later release.
    error = read_error(call, KINDS, Unavailable if is_down else RingserveError)
    if error is not None:
        return error
    match call.code():
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded("the deadline passed before the call ended")
        case grpc.StatusCode.UNAVAILABLE:
            return Unreachable(f"the gateway at {target} cannot be reached")
        case grpc.StatusCode.CANCELLED if call.details() not in OWN_ENDS:
            return Unreachable(f"the gateway at {target} is ending")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return CapacityExceeded(f"RESOURCE_EXHAUSTED: {call.details()}")
        case grpc.StatusCode.UNAUTHENTICATED:
            return Unauthenticated(f"UNAUTHENTICATED: {call.details()}")
        case code:
            return RingserveError(f"{code.name}: {call.details()}")
