"""A client for threads. Methods raise the errors of `cp_core.errors`, each with one sentence."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from types import TracebackType
from typing import Any, TypeVar

import grpc

from cp_core.errors import Unavailable
from ringserve.v1 import inference_pb2, inference_pb2_grpc
from services.client.channel import TlsFiles, metadata_of
from services.client.failures import error_from_call
from services.client.requests import Prompt, Sampling, is_repeatable, request_of
from services.client.results import Answer, AnswerReader, Piece, Plan
from services.client.retries import Retries, RetryPolicy
from services.rpc.server import OPTIONS

T = TypeVar("T")
Responses = Generator[inference_pb2.GenerateResponse, None, None]

CONTROL_SECONDS = 30.0


class AnswerStream(Iterator[Piece]):
    """A turn's pieces as they come. A context: leaving it early ends the turn everywhere."""

    def __init__(self, responses: Responses) -> None:
        self._responses = responses
        self._reader = AnswerReader()

    def __next__(self) -> Piece:
        for response in self._responses:
            piece = self._reader.take(response)
            if piece is not None:
                return piece
        if self._reader.answer is None:
            raise Unavailable("the stream ended without a completion")
        raise StopIteration

    def __enter__(self) -> AnswerStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the turn, if it still runs."""
        self._responses.close()

    @property
    def plan(self) -> Plan | None:
        """The plan, once the first piece is there; its measured fields are final with the answer."""
        return self._reader.plan

    def answer(self) -> Answer:
        """Read what is left; the whole turn."""
        for _ in self:
            continue
        assert self._reader.answer is not None, "a stream that ends has its answer"
        return self._reader.answer


class Client:
    """One gateway, HOST:PORT, or several, ipv4:HOST:PORT,HOST:PORT: the next is called where one has ended.

    Threads may share it.
    """

    def __init__(
        self, target: str, *, token: str = "", tls: TlsFiles | None = None, retry: RetryPolicy | None = None
    ) -> None:
        """`token` is sent with every call. Raises ConfigError."""
        self._target = target
        self._metadata = metadata_of(token)
        self._retry = retry or RetryPolicy()
        if tls is None:
            self._channel = grpc.insecure_channel(target, options=OPTIONS)
        else:
            self._channel = grpc.secure_channel(target, tls.credentials(), options=tls.options())
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)
        self._closed = threading.Event()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hang up; running calls are cancelled."""
        self._closed.set()
        self._channel.close()

    # --- turns -------------------------------------------------------------------------------------------------------

    def ask(
        self,
        prompt: Prompt,
        *,
        conversation_id: str = "",
        mode: str = "auto",
        sampling: Sampling | None = None,
        request_id: str = "",
        timeout: float | None = None,
    ) -> Answer:
        """One turn to its end. `mode` says what the prompt is to its conversation: "auto", "append", "whole_history".

        `timeout` in seconds bounds all attempts together.
        """
        with self.stream(
            prompt,
            conversation_id=conversation_id,
            mode=mode,
            sampling=sampling,
            request_id=request_id,
            timeout=timeout,
        ) as stream:
            return stream.answer()

    def stream(
        self,
        prompt: Prompt,
        *,
        conversation_id: str = "",
        mode: str = "auto",
        sampling: Sampling | None = None,
        request_id: str = "",
        timeout: float | None = None,
    ) -> AnswerStream:
        """The same, piece by piece. Nothing is sent before the first piece is asked for."""
        request = request_of(prompt, conversation_id, mode, sampling or Sampling(), request_id)
        return AnswerStream(self._attempts(request, timeout))

    def talk(self, conversation_id: str = "") -> Conversation:
        """A conversation to go on with, or a new one under a name of its own."""
        return Conversation(self, conversation_id or f"conversation-{uuid.uuid4().hex[:16]}")

    def generate(self, request: inference_pb2.GenerateRequest, timeout: float | None = None) -> Responses:
        """One turn in the contract's own messages, tried once; `timeout` (seconds) ends the turn everywhere."""
        try:
            yield from self._responses(request, timeout)
        except grpc.RpcError as failure:
            raise error_from_call(failure, self._target) from None

    def _responses(self, request: inference_pb2.GenerateRequest, timeout: float | None) -> Responses:
        call = self._stub.Generate(request, timeout=timeout, metadata=self._metadata)
        try:
            yield from call
        finally:
            call.cancel()

    def _attempts(self, request: inference_pb2.GenerateRequest, timeout: float | None) -> Responses:
        deadline = None if timeout is None else time.monotonic() + timeout
        retries = Retries(self._retry, is_repeatable=is_repeatable(request), deadline=deadline)
        while True:
            has_tokens = False
            try:
                left = None if deadline is None else max(deadline - time.monotonic(), 0.001)
                for response in self._responses(request, left):
                    has_tokens = has_tokens or not response.HasField("start")
                    yield response
                return
            except grpc.RpcError as failure:
                error = error_from_call(failure, self._target)
            delay = retries.delay_after(error, has_tokens=has_tokens, now=time.monotonic())
            if delay is None or self._closed.wait(delay):
                raise error

    # --- asking ------------------------------------------------------------------------------------------------------

    def abort(self, request_ids: list[str]) -> inference_pb2.AbortResponse:
        return self._unary(self._stub.Abort, inference_pb2.AbortRequest(request_ids=request_ids))

    def model_info(self) -> inference_pb2.GetModelInfoResponse:
        return self._unary(self._stub.GetModelInfo, inference_pb2.GetModelInfoRequest())

    def server_info(self) -> inference_pb2.GetServerInfoResponse:
        return self._unary(self._stub.GetServerInfo, inference_pb2.GetServerInfoRequest())

    def conversation(self, conversation_id: str) -> inference_pb2.GetConversationResponse:
        request = inference_pb2.GetConversationRequest(conversation_id=conversation_id)
        return self._unary(self._stub.GetConversation, request)

    def list_conversations(self, prefix: str = "", page_size: int = 100) -> Iterator[inference_pb2.ConversationSummary]:
        """Every conversation whose id begins with `prefix`, fetched page by page."""
        request = inference_pb2.ListConversationsRequest(prefix=prefix, page_size=page_size)
        while True:
            page = self._unary(self._stub.ListConversations, request)
            yield from page.conversations
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    def fork_conversation(
        self, source_id: str, new_id: str, at_token: int | None = None
    ) -> inference_pb2.GetConversationResponse:
        request = inference_pb2.ForkConversationRequest(source_id=source_id, new_id=new_id, at_token=at_token)
        return self._unary(self._stub.ForkConversation, request)

    def delete_conversation(self, conversation_id: str) -> None:
        request = inference_pb2.DeleteConversationRequest(conversation_id=conversation_id)
        self._unary(self._stub.DeleteConversation, request)

    def _unary(self, method: Callable[..., T], request: Any) -> T:
        try:
            return method(request, timeout=CONTROL_SECONDS, metadata=self._metadata)
        except grpc.RpcError as failure:
            raise error_from_call(failure, self._target) from None


class Conversation:
    """Turns that follow each other. What is said is only what is new; the service knows the rest."""

    def __init__(self, client: Client, conversation_id: str) -> None:
        self._client = client
        self.conversation_id = conversation_id

    def ask(
        self, prompt: Prompt, *, mode: str = "auto", sampling: Sampling | None = None, timeout: float | None = None
    ) -> Answer:
        """The next turn to its end."""
        return self._client.ask(
            prompt, conversation_id=self.conversation_id, mode=mode, sampling=sampling, timeout=timeout
        )

    def stream(
        self, prompt: Prompt, *, mode: str = "auto", sampling: Sampling | None = None, timeout: float | None = None
    ) -> AnswerStream:
        """The next turn, piece by piece."""
        return self._client.stream(
            prompt, conversation_id=self.conversation_id, mode=mode, sampling=sampling, timeout=timeout
        )

    def info(self) -> inference_pb2.GetConversationResponse:
        """Where its KV lies. Raises NotFound before the first turn has ended."""
        return self._client.conversation(self.conversation_id)

    def delete(self) -> None:
        """Forget it and free its KV. Raises NotFound, Busy while a turn runs."""
        self._client.delete_conversation(self.conversation_id)
