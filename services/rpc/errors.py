"""Table from errors to gRPC status codes, and back for calls between our own processes."""

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
from ringserve.errors import ERROR_KEY, RETRY_KEY, error_named_by

log = logging.getLogger(__name__)
T = TypeVar("T")

DETAILS_KEY = "grpc-status-details-bin"
"""Trailing metadata with the same error as `google.rpc.Status`, which clients of any language can read."""

ERROR_DOMAIN = "ringserve"
"""Domain of the reasons in `google.rpc.ErrorInfo`."""

MAX_MESSAGE = 400
"""Longest message in characters. Each may take 12 bytes of the metadata, and 6 more in the status's details."""

MAX_DESCRIPTION = 100
"""Longest description of a field's fault beside the message, in characters of 6 bytes at most."""

FIELD = re.compile(r"([A-Za-z_][\w.\[\]]*): ")
"""Beginning of a message about a field of the request."""

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
    errors.Stopping: grpc.StatusCode.UNAVAILABLE,
    errors.NotBegun: grpc.StatusCode.UNAVAILABLE,
    errors.StaleIncarnation: grpc.StatusCode.UNAVAILABLE,
    errors.TransferError: grpc.StatusCode.UNAVAILABLE,
    errors.NotFinite: grpc.StatusCode.INTERNAL,
    errors.ReshardError: grpc.StatusCode.INTERNAL,
    errors.ModelRefused: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
}


def code_of(error: RingserveError) -> grpc.StatusCode:
    """Return the status code of an error."""
    return next((CODES[kind] for kind in type(error).__mro__ if kind in CODES), grpc.StatusCode.INTERNAL)


def error_named(name: str, message: str) -> RingserveError:
    """Return an error by its class name; an unknown name becomes Unavailable."""
    return {kind.__name__: kind for kind in CODES}.get(name, Unavailable)(message)


def error_of(failure: Any) -> RingserveError | None:
    """Return the error that a failed call's trailing metadata names; None: gRPC itself failed."""
    return error_named_by(failure, {kind.__name__: kind for kind in CODES}, Unavailable)


def metadata_of(error: RingserveError) -> tuple[tuple[str, str], ...]:
    """Return the trailing metadata from which `error_of` restores the error."""
    named = ((ERROR_KEY, type(error).__name__),)
    if isinstance(error, CapacityExceeded) and error.retry_after_seconds is not None:
        return (*named, (RETRY_KEY, str(math.ceil(1000 * error.retry_after_seconds))))
    return named


def error_from(failure: grpc.aio.AioRpcError, peer: str) -> RingserveError:
    """Return the error of a failed call to one of our own processes.

    A failure of gRPC itself becomes Unavailable: Unreachable where the way is cut. That is about this caller's way, so
    it has no code: who is told of it by another process gets Unavailable.
    """
    error = error_of(failure)
    if error is not None:
        return error
    if failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Unavailable(f"{peer} did not answer in time")
    if failure.code() is grpc.StatusCode.UNIMPLEMENTED:
        return Unavailable(f"{peer} does not know this call (unimplemented): another process or release listens there")
    kind = Unreachable if failure.code() is grpc.StatusCode.UNAVAILABLE else Unavailable
    return kind(f"{peer} cannot be reached ({failure.code().name.lower()})")


def details_of(error: RingserveError, message: str) -> bytes:
    """Return the error as a serialized `google.rpc.Status` with this message.

    ErrorInfo has the name of the error's class in capitals, BadRequest the field of a request that is refused, and
    RetryInfo when there is room again.
    """
    status = Status(code=code_of(error).value[0], message=message)
    reason = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__).upper()
    status.details.add().Pack(ErrorInfo(reason=reason, domain=ERROR_DOMAIN))
    if isinstance(error, InvalidRequest) and (field := FIELD.match(message)):
        description = _shortened(message[field.end() :], MAX_DESCRIPTION)
        violation = BadRequest.FieldViolation(field=field[1], description=description)
        status.details.add().Pack(BadRequest(field_violations=[violation]))
    if isinstance(error, CapacityExceeded) and error.retry_after_seconds is not None:
        retry = RetryInfo()
        retry.retry_delay.FromMilliseconds(math.ceil(1000 * error.retry_after_seconds))
        status.details.add().Pack(retry)
    return status.SerializeToString()


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: RingserveError) -> NoReturn:
    message = _shortened(str(error))
    await context.abort(code_of(error), message, (*metadata_of(error), (DETAILS_KEY, details_of(error, message))))
    raise AssertionError("abort does not return")


def _shortened(message: str, most: int = MAX_MESSAGE) -> str:
    """Cut a message that quotes a client's input: gRPC replaces trailing metadata over 8 KiB by a refusal."""
    return message if len(message) <= most else message[: most - 4] + " ..."


async def _abort_internal(context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
    log.exception("a request met an internal error")
    await context.abort(grpc.StatusCode.INTERNAL, "internal error; the server's log has the details")
    raise AssertionError("abort does not return")


@asynccontextmanager
async def answering(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """Run a handler's work: an error becomes its status, and no stack trace leaves the process."""
    try:
        yield
    except RingserveError as error:
        await _abort(context, error)
    except Exception:  # the last place before the network: logged whole, shown as one sentence
        await _abort_internal(context)


async def answer(context: grpc.aio.ServicerContext[Any, Any], call: Awaitable[T]) -> T:
    """Await a unary handler's work; an error becomes its status."""
    async with answering(context):
        return await call
    raise AssertionError("abort does not return")
