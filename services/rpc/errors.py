"""Table from errors to gRPC status codes, for all servers, and back for calls between ringserve processes."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any, NoReturn, TypeVar

import grpc
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from ringserve.cp_core import errors
from ringserve.cp_core.errors import CapacityExceeded, InvalidRequest, RingserveError, Unavailable, Unreachable
from ringserve.errors import ERROR_KEY, RETRY_KEY, read_error

log = logging.getLogger(__name__)
T = TypeVar("T")

DETAILS_KEY = "grpc-status-details-bin"
"""Trailing metadata key of the error as a `google.rpc.Status`, which clients in any language can read."""

ERROR_DOMAIN = "ringserve"
"""Domain in `google.rpc.ErrorInfo`."""

MAX_MESSAGE = 400
"""Longest message in characters. A character may take 12 bytes of metadata, and 6 more in the status details."""

MAX_DESCRIPTION = 100
"""Longest field description in the status details, in characters of at most 6 bytes."""

FIELD = re.compile(r"([A-Za-z_][\w.\[\]]*): ")
"""Start of a message about a request field."""

CODES: dict[type[RingserveError], grpc.StatusCode] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ContextTooLong: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.Forbidden: grpc.StatusCode.PERMISSION_DENIED,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.ConversationLost: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Busy: grpc.StatusCode.ABORTED,
    errors.CapacityExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.TurnCancelled: grpc.StatusCode.CANCELLED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.DiskFull: grpc.StatusCode.UNAVAILABLE,
    errors.Stopping: grpc.StatusCode.UNAVAILABLE,
    errors.NotBegun: grpc.StatusCode.UNAVAILABLE,
    errors.StaleIncarnation: grpc.StatusCode.UNAVAILABLE,
    errors.TransferError: grpc.StatusCode.UNAVAILABLE,
    errors.NotFinite: grpc.StatusCode.INTERNAL,
    errors.ReshardError: grpc.StatusCode.INTERNAL,
    errors.ModelRefused: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
}


def find_status_code(error: RingserveError) -> grpc.StatusCode:
    """Return an error's gRPC status code. Example: Busy is ABORTED."""
    return next((CODES[kind] for kind in type(error).__mro__ if kind in CODES), grpc.StatusCode.INTERNAL)


def make_error(name: str, message: str) -> RingserveError:
    """Return an error by its class name; an unknown name becomes Unavailable."""
    return {kind.__name__: kind for kind in CODES}.get(name, Unavailable)(message)


def read_peer_error(failure: Any) -> RingserveError | None:
    """Return the error named in a failed call's trailing metadata; None if gRPC itself failed."""
    return read_error(failure, {kind.__name__: kind for kind in CODES}, Unavailable)


def make_metadata(error: RingserveError) -> tuple[tuple[str, str], ...]:
    """Return the trailing metadata from which `read_peer_error` restores the error."""
    named = ((ERROR_KEY, type(error).__name__),)
    if isinstance(error, CapacityExceeded) and error.retry_after_seconds is not None:
        return (*named, (RETRY_KEY, str(math.ceil(1000 * error.retry_after_seconds))))
    return named


def error_from(failure: grpc.aio.AioRpcError, peer: str) -> RingserveError:
    """Return the error of a failed call to another ringserve process.

    A failure of gRPC itself becomes Unavailable, or Unreachable if the connection is cut. Unreachable concerns only
    this caller's connection, so it has no status code of its own. If this process passes it on, the next process sees
    Unavailable.
    """
    error = read_peer_error(failure)
    if error is not None:
        return error
    if failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Unavailable(f"{peer} did not answer in time")
    if failure.code() is grpc.StatusCode.UNIMPLEMENTED:
        return Unavailable(f"{peer} does not know this call (unimplemented): another process or release listens there")
    kind = Unreachable if failure.code() is grpc.StatusCode.UNAVAILABLE else Unavailable
    return kind(f"{peer} cannot be reached ({failure.code().name.lower()})")


def make_details(error: RingserveError, message: str) -> bytes:
    """Return the error as a serialized `google.rpc.Status` with this message.

    ErrorInfo holds the error's class name in capitals, BadRequest the refused request field, and RetryInfo the time
    until there may be room. Example: the reason for NotFound is NOT_FOUND.
    """
    status = Status(code=find_status_code(error).value[0], message=message)
    reason = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__).upper()
    status.details.add().Pack(ErrorInfo(reason=reason, domain=ERROR_DOMAIN))
    if isinstance(error, InvalidRequest) and (field := FIELD.match(message)):
        description = _shorten(message[field.end() :], MAX_DESCRIPTION)
        violation = BadRequest.FieldViolation(field=field[1], description=description)
        status.details.add().Pack(BadRequest(field_violations=[violation]))
    if isinstance(error, CapacityExceeded) and error.retry_after_seconds is not None:
        retry = RetryInfo()
        retry.retry_delay.FromMilliseconds(math.ceil(1000 * error.retry_after_seconds))
        status.details.add().Pack(retry)
    return status.SerializeToString()


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: RingserveError) -> NoReturn:
    message = _shorten(str(error))
    await context.abort(
        find_status_code(error), message, (*make_metadata(error), (DETAILS_KEY, make_details(error, message)))
    )
    raise AssertionError("abort does not return")


def _shorten(message: str, most: int = MAX_MESSAGE) -> str:
    """Cut a message that may quote client input: gRPC replaces trailing metadata over 8 KiB by an error."""
    return message if len(message) <= most else message[: most - 4] + " ..."


async def _abort_internal(context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
    log.exception("a request failed with an internal error")
    await context.abort(grpc.StatusCode.INTERNAL, "internal error; the server's log has the details")
    raise AssertionError("abort does not return")


@asynccontextmanager
async def abort_on_error(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """Run a handler's work and turn an error into its gRPC status. No stack trace leaves the process."""
    try:
        yield
    except RingserveError as error:
        await _abort(context, error)
    except Exception:  # the last place before the network: logged whole, shown as one sentence
        await _abort_internal(context)


async def answer(context: grpc.aio.ServicerContext[Any, Any], call: Awaitable[T]) -> T:
    """Await a unary handler's work; an error becomes its gRPC status."""
    async with abort_on_error(context):
        return await call
    raise AssertionError("abort does not return")
