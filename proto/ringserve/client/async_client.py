"""Python client for asyncio, called by users and by the client for threads.

A client owns its gRPC channel. Methods raise the errors of `ringserve.client.errors`, each with a message of one
sentence.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, TypeVar, Unpack

import grpc

from ringserve.client.channel import CLIENT_OPTIONS, TlsFiles, make_metadata
from ringserve.client.failures import error_from_call
from ringserve.client.requests import Prompt, RequestOptions, TurnOptions, is_chat, make_count_request, make_request
from ringserve.client.results import MAPPER, Answer, AnswerReader, Piece, Plan
from ringserve.client.retries import Retries, RetryPolicy, is_lost
from ringserve.errors import RingserveError, Unavailable
from ringserve.v1 import inference_pb2, inference_pb2_grpc
from ringserve.views import Aborted, ConversationInfo, ConversationSummary, ModelInfo, ServerInfo

T = TypeVar("T")
Responses = AsyncGenerator[inference_pb2.GenerateResponse, None]

CONTROL_SECONDS = 30.0
"""Deadline of a call other than a turn."""


class AsyncAnswerStream(AsyncIterator[Piece]):
    """Pieces of one turn as they come. An async context: leaving it early ends the turn everywhere."""

    def __init__(self, responses: Responses, reader: AnswerReader) -> None:
        self._responses = responses
        self._reader = reader
        self._reading: asyncio.Task[Any] | None = None
        self._is_closed = False
        self._reader_left = asyncio.Event()

    async def __anext__(self) -> Piece:
        self._reading = asyncio.current_task()
        try:
            async for response in self._responses:
                piece = self._reader.take(response)
                if piece is not None:
                    return piece
        except asyncio.CancelledError:
            assert self._reading is not None, "a coroutine runs in a task"
            if not self._is_closed or self._reading.uncancel():
                raise
        finally:
            self._reading = None
            self._reader_left.set()
        if self._reader.answer is None and self._is_closed:
            raise RingserveError("CANCELLED: the stream was closed before its answer ended")
        if self._reader.answer is None:
            raise Unavailable("the stream ended without a completion")
        raise StopAsyncIteration

    async def __aenter__(self) -> AsyncAnswerStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the turn, if it still runs. A task that waits for the next piece gets a RingserveError."""
        was_closed, self._is_closed = self._is_closed, True
        if self._reading is not None and not was_closed:
            self._reading.cancel()
        while self._reading is not None:  # a generator cannot be closed while it runs
            self._reader_left.clear()
            await self._reader_left.wait()
        await self._responses.aclose()

    @property
    def remembered_tokens(self) -> int | None:
        """Tokens that the conversation remembers, if known here."""
        return self._reader.remembered_tokens

    @property
    def plan(self) -> Plan | None:
        """Plan of the turn, None before the first piece; its measured fields are final with the answer."""
        return self._reader.plan

    async def answer(self) -> Answer:
        """Read the rest of the pieces, and return the whole answer."""
        async for _ in self:
            continue
        answer = self._reader.answer
        assert answer is not None, "a stream that ends has its answer"
        return answer


class AsyncClient:
    """Client of one gateway, HOST:PORT, or of several, ipv4:HOST:PORT,HOST:PORT: when one is lost, the next is tried.

    Use it only in the event loop in which it is made.
    """

    def __init__(
        self, target: str, *, token: str = "", tls: TlsFiles | None = None, retry: RetryPolicy | None = None
    ) -> None:
        """Send `token` with every call. Raises ConfigError."""
        self._target = target
        self._metadata = make_metadata(token)
        self._retry = retry or RetryPolicy()
        if tls is None:
            self._channel = grpc.aio.insecure_channel(target, options=CLIENT_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(target, tls.credentials(), options=tls.options())
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; running calls are cancelled."""
        await self._channel.close()

    # --- turns -------------------------------------------------------------------------------------------------------

    async def ask(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Answer:
        """Run one turn to its end."""
        async with self.stream(prompt, **options) as stream:
            return await stream.answer()

    def stream(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> AsyncAnswerStream:
        """Run one turn piece by piece. Nothing is sent before the first piece is asked for.

        If the gateway is lost, the turn goes on at another, or at the same one once it is back: no token is lost, and
        none comes twice. A request for several answers (`n` > 1) is not resumed.
        """
        return self._stream(prompt, options, None)

    def _stream(self, prompt: Prompt, options: RequestOptions, remembered_tokens: int | None) -> AsyncAnswerStream:
        request = make_request(prompt, options)
        reader = AnswerReader(remembered_tokens, max(request.sampling_params.n, 1))
        return AsyncAnswerStream(self._attempts(request, options.get("timeout")), reader)

    def talk(self, conversation_id: str = "") -> AsyncConversation:
        """Return the conversation of this id, or a new one with a generated id."""
        return AsyncConversation(self, conversation_id or f"conversation-{uuid.uuid4().hex[:16]}")

    async def _responses(self, request: inference_pb2.GenerateRequest, timeout: float | None) -> Responses:
        call = self._stub.Generate(request, timeout=timeout, metadata=self._metadata)
        try:
            async for response in call:
                yield response
        finally:
            call.cancel()

    async def _attempts(self, request: inference_pb2.GenerateRequest, timeout: float | None) -> Responses:
        clock = asyncio.get_running_loop().time
        deadline = None if timeout is None else clock() + timeout
        retries, resume = Retries(self._retry, deadline=deadline), inference_pb2.Resume()
        while True:
            num_before = len(resume.received)
            try:
                left = None if deadline is None else max(deadline - clock(), 0.001)
                async with aclosing(self._responses(request, left)) as responses:
                    async for response in responses:
                        if response.HasField("start"):
                            resume.prompt_tokens = response.start.prompt_tokens
                        resume.received.extend(response.chunk.token_ids)
                        yield response
                return
            except grpc.aio.AioRpcError as failure:
                error = error_from_call(failure, self._target)
            has_tokens, has_answered = len(resume.received) > num_before, resume.prompt_tokens > 0
            delay = retries.delay_after(error, has_tokens=has_tokens, now=clock(), has_answered=has_answered)
            if delay is None or (is_lost(error) and request.sampling_params.n > 1):
                raise error
            if is_lost(error) or request.HasField("resume"):
                request.resume.CopyFrom(resume)
            await asyncio.sleep(delay)

    # --- control -----------------------------------------------------------------------------------------------------

    async def abort(self, request_ids: str | Sequence[str]) -> Aborted:
        """End running turns by request id, wherever they are; an unknown id is reported."""
        names = [request_ids] if isinstance(request_ids, str) else request_ids
        response = await self._unary(self._stub.Abort, inference_pb2.AbortRequest(request_ids=names))
        return MAPPER.from_message(Aborted, response)

    async def count_tokens(self, prompt: Prompt, *, model: str = "") -> int:
        """Return the number of prompt tokens, including the chat template's."""
        return int((await self._unary(self._stub.CountTokens, make_count_request(prompt, model))).num_tokens)

    async def model_info(self) -> ModelInfo:
        """Return the model's sizes."""
        response = await self._unary(self._stub.GetModelInfo, inference_pb2.GetModelInfoRequest())
        return MAPPER.from_message(ModelInfo, response)

    async def server_info(self) -> ServerInfo:
        """Return the state of the service. Raises Forbidden for a tenant that is no operator."""
        response = await self._unary(self._stub.GetServerInfo, inference_pb2.GetServerInfoRequest())
        return MAPPER.from_message(ServerInfo, response)

    async def conversation(self, conversation_id: str) -> ConversationInfo:
        """Return the state of a conversation and the locations of its KV. Raises NotFound."""
        request = inference_pb2.GetConversationRequest(conversation_id=conversation_id)
        return MAPPER.from_message(ConversationInfo, await self._unary(self._stub.GetConversation, request))

    async def list_conversations(self, prefix: str = "", page_size: int = 100) -> AsyncIterator[ConversationSummary]:
        """Yield every conversation whose id begins with `prefix`, fetched page by page."""
        request = inference_pb2.ListConversationsRequest(prefix=prefix, page_size=page_size)
        while True:
            page = await self._unary(self._stub.ListConversations, request)
            for summary in page.conversations:
                yield MAPPER.from_message(ConversationSummary, summary)
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def fork_conversation(self, source_id: str, new_id: str, at_token: int | None = None) -> ConversationInfo:
        """Begin a conversation with another's tokens, or with the first `at_token` of them. Raises NotFound."""
        request = inference_pb2.ForkConversationRequest(source_id=source_id, new_id=new_id, at_token=at_token)
        return MAPPER.from_message(ConversationInfo, await self._unary(self._stub.ForkConversation, request))

    async def delete_conversation(self, conversation_id: str) -> None:
        """Delete a conversation and free its KV. Raises NotFound, and Busy while a turn runs."""
        request = inference_pb2.DeleteConversationRequest(conversation_id=conversation_id)
        await self._unary(self._stub.DeleteConversation, request)

    async def _unary(self, method: Callable[..., Awaitable[T]], request: Any) -> T:
        try:
            return await method(request, timeout=CONTROL_SECONDS, metadata=self._metadata)
        except grpc.aio.AioRpcError as failure:
            raise error_from_call(failure, self._target) from None


class AsyncConversation:
    """Turns that follow each other. Each prompt holds only new text; the service stores the turns before it.

    From the second turn on, prompts are appended (mode "append"), and each request says how many tokens the service
    must remember. If the service does not remember exactly that many, the turn fails with ConversationLost. If the end
    of a turn is not known here, the next request gives no number; if the service remembers nothing then, that turn
    fails with NotFound.
    """

    def __init__(self, client: AsyncClient, conversation_id: str) -> None:
        self._client = client
        self._latest: AsyncAnswerStream | None = None
        self._has_history = False
        self.conversation_id = conversation_id

    @property
    def remembered_tokens(self) -> int | None:
        """Tokens that the next turn expects the service to remember; None if that is not known here."""
        return None if self._latest is None else self._latest.remembered_tokens

    async def ask(self, prompt: Prompt, **options: Unpack[TurnOptions]) -> Answer:
        """Run the next turn to its end."""
        async with self.stream(prompt, **options) as stream:
            return await stream.answer()

    def stream(self, prompt: Prompt, **options: Unpack[TurnOptions]) -> AsyncAnswerStream:
        """Run the next turn piece by piece."""
        expected = self.remembered_tokens
        self._has_history |= bool(expected)
        if options.get("mode") == "whole_history" or is_chat(prompt):
            expected = None  # the prompt holds the whole history
        elif self._has_history and options.get("mode", "auto") == "auto":
            options["mode"] = "append"
        known: RequestOptions = {"conversation_id": self.conversation_id, "expected_tokens": expected}
        self._latest = self._client._stream(prompt, {**known, **options}, expected)
        return self._latest

    async def info(self) -> ConversationInfo:
        """Return the state of the conversation and the locations of its KV.

        Raises NotFound if no turn of it has ended yet.
        """
        return await self._client.conversation(self.conversation_id)

    async def delete(self) -> None:
        """Delete the conversation and free its KV. Raises NotFound, and Busy while a turn runs."""
        await self._client.delete_conversation(self.conversation_id)
