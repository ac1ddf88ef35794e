"""The control plane's ports over gRPC: how router, leaders and gateway reach each other."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from cp_core.errors import RingserveError
from cp_core.transport.peer_tls import PeerTls
from orchestration.protocol.kv import ForkedKv, ForkKv, RetainedKv, SendKv, SentKv, TakeKv, TakenKv
from orchestration.protocol.turns import (
    Admit,
    BegunTurn,
    PrefillDone,
    PrefillTurn,
    Reservation,
    Reserve,
    ResumeTurn,
    RingRegistration,
    TurnEvent,
    TurnOutcome,
    TurnRequest,
)
from orchestration.protocol.views import ConversationList, ConversationView, RingStatus, ServerView
from ringserve.v1 import inference_pb2, rings_pb2, rings_pb2_grpc, router_pb2, router_pb2_grpc
from services.auth.tls import peer_channel
from services.rpc.errors import error_from
from services.rpc.server import OPTIONS
from services.rpc.wire.contract import event_from, from_message, to_message

T = TypeVar("T")

CONTROL_SECONDS = 30.0
"""Deadline of a call that should take milliseconds, on a machine whose cores may all be computing."""

ABORT_SECONDS = 330.0
"""Deadline of an abort: a ring finishes the prefill step under way first."""


class _Peer:
    """Process at the other end of a channel; `name` is for error messages."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def _reach(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except grpc.aio.AioRpcError as failure:
            raise error_from(failure, self._name) from None

    async def _ask(
        self, method: Callable[..., Awaitable[Any]], request: Message, kind: type[T], timeout: float = CONTROL_SECONDS
    ) -> T:
        """Call a method and return its answer as a dataclass of this kind."""
        return from_message(kind, await self._reach(method(request, timeout=timeout)))


class GrpcRing(_Peer):
    """`RingPort` over a channel."""

    def __init__(self, role: str, endpoint: str, channel: grpc.aio.Channel) -> None:
        super().__init__(f"the {role} leader at {endpoint}")
        self._stub = rings_pb2_grpc.RingServiceStub(channel)
        # A prefill ring finishes the step under way before it unpins a sequence.
        self._settle_seconds = ABORT_SECONDS if role == "prefill" else CONTROL_SECONDS

    async def reserve(self, request: Reserve) -> Reservation:
        return await self._ask(self._stub.Reserve, to_message(rings_pb2.ReserveRequest, request), Reservation)

    async def prefill(self, turn: PrefillTurn) -> PrefillDone:
        # The decode leader enforces the turn's deadline: a ring that works up to it still answers.
        timeout = turn.deadline_seconds + CONTROL_SECONDS
        return await self._ask(self._stub.Prefill, to_message(rings_pb2.PrefillRequest, turn), PrefillDone, timeout)

    async def admit(self, admit: Admit) -> None:
        request = to_message(rings_pb2.AdmitRequest, admit)
        await self._reach(self._stub.Admit(request, timeout=CONTROL_SECONDS))

    async def stream_turn(self, turn_id: str) -> AsyncGenerator[TurnEvent, None]:
        """Yield a turn's events. Leaving the iterator cancels the call, and with it the turn."""
        call = self._stub.StreamTurn(rings_pb2.StreamTurnRequest(turn_id=turn_id))
        try:
            async for event in call:
                yield event_from(event)
        except grpc.aio.AioRpcError as failure:
            raise error_from(failure, self._name) from None
        finally:
            call.cancel()

    async def finish_turn(self, turn_id: str, num_tokens: int) -> None:
        request = rings_pb2.FinishTurnRequest(turn_id=turn_id, num_tokens=num_tokens)
        await self._reach(self._stub.FinishTurn(request, timeout=CONTROL_SECONDS))

    async def abort_turn(self, turn_id: str, error: RingserveError) -> None:
        request = rings_pb2.AbortTurnRequest(turn_id=turn_id, message=str(error), error=type(error).__name__)
        await self._reach(self._stub.AbortTurn(request, timeout=ABORT_SECONDS))

    async def settle(self, kv_id: str, turn_id: str, retain_tokens: int) -> None:
        request = rings_pb2.SettleRequest(kv_id=kv_id, turn_id=turn_id, retain_tokens=retain_tokens)
        await self._reach(self._stub.Settle(request, timeout=self._settle_seconds))

    async def send_kv(self, request: SendKv) -> SentKv:
        timeout = request.deadline_seconds + CONTROL_SECONDS
        return await self._ask(self._stub.SendKv, to_message(rings_pb2.SendKvRequest, request), SentKv, timeout)

    async def take_kv(self, request: TakeKv) -> TakenKv:
        # The leader gives the source ring as long as `send_kv` does, and then reports the outcome.
        timeout = request.deadline_seconds + 2 * CONTROL_SECONDS
        return await self._ask(self._stub.TakeKv, to_message(rings_pb2.TakeKvRequest, request), TakenKv, timeout)

    async def fork_kv(self, request: ForkKv) -> ForkedKv:
        return await self._ask(self._stub.ForkKv, to_message(rings_pb2.ForkKvRequest, request), ForkedKv)

    async def get_retained(self, kv_ids: Sequence[str]) -> RetainedKv:
        return await self._ask(self._stub.GetRetained, rings_pb2.GetRetainedRequest(kv_ids=kv_ids), RetainedKv)

    async def drain(self, seconds: float) -> None:
        await self._reach(self._stub.Drain(rings_pb2.DrainRequest(seconds=seconds), timeout=CONTROL_SECONDS))

    async def undrain(self) -> None:
        await self._reach(self._stub.Drain(rings_pb2.DrainRequest(undo=True), timeout=CONTROL_SECONDS))

    async def get_status(self) -> RingStatus:
        return await self._ask(self._stub.GetStatus, rings_pb2.GetStatusRequest(), RingStatus)


class GrpcRouter(_Peer):
    """`RouterPort` over a channel."""

    def __init__(self, endpoint: str, channel: grpc.aio.Channel) -> None:
        super().__init__(f"the router at {endpoint}")
        self._stub = router_pb2_grpc.RouterServiceStub(channel)

    async def begin_turn(self, request: TurnRequest) -> BegunTurn:
        # A request may wait for its conversation or for a ring; the router tells it when its deadline has passed.
        timeout = request.deadline_seconds + CONTROL_SECONDS
        return await self._ask(
            self._stub.BeginTurn, to_message(router_pb2.BeginTurnRequest, request), BegunTurn, timeout
        )

    async def resume_turn(self, request: ResumeTurn) -> None:
        message = to_message(router_pb2.ResumeTurnRequest, request)
        await self._reach(self._stub.ResumeTurn(message, timeout=request.deadline_seconds))

    async def end_turn(self, outcome: TurnOutcome) -> int:
        call = self._stub.EndTurn(to_message(router_pb2.EndTurnRequest, outcome), timeout=ABORT_SECONDS)
        return (await self._reach(call)).retain_tokens

    async def abort_requests(self, request_ids: Sequence[str]) -> tuple[list[str], list[str]]:
        request = inference_pb2.AbortRequest(request_ids=request_ids)
        answer = await self._reach(self._stub.AbortTurns(request, timeout=ABORT_SECONDS))
        return list(answer.aborted), list(answer.unknown)

    async def get_conversation(self, conversation_id: str) -> ConversationView:
        request = inference_pb2.GetConversationRequest(conversation_id=conversation_id)
        return await self._ask(self._stub.GetConversation, request, ConversationView)

    async def list_conversations(self, prefix: str, after: str, limit: int) -> ConversationList:
        request = inference_pb2.ListConversationsRequest(prefix=prefix, page_token=after, page_size=limit)
        return await self._ask(self._stub.ListConversations, request, ConversationList)

    async def fork_conversation(self, source_id: str, new_id: str, at_token: int | None) -> ConversationView:
        request = inference_pb2.ForkConversationRequest(source_id=source_id, new_id=new_id, at_token=at_token)
        return await self._ask(self._stub.ForkConversation, request, ConversationView)

    async def delete_conversation(self, conversation_id: str) -> None:
        request = inference_pb2.DeleteConversationRequest(conversation_id=conversation_id)
        await self._reach(self._stub.DeleteConversation(request, timeout=CONTROL_SECONDS))

    async def register_ring(self, ring: RingRegistration) -> int:
        call = self._stub.RegisterRing(to_message(router_pb2.RegisterRingRequest, ring), timeout=CONTROL_SECONDS)
        return (await self._reach(call)).running_turns

    async def drain_ring(self, name: str, seconds: float, *, force: bool = False) -> None:
        request = router_pb2.DrainRingRequest(ring=name, seconds=seconds, force=force)
        await self._reach(self._stub.DrainRing(request, timeout=CONTROL_SECONDS))

    async def restart_ring(self, name: str, seconds: float, *, leaving_node: str = "") -> None:
        request = router_pb2.RestartRingRequest(ring=name, seconds=seconds, leaving_node=leaving_node)
        await self._reach(self._stub.RestartRing(request, timeout=CONTROL_SECONDS))

    async def undrain_ring(self, name: str) -> None:
        request = router_pb2.UndrainRingRequest(ring=name)
        await self._reach(self._stub.UndrainRing(request, timeout=CONTROL_SECONDS))

    async def get_server_info(self) -> ServerView:
        return await self._ask(self._stub.GetServerInfo, inference_pb2.GetServerInfoRequest(), ServerView)


class GrpcPeers:
    """`Peers` over gRPC: one channel an endpoint, opened on first use; `close` closes all."""

    def __init__(self, tls: PeerTls | None = None) -> None:
        """Raise ConfigError for TLS files that cannot be used."""
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._credentials, options = peer_channel(tls)
        self._options = (*OPTIONS, *options)

    def leader(self, role: str, endpoint: str) -> GrpcRing:
        return GrpcRing(role, endpoint, self._channel(endpoint))

    def router(self, endpoint: str) -> GrpcRouter:
        return GrpcRouter(endpoint, self._channel(endpoint))

    def _channel(self, endpoint: str) -> grpc.aio.Channel:
        if endpoint not in self._channels:
            self._channels[endpoint] = self._open(endpoint)
        return self._channels[endpoint]

    def _open(self, endpoint: str) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(endpoint, options=self._options)
        return grpc.aio.secure_channel(endpoint, self._credentials, options=self._options)

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()
