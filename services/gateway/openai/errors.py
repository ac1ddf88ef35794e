"""Errors in OpenAI's shape. The HTTP status follows from the gRPC status: `services.rpc.errors` is the one table."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import grpc

from ringserve.cp_core.errors import (
    CapacityExceeded,
    ContextTooLong,
    ConversationLost,
    InvalidRequest,
    NotFinite,
    RingserveError,
    Unavailable,
)
from ringserve.services.rpc.errors import code_of

INTERNAL = "internal error; the server's log has the details"
RETRY_SECONDS = 1.0
"""Seconds in `Retry-After` where the error names none."""

# HTTP status and OpenAI's `type` and `code` of each gRPC status that a turn can end with.
_SHAPES: dict[grpc.StatusCode, tuple[int, str, str | None]] = {
    grpc.StatusCode.INVALID_ARGUMENT: (400, "invalid_request_error", None),
    grpc.StatusCode.UNAUTHENTICATED: (401, "authentication_error", "invalid_api_key"),
    grpc.StatusCode.PERMISSION_DENIED: (403, "permission_error", None),
    grpc.StatusCode.NOT_FOUND: (404, "not_found_error", "not_found"),
    grpc.StatusCode.ABORTED: (409, "conflict_error", "busy"),
    grpc.StatusCode.FAILED_PRECONDITION: (412, "precondition_error", "failed_precondition"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (429, "rate_limit_error", "rate_limit_exceeded"),
    grpc.StatusCode.CANCELLED: (499, "cancelled_error", "cancelled"),
    grpc.StatusCode.UNAVAILABLE: (503, "service_unavailable_error", "unavailable"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (504, "timeout_error", "deadline_exceeded"),
}
_RETRYABLE = (429, 503)

# The contract's names of what OpenAI's requests call otherwise.
_NAMES = (
    (re.compile(r"^sampling_params\."), ""),
    (re.compile(r"^input\.chat\.messages"), "messages"),
    (re.compile(r"^input\.chat\b"), "messages"),
    (re.compile(r"^input\.tokenized\.input_ids"), "prompt"),
    (re.compile(r"^input\.(text|tokenized)\b"), "prompt"),
)
PROMPTS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/responses": "input"}
"""Field that has the prompt, by path."""
# First parts of paths of other APIs that OpenAI's and vLLM's clients look for.
_OTHERS = frozenset(
    {
        *("assistants", "audio", "batches", "classify", "embeddings", "files", "fine_tuning", "images", "moderations"),
        *("pooling", "realtime", "rerank", "score", "threads", "uploads", "vector_stores", "videos"),
    }
)
_PARAMETER = re.compile(r"^([a-z_]+(?:\[\d+\]|\.[a-z_]+)*): ")


class BadHttpRequest(RingserveError):
    """Request that HTTP itself has a status for: `status`."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def status_of(error: BaseException) -> int:
    """Return the HTTP status of an error; 500 where it has none."""
    if isinstance(error, BadHttpRequest):
        return error.status
    shape = _SHAPES.get(code_of(error)) if isinstance(error, RingserveError) else None
    return shape[0] if shape else 500


def headers_of(error: BaseException) -> dict[str, str]:
    """Return the headers that belong to an error. OpenAI's clients would try any error from 500 on again."""
    status = status_of(error)
    if status == 401:
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(error, NotFinite) or type(error) is Unavailable:  # given up here: its prompt may be what ends rings
        return {"x-should-retry": "false"}
    if status not in _RETRYABLE:
        return {}
    hint = error.retry_after_seconds if isinstance(error, CapacityExceeded) else None
    return {"Retry-After": str(max(1, math.ceil(hint or RETRY_SECONDS)))}


def refused_route(status: int, method: str, path: str, allowed: Sequence[str], detail: str) -> BadHttpRequest:
    """Return the refusal of a path that is not served, or not by this method; `allowed` are those that are."""
    shown, parts = path[:200], path.removeprefix("/v1").strip("/").split("/")
    if parts[0] in _OTHERS:
        words = f"{shown} is not served: this service answers chats, completions and responses"
    elif parts[0] == "responses" and len(parts) > 1:
        words = (
            "a response is remembered as tokens for those that follow it (previous_response_id) and cannot be shown "
            "again; keep its answer"
        )
    elif status == 405:
        words = f"{shown} does not know the method {method[:20]}; allowed is {' or '.join(allowed)}"
    else:
        words = f"there is no {shown}; /openapi.json lists all paths" if status == 404 else detail
    return BadHttpRequest(status, words)


def error_body(error: BaseException, path: str = "") -> dict[str, Any]:
    """Return an error as `{"error": {...}}`. The text of a foreign error is not shown.

    The prompt has the name that it has in requests to `path`. Example: "input: 9010 prompt tokens and ..." begins with
    "messages: " for /v1/chat/completions.
    """
    if isinstance(error, BadHttpRequest):
        return _body(str(error), "invalid_request_error", None, error.code)
    if isinstance(error, NotFinite):
        return _body(str(error), "server_error", None, "not_finite")
    shape = _SHAPES.get(code_of(error)) if isinstance(error, RingserveError) else None
    if shape is None:
        return _body(INTERNAL, "server_error", None, None)
    _, kind, code = shape
    if isinstance(error, ConversationLost):
        code = "conversation_lost"
    if isinstance(error, ContextTooLong):
        code = "context_length_exceeded"
    message = str(error)
    for pattern, name in _NAMES:
        message = pattern.sub(name, message, count=1)
    if prompt := PROMPTS.get(path):
        message = re.sub(r"^(input|prompt|messages)(?=[:.\[])", prompt, message, count=1)
    named = _PARAMETER.match(message) if isinstance(error, InvalidRequest | ConversationLost) else None
    return _body(message, kind, named.group(1) if named else None, code)


def _body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
