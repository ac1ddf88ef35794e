"""Errors in OpenAI's shape, for all HTTP paths. The status follows from the gRPC status (`services.rpc.errors`)."""

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
from ringserve.services.rpc.errors import find_status_code

INTERNAL = "internal error; the server's log has the details"
RETRY_SECONDS = 1.0
"""Seconds in `Retry-After` if the error names none."""

# HTTP status and OpenAI's error `type` and `code`, by the gRPC status of a failed turn.
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

# Contract field names to replace by OpenAI's names in error messages.
_NAMES = (
    (re.compile(r"^sampling_params\."), ""),
    (re.compile(r"^input\.chat\.messages"), "messages"),
    (re.compile(r"^input\.chat\b"), "messages"),
    (re.compile(r"^input\.tokenized\.input_ids"), "prompt"),
    (re.compile(r"^input\.(text|tokenized)\b"), "prompt"),
)
PROMPTS = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/messages": "messages",
    "/v1/responses": "input",
}
"""Field that has the prompt, by path."""
# First path segments of other APIs that OpenAI's and vLLM's clients ask for.
_OTHERS = frozenset(
    {
        *("assistants", "audio", "batches", "classify", "embeddings", "files", "fine_tuning", "images", "moderations"),
        *("pooling", "realtime", "rerank", "score", "threads", "uploads", "vector_stores", "videos"),
    }
)
_PARAMETER = re.compile(r"^([a-z_]+(?:\[\d+\]|\.[a-z_]+)*): ")


class BadHttpRequest(RingserveError):
    """Request refused with an HTTP status of its own, such as 413 for a body that is too large."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def http_status(error: BaseException) -> int:
    """Return an error's HTTP status; 500 if the tables do not list it. Example: `InvalidRequest` is 400."""
    if isinstance(error, BadHttpRequest):
        return error.status
    shape = _SHAPES.get(find_status_code(error)) if isinstance(error, RingserveError) else None
    return shape[0] if shape else 500


def error_headers(error: BaseException) -> dict[str, str]:
    """Return an error's response headers. OpenAI's clients retry any status from 500 up unless a header forbids it."""
    status = http_status(error)
    if status == 401:
        return {"WWW-Authenticate": "Bearer"}
    if (
        isinstance(error, NotFinite) or type(error) is Unavailable
    ):  # the gateway gave up: the prompt itself may crash rings
        return {"x-should-retry": "false"}
    if status not in _RETRYABLE:
        return {}
    hint = error.retry_after_seconds if isinstance(error, CapacityExceeded) else None
    return {"Retry-After": str(max(1, math.ceil(hint or RETRY_SECONDS)))}


def make_route_error(status: int, method: str, path: str, allowed: Sequence[str], detail: str) -> BadHttpRequest:
    """Return the error for an unknown path or method. `allowed` lists the methods that the path does serve."""
    shown, parts = path[:200], path.removeprefix("/v1").strip("/").split("/")
    if parts[0] in _OTHERS:
        words = f"{shown} is not served: this service answers chats, completions and responses"
    elif parts[0] == "responses" and parts[-1] == "input_items":
        words = f"{shown} is not served: the service keeps responses, but not the input of their requests"
    elif status == 405:
        words = f"{shown} does not serve the method {method[:20]}; use {' or '.join(allowed)}"
    else:
        words = f"there is no path {shown}; /openapi.json lists all paths" if status == 404 else detail
    return BadHttpRequest(status, words)


def error_body(error: BaseException, path: str = "") -> dict[str, Any]:
    """Return an error as `{"error": {message, type, param, code}}`. Unexpected errors do not show their text.

    The message names the prompt field as requests to `path` name it. Example: for /v1/chat/completions, "input: 9010
    prompt tokens" becomes "messages: 9010 prompt tokens".
    """
    if isinstance(error, BadHttpRequest):
        return _body(str(error), "invalid_request_error", None, error.code)
    if isinstance(error, NotFinite):
        return _body(str(error), "server_error", None, "not_finite")
    shape = _SHAPES.get(find_status_code(error)) if isinstance(error, RingserveError) else None
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
