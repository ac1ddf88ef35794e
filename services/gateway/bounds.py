"""Reader of the bound for which a turn may be approximate."""

from __future__ import annotations

import math

from cp_core.errors import InvalidRequest
from orchestration.protocol.plans import MAX_LOSS, MAX_TTFT, Bound
from ringserve.v1 import inference_pb2

PASS_KV_OR_NONE = (inference_pb2.ALGORITHM_UNSPECIFIED, inference_pb2.ALGORITHM_PASS_KV)
"""Algorithms that a request with a bound may ask for."""


def read_bound(request: inference_pb2.GenerateRequest) -> Bound | None:
    """Return the bound of a request; None where it names none. Raises InvalidRequest."""
    has_loss, has_ttft = request.HasField("max_loss"), request.HasField("max_ttft")
    if not (has_loss or has_ttft):
        return None
    if has_loss and has_ttft:
        raise InvalidRequest(f"max_loss: {request.max_loss:g} is given beside max_ttft; give one of them")
    name, value = (MAX_LOSS, request.max_loss) if has_loss else (MAX_TTFT, request.max_ttft)
    if not math.isfinite(value) or value < 0 or (has_ttft and not value):
        allowed = "nats, 0 or more" if has_loss else "seconds above 0"
        raise InvalidRequest(f"{name}: {value:g} is not allowed; give {allowed}")
    if value and request.algorithm not in PASS_KV_OR_NONE:
        asked = inference_pb2.Algorithm.Name(request.algorithm)
        raise InvalidRequest(f"algorithm: {asked} is exact; with {name} allowed is ALGORITHM_PASS_KV")
    return Bound(name=name, limit=value)
