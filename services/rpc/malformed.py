"""Bytes that are no message: gRPC alone would answer UNKNOWN and log a stack trace for everybody who sends some."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from inspect import iscoroutinefunction
from typing import Any

import grpc
from google.protobuf.message import DecodeError

Context = grpc.aio.ServicerContext[Any, Any]
MESSAGE = "the request is no valid message of this method"


class _Malformed:
    """Stands for a message that could not be read."""


MALFORMED = _Malformed()


class MalformedInterceptor(grpc.aio.ServerInterceptor):
    """Answers INVALID_ARGUMENT to what cannot be decoded. For methods that take one message."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        read = _tolerant(handler.request_deserializer)
        if handler.response_streaming:
            stream = handler.unary_stream

            if iscoroutinefunction(stream):  # which writes its responses itself

                async def checked_writer(request: Any, context: Context) -> None:
                    await _check(request, context)
                    await stream(request, context)

                return grpc.unary_stream_rpc_method_handler(checked_writer, read, handler.response_serializer)

            async def checked_stream(request: Any, context: Context) -> AsyncIterator[Any]:
                await _check(request, context)
                # Closed with us: who hangs up must be heard of at once, not at some collection.
                async with aclosing(stream(request, context)) as responses:
                    async for response in responses:
                        yield response

            return grpc.unary_stream_rpc_method_handler(checked_stream, read, handler.response_serializer)
        unary = handler.unary_unary

        async def checked(request: Any, context: Context) -> Any:
            await _check(request, context)
            return await unary(request, context)

        return grpc.unary_unary_rpc_method_handler(checked, read, handler.response_serializer)


def _tolerant(read: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def tolerant(data: bytes) -> Any:
        try:
            return read(data)
        except DecodeError:
            return MALFORMED

    return tolerant


async def _check(request: Any, context: Context) -> None:
    if request is MALFORMED:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, MESSAGE)
