"""A synchronous client of `ringserve.v1.Inference`, as the command line uses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, TypeVar

import grpc

from cp_core.errors import DeadlineExceeded, RingserveError, Unavailable
from ringserve.v1 import inference_pb2, inference_pb2_grpc
from services.grpc_server import OPTIONS
from services.status import error_of

T = TypeVar("T")

CONTROL_SECONDS = 30.0


class Client:
    """One gateway, HOST:PORT. Methods raise the errors of `cp_core.errors`, each with one sentence."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._channel = grpc.insecure_channel(target, options=OPTIONS)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hang up; running calls are cancelled."""
        self._channel.close()

    def generate(
        self, request: inference_pb2.GenerateRequest, timeout: float | None = None
    ) -> Iterator[inference_pb2.GenerateResponse]:
        """Responses of one turn as they come; `timeout` (seconds) ends the turn everywhere. Leaving early aborts it."""
        call = self._stub.Generate(request, timeout=timeout)
        try:
            yield from call
        except grpc.RpcError as failure:
            raise self._error(failure) from None
        finally:
            call.cancel()

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
            return method(request, timeout=CONTROL_SECONDS)
        except grpc.RpcError as failure:
            raise self._error(failure) from None

    def _error(self, failure: Any) -> RingserveError:
        """What the server named, or what gRPC found by itself."""
        error = error_of(failure)
        if error is not None:
            return error
        if failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded("the deadline passed before the turn ended")
        if failure.code() is grpc.StatusCode.UNAVAILABLE:
            return Unavailable(f"the gateway at {self._target} cannot be reached")
        return RingserveError(f"{failure.code().name}: {failure.details()}")
