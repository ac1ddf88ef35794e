"""What a failed call means: the error that the server named, or what gRPC found by itself."""

from __future__ import annotations

from typing import Any

import grpc

from cp_core.errors import CapacityExceeded, DeadlineExceeded, RingserveError, Unauthenticated, Unavailable
from services.rpc.errors import error_of

OWN_ENDS = ("Locally cancelled by application!", "Channel closed!")
"""gRPC's details where this side ended the call. A server that stops cancels what reaches it a moment too late."""


def error_from_call(call: Any, target: str) -> RingserveError:
    """`call` is a grpc.RpcError, of a channel of either kind."""
    error = error_of(call)
    if error is not None:
        return error
    match call.code():
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded("the deadline passed before the turn ended")
        case grpc.StatusCode.UNAVAILABLE:
            return Unavailable(f"the gateway at {target} cannot be reached")
        case grpc.StatusCode.CANCELLED if call.details() not in OWN_ENDS:
            return Unavailable(f"the gateway at {target} is ending")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return CapacityExceeded(f"RESOURCE_EXHAUSTED: {call.details()}")
        case grpc.StatusCode.UNAUTHENTICATED:
            return Unauthenticated(f"UNAUTHENTICATED: {call.details()}")
        case code:
            return RingserveError(f"{code.name}: {call.details()}")
