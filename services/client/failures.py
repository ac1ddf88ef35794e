"""What a failed call means: the error that the server named, or what gRPC found by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc

from cp_core.errors import CapacityExceeded, DeadlineExceeded, RingserveError, Unavailable
from services.status import ERROR_KEY, RETRY_KEY, error_named


@dataclass(frozen=True, kw_only=True)
class Failure:
    """`retry_after_seconds` is what the server asks for, None where it says nothing."""

    error: RingserveError
    retry_after_seconds: float | None = None


def failure_from(call: Any, target: str) -> Failure:
    """`call` is a grpc.RpcError, of a channel of either kind."""
    metadata = {key: value for key, value in call.trailing_metadata() or () if isinstance(value, str)}
    retry = metadata.get(RETRY_KEY, "")
    seconds = int(retry) / 1000 if retry.isdecimal() and len(retry) < 10 else None
    return Failure(error=_error(call, metadata.get(ERROR_KEY, ""), target), retry_after_seconds=seconds)


def _error(call: Any, name: str, target: str) -> RingserveError:
    if name:
        return error_named(name, call.details())
    match call.code():
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded("the deadline passed before the turn ended")
        case grpc.StatusCode.UNAVAILABLE:
            return Unavailable(f"the gateway at {target} cannot be reached")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return CapacityExceeded(f"RESOURCE_EXHAUSTED: {call.details()}")
        case code:
            return RingserveError(f"{code.name}: {call.details()}")
